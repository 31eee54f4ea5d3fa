"""The discriminator divided among ranks (redundancy.ranks) equals the one that a single rank holds."""

import shutil
from statistics import fmean

import pytest
import torch

from dicedist.training import auto
from dicedist.training.forecast import Rehearsal, divides
from tests.support.processes import run_ranks
from tests.support.steps import STRONG, B, batch_at, build_step, configured, share_of, weights_of
from tests.support.tiny import build, records_of, tensors_of, train


def train_on_rank(rank, world_size, overrides):
    step = build_step(configured(*overrides), rank, world_size)
    for n in range(3):
        values = step(share_of(batch_at(n, size=B if n != 1 else 7), step)).values
    return weights_of(step), {name: float(value) for name, value in values.items()}


def together(world_size, overrides):
    """The weights of each rank's parts; and the values as they are recorded, averaged over ranks."""
    weights, values = zip(*run_ranks(world_size, train_on_rank, world_size, overrides), strict=True)
    names = {name for own in values for name in own}
    return weights, {name: fmean(own[name] for own in values if name in own) for name in names}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("world_size", "size", "ranks", "overrides"),
    [
        (5, 3, 2, ()),  # on ranks of their own
        (4, 4, 3, ("redundancy.terms=both",)),  # with members
        (3, 6, "members", ("redundancy.max_pairs=7",)),  # each with two members
        (4, 4, "members", ("method=cebr", "structure=branch")),
        (5, 4, "all", ()),  # with members, and on a rank of its own
        (6, 4, 2, ("method=okddip_dice",)),  # which compares three of four members
        (8, 3, 2, ("ensemble.replicas=2", "ensemble.sync_batch_norm=true")),
    ],
)
def test_it_equals_one_process(world_size, size, ranks, overrides):
    common = (size, *STRONG, *overrides)
    alone = [override for override in common[1:] if "replicas" not in override]
    (expected,), expected_values = together(1, (size, *alone))
    weights, values = together(world_size, (*common, f"redundancy.ranks={ranks}"))
    assert {part for found in weights for part in found} == expected.keys()
    for found in weights:
        for part, tensors in found.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[part][name], atol=1e-7, rtol=1e-6)
    of_w = [name for name in expected_values if name.startswith(("redundancy", "discriminator"))]
    assert len(of_w) == 5
    for name in of_w:
        assert values[name] == pytest.approx(expected_values[name], rel=1e-6), name
    holders = [found["discriminator"] for found in weights if "discriminator" in found]
    assert len(holders) == (world_size if ranks in ("members", "all") else ranks)
    for other in holders[1:]:
        assert [name for name, tensor in holders[0].items() if not torch.equal(other[name], tensor)] == []


def divided_on_rank(rank, folder, *settings):
    return train(folder, "ensemble.size=3", "redundancy.ranks=2", *settings, rank=rank, world_size=5)


def test_a_run_goes_on_with_another_division(tmp_path):
    run_ranks(5, divided_on_rank, tmp_path / "divided", "max_steps=6")
    shutil.copytree(tmp_path / "divided", tmp_path / "whole")
    train(tmp_path / "whole", "ensemble.size=3", "max_steps=7")
    run_ranks(5, divided_on_rank, tmp_path / "divided", "max_steps=7")
    divided, whole = (tensors_of(tmp_path / name / "tiny", 7) for name in ("divided", "whole"))
    assert divided.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(divided[name], whole[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    steps = [[record["step"] for record in records_of(tmp_path / name / "tiny")] for name in ("divided", "whole")]
    assert steps[0] == steps[1]


def budget_on_rank(rank, folder, *settings):
    trainer = build(folder, "ensemble.size=3", "redundancy.max_pairs=auto", *settings, rank=rank, world_size=4)
    return trainer.job.plan.max_pairs


def test_a_budget_that_hides_w_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Rehearsal, "seconds_of_parts", lambda rehearsal: (0.5, 0.7))
    assert run_ranks(4, budget_on_rank, tmp_path) == [2] * 4  # of three pairs
    monkeypatch.setattr(Rehearsal, "seconds_of_parts", lambda rehearsal: (0.1, 0.7))
    assert run_ranks(4, budget_on_rank, tmp_path) == [2] * 4  # a run that goes on keeps it
    assert run_ranks(4, budget_on_rank, tmp_path / "another") == [1] * 4


def test_beside_members_nothing_hides_w(tmp_path):
    assert build(tmp_path, "ensemble.size=3", "redundancy.max_pairs=auto").job.plan.max_pairs == 3


@pytest.mark.parametrize(
    ("members", "w", "beside", "divided"),
    [
        (3.0, 2.0, False, False),  # it hides
        (3.0, 12.0, False, True),
        (3.0, 3.5, False, False),  # a share for every rank would take as long
        (3.0, 2.0, True, True),  # nothing hides it
        (3.0, 0.2, True, False),
    ],
)
def test_w_is_divided_where_it_sets_the_pace(members, w, beside, divided):
    assert divides(members, w, 8, beside) == divided


def placed_on_rank(rank, folder, *settings):
    trainer = build(folder, "ensemble.size=3", "data.train_limit=32", "max_steps=4", *settings, rank=rank, world_size=3)
    trainer.train()
    return trainer.job.placement.discriminators, trainer.messages


def test_a_run_divides_w_after_its_measurement_and_trains_as_before(tmp_path, monkeypatch):
    """On a GPU; here a CPU is measured like one."""
    run_ranks(3, placed_on_rank, tmp_path / "one")
    monkeypatch.setattr(auto, "may_divide", lambda job, world: True)
    monkeypatch.setattr(Rehearsal, "seconds_of_parts", lambda rehearsal: (0.003, 0.006))
    found = run_ranks(3, placed_on_rank, tmp_path / "all")
    assert found == [((0, 1, 2), ["w takes 6.0 ms of a step, the members of a rank 3.0 ms: all 3 ranks divide it"])] * 3
    monkeypatch.setattr(Rehearsal, "seconds_of_parts", lambda rehearsal: (0.003, 0.0001))
    assert run_ranks(3, placed_on_rank, tmp_path / "all")[0] == ((0, 1, 2), [])  # a run that goes on keeps it
    one, divided = (records_of(tmp_path / name / "tiny") for name in ("one", "all"))
    for record, same in zip(one, divided, strict=True):
        assert same == pytest.approx(record, rel=1e-2, abs=1e-2)
