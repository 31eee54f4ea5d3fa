"""The comparisons of gpu-check, tried on the CPU: correct implementations pass, broken ones fail.

A correct implementation that rounds differently is emulated: every operation changes the last bit of its result.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dicedist.algorithm.discriminator import Discriminator
from dicedist.cluster.exchange import Exchange
from dicedist.cluster.world import World
from dicedist.diagnosis.comparisons import DOUBLE, SINGLE, judge
from dicedist.diagnosis.finding import FAILED, OK
from dicedist.diagnosis.trial import Case, follow
from dicedist.diagnosis.trials import COMMON, TINY, joined
from tests.support.processes import run_ranks
from tests.support.steps import CPU

STEPS = 6
NET = (*COMMON, *TINY, "method=dice", "ensemble.size=2")
BRANCH = (*NET, "structure=branch")
ROUNDED = ("mm", "addmm", "bmm", "convolution", "native_batch_norm", "sum", "mean", "mul", "add", "exp", "log", "div")


class RoundsDifferently(TorchDispatchMode):
    """Inside the context, operations that round add or take away one unit in the last place of their results."""

    def __init__(self):
        super().__init__()
        self.draws, self.changed = torch.Generator().manual_seed(0), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name.removesuffix("_backward") not in ROUNDED or function._schema.is_mutable:
            return result
        return tree_map(self.other, result)

    def other(self, result):
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        self.changed += 1
        signs = torch.empty_like(result).bernoulli_(0.5, generator=self.draws).mul_(2).sub_(1)
        return result.addcmul(result, signs, value=torch.finfo(result.dtype).eps / 2)


def followed(rank, case, size=1, break_it=lambda: None, mode=None):
    break_it()
    world = World(rank, size, CPU)
    if mode is None:
        return follow(case, STEPS, world)
    with mode:
        return follow(case, STEPS, world)


@pytest.fixture(scope="module")
def reference():
    known = {}

    def of(keys, rounding):
        if (keys, rounding) not in known:
            known[keys, rounding] = joined([followed(0, Case(keys, rounding.dtype, rounding.unit))])
        return known[keys, rounding]

    return of


def found(by_rank, expected, rounding):
    return judge(joined(by_rank).values, expected, "", rounding)


@pytest.mark.parametrize("rounding", [DOUBLE, SINGLE], ids=lambda rounding: rounding.dtype)
def test_an_implementation_that_rounds_differently_passes(reference, rounding):
    mode = RoundsDifferently()
    other = followed(0, Case(NET, rounding.dtype), mode=mode)
    expected = reference(NET, rounding)
    assert mode.changed > 1000 and joined([other]).values != expected.values
    one = found([other], expected, rounding)
    assert one.state == OK, one


def wrong_sign():
    scatter = Exchange.scatter

    def negated(exchange, answers, size):
        return {
            member: replace(answer, gradients={name: -gradient for name, gradient in answer.gradients.items()})
            for member, answer in scatter(exchange, answers, size).items()
        }

    Exchange.scatter = negated


def missing_sum():
    Exchange.sum_gradients = lambda exchange, parameters: None


def late_write():
    """Weights of w that another stream has not written yet when they are read, once."""
    learn, calls = Discriminator.learn, []

    def late(w, *given):
        calls.append(given)
        kept = {name: value.clone() for name, value in w.state_dict().items()}
        values = learn(w, *given)
        if len(calls) == 2:
            w.load_state_dict(kept)
        return values

    Discriminator.learn = late


@pytest.mark.parametrize("rounding", [DOUBLE, SINGLE], ids=lambda rounding: rounding.dtype)
@pytest.mark.parametrize("break_it", [wrong_sign, late_write])
def test_a_broken_step_fails(reference, rounding, break_it, monkeypatch):
    for owner, name in ((Exchange, "scatter"), (Discriminator, "learn")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # is put back afterwards
    one = found([followed(0, Case(NET, rounding.dtype), break_it=break_it)], reference(NET, rounding), rounding)
    assert one.state == FAILED, one


@pytest.mark.parametrize(("break_it", "state"), [(lambda: None, OK), (missing_sum, FAILED)])
def test_a_sum_over_ranks_that_is_missing_fails(reference, break_it, state):
    by_rank = run_ranks(2, followed, Case(BRANCH, DOUBLE.dtype), 2, break_it)
    one = found(by_rank, reference(BRANCH, DOUBLE), DOUBLE)
    assert one.state == state, one
