"""The memory of rank 0 does not grow with the training set, in training, validation and evaluation."""

import os
import subprocess
import sys

import pytest

from tests.support import CHECKOUT

FEW, MANY = 20_000, 100_000
CHILD = f"""
import sys
from pathlib import Path
from dicedist import train
from dicedist.evaluation import evaluator

evaluator.ESTIMATED = 100  # as many in both runs: the features that stay for w's estimate are bounded, not few

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

for number in ({FEW}, {MANY}):
    train.run([
        "data=own", "data._target_=tests.support.leaves.Measured", "data.trusted=true", f"data.root={{number}}",
        "network=mlp", "network.width=512", "network.depth=2", "ensemble.size=2", "batch_size=64", "max_steps=2",
        "redundancy.num_steps=1", "redundancy.num_samples=1", "evaluate.train_images=100", "tracking=none",
        f"run.dir={{sys.argv[1]}}", f"run.name={{number}}",
    ])
    print("peak", peak())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of a process's memory is Linux's")
def test_rank_0_is_flat_in_the_training_set(tmp_path):
    """Five times as many: 5,000 are held out, whose features alone are 40 MB, and all inputs are 50 MB."""
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    few, many = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak"))
    assert many - few < 40e6, (few, many)
