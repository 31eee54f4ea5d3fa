"""Members of one device as one grouped network: the same training as one after another, to rounding."""

from dataclasses import replace

import pytest
import torch

from dicedist.algorithm.checks import check_members
from dicedist.algorithm.encoders import Encoders
from dicedist.algorithm.grouped import Together
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.step import Step
from dicedist.cluster.placement import place
from dicedist.cluster.world import World
from dicedist.data import sources
from dicedist.training import auto
from dicedist.training.auto import faster_way
from dicedist.training.job import Job
from tests.support import tiny
from tests.support.pretend import CUDA, PretendGpu
from tests.support.processes import run_ranks
from tests.support.steps import STRONG, batch_at, build_step, configured, plan_of, side_for, weights_of

SIZE, STEPS, B = 3, 3, 8


def trained(*keys, batched=True, switch=None):
    """A step after some batches; switch: the batch before which it changes its way."""
    config = configured(SIZE, *STRONG, *keys, f"ensemble.batched={str(batched).lower()}")
    check_members(config, Method(config.method), plan_of(config), 1, 1)
    step = build_step(config)
    for n in range(STEPS):
        if n == switch:
            plan = replace(plan_of(config), grouped=not batched)
            encoders = Encoders(config, step.method, plan, step.hosted, step.exchange)
            step = Step(step.method, step.hosted, step.exchange, encoders, step.schedules, step.loss)
        outcome = step(batch_at(n, B, side=side_for(config.method.name)))
    return step, outcome.values


def assert_same_training(found, expected):
    (step, values), (reference, known) = found, expected
    torch.testing.assert_close(values, known, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(weights_of(step), weights_of(reference), rtol=1e-7, atol=1e-9)


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
    ],
    ids=" ".join,
)
def test_one_network_is_all_members(keys):
    found = trained(*keys)
    assert found[0].encoders.together is not None
    assert_same_training(found, trained(*keys, batched=False))


@pytest.mark.usefixtures("double_precision")
def test_the_way_may_change_between_two_steps():
    assert_same_training(trained("method=dice", switch=2), trained("method=dice", batched=False))


def faster(config, rank=0, ranks=1):
    method, step = Method(config.method), build_step(config, rank, ranks)
    placement = place(ranks, config.ensemble.size, method.counterpart is not None)
    job = Job(config, method, plan_of(config), placement, sources.load(config.data))
    return faster_way(job, World(rank, ranks, step.device), step.exchange, None)


def test_both_ways_are_timed():
    _, shown = faster(configured(SIZE, "batch_size=8"))
    assert "one after another" in shown and "one grouped network" in shown


def test_a_way_that_does_not_fit_is_not_chosen(monkeypatch):
    def refuse(together, inputs, noise):
        raise torch.OutOfMemoryError("as if grouped convolutions needed more")

    monkeypatch.setattr(Together, "forward", refuse)
    batched, shown = faster(configured(SIZE, "method=ind", "batch_size=8"))
    assert not batched and "does not fit" in shown


def faster_on_rank(rank, times):
    """times: by rank, of both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "milliseconds", lambda encoders, batch: times[rank][bool(encoders.together)])
        return faster(configured(4, "method=ind", "batch_size=8"), rank, 2)[0]


def test_the_slowest_rank_decides_for_all():
    assert run_ranks(2, faster_on_rank, [(2.0, 1.0), (3.0, 5.0)]) == [False, False]
    assert run_ranks(2, faster_on_rank, [(2.0, 3.0), (5.0, 4.0)]) == [True, True]


def test_the_choice_is_made_once(tmp_path, monkeypatch):
    """On a GPU only; a run that goes on keeps it, wherever it goes on."""
    measured = auto.milliseconds

    def faster_together(encoders, batch):
        return min(2.0, measured(encoders, batch)) - bool(encoders.together)

    monkeypatch.setattr(auto, "WARM_UP", 0)
    monkeypatch.setattr(auto, "ROUNDS", 1)
    monkeypatch.setattr(auto, "milliseconds", faster_together)
    assert tiny.build(tmp_path / "cpu").job.plan.grouped is None
    with PretendGpu():
        trainer = tiny.build(tmp_path / "run", device=CUDA)
        assert trainer.job.plan.grouped is True and "one grouped network" in trainer.messages[0]
        assert trainer.step.encoders.together is not None
        monkeypatch.setattr(auto, "milliseconds", lambda encoders, batch: 2.0 + bool(encoders.together))
        kept = tiny.build(tmp_path / "run", device=CUDA)
        assert kept.job.plan.grouped is True and kept.step.encoders.together is not None and kept.messages == []
        assert tiny.build(tmp_path / "other", device=CUDA).job.plan.grouped is False
        assert "compiled" in tiny.build(tmp_path / "compiled", "compile=true", device=CUDA).messages[0]
    assert tiny.build(tmp_path / "run").step.encoders.together is not None
    assert tiny.build(tmp_path / "run", "ensemble.batched=false").step.encoders.together is None


def test_a_run_goes_on_in_the_other_way(tmp_path):
    keys = ("method=ind", "ensemble.size=3", "max_steps=7", "optimizer.lr=1e-3")  # so that rounding stays small
    tiny.train(tmp_path / "plain", *keys, "ensemble.batched=false")
    tiny.train(tmp_path / "mixed", *keys, "ensemble.batched=true", after_step=tiny.asked_after(4))
    tiny.train(tmp_path / "mixed", *keys, "ensemble.batched=false")
    mixed, plain = (tiny.tensors_of(tmp_path / name / "tiny", 7) for name in ("mixed", "plain"))
    assert mixed.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(mixed[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
