"""Faults around a bucket, with the local disk wiped afterwards: nothing is lost beyond the last uploaded checkpoint."""

import contextlib
import re
import shutil
import signal
import threading

import psutil

from dicedist.runs import checkpoint, copies
from dicedist.runs.run import Run as Folder
from tests.faults.subject import UNSENT
from tests.support.servers import CREDENTIALS, bucket_server

_making = threading.Lock()


@contextlib.contextmanager
def kept_in_a_bucket(run):
    """Start a server for this round, which can be made to misbehave."""
    with contextlib.ExitStack() as held:
        with _making:
            between = held.enter_context(bucket_server(run.variables.__setitem__))
        between.prefix = run.directory.name  # servers of one process share what they hold
        run.settings = (*run.settings, f"run.remote=s3://runs/{between.prefix}")
        yield between


def uploaded(between):
    """The steps of the checkpoints that the bucket has whole, by what it holds itself."""
    start = f"{between.prefix}/tiny/"
    found = between.client.list_objects_v2(Bucket="runs", Prefix=start).get("Contents", [])
    names = [one["Key"].removeprefix(start) for one in found]
    return sorted({copies.step_in(name) for name in names if name.endswith(checkpoint.MANIFEST)})


def kill_everyone(run):
    """The machine is lost, all at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = run.everyone()
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone)
    run.launcher.wait()


def goes_on_elsewhere(run, between):
    """The disk is gone; the run goes on from what the bucket has, and says from where."""
    steps = uploaded(between)
    shutil.rmtree(run.run)
    before = len(run.told())
    finished = run.finish()
    told = run.told()[before:]
    found = re.search(r"continues after step (\d+)", told)
    assert found is None or int(found[1]) == steps[-1], f"{steps}: {told[-500:]}"
    assert found is not None or not steps or "is finished" in told, f"the bucket had {steps}: {told[-500:]}"
    return finished and quiet(run)


def quiet(run):
    return "Traceback" not in run.told() and CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in run.told()


def stop_and_wipe(run, draws):
    """The checkpoint of a run that was asked to stop is in the bucket when the run has ended."""
    with kept_in_a_bucket(run) as between:
        run.start()
        run.wait_for_records(draws.randint(2, 10))
        stopped = run.stop(signal.SIGTERM)
        newest = checkpoint.step_of(checkpoint.saved(Folder(run.run).checkpoints)[-1])
        assert newest in uploaded(between), f"{newest} is not among {uploaded(between)}"
        return stopped and goes_on_elsewhere(run, between)


def kill_and_wipe(run, draws):
    with kept_in_a_bucket(run) as between:
        run.start()
        run.wait_for(lambda: uploaded(between))
        run.wait_for_records(draws.randint(6, 12))
        kill_everyone(run)
        return goes_on_elsewhere(run, between)


def harm_kill_and_wipe(manner, heals):
    """The bucket misbehaves from some record on. heals: before the machine is lost."""

    def fault(run, draws):
        with kept_in_a_bucket(run) as between:
            run.start()
            run.wait_for(lambda: uploaded(between))
            run.wait_for_records(draws.randint(3, 6))
            before = uploaded(between)
            between.behave(manner)
            run.wait_for(lambda: between.refused or manner == "gone")
            run.wait_for_records(draws.randint(8, 11))
            if heals:
                between.behave("well")
                run.wait_for(lambda: uploaded(between)[-1:] > before[-1:])
            kill_everyone(run)
            between.behave("well")
            assert uploaded(between)[-1] >= before[-1], "a checkpoint that was there is gone"
            return goes_on_elsewhere(run, between)

    return fault


def full_to_the_end(run, draws):
    """The run says that not all arrived; the same command sends it; then the disk is wiped, and nothing is missing."""
    with kept_in_a_bucket(run) as between:
        run.start(("tests.support.faulty", "impatient", "0", "0"))
        run.wait_for_records(draws.randint(2, 6))
        between.behave("full")
        ended = run.wait() == UNSENT and "has not received all of it; the same command sends it" in run.told()
        between.behave("well")
        sent = run.finish()
        return ended and sent and goes_on_elsewhere(run, between)
