"""Faults of files and disks: checkpoints, records, results, configs and prepared images harmed, no room left."""

import contextlib
import os
import shutil
import signal
import subprocess

import psutil

from dicedist.runs import checkpoint
from dicedist.runs.run import Run as Folder
from tests.faults.processes import kill_one_of


def truncate(file, draws):
    os.truncate(file, draws.randrange(file.stat().st_size))


def flip_a_bit(file, draws):
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    file.write_bytes(content)


def begin_and_stop(run, draws):
    run.start()
    run.wait_for_records(draws.randint(4, 10))
    return run.stop(signal.SIGTERM)


def damage_checkpoint(how):
    """One file of the newest checkpoint, while the run is down."""

    def fault(run, draws):
        stopped = begin_and_stop(run, draws)
        harm_newest(run, draws, how)
        return stopped and run.finish()

    return fault


def harm_newest(run, draws, how):
    how(draws.choice(sorted(checkpoint.saved(Folder(run.run).checkpoints)[-1].iterdir())), draws)


def while_down(harm, *, refused=None):
    """Harm a file next to the checkpoints while the run is down. refused: the message of the run, before a remedy."""

    def fault(run, draws):
        stopped = begin_and_stop(run, draws)
        remedy = harm(run, draws)
        if refused:
            run.start()
            if run.wait() == 0 or refused not in run.told() or "Traceback" in run.told():
                return False
            remedy()
        return stopped and run.finish()

    return fault


def remove_records_in_mid_run(run, draws):
    run.start()
    run.wait_for_records(draws.randint(2, 8))
    (run.run / "metrics.jsonl").unlink()
    return run.recovers() and not run.restarted()


def remove_records(run, draws):
    (run.run / "metrics.jsonl").unlink()


def shorten_records(run, draws):
    truncate(run.run / "metrics.jsonl", draws)


def half_an_evaluation(run, draws):
    (run.run / "evaluation.json").write_text('{"step": 60, "ensem')


def shorten_the_evaluation(run, draws):
    """Of a finished run, which is then no longer finished: it is evaluated again."""
    run.start()
    done = run.wait() == 0
    truncate(run.run / "evaluation.json", draws)
    return done and run.finish()


def damage_the_config(run, draws):
    path = run.run / "config.yaml"
    whole = path.read_text()
    truncate(path, draws)
    path.write_text(path.read_text() + "\n[")
    return lambda: path.write_text(whole)


def damage_the_images(run, draws):
    """A pixel, the head of the array, its end, or the file that says what they are."""
    prepared = run.directory / "home" / "prepared"
    (images,), (about,) = prepared.rglob("train_images.npy"), prepared.rglob("about.json")
    match draws.randrange(4):
        case 0:
            content = bytearray(images.read_bytes())
            content[draws.randrange(1000, len(content))] ^= 255
            images.write_bytes(content)
        case 1:
            images.write_bytes(b"\0" * 100 + images.read_bytes()[100:])
        case 2:
            truncate(images, draws)
        case 3:
            truncate(about, draws)
    return lambda: shutil.rmtree(prepared)


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of its own, which only root can mount."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Until there is no room; returns the file to remove."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def fill_the_disk(run, draws):
    """It is full for a while."""
    if os.geteuid():
        return limit_files(run, draws)
    with small_disk(run.directory, "64m"):
        run.start()
        run.wait_for_records(draws.randint(1, 5))
        filler = fill(run.directory)
        run.wait_for(lambda: "could not be written" in run.told())
        filler.unlink()
        recovered = run.recovers()
        kept = run.directory.with_name(f"{run.directory.name}-kept")
        run.run = shutil.copytree(run.run, kept / "tiny")
    return recovered


def limit_files(run, draws):
    """For a while the process may only write small files."""
    run.start()
    run.wait_for_records(draws.randint(1, 5))
    process = psutil.Process(run.launcher.pid)
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1000, hard))
    run.wait_for(lambda: "could not be written" in run.told())
    process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
    return run.recovers()


def fill_tmp(run, draws):
    """The folder for temporary files is full when the run is asked to stop, and when it starts again."""
    folder = run.directory / "tmp"
    with small_disk(folder, "64k"):
        run.start(("dicedist.train",), TMPDIR=str(folder))
        run.wait_for_records(draws.randint(1, 8))
        fill(folder)
        stopped = run.stop(signal.SIGTERM)
        run.start(("dicedist.train",), TMPDIR=str(folder))
        return stopped and run.recovers()


def several(run, draws):
    """One after the other in a run: it is stopped, a rank is killed, stopped again, and a file is damaged."""
    stopped = begin_and_stop(run, draws)
    run.start()
    run.wait_for_records(draws.randint(11, 13))
    kill_one_of(run, draws)
    if run.num_ranks == 1:
        run.wait()
        run.start()
    run.wait_for_records(15)
    stopped = run.stop(signal.SIGTERM) and stopped
    harm_newest(run, draws, draws.choice([truncate, flip_a_bit]))
    draws.choice([remove_records, shorten_records, half_an_evaluation])(run, draws)
    return stopped and run.finish()
