"""Ranks that fail, hang or are asked to stop; who is blamed, who may use a folder, and the launcher."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from dicedist.cluster import process
from dicedist.cluster.launcher import codes, worst
from dicedist.cluster.process import EndedElsewhere
from dicedist.runs.lock import run_lock
from dicedist.runs.run import Run as Folder
from tests.faults.subject import SETTINGS, Run, listens
from tests.support.processes import run_ranks
from tests.support.tiny import assert_same_tensors, records_of, train


def fault_on_rank(rank, run_dir, harm):
    """Return the error of this rank in a training in which rank 1 is harmed at step 5 (the sixth)."""

    def at_step(trainer, done):
        if rank == 1 and done == 5:
            harm(trainer)

    try:
        train(run_dir, "checkpoint.every_steps=4", after_step=at_step, rank=rank, world_size=3)
    except (ValueError, EndedElsewhere) as error:
        return f"{type(error).__name__}: {error}"


def a_nan(trainer):
    with torch.no_grad():
        trainer.hosted.member(1).classifier.weight[0, 0] = float("nan")


def another_batch(trainer):
    epoch = trainer.loader.epoch
    trainer.loader.epoch = lambda *place: (replace(batch, checksum=batch.checksum ^ 1) for batch in epoch(*place))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (a_nan, "cross_entropy of member_1 became nan at step 5: lower optimizer.lr or redundancy.delta"),
        (another_batch, "member_1 is out of step with the discriminator at step 6: it saw another batch"),
    ],
)
def test_a_fault_on_one_rank_is_named_and_nothing_is_lost(tmp_path, harm, told):
    first, *others = run_ranks(3, fault_on_rank, tmp_path, harm)
    assert told in first.replace("loss of", "cross_entropy of")
    assert others == ["EndedElsewhere: ", "EndedElsewhere: "]
    assert Folder(tmp_path / "tiny").newest_checkpoint().step == 4
    assert [record["step"] for record in records_of(tmp_path / "tiny")][:1] == [4]


def train_to(rank, run_dir, step):
    train(run_dir, *SETTINGS, f"max_steps={step}", rank=rank, world_size=3)


def test_killed_then_asked_to_stop(tmp_path):
    """The launcher of three ranks restarts them after a kill, returns 75 after SIGTERM, and no bit has changed; what
    one rank refuses is one line and the launcher's exit code."""
    run = Run(tmp_path, 3, "data.pipeline=torch")  # which starts quicker than DALI
    run.start()
    run.wait_for_records(2)
    run.ranks()[1].kill()
    run.wait_for(lambda: run.told().count("Ctrl-C saves") == 2)
    run.wait_for_records(6)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.told()
    assert "dicedist: rank 1 (member 1) is gone: killed, or its machine is lost\n" in run.told()
    assert "continues after step" in run.told() and "Traceback" not in run.told()
    before = run.told()
    run.start(("dicedist.train",), "seed=1")
    assert run.wait() == 2 and run.told().removeprefix(before).count("\n") == 1, run.told()
    step = Folder(run.run).newest_checkpoint().step
    assert f"stopped after step {step}, saved; the same command continues the run" in run.told()
    run_ranks(3, train_to, tmp_path / "undisturbed", step)
    undisturbed = tmp_path / "undisturbed" / "tiny"
    assert_same_tensors(run.run, undisturbed, step)
    earlier = [[record for record in records_of(path) if record["step"] < step] for path in (run.run, undisturbed)]
    assert earlier[0] == earlier[1]  # only a finished run has all records of its last step


def test_a_folder_in_use_is_refused(tmp_path):
    with run_lock(Folder(tmp_path / "run")):
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*: wait for it, or choose another"):
            with run_lock(Folder(tmp_path / "run")):
                pass
    with run_lock(Folder(tmp_path / "run")):
        pass


SLEEPER = """
    import sys, time
    from dicedist.cluster import signals
    signals.SAME_REQUEST = 1.0
    signals.listen()
    try:
        with signals.deferred():
            print("ready", flush=True)
            while not signals.asked():
                time.sleep(0.01)
            print("asked", flush=True)
            with signals.interruptible():
                print("not here")
    except signals.Stopped:
        print("stopped", flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_asks_and_a_second_one_ends(number):
    not_ignored = partial(signal.signal, number, signal.SIG_DFL)  # as it would be if these tests ran under nohup
    words = [sys.executable, "-c", textwrap.dedent(SLEEPER)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=not_ignored)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.send_signal(number)  # the same request, forwarded by a launcher
    assert [process.stdout.readline() for _ in range(2)] == ["asked\n", "stopped\n"]
    time.sleep(1.1)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(10) == 75


def started(tmp_path, module):
    launch = ["--nproc_per_node=2", "-m", "dicedist.train"] if module == "dicedist.launch" else []
    words = [sys.executable, "-m", module, *launch, *SETTINGS, f"run.dir={tmp_path}", "data.pipeline=torch"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not listens(process.pid):
        time.sleep(0.01)
    return process


def end_of(process, *numbers):
    """Return the exit code after signals, and the output."""
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    told = process.communicate(timeout=100)[0]
    assert "Traceback" not in told, told
    return process.returncode, told


@pytest.mark.parametrize("module", ["dicedist.train", "dicedist.launch"])
def test_signals_before_torch_is_imported(tmp_path, module):
    process = started(tmp_path, module)
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    code, told = end_of(process, signal.SIGTERM, signal.SIGTERM)
    assert code == 75, told


def imports_torch(pid):
    """False also for a process that has just ended."""
    try:
        return "libtorch_python" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_repeated_signals_while_ranks_import_torch(tmp_path):
    process = started(tmp_path, "dicedist.launch")
    while not any(imports_torch(child.pid) for child in psutil.Process(process.pid).children()):
        time.sleep(0.01)
    code, told = end_of(process, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    assert code == 75 and told.count("\n") <= 1, told


LEAVER = """
    import os, threading, time
    from dicedist.cluster import process
    for _ in range(20):
        threading.Thread(target=process.exit_process, args=(75,)).start()
    time.sleep(30)
"""


def test_threads_that_leave_together_leave_one_code(tmp_path):
    environment = {**os.environ, process.LAUNCHER: str(tmp_path), "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LEAVER)], env=environment, timeout=120)
    assert done.returncode == 0  # so the agent restarts nothing
    assert codes(str(tmp_path)) == [75]


def test_a_code_that_cannot_be_left_is_the_process_own(tmp_path):
    """Otherwise the launcher would find nothing, and take the run for done."""
    (tmp_path / "file").touch()  # in place of the folder
    environment = {**os.environ, process.LAUNCHER: str(tmp_path / "file"), "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LEAVER)], env=environment, timeout=120)
    assert done.returncode == 75


def test_a_folder_that_was_cleaned_away_is_made_again(tmp_path):
    environment = {**os.environ, process.LAUNCHER: str(tmp_path / "removed"), "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LEAVER)], env=environment, timeout=120)
    assert done.returncode == 0 and codes(str(tmp_path / "removed")) == [75]


def test_exit_codes_of_ranks_make_one():
    assert [worst(each) for each in ([0, 0], [75, 75], [0, 76], [75, 2], [1, 2, 75])] == [0, 75, 76, 2, 1]
