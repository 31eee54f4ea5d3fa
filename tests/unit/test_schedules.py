"""Schedules at the paper's knots, by hand."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from dicedist.algorithm.schedules import Schedules
from dicedist.config import compose_config


def moment(epoch, *overrides):
    return Schedules(compose_config(overrides)).at(epoch)


@pytest.mark.parametrize(
    ("data", "epoch", "log_beta"),
    [
        ("cifar100", 0, 100), ("cifar100", 4, 55), ("cifar100", 8, 10), ("cifar100", 91.5, 6), ("cifar100", 175, 2),
        ("cifar100", 250, 1.5), ("cifar100", 275, 1.25), ("cifar100", 300, 1),
        ("cifar10", 0, 100), ("cifar10", 2.5, 55), ("cifar10", 5, 10), ("cifar10", 52.5, 6),
        ("cifar10", 100, 2), ("cifar10", 299, 2),
        ("shapes", 0, 100), ("shapes", 100, 10), ("shapes", 200, 7), ("shapes", 300, 4),  # auto
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
        (
            ("optimizer.lr=ashukha2020", "optimizer.schedule=knots"),
            {0: 0.1, 150: 0.1, 180: 0.07525, 210: 0.0505, 240: 0.02575, 270: 0.001, 299: 0.001},
        ),
        (("optimizer.lr=0.05",), {0: 0.05, 150: 5e-4, 250: 5e-6}),
    ],
)
def test_learning_rate(overrides, rates):
    for epoch, rate in rates.items():
        assert moment(epoch, *overrides).learning_rate == pytest.approx(rate)


SCHEDULERS = {
    "constant": lambda optimizer, steps: lr_scheduler.ConstantLR(optimizer, factor=1.0),
    "linear": lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
}


def rates_of_torch(build, steps):
    """The rates of a scheduler of torch that is stepped after every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    scheduler, rates = build(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("shape", SCHEDULERS)
def test_rates_are_those_of_torch(shape, warmup):
    def build(optimizer):
        after = SCHEDULERS[shape](optimizer, 12 - warmup)
        if not warmup:
            return after
        before = lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=warmup)
        return lr_scheduler.SequentialLR(optimizer, [before, after], [warmup])

    settings = ("optimizer.lr=0.2", "epochs=12", f"optimizer.schedule={shape}", f"optimizer.warmup_epochs={warmup}")
    ours = [moment(epoch, *settings).learning_rate for epoch in range(12)]
    assert ours == pytest.approx(rates_of_torch(build, 12))


@pytest.mark.parametrize(("warmup", "rise"), [(0, 0.3), (5, 0.5)])
def test_one_cycle_is_that_of_torch(warmup, rise):
    """torch's last step is the end of the run, ours is the step before: its cycle has one step fewer."""
    settings = ("optimizer.lr=0.2", "epochs=10", "optimizer.schedule=onecycle", f"optimizer.warmup_epochs={warmup}")
    now = Schedules(compose_config(settings))
    steps = 20
    rates = rates_of_torch(lambda optimizer: OneCycle(optimizer, rise, steps), steps)
    assert [now.at(step / 2).learning_rate for step in range(steps)] == pytest.approx(rates)


def OneCycle(optimizer, rise, steps):
    """OneCycleLR counts its phases in steps from 0 to total_steps - 1, and peaks at rise * total_steps - 1."""
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps + 1, pct_start=rise, cycle_momentum=False)
    scheduler._schedule_phases[0]["end_step"] = rise * steps
    return scheduler


def test_the_tables_can_warm_up():
    settings = ("optimizer.warmup_epochs=10",)
    assert moment(0, *settings).learning_rate == pytest.approx(0.001)
    assert moment(5, *settings).learning_rate == pytest.approx(0.1 * 0.505)
    assert moment(10, *settings).learning_rate == moment(10).learning_rate


def test_other_lengths_go_through_the_same_phases():
    assert moment(15, "epochs=30") == moment(150)
    assert moment(15, "epochs=30", "schedules.scale=false") == moment(15)
