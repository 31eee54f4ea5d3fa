"""Runs of heads on a frozen trunk: over ranks as in one process, resumed without weights and cache, evaluated."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dicedist import Ensemble
from dicedist.config import compose_request
from dicedist.config.requests import EvaluateRequest
from dicedist.data import sources
from dicedist.evaluation.formats import export
from dicedist.evaluation.saved import evaluate_run
from dicedist.runs.run import Run
from tests.support.networks import Small
from tests.support.processes import run_ranks
from tests.support.tiny import STEPS, asked_after, assert_same_run, build, tensors_of, train

HEADS = (
    "structure=branch", "network._target_=tests.support.networks.Small", "network.trusted=true",
    "network.freeze=trunk", "network.width=16", "network.depth=1", "network.norm=batch", "network.dropout=0.2",
    "network.feature_dim=6", "data.views=2", "data.per_member=true", "optimizer.ema=0.9",
)  # fmt: skip


@pytest.fixture
def weights(tmp_path, fresh_home):
    torch.manual_seed(7)
    path = tmp_path / "weights.safetensors"
    save_file(Small().state_dict(), path)
    return path


def train_on_rank(rank, world_size, run_dir, overrides):
    train(run_dir, *overrides, rank=rank, world_size=world_size)


def test_ranks_equal_one_process_and_a_stopped_run(tmp_path, weights, fresh_home):
    """The run that is stopped goes on where the file of the weights and the outputs of the trunk are gone."""
    given = (*HEADS, f"network.pretrained={weights}", "checkpoint.every_steps=1")
    train(tmp_path / "one", *given)
    run_ranks(3, train_on_rank, 3, tmp_path / "three", given)
    expected, found = (tensors_of(tmp_path / runs / "tiny") for runs in ("one", "three"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    saved = load_file(weights)
    trunk = {name for name in expected if name.startswith("trunk/weights.")}
    assert trunk and all(torch.equal(expected[name], saved[name.removeprefix("trunk/weights.")]) for name in trunk)
    assert train(tmp_path / "stopped", *given, after_step=asked_after(5))
    weights.unlink()
    shutil.rmtree(fresh_home / "prepared")
    assert not train(tmp_path / "stopped", *given)
    assert_same_run(tmp_path / "stopped" / "tiny", tmp_path / "one" / "tiny", STEPS)


def test_every_command_answers_images_alike(tmp_path, weights):
    """At the end of training, by evaluate, by the loaded ensemble and by an exported file."""
    others = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "others.npy", others)
    trainer = build(tmp_path, *HEADS, f"network.pretrained={weights}", f"ood.sets.others={tmp_path / 'others.npy'}")
    trainer.train_and_evaluate()
    run = Run(tmp_path / "tiny")
    logits = load_file(run.logits_file)
    result = run.result()
    assert result["ood"]["others"]["max_softmax"]["auroc"] >= 0 and run.gallery_file.exists()
    words = [f"run={run}", "network.trusted=true", "shift=corruptions", "shift_severities=[3]", "shift_limit=20"]
    _, found = evaluate_run(run, compose_request("evaluate", words, EvaluateRequest))
    assert found["ensemble"] == result["ensemble"] and found["ood"] == result["ood"]
    assert found["shift"]["corruptions"]["num_inputs"] == 20
    ensemble = Ensemble.load(run.directory, trusted=True)
    images = sources.load(run.config().data).test.take(torch.arange(40))
    answers = ensemble.predict(images.numpy())
    torch.testing.assert_close(answers.member_logits, logits["logits"][:, :40], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ensemble.predict(others).member_logits, logits["ood.others"], atol=1e-4, rtol=1e-4)
    assert export(ensemble, tmp_path / "heads.pt2", "pt2", images[:4]) < 1e-4
