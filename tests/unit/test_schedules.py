"""Schedules at the paper's knots, by hand."""

import math

import pytest

from dicedist.algorithm.schedules import Schedules
from dicedist.config import compose_config


def moment(epoch, *overrides):
    return Schedules.of(compose_config(overrides)).at(epoch)


@pytest.mark.parametrize(
    ("data", "epoch", "log_beta"),
    [
        ("cifar100", 0, 100), ("cifar100", 4, 55), ("cifar100", 8, 10), ("cifar100", 91.5, 6), ("cifar100", 175, 2),
        ("cifar100", 250, 1.5), ("cifar100", 275, 1.25), ("cifar100", 300, 1),
        ("cifar10", 0, 100), ("cifar10", 2.5, 55), ("cifar10", 5, 10), ("cifar10", 52.5, 6),
        ("cifar10", 100, 2), ("cifar10", 299, 2),
    ],
)  # fmt: skip
def test_log_beta(data, epoch, log_beta):
    now = moment(epoch, f"data={data}")
    assert now.log_beta == pytest.approx(log_beta)
    assert now.compression_ceb == pytest.approx(math.exp(-log_beta))
    assert now.compression_ib == pytest.approx(1 / (math.exp(log_beta) + 1))


@pytest.mark.parametrize(
    ("epoch", "value"), [(0, math.exp(-5)), (40, math.exp(-1.25)), (79.999, 1.0), (80, 1.0), (300, 1.0)]
)
def test_ramp_up(epoch, value):
    assert moment(epoch).ramp_up == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("epoch", "share"), [(0, 0), (100, 0), (175, 0.5), (250, 1), (299, 1)])
def test_covariance(epoch, share):
    assert moment(epoch).covariance == pytest.approx(share)


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [
        ((), {0: 0.1, 149.9: 0.1, 150: 1e-3, 225: 1e-4, 250: 1e-5, 299: 1e-5}),
        (("data=cifar10",), {0: 0.1, 150: 1e-3, 225: 1e-4, 299: 1e-4}),
        (("optimizer.lr=chen2020",), {0: 0.1, 150: 1e-2, 225: 1e-3, 299: 1e-3}),
        (("optimizer.lr=0.05",), {0: 0.05, 150: 5e-4, 250: 5e-6}),
    ],
)
def test_learning_rate(overrides, rates):
    for epoch, rate in rates.items():
        assert moment(epoch, *overrides).learning_rate == pytest.approx(rate)


def test_other_lengths_go_through_the_same_phases():
    assert moment(15, "epochs=30") == moment(150)
    assert moment(15, "epochs=30", "schedules.scale=false") == moment(15)
