"""The batched network of `bench batched` computes what its members compute, side by side."""

import torch

from dicedist.algorithm.networks import build
from dicedist.benchmarks.batched import grouped
from dicedist.config.schema import NetworkConfig


def test_grouped_members_are_the_members():
    torch.manual_seed(0)
    members = [build(NetworkConfig("resnet8", None, False, None)) for _ in range(3)]
    images = torch.randn(5, 3, 32, 32)
    together = grouped(members)
    expected = torch.cat([member(images) for member in members], 1)
    torch.testing.assert_close(together(images.repeat(1, 3, 1, 1)), expected, atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in together.parameters()) == 3 * sum(p.numel() for p in members[0].parameters())
