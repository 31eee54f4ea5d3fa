"""launch/sky.yaml: its script with SkyPilot's variables, and its keys by SkyPilot's own schema if it is installed."""

import re
import subprocess

import pytest
import yaml
from torch.distributed import run as torchrun

from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import place
from dicedist.cluster.process import EXIT_STOPPED, EXIT_USER
from dicedist.config import compose_config
from tests.support import CHECKOUT

TASK = yaml.safe_load((CHECKOUT / "launch" / "sky.yaml").read_text())


def test_sky_pilots_own_schema():
    """Its package brings hundreds of MB, so it is no part of the dev extra."""
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    import jsonschema

    jsonschema.validate(TASK, schemas.get_task_schema())
    jsonschema.validate(TASK["resources"], schemas.get_resources_schema())


def example():
    """The ARGUMENTS that the file's own example overrides."""
    return re.search(r'--env ARGUMENTS="([^"]+)"', (CHECKOUT / "launch" / "sky.yaml").read_text())[1]


@pytest.mark.skipif(
    "--shutdown" not in torchrun.get_args_parser().format_help(), reason="torchrun has --shutdown-timeout since 2.12"
)
@pytest.mark.parametrize(
    ("arguments", "trackers"),
    [(TASK["envs"]["ARGUMENTS"], []), (example(), []), ("ensemble.size=7 tracking=mlflow", ["mlflow"])],
)
def test_script(tmp_path, arguments, trackers):
    """The script on two machines of four GPUs."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    python.chmod(0o755)
    variables = {
        "SKYPILOT_NODE_IPS": "10.1.2.3\n10.1.2.4", "SKYPILOT_NUM_NODES": str(TASK["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": TASK["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "sky-managed-2026-11-17_dicedist_1-0", "PATH": "/usr/bin:/bin", "ARGUMENTS": arguments,
    }  # fmt: skip
    shell = ["bash", "-euo", "pipefail", "-c", TASK["run"]]
    done = subprocess.run(
        shell, cwd=tmp_path, env={**TASK["envs"], **variables}, check=True, capture_output=True, text=True
    )
    module, name, *words = done.stdout.splitlines()
    assert (module, name) == ("-m", "dicedist.launch")
    options = torchrun.parse_args(words)
    assert options.rdzv_endpoint == "10.1.2.3:29400" and options.rdzv_id == variables["SKYPILOT_TASK_ID"]
    config = compose_config(options.training_script_args)
    assert config.run.remote == TASK["envs"]["REMOTE"] and config.tracking.trackers == trackers
    ranks = int(options.nnodes) * int(options.nproc_per_node)
    place(ranks, config.ensemble.size, Method(config.method).counterpart is not None)


def test_exit_codes():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_STOPPED] and EXIT_USER not in recovery["recover_on_exit_codes"]
