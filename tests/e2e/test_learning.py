"""Every method on a few hundred real images: it learns, and what it leaves is reported and predicts."""

import json

import numpy as np
import pytest

from dicedist import train
from dicedist.config.compose import choices_of
from dicedist.evaluation.loading import load_ensemble
from tests.support.steps import STRUCTURES, TRAJECTORIES

CHANCE = 0.1
SMALL = [
    "data=cifar10", "data.train_limit=600", "data.pipeline=torch", "network=resnet8", "ensemble.size=3", "epochs=12",
    "batch_size=32", "evaluate.every_epochs=12", "ood.sets={}", "tracking=none", "optimizer.lr=0.05",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", choices_of("method"))
def test_a_method_learns(tmp_path, real_data, method):
    options = [f"method={method}", f"structure={STRUCTURES[method][-1]}"]
    if method in TRAJECTORIES:
        options += ["ensemble.size=1", "trajectory.samples=3"]
    if method == "distill":
        train.run([*SMALL, "method=ind", f"run.dir={tmp_path}", "run.name=teacher"])
        options.append(f"teacher.run={tmp_path / 'teacher'}")
    train.run([*SMALL, *options, f"run.dir={tmp_path}", "run.name=learns"])
    result = json.loads((tmp_path / "learns" / "evaluation.json").read_text())
    assert len(result["member_ids"]) == 3
    assert result["ensemble"]["accuracy"] > 2 * CHANCE
    assert "<svg" in (tmp_path / "learns" / "report.html").read_text()
    ensemble = load_ensemble(tmp_path / "learns")
    answers = ensemble.predict(np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8))
    assert len(answers.labels) == 4
