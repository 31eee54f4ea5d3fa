"""launch/slurm.sbatch with fake srun, scontrol and squeue that only record their arguments.

The same with real Slurm daemons: `python -m tests.slurm`.
"""

import os
import subprocess

import pytest
from torch.distributed import run as torchrun

from dicedist.config import compose_config
from tests.support import CHECKOUT

SCRIPT = CHECKOUT / "launch/slurm.sbatch"
STUBS = {
    "srun": 'printf "%s\\n" "$@" >step; exit "$CODE"',
    "scontrol": 'if [[ $1 == show ]]; then printf "%s\\n" gpu07 gpu11; else echo "$*" >>asked; fi',
    "squeue": 'echo "$STATE"',
}
TASK = {
    "SLURM_JOB_ID": "30017", "SLURM_ARRAY_JOB_ID": "30015", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NAME": "dicedist",
    "SLURM_JOB_NODELIST": "gpu[07,11]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


@pytest.fixture
def submit(tmp_path):
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/usr/bin/env bash\n{body}\n")
        stub.chmod(0o755)

    def submit(*overrides, code=0, state="RUNNING", **variables):
        """Runs the script as sbatch would: its exit code, the words after srun, and the requests to scontrol."""
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CODE": str(code), "STATE": state, **TASK}
        env |= variables
        done = subprocess.run(
            ["bash", SCRIPT, *overrides], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""
        asked = tmp_path / "asked"
        step = (tmp_path / "step").read_text().splitlines()
        return done.returncode, step, asked.read_text().splitlines() if asked.exists() else []

    return submit


def launched(step):
    """The options that dicedist.launch gets, and the overrides that dicedist.train gets."""
    words = step[step.index("dicedist.launch") + 1 :]
    options = torchrun.parse_args(words)
    return options, options.training_script_args


def test_one_launcher_a_node_meets_on_the_first(submit):
    code, step, _ = submit("experiment=cifar100/resnet32-net4-dice", "batch_size=64")
    assert code == 0
    assert {"--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0", ".venv/bin/python"} <= set(step)
    options, overrides = launched(step)
    assert (options.nnodes, options.nproc_per_node) == ("2", "4")
    assert (options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id) == ("c10d", "gpu07:20017", "30017-0")
    assert options.module and options.training_script == "dicedist.train"
    config = compose_config(overrides)
    assert (config.seed, config.batch_size) == (2, 64)
    assert config.run.name == "cifar100-resnet32-net4-dice-seed2"


def test_a_restart_is_another_rendezvous(submit):
    _, step, _ = submit(SLURM_RESTART_COUNT="3")
    assert launched(step)[0].rdzv_id == "30017-3"


def test_ranks_and_interpreter_of_ones_own(submit):
    _, step, _ = submit(RANKS="3", PYTHON="/opt/python")
    assert launched(step)[0].nproc_per_node == "3"
    assert "/opt/python" in step


def test_the_jobs_name_names_the_runs(submit):
    _, step, _ = submit("experiment=quickstart", SLURM_JOB_NAME="trial")
    assert compose_config(launched(step)[1]).run.name == "trial-seed2"


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),  # warned or preempted
        (138, "RUNNING", True),  # warned before the ranks handled signals
        (143, "RUNNING", True),  # preempted before the ranks handled signals
        (75, "COMPLETING", False),  # canceled
        (0, "RUNNING", False),  # done
        (2, "RUNNING", False),  # refused
        (1, "RUNNING", False),  # gave up after restarts
    ],
)
def test_requeued_if_asked_to_stop(submit, code, state, requeued):
    returned, _, asked = submit(code=code, state=state)
    assert returned == code
    assert asked == (["requeue 30015_2"] if requeued else [])


def test_a_job_without_array_is_seed_0(submit):
    _, step, asked = submit(code=75, SLURM_ARRAY_JOB_ID="", SLURM_ARRAY_TASK_ID="")
    assert compose_config(launched(step)[1]).seed == 0
    assert asked == ["requeue 30017"]


def test_slurm_is_asked_to_warn_and_to_append():
    options = {line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")}
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= options
