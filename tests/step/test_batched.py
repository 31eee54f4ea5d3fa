"""Members of one device as one grouped network: the same training as one after another, to rounding."""

import pytest
import torch
from torch import nn

from dicedist.algorithm.build import check_members
from dicedist.algorithm.objectives import Method
from tests.support.steps import STRONG, batch_at, build_step, configured, side_for, weights_of

SIZE, STEPS, B = 3, 3, 8


def trained(*keys, batched=True, switch=None):
    """A step after some batches; switch: the batch before which it changes its way."""
    config = configured(SIZE, *STRONG, *keys, f"ensemble.batched={str(batched).lower()}")
    check_members(config, Method(config.method), SIZE, 1, 1)
    step = build_step(config)
    for n in range(STEPS):
        if n == switch:
            step.batch_members(not batched)
        outcome = step(batch_at(n, B, side=side_for(config.method.name)))
    return step, outcome.values


def assert_same_training(found, expected):
    for (step, values), (reference, known) in [(found, expected)]:
        assert values.keys() == known.keys()
        for name, value in known.items():
            torch.testing.assert_close(values[name], value, msg=name)
        ours, theirs = weights_of(step), weights_of(reference)
        for part in theirs:
            torch.testing.assert_close(ours[part], theirs[part], rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "keys",
    [
        ("method=dice",),
        ("method=dice", "structure=branch"),
        ("method=ind", "network.feature_dim=12", "network.freeze=stem"),
        ("method=ind", "optimizer.accumulate=2", "optimizer.ema=0.9", "optimizer.clip_norm=1"),
        ("method=gal",),
        ("method=afd",),
        ("method=dice", "network=preresnet110"),
    ],
    ids=" ".join,
)
def test_one_network_is_all_members(keys):
    found = trained(*keys)
    assert found[0].together is not None
    assert_same_training(found, trained(*keys, batched=False))


@pytest.mark.usefixtures("double_precision")
def test_the_way_may_change_between_two_steps():
    assert_same_training(trained("method=dice", switch=2), trained("method=dice", batched=False))
