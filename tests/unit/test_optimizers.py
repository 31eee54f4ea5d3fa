"""Optimizers by name, their parameter groups, clipping and moving averages, against torch's own."""

import copy

import pytest
import torch
from torch import nn

from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.networks.layers import layers
from dicedist.algorithm.optimizers import build_optimizer, parameter_groups, set_rate
from dicedist.config import compose_config


def settings(*overrides):
    return compose_config(["optimizer.lr=0.1", *overrides]).optimizer


def quadratic():
    """A module of one weight matrix and a bias, and its loss, whose minimum is not at 0."""
    torch.manual_seed(0)
    return nn.Linear(3, 2), torch.randn(5, 3)


def descend(module, optimizer, inputs, steps=4, rate=0.05):
    for _ in range(steps):
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        (module(inputs) - 1).square().sum().backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("overrides", "torchs"),
    [
        ((), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)),
        (["optimizer.name=adam"], lambda p: torch.optim.Adam(p, 0.05, weight_decay=5e-4)),
        (
            ["optimizer.name=adamw", "optimizer.betas=[0.8, 0.99]", "optimizer.weight_decay=0.05"],
            lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.99), weight_decay=0.05),
        ),
    ],
)
def test_optimizers_are_torchs(overrides, torchs):
    module, inputs = quadratic()
    reference = copy.deepcopy(module)
    expected = descend_by(reference, torchs(reference.parameters()), inputs)
    found = descend(module, build_optimizer(settings(*overrides), module), inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def descend_by(module, optimizer, inputs, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        (module(inputs) - 1).square().sum().backward()
        optimizer.step()
    return module.state_dict()


def test_by_default_there_is_one_group_as_ever():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    (group,) = build_optimizer(settings(), module, layers(module)).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in module.parameters()]
    assert (group["weight_decay"], group["rate"]) == (5e-4, 1.0)


class Transformer(nn.Module):
    """A network like timm's, with positions outside of the sequence of blocks that get no weight decay."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 2, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.blocks = nn.Sequential(*(nn.ModuleDict({"mix": nn.Linear(4, 4)}) for _ in range(2)))
        self.norm = nn.LayerNorm(4)

    def no_weight_decay(self):
        return {"positions"}


def test_norms_biases_and_positions_may_be_spared():
    module = nn.ModuleDict({"body": Transformer()})
    groups = parameter_groups(settings("optimizer.decay_norms=false"), module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    decayed = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in groups}
    assert decayed[5e-4] == ["body.patches.weight", "body.blocks.0.mix.weight", "body.blocks.1.mix.weight"]
    assert "body.positions" in decayed[0.0] and "body.norm.weight" in decayed[0.0] and len(decayed) == 2


def test_layers_of_a_transformer_and_of_our_resnet():
    firsts = [names[0] for names in layers(Transformer())]
    assert firsts == ["positions", "blocks.0.mix.weight", "blocks.1.mix.weight", "norm.weight"]
    from dicedist.algorithm.networks import build

    network = build(compose_config(["network=resnet20"]).network, (3, 32, 32))
    found = layers(network)
    assert len(found) == 1 + 9  # the stem, and three blocks in each of three stages
    assert [name for names in found for name in names] == [name for name, _ in network.named_parameters()]


def test_rates_fall_towards_the_images():
    """Heads 1, the last layer of the network 0.1, each before it half of that, 2 layers of branches behind a trunk."""
    module = nn.ModuleDict({"body": Transformer(), "head": nn.Linear(4, 2)})
    given = settings("optimizer.backbone_factor=0.1", "optimizer.layer_decay=0.5")
    named = [[f"body.{name}" for name in names] for names in layers(module["body"])]
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def rates(behind):
        optimizer = build_optimizer(given, module, named, behind)
        set_rate(optimizer, 2.0)
        return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}

    alone = rates(0)
    expected = {"head.weight": 2.0, "body.norm.bias": 0.2, "body.blocks.1.mix.bias": 0.1, "body.positions": 0.025}
    assert {name: alone[name] for name in expected} == pytest.approx(expected)
    assert rates(2)["body.positions"] == pytest.approx(0.025 / 4)


def test_frozen_parameters_belong_to_no_group():
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    (group,) = parameter_groups(settings(), module)
    assert group["params"] == [module.bias]


def test_a_moving_average_is_the_recursion():
    """a <- d a + (1 - d) w, from the first update on; running statistics too."""
    module = nn.BatchNorm1d(2)
    average = MovingAverage(module, 0.9)
    expected = None
    for step in range(4):
        with torch.no_grad():
            module.weight.fill_(step + 1.0)
            module.running_mean.fill_(10.0 * step)
        average.follow(module)
        now = torch.stack([module.weight, module.running_mean]).detach()
        expected = now.clone() if expected is None else 0.9 * expected + 0.1 * now
    torch.testing.assert_close(torch.stack([average.module.weight, average.module.running_mean]), expected)
