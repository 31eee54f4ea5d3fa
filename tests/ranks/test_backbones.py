"""Pretrained backbones: over ranks as in one process, and resumed, without their file, as if they had not stopped."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from tests.support.processes import run_ranks
from tests.support.tiny import asked_after, assert_same_run, tensors_of, train

VIT = (
    "network=timm/test_vit", "network.split=blocks.3", "network.feature_dim=8", "network.freeze=stem", "epochs=1",
    "optimizer.lr=1e-3", "optimizer.schedule=cosine", "optimizer.layer_decay=0.8",
)  # fmt: skip
ADAMW = ("optimizer.name=adamw",)
STEPS = 3


@pytest.fixture
def weights(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(7)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=5).state_dict(), path)
    return path


def train_on_rank(rank, world_size, run_dir, overrides):
    train(run_dir, *overrides, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("structure", "optimizer"), [("net", ADAMW), ("branch", ())])
def test_ranks_equal_one_process(tmp_path, weights, structure, optimizer):
    """A network of layer norms, whose first layer is frozen, with weights from a file.

    Branches add their gradients in another order, and the bias of keys has a gradient of rounding alone, which Adam
    would scale up to the size of any other.
    """
    given = (*VIT, *optimizer, f"network.pretrained={weights}", f"structure={structure}")
    train(tmp_path / "one", *given)
    run_ranks(3, train_on_rank, 3, tmp_path / "three", given)
    expected, found = (tensors_of(tmp_path / runs / "tiny", STEPS) for runs in ("one", "three"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    part = "trunk/weights." if structure == "branch" else "member-0/weights.encoder.trunk."
    stem = {name.removeprefix(part) for name in expected if name.startswith(f"{part}patch_embed")}
    saved = load_file(weights)
    assert stem and all(torch.equal(expected[part + name], saved[name]) for name in stem)


def test_a_run_goes_on_without_the_file_of_its_weights(tmp_path, weights):
    given = (*VIT, *ADAMW, f"network.pretrained={weights}", "checkpoint.every_steps=1")
    train(tmp_path / "whole", *given)
    assert train(tmp_path / "stopped", *given, after_step=asked_after(1))
    sha256 = Run(tmp_path / "stopped" / "tiny").plan().weights_sha256
    assert len(sha256) == 2 and sha256[0] == sha256[1] and len(sha256[0]) == 64
    weights.unlink()
    assert not train(tmp_path / "stopped", *given)
    assert_same_run(tmp_path / "stopped" / "tiny", tmp_path / "whole" / "tiny", STEPS)
    ensemble = load_ensemble(Run(tmp_path / "stopped" / "tiny"), tell=lambda text: None)
    assert ensemble.about.options["split"] == "blocks.3" and "pretrained" not in ensemble.about.options
