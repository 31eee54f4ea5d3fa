"""Runs launch/slurm.sbatch under real Slurm daemons, on two nodes of this machine, in a folder that is removed later.

python -m tests.slurm      as root, with munge, slurmctld and slurmd (Debian: slurm-wlm); 10 minutes
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import CHECKOUT
from tests.support.tiny import assert_same_run

STEPS, PATIENCE = 300, 600  # PATIENCE in seconds
SETTINGS = [
    "data=shapes", "data.train_limit=480", "data.pipeline=torch", "batch_size=16", "network=resnet8", "epochs=10",
    "evaluate.every_epochs=5", "distributed.timeout=60", "tracking=none",
]  # fmt: skip
# The addresses of the two nodes are also their names, so that nothing must be added to /etc/hosts.
# cred_expire: how long a requeued job waits. GraceTime: how long a preempted job may run after SIGTERM.
CONFIG = """
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[17001-17002] CPUs=8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@contextlib.contextmanager
def cluster(folder):
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=socket.gethostname()))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{option}={folder}/munge.{name}" for option, name in munge.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "127.0.0.1"],
        ["slurmd", "-D", "-N", "127.0.0.2"],
    ]
    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            process = stack.enter_context(subprocess.Popen(daemon, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
            time.sleep(1)  # each daemon needs the one before
        yield


def slurm(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def submit(name, *options, overrides=(), ranks=2, nodes=2, array="0"):
    """Submits a job with runs of SETTINGS, named after the job; returns its id."""
    allocation = (f"--nodes={nodes}", "--gpus-per-node=0", "--cpus-per-task=2", f"--array={array}", "--time=30")
    environment = {**os.environ, "RANKS": str(ranks), "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT)}
    script = [CHECKOUT / "launch/slurm.sbatch", *SETTINGS, *overrides]
    command = ["sbatch", "--parsable", f"--job-name={name}", *allocation, *options, *script]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def field(job, name):
    """A field of a job's first task, as scontrol shows it."""
    words = slurm("scontrol", "show", "job", f"{job}_0").split()
    return dict(word.split("=", 1) for word in words if "=" in word)[name]


def wait_for(what, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE} s"
        time.sleep(1)


def wait_for_end(job):
    wait_for(f"end of {job}", lambda: f"{job}_" not in slurm("squeue", "--noheader", "--format=%i"))


def wait_for_steps(name):
    records = Path(f"runs/{name}-seed0/metrics.jsonl")
    wait_for(f"steps of {name}", lambda: records.exists() and records.stat().st_size > 0)


def seeds():
    """A job array with one node per seed."""
    job = submit("seeds", overrides=["epochs=1", "ensemble.size=2"], ranks=3, nodes=1, array="0-1")
    wait_for_end(job)
    for seed in (0, 1):
        assert Path(f"runs/seeds-seed{seed}/evaluation.json").exists(), Path(f"slurm-{job}_{seed}.out").read_text()
    assert (field(job, "JobState"), field(job, "Restarts")) == ("COMPLETED", "0")


def undisturbed():
    job = submit("whole", overrides=["ensemble.size=3"])
    wait_for_end(job)
    assert field(job, "JobState") == "COMPLETED", Path(f"slurm-{job}_0.out").read_text()


def out_of_time():
    """A run on two nodes is warned before its time is up: saved, requeued, continued, equal to the undisturbed run."""
    job = submit("warned", "--signal=USR1@90", overrides=["ensemble.size=3"])
    wait_for_steps("warned")
    hours, minutes, _ = map(int, field(job, "RunTime").split(":"))
    slurm("scontrol", "update", f"job={job}", f"TimeLimit={60 * hours + minutes + 2}")  # the warning comes within 30 s
    wait_for("requeue", lambda: field(job, "Restarts") == "1")
    slurm("scontrol", "update", f"job={job}", "TimeLimit=30")
    wait_for_end(job)
    told = Path(f"slurm-{job}_0.out").read_text()
    assert "saved; the same command continues" in told and "continues after step" in told, told
    assert_same_run(Path("runs/warned-seed0"), Path("runs/whole-seed0"), STEPS)


def preempted_and_canceled():
    """A job is requeued when one of higher priority takes its nodes, but not when it is canceled."""
    job = submit("preempted", "--exclusive", overrides=["ensemble.size=3"])
    wait_for_steps("preempted")
    slurm("sbatch", "--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3")
    wait_for("requeue", lambda: field(job, "Restarts") == "1")
    told = Path(f"slurm-{job}_0.out")
    wait_for("continuation", lambda: "continues after step" in told.read_text())
    slurm("scancel", job)
    wait_for_end(job)
    time.sleep(5)
    assert (field(job, "JobState"), field(job, "Restarts")) == ("CANCELLED", "1")
    assert told.read_text().count("saved; the same command continues") == 2


def refused():
    job = submit("refused", overrides=["ensemble.size=3", "resume=must"])
    wait_for_end(job)
    assert (field(job, "ExitCode"), field(job, "Restarts")) == ("2:0", "0"), Path(f"slurm-{job}_0.out").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        os.chdir(folder / "work")
        with cluster(folder):
            for check in (seeds, refused, undisturbed, out_of_time, preempted_and_canceled):
                start = time.monotonic()
                check()
                print(f"{check.__name__}: as it should be, {time.monotonic() - start:.0f} s", flush=True)
        os.chdir("/")
