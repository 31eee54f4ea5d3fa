"""Faults of processes: ranks that are killed, stopped, slow or raise, launchers that are lost, signals."""

import contextlib
import shutil
import signal
import time

import psutil

from dicedist.cluster.signals import ASKING
from dicedist.runs import checkpoint
from dicedist.runs.run import Run as Folder
from tests.faults.subject import PATIENCE, STEPS, TIMEOUT, TORCHRUN, listens


def kill_one_of(run, draws):
    with contextlib.suppress(psutil.Error, KeyError):  # the run may have come to its end
        run.ranks()[draws.randrange(run.num_ranks)].kill()


def kill_a_rank(run, draws):
    """SIGKILL: the launcher starts the ranks again."""
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    kill_one_of(run, draws)
    return run.recovers()


def kill_at_start(run, draws):
    """Before the ranks have become a group, or just after."""
    run.start()
    run.wait_for(lambda: len(run.ranks()) == run.num_ranks)
    time.sleep(draws.uniform(0, 8))
    kill_one_of(run, draws)
    return run.recovers()


def kill_in_evaluation(run, draws):
    """After the last step, while results are computed and written."""
    run.start()
    run.wait_for(lambda: checkpoint.path_of(Folder(run.run).checkpoints, STEPS).exists())
    time.sleep(draws.uniform(0, 1))
    kill_one_of(run, draws)
    return run.recovers()


def kill_twice(run, draws):
    """A rank, and another while the run recovers: between its restart and its next records."""
    run.start()
    run.wait_for_records(draws.randint(1, 4))
    before = {process.pid for process in run.ranks().values()}
    kill_one_of(run, draws)
    run.wait_for(lambda: len({process.pid for process in run.ranks().values()} - before) == run.num_ranks)
    time.sleep(draws.uniform(0, 8))
    kill_one_of(run, draws)
    return run.recovers()


def stop_a_rank(run, draws):
    """SIGSTOP, a rank that hangs: the others end after distributed.timeout, and the launcher starts them again."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    with contextlib.suppress(psutil.Error, KeyError):
        run.ranks()[draws.randrange(run.num_ranks)].suspend()
    return run.wait() == 0


def slow_rank(run, draws):
    """SIGSTOP and SIGCONT in turns: a rank that gets a fraction of a core is no hang, and nothing is restarted."""
    run.start()
    run.wait_for_records(draws.randint(1, 4))
    slow, deadline = run.ranks().get(draws.randrange(run.num_ranks)), time.monotonic() + 2 * TIMEOUT
    with contextlib.suppress(psutil.Error, AttributeError):
        while run.launcher.poll() is None and time.monotonic() < deadline:
            slow.suspend()
            time.sleep(draws.uniform(0.5, 5))
            slow.resume()
            time.sleep(0.1)
    return run.wait() == 0 and not run.restarted()


def slow_reading(run, draws):
    """Validation takes longer than the timeout, in many small pieces: that is no hang."""
    run.start(("tests.support.faulty", "slow", "0", "0"))
    return run.wait() == 0 and "no work" not in run.told() and not run.restarted()


def suspend_everything(run, draws):
    """For longer than the timeout, as when a laptop's lid is closed: nothing is restarted."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    everyone = run.everyone()
    for act in ("suspend", "resume"):
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, act)()
        time.sleep(1.5 * TIMEOUT if act == "suspend" else 0)
    return run.wait() == 0 and "no sign of life" not in run.told() and not run.restarted()


def raise_on_a_rank(run, draws):
    run.start(("tests.support.faulty", "raise", str(draws.randrange(run.num_ranks)), str(draws.randrange(1, STEPS))))
    return run.recovers()


def asking_signal(run, draws):
    """A scheduler's SIGTERM, Ctrl-C, Slurm's SIGUSR1, a closed terminal; plain torchrun passes two of them on."""
    return draws.choice(ASKING[:2] if run.launcher_name == TORCHRUN else ASKING)


def terminate(run, draws):
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    return run.stop(asking_signal(run, draws)) and run.finish()


def terminate_early(run, draws):
    """While torch is imported, while ranks meet, before the first step."""
    run.start()
    run.wait_for(lambda: listens(run.launcher.pid))
    time.sleep(draws.uniform(0, 12))
    return run.stop(asking_signal(run, draws)) and run.finish()


def terminate_again(run, draws):
    """Somebody who cannot wait: several signals, close together and far apart."""
    run.start()
    run.wait_for_records(draws.randint(1, 10))
    ranks = [*run.ranks().values()]
    for _ in range(draws.randint(2, 4)):
        run.launcher.send_signal(asking_signal(run, draws))
        time.sleep(draws.choice([0, 0.3, 3]))
    stopped = run.stop(signal.SIGTERM)
    psutil.wait_procs(ranks, PATIENCE)
    return stopped and run.finish()


def kill_the_launcher(run, draws):
    """Its ranks save and end by themselves."""
    run.start()
    run.wait_for_records(draws.randint(1, 8))
    orphans = [*run.ranks().values()]
    run.launcher.kill()
    run.launcher.wait()
    _, alive = psutil.wait_procs(orphans, PATIENCE)
    return not alive and run.finish()


def lose_the_launchers_folder(run, draws):
    """Whatever cleans temporary folders removes it in mid-run."""
    folder = run.directory / "tmp"
    folder.mkdir()
    run.start(("dicedist.train",), TMPDIR=str(folder))
    run.wait_for_records(draws.randint(1, 8))
    for path in folder.glob("dicedist-*"):
        shutil.rmtree(path)
    return run.wait() == 0 and not run.restarted()
