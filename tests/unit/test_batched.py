"""Members side by side in one network compute what they compute alone, and what cannot be grouped is known."""

import pytest
import torch
from torch import nn

from dicedist.algorithm.checks import check_members, why_not_batched
from dicedist.algorithm.grouped import grouped, why_not_grouped
from dicedist.algorithm.networks import Network, build
from dicedist.algorithm.objectives import Method
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.config.schema import NetworkConfig


def test_grouped_members_are_the_members():
    torch.manual_seed(0)
    members = [build(NetworkConfig("resnet8", None, False, None), (3, 32, 32)) for _ in range(3)]
    images = torch.randn(5, 3, 32, 32)
    together = grouped(members)
    expected = torch.cat([member(images) for member in members], 1)
    torch.testing.assert_close(together(images.repeat(1, 3, 1, 1)), expected, atol=1e-5, rtol=1e-4)
    own = {id(parameter) for member in members for parameter in member.parameters()}
    assert {id(parameter) for parameter in together.parameters()} == own  # nothing is copied


class Mixing(nn.Module):
    """Reads all channels at once."""

    def forward(self, x_BCHW):
        return x_BCHW - x_BCHW.mean(1, keepdim=True)


class Single(nn.Module):
    """Takes the sizes of one member for granted."""

    def forward(self, x_BCHW):
        return x_BCHW.view(len(x_BCHW), 4, 16)


def small(*layers, trunk=lambda: nn.Conv2d(3, 4, 3, 2, 1)):
    return [Network(trunk(), nn.Sequential(*layers), 4, 4) for _ in range(2)]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (small(nn.AdaptiveAvgPool2d(1), nn.Flatten()), None),
        (small(nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(64, 4, bias=False), nn.BatchNorm1d(4)), None),
        (small(Mixing(), nn.Flatten()), "its code mixes channels"),
        (small(Single()), "its code works for a single member only"),
        (small(nn.Dropout(0.1), nn.Flatten()), "layers of members draw random numbers"),
        (small(nn.GroupNorm(2, 4), nn.Flatten()), "GroupNorm has no grouped form"),
        (small(nn.BatchNorm2d(4, momentum=None), nn.Flatten()), "its code works for a single member only"),
        (small(nn.Flatten(), trunk=lambda: nn.Conv2d(3, 4, 3, 2, 1, padding_mode="circular")), "its code mixes"),
        ([*small(nn.Flatten()), *small(nn.ReLU(), nn.Flatten())], "members have different networks"),
    ],
)
def test_what_cannot_be_grouped_is_known(members, reason):
    torch.manual_seed(0)
    found = why_not_grouped(members, (3, 8, 8))
    assert found is None if reason is None else found.startswith(reason), found


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["network.per_member=[resnet8,resnet20]"], "different networks"),
        (["compile=true"], "compile=false"),
        (["method=sse"], "trajectory.kind=sse follows each member alone"),
    ],
)
def test_a_refusal_says_what_to_write(keys, reason):
    config = compose_config(["data=shapes", "network=resnet8", "method=ind", "ensemble.batched=true", *keys])
    with pytest.raises(ValueError, match=f"^ensemble.batched=true: .*{reason}.*; write ensemble.batched=false$"):
        check_members(config, Method(config.method), Plan.of(config, 2, (3, 32, 32)), 1, 1)


@pytest.mark.parametrize("network", ["resnet8", "wrn28_2", "preresnet110"])
def test_our_networks_can_be_grouped(network):
    config = compose_config(["data=shapes", f"network={network}"])
    assert why_not_batched(config, Plan.of(config, 2, (3, 32, 32))) is None
