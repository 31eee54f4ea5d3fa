"""Every method of the paper in the middle of its own state: stopped and continued, it equals a run that was not."""

import pytest
import torch

from dicedist.config.compose import compose_request
from dicedist.config.requests import EvaluateRequest
from dicedist.data import sources
from dicedist.data.pipeline import Loader
from dicedist.evaluation.loading import load_ensemble
from dicedist.evaluation.saved import evaluate_run
from dicedist.runs.run import Run
from tests.support.processes import run_ranks
from tests.support.tiny import asked_after, assert_same_run, tensors_of, train

SHORT = ("max_steps=4", "evaluate.every_epochs=1")  # an epoch has 3 steps
PCL = ("method=pcl", "structure=branch")
GENERAL = ("method=kdcl", "method.terms.kdcl.teacher=general")


CONTINUED = (GENERAL, ("method=dibs",), ("method=gal",), PCL, ("method=ffl",), ("method=afd",))


@pytest.mark.parametrize("options", CONTINUED, ids=lambda options: options[0])
def test_continued_it_equals_the_run_that_was_not_stopped(tmp_path, options):
    train(tmp_path / "whole", *SHORT, *options)
    assert train(tmp_path / "cut", *SHORT, *options, after_step=asked_after(2))
    train(tmp_path / "cut", *SHORT, *options)
    assert_same_run(tmp_path / "cut" / "tiny", tmp_path / "whole" / "tiny", 4)
    saved = {name.rpartition(".")[0] for name in tensors_of(tmp_path / "cut" / "tiny", 4)}
    for method, state in (
        ("method=ffl", "fusion/optimizer.momentum_buffer.network.layers.0"),
        ("method=afd", "member-0/second.exp_avg.encoder.tail.0.0.residual.0"),
        ("method=afd", "member-1-companion/optimizer.exp_avg_sq.layers.0"),
    ):
        assert (state in saved) == (method in options)


# Cycles of one epoch, or a start after the second of four; stopped within a cycle, and where samples are drawn.
KINDS = {
    "sse": (5, "trajectory.samples=3", "trajectory.cycle_epochs=1"),
    "csgld": (5, "trajectory.samples=2", "trajectory.cycle_epochs=2", "trajectory.noise_epochs=1"),
    "fge": (8, "trajectory.samples=2", "trajectory.start=2", "trajectory.cycle_epochs=1"),
    "swag": (10, "trajectory.samples=2", "trajectory.start=1"),
    "vi": (8, "trajectory.samples=2", "trajectory.start=2"),
    "kfac_laplace": (11, "trajectory.samples=2", "trajectory.scale=0.5"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_trajectory_continued_equals_one_that_was_not_stopped(tmp_path, name):
    """And its samples are what is evaluated, predicts and is exported."""
    stop, *options = KINDS[name]
    options = [f"method={name}", *options, "epochs=4", "schedules.reference_epochs=4", "batch_size=16"]
    train(tmp_path / "whole", *options)
    assert train(tmp_path / "cut", *options, after_step=asked_after(stop))
    train(tmp_path / "cut", *options)
    whole, cut = tmp_path / "whole" / "tiny", tmp_path / "cut" / "tiny"
    assert_same_run(cut, whole)
    samples = {key.partition("/")[0] for key in tensors_of(cut) if "sample" in key}
    expected = int(options[1].partition("=")[2])
    assert samples == {f"member-{member}-sample-{nth}" for member in range(2) for nth in range(expected)}
    ensemble = load_ensemble(cut, tell=lambda text: None)
    assert len(ensemble.encoders) == 2 * expected
    result = evaluate_run(Run(cut), compose_request("evaluate", [f"run={cut}"], EvaluateRequest))[1]
    assert result["member_ids"] == list(range(2 * expected)) and result["average"] == "probabilities"


def train_on_rank(rank, world_size, run_dir, *options):
    return train(run_dir, *SHORT, *options, rank=rank, world_size=world_size)


def test_weights_on_validation_reach_every_rank(tmp_path):
    train(tmp_path / "one", *SHORT, *GENERAL)
    run_ranks(2, train_on_rank, 2, tmp_path / "two", *GENERAL)
    one, two = (tensors_of(tmp_path / name / "tiny", 4)["shared/weights.weights.weights_M"] for name in ("one", "two"))
    assert one.sum().item() == pytest.approx(1) and one[0] != one[1]
    torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-3)


def test_a_trunk_with_a_view_for_every_branch_is_the_same_on_ranks(tmp_path):
    options = (*PCL, "ensemble.size=3", "optimizer.lr=0.01")
    train(tmp_path / "one", *SHORT, *options)
    run_ranks(2, train_on_rank, 2, tmp_path / "two", *options)
    one, two = (tensors_of(tmp_path / name / "tiny", 4) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in [name for name in one if name.startswith("trunk/weights")]:  # running statistics among them
        torch.testing.assert_close(two[name], one[name], atol=1e-3, rtol=1e-3, msg=lambda text, name=name: name + text)


def test_noise_on_pixels_is_the_same_for_members_and_replicas(data_config):
    config = data_config("shapes", train_limit=32, noise=0.045, augment="none", pipeline="torch")
    source = sources.load(config)
    clean = Loader(source.train, data_config("shapes", train_limit=32, augment="none", pipeline="torch"), source, 32, 0,
                   torch.device("cpu"), [0])  # fmt: skip
    whole, *shares = (
        next(iter(Loader(source.train, config, source, 32, 0, torch.device("cpu"), [0], replica, replicas).epoch(0)))
        for replica, replicas in ((0, 1), (0, 2), (1, 2))
    )
    torch.testing.assert_close(torch.cat([share.images[0] for share in shares]), whole.images[0])
    noise = whole.images[0] - next(iter(clean.epoch(0))).images[0]
    deviation = noise.std((0, 2, 3)) * torch.tensor(source.std)
    torch.testing.assert_close(deviation, torch.full((3,), 0.045), atol=1e-3, rtol=0)
