"""Members of one device as one grouped network: the same training as one after another, to rounding."""

import pytest
import torch

from dicedist.algorithm.build import check_members
from dicedist.algorithm.grouped import Together
from dicedist.algorithm.objectives import Method
from dicedist.cluster.world import World
from dicedist.data import sources
from dicedist.tracking import ways
from dicedist.tracking.ways import faster_way
from tests.support import tiny
from tests.support.pretend import CUDA, PretendGpu
from tests.support.processes import run_ranks
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
    assert found[0].together is not None
    assert_same_training(found, trained(*keys, batched=False))


@pytest.mark.usefixtures("double_precision")
def test_the_way_may_change_between_two_steps():
    assert_same_training(trained("method=dice", switch=2), trained("method=dice", batched=False))


def faster(step):
    config = configured(SIZE, "batch_size=8")
    return faster_way(config, World(0, 1, step.device), step, sources.load(config.data))


def test_timing_both_ways_changes_nothing():
    step, _ = trained("method=dice", batched=False)
    before = weights_of(step)
    _, shown = faster(step)
    torch.testing.assert_close(weights_of(step), before, rtol=0, atol=0)
    assert step.together is None
    assert all(parameter.grad is None for part in step.hosted.learners for parameter in part.module.parameters())
    assert "one after another" in shown and "one grouped network" in shown


def test_a_way_that_does_not_fit_is_not_chosen(monkeypatch):
    def refuse(together, inputs, noise):
        raise torch.OutOfMemoryError("as if grouped convolutions needed more")

    monkeypatch.setattr(Together, "forward", refuse)
    batched, shown = faster(trained("method=ind", batched=False)[0])
    assert not batched and "does not fit" in shown


def faster_on_rank(rank, times):
    """times: by rank, of both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "milliseconds", lambda step, batch: times[rank][bool(step.together)])
        config = configured(4, "method=ind", "batch_size=8")
        step = build_step(config, rank, 2)
        return faster_way(config, World(rank, 2, step.device), step, sources.load(config.data))[0]


def test_the_slowest_rank_decides_for_all():
    assert run_ranks(2, faster_on_rank, [(2.0, 1.0), (3.0, 5.0)]) == [False, False]
    assert run_ranks(2, faster_on_rank, [(2.0, 3.0), (5.0, 4.0)]) == [True, True]


def test_the_choice_is_made_once(tmp_path, monkeypatch):
    """On a GPU only; a run that goes on keeps it, wherever it goes on."""
    measured = ways.milliseconds
    monkeypatch.setattr(ways, "WARM_UP", 0)
    monkeypatch.setattr(ways, "ROUNDS", 1)
    monkeypatch.setattr(ways, "milliseconds", lambda step, batch: min(2.0, measured(step, batch)) - bool(step.together))
    assert tiny.build(tmp_path / "cpu").config.ensemble.batched == "auto"
    with PretendGpu():
        trainer = tiny.build(tmp_path / "run", device=CUDA)
        assert trainer.config.ensemble.batched is True and "one grouped network" in trainer.told[0]
        assert trainer.step.together is not None
        monkeypatch.setattr(ways, "milliseconds", lambda step, batch: 2.0 + bool(step.together))
        kept = tiny.build(tmp_path / "run", device=CUDA)
        assert kept.config.ensemble.batched is True and kept.step.together is not None and kept.told == []
        assert tiny.build(tmp_path / "other", device=CUDA).config.ensemble.batched is False
        assert "compiled" in tiny.build(tmp_path / "compiled", "compile=true", device=CUDA).told[0]
    assert tiny.build(tmp_path / "run").step.together is not None
    assert tiny.build(tmp_path / "run", "ensemble.batched=false").step.together is None


def test_a_run_goes_on_in_the_other_way(tmp_path):
    keys = ("method=ind", "ensemble.size=3", "max_steps=7", "optimizer.lr=1e-3")  # so that rounding stays small
    tiny.train(tmp_path / "plain", *keys, "ensemble.batched=false")
    tiny.train(tmp_path / "mixed", *keys, "ensemble.batched=true", after_step=tiny.asked_after(4))
    tiny.train(tmp_path / "mixed", *keys, "ensemble.batched=false")
    mixed, plain = (tiny.tensors_of(tmp_path / name / "tiny", 7) for name in ("mixed", "plain"))
    assert mixed.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(mixed[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
