"""The best checkpoint and early stopping follow from the validations alone, interrupted or not."""

import pytest

from dicedist.config import compose_config
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from dicedist.training.selection import best_of, is_over
from tests.support.tiny import asked_after, assert_same_run, build, failing_after, records_of, train

# 24 steps in 8 epochs, each validated. The rate is far too high, so that the last validation is not the best.
BEST = [
    "method=ind", "epochs=8", "evaluate.every_epochs=1", "checkpoint.every_steps=2", "checkpoint.keep=1",
    "optimizer.lr=1.5", "optimizer.schedule=constant", "checkpoint.best=val/nll",
]  # fmt: skip
EARLY = [*BEST, "early_stopping.patience=2", "early_stopping.metric=val/accuracy"]


@pytest.mark.parametrize(
    ("values", "metric", "best", "over"),
    [
        ([3.0, 1.0, 2.0, 1.0], "val/nll", 2, True),
        ([3.0, 2.0, 1.0], "val/nll", 3, False),
        ([0.1, 0.5, 0.5], "val/accuracy", 2, False),
        ([0.9, 0.5, 0.6], "val/accuracy", 1, True),
    ],
)
def test_the_first_of_the_best_counts(values, metric, best, over):
    validations = list(enumerate(values, 1))
    assert best_of(validations, metric) == (best, values[best - 1])
    assert is_over(validations, metric, 2) is over and not is_over(validations, metric, None)
    assert best_of([], metric) is None and not is_over([], metric, 1)


def validated(run, measure):
    name = f"val/ensemble/{measure}"
    return [(record["step"], record[name]) for record in records_of(run) if name in record]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not interrupted, with its best step."""
    folder = tmp_path_factory.mktemp("whole")
    assert not train(folder, *BEST)
    validations = validated(folder / "tiny", "nll")
    best, _ = min(validations, key=lambda validation: validation[1])
    assert len(validations) == 8 and best < 24
    return folder / "tiny", best


def test_the_best_checkpoint_is_kept_beside_the_last(whole):
    run, best = Run(whole[0]), whole[1]
    assert (
        run.checkpoint(which="best").step == run.checkpoint().step == best and run.checkpoint(which="last").step == 24
    )
    assert {checkpoint.step_of(path) for path in checkpoint.saved(run.checkpoints)} >= {best, 24}
    assert load_ensemble(run, tell=lambda text: None).about.step == best
    assert load_ensemble(run, which="last", tell=lambda text: None).about.step == 24


@pytest.mark.parametrize("how", [asked_after, failing_after])
def test_a_resumed_run_keeps_the_same_best(whole, tmp_path, how):
    reference, best = whole
    try:
        assert train(tmp_path, *BEST, after_step=how(best + 2))
    except RuntimeError:
        pass
    assert not train(tmp_path, *BEST)
    assert_same_run(tmp_path / "tiny", reference, 24)
    assert_same_run(tmp_path / "tiny", reference, best)


def test_training_ends_early_and_stays_ended(whole, tmp_path):
    reference, best = whole
    assert not train(tmp_path, *EARLY)
    run = Run(tmp_path / "tiny")
    last = run.checkpoint(which="last")
    assert last.complete and run.checkpoint().step <= best
    recorded = records_of(run.directory)
    assert recorded == records_of(reference)[: len(recorded)] and last.step == recorded[-1]["step"]
    validations = validated(run.directory, "accuracy")
    assert is_over(validations, "val/accuracy", 2) and not is_over(validations[:-1], "val/accuracy", 2)
    assert build(tmp_path, *EARLY).selection.over
    assert not train(tmp_path, *BEST), "more patience continues it"
    assert_same_run(run.directory, reference, 24)


def test_results_are_of_the_best(tmp_path):
    trainer = build(tmp_path, *BEST, "epochs=4")
    trainer.train_and_evaluate()
    run = Run(tmp_path / "tiny")
    best = run.checkpoint()
    assert run.result()["step"] == best.step and run.ending() == "FINISHED"
    assert load_ensemble(run, tell=lambda text: pytest.fail(text)).about.calibration is not None


def test_a_run_without_best_says_so(tmp_path):
    train(tmp_path, "max_steps=2")
    with pytest.raises(ValueError, match="keeps no best checkpoint"):
        Run(tmp_path / "tiny").checkpoint(which="best")


@pytest.mark.parametrize("key", ["checkpoint.best=val/nll", "early_stopping.patience=3"])
def test_selection_needs_validation(key):
    with pytest.raises(ValueError, match="needs validation, and data.split=full holds out none"):
        compose_config(["data=shapes", "data.split=full", key])
    with pytest.raises(ValueError, match="samples to the end"):
        compose_config(["data=shapes", "method=swag", key])
