"""Heads on a frozen trunk: their layers, the views that the trunk reads once, and what the cache is known by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dicedist.algorithm.build import build_hosted, read_shape
from dicedist.algorithm.networks import build
from dicedist.algorithm.objectives import Method
from dicedist.config import compose_config
from dicedist.config.schema import NetworkConfig
from dicedist.data.frozen import FrozenTrunk
from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.sources import Split, load, part
from dicedist.runs.pretrained import read_once
from tests.support.networks import Small
from tests.support.photographs import CLASSES, photograph
from tests.support.steps import plan_of

CPU = torch.device("cpu")
HEAD = {"width": 16, "depth": 2, "norm": "batch", "dropout": 0.5, "feature_dim": 5}
SETTINGS = (
    "data=shapes", "data.train_limit=40", "data.val_fraction=0.01", "data.pipeline=torch", "ensemble.size=2",
    "structure=branch", "network.freeze=trunk", "network.width=16", "network.depth=1", "network.norm=batch",
    "network.dropout=0.5",
)  # fmt: skip
OWN = ("network._target_=tests.support.networks.Small", "network.trusted=true")


def network(name, size=32, **settings):
    torch.manual_seed(0)
    return build(NetworkConfig(name, None, False, None, **settings), (3, size, size))


def test_the_recipe_has_a_cheaper_discriminator_than_the_paper():
    recipe, paper = (compose_config([f"recipe={name}", "data.size=32"]).redundancy for name in ("heads", "paper"))
    assert (recipe.width, recipe.num_samples) < (paper.width, paper.num_samples)
    assert recipe.num_steps == paper.num_steps


def test_a_head_reads_the_features_of_the_whole_network():
    pytest.importorskip("timm")
    plain, headed = network("timm/test_resnet").eval(), network("timm/test_resnet", **HEAD).eval()
    images = torch.randn(2, 3, 32, 32)
    assert headed.feature_dim == 5 and headed(images).shape == (2, 5)
    assert torch.equal(headed.trunk(images), plain(images))  # the trunk is drawn before the head
    assert torch.equal(headed.branch()(headed.trunk(images)), headed(images))
    kinds = [type(layer).__name__ for block in headed.projection for layer in block]
    dense = ["Dropout", "Linear", "BatchNorm1d"]
    assert kinds == [*dense, "ReLU", *dense, "ReLU", *dense]
    assert [block[0].p for block in headed.projection] == [0, 0.5, 0.5]
    ours = {headed.published_name(name) for name in headed.state_dict() if not name.startswith("projection.")}
    assert ours == {plain.published_name(name) for name in plain.state_dict()}


def test_whole_stages_may_belong_to_a_member():
    headed = network("resnet8", **HEAD, freeze="trunk")
    assert headed.branch()(headed.trunk(torch.randn(2, 3, 32, 32))).shape == (2, 5)
    learning = {name.partition(".")[0] for name, value in headed.named_parameters() if value.requires_grad}
    assert learning == {"tail", "projection"}


@pytest.mark.parametrize("settings", [{}, {"split": "layer3"}, HEAD])
def test_images_are_enlarged_inside_the_network(settings):
    pytest.importorskip("timm")
    plain, large = (network("timm/test_resnet", **settings, enlarge=side).eval() for side in (None, 48))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(large(images), plain(F.interpolate(images, (48, 48), mode="bilinear")))
    assert [large.published_name(name) for name in large.state_dict()] == [
        plain.published_name(name) for name in plain.state_dict()
    ]
    assert [len(layer) for layer in large.layers()] == [len(layer) for layer in plain.layers()]


def test_the_frozen_trunk_is_saved_but_no_step_runs_it():
    config = compose_config([*SETTINGS, *OWN, "optimizer.ema=0.9"])
    hosted = build_hosted(config, Method(config.method), plan_of(config), [0, 1], False, 10, CPU)
    assert hosted.trunk is None and hosted.frozen.name == "trunk" and hosted.frozen.average is None
    assert hosted.frozen in hosted.parts and hosted.frozen not in hosted.learners and not hosted.common_parameters
    assert read_shape(config, plan_of(config)) == (4,)
    assert not any("trunk" in name for name in hosted.member(0).state_dict())


@pytest.fixture
def opened(fresh_home):
    """A source whose images a small trunk reads, with so many views; and how many images the trunk has read."""
    torch.manual_seed(0)
    module, read = Small().eval(), []
    module.register_forward_hook(lambda _, images, outputs: read.append(len(images[0])))

    def make(*overrides, trunk=module):
        config = compose_config([*SETTINGS, *OWN, *overrides])
        source = load(config.data)
        return source, read_once(source, config, plan_of(config), trunk), config, read

    return make


def test_outputs_are_those_of_the_trunk_and_are_computed_once(opened):
    images, source, config, read = opened()
    for name in ("train", "val", "test"):
        split, plain = getattr(source, name), getattr(images, name)
        views = torch.cat([view for view, _ in evaluation_batches(plain, images, 1000, CPU)])
        torch.testing.assert_close(split.outputs_N[:, 0], source.trunk.module(views))
        seen = torch.cat([view for view, _ in evaluation_batches(split, source, 7, CPU)])
        assert torch.equal(seen, split.outputs_N[:, 0]) and torch.equal(split.labels_N, plain.labels_N)
        assert torch.equal(split.take(torch.arange(3)), plain.take(torch.arange(3)))  # images for the gallery
    read.clear()
    again = opened()[1]
    assert not read and torch.equal(again.train.outputs_N, source.train.outputs_N)
    some = part(source.train, torch.tensor([5, 2]))
    assert torch.equal(some.outputs_N, source.train.outputs_N[[5, 2]])


def test_other_weights_or_images_are_read_again(opened):
    source, read = opened()[1], opened()[3]
    torch.manual_seed(1)
    assert not torch.equal(opened(trunk=Small().eval())[1].test.outputs_N, source.test.outputs_N)
    read.clear()
    opened("data.train_limit=41")
    assert sum(read) > 41
    other = Split(torch.randint(256, (9, 32, 32, 3), dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    read.clear()
    outputs = [source.seen(other).outputs_N for _ in range(2)]
    assert read == [9] and torch.equal(*outputs)
    assert source.seen(source.test) is source.test


def test_views_take_turns_and_are_keyed(opened):
    images, source, config, _ = opened("data.views=3")
    outputs_N = source.train.outputs_N
    assert outputs_N.shape == (40, 3, 4) and source.val.outputs_N.shape[1] == 1
    assert torch.equal(outputs_N[:, 0], opened()[1].train.outputs_N[:, 0])
    assert not torch.equal(outputs_N[:, 1], outputs_N[:, 0]) and not torch.equal(outputs_N[:, 2], outputs_N[:, 1])
    assert torch.equal(opened("data.views=3", "seed=5", trunk=source.trunk.module)[1].train.outputs_N, outputs_N)
    for per_member, viewers in ((False, [0]), (True, [0, 1])):
        data = replace(config.data, per_member=per_member)
        loader = Loader(source.train, data, source, 16, 0, CPU, [0, 1])
        met = torch.zeros(40, 3)
        for epoch in range(3):
            for batch in loader.epoch(epoch):
                assert len(batch.images) == len(viewers)
                for member, inputs in zip(viewers, batch.images, strict=True):
                    view_B = (batch.indices_B + epoch + member) % 3
                    assert torch.equal(inputs, outputs_N[batch.indices_B, view_B])
                    met[batch.indices_B, view_B] += 1
        assert (met == len(viewers)).all()
    noisy = Loader(source.train, replace(config.data, noise=0.1), source, 16, 0, CPU, [0])
    assert not torch.equal(next(noisy.epoch(0)).images[0], next(loader.epoch(0)).images[0])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, images):
        return self.factor * images.mean((2, 3))


@pytest.mark.parametrize("kind", ["folder", "files", "own"])
def test_every_source_is_read(tmp_path, data_config, fresh_home, kind):
    rng = np.random.default_rng(0)
    for split, each in (("train", 6), ("test", 2)):
        for name in CLASSES:
            (tmp_path / split / name).mkdir(parents=True)
            for place in range(each):
                photograph(rng, tmp_path / split / name / f"{place}.png", 40, 30)
    more = {"_target_": "tests.support.leaves.Leaves", "trusted": True} if kind == "own" else {}
    root = "18" if kind == "own" else str(tmp_path)
    config = data_config(kind, root=root, pipeline="torch", views=2, split="full", size=16, **more)
    images = load(config)
    source = FrozenTrunk(Mean(), ("mean",), (3,), config).read_all(images)
    assert source.train.outputs_N.shape == (18, 2, 3) and source.val.outputs_N is None
    expected = torch.cat([view.mean((2, 3)) for view, _ in evaluation_batches(images.train, images, 5, CPU)])
    torch.testing.assert_close(source.train.outputs_N[:, 0], expected)
    moved = (source.train.outputs_N[:, 1] - expected).abs()
    assert (0.001 < moved.mean()) and moved.mean() < 1  # a crop of the same image


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.views=2", "network.freeze=none"], "data.views=2: views are kept for a frozen trunk only"),
        (["structure=net"], "network.freeze=trunk: write structure=branch"),
        (["loss.cutmix=1"], "network.freeze=trunk: write loss.cutmix=0"),
        (["method=distill", "teacher.run=runs/a"], "network.freeze=trunk: write network.freeze=none: a teacher"),
        (["network.norm=null"], "network.norm is not set: write network=mlp or recipe=heads"),
        (["data.views=0"], "data.views=0: write a whole number from 1"),
    ],
)
def test_refusals(overrides, line):
    with pytest.raises(ValueError, match=line):
        compose_config([*SETTINGS, *overrides])


def test_outputs_that_do_not_fit_are_refused(opened, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ValueError, match="MB in .*, which has 0 MB free: lower data.views"):
        opened()
