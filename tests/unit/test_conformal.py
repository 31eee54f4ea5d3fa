"""Thresholds chosen on held-out inputs: coverage over many splits, plain loops, values by hand, refusals."""

import math

import numpy as np
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from sklearn.base import BaseEstimator, ClassifierMixin

from dicedist.config import compose_config
from dicedist.config.schema import CalibrationConfig
from dicedist.evaluation import calibration
from dicedist.evaluation.promises import no_better_than_guessing, rests_on_few
from dicedist.evaluation.tables import calibration_table
from dicedist.metrics import conformal
from dicedist.metrics.conformal import acceptance_threshold, label_sets, nonconformity


def random_case(N, K=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(K, (N,), generator=generator)
    logits_NK = 1.5 * torch.randn(N, K, generator=generator, dtype=torch.float64)
    logits_NK[torch.arange(N), labels_N] += 1
    return logits_NK, labels_N


class Given(ClassifierMixin, BaseEstimator):
    """A classifier of scikit-learn whose inputs are the probabilities that it answers."""

    def __init__(self, num_classes=5):
        self.num_classes = num_classes
        self.classes_ = np.arange(num_classes)

    def fit(self, p_NK, labels_N):
        return self

    def predict_proba(self, p_NK):
        return p_NK

    def predict(self, p_NK):
        return p_NK.argmax(axis=1)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5])
def test_sets_equal_those_of_mapie(alpha):
    """LAC: MAPIE's APS draws random numbers, ours none."""
    logits_NK, labels_N = random_case(400)
    p_NK, held_out = logits_NK.softmax(1), slice(200)
    theirs = SplitConformalClassifier(Given(), confidence_level=1 - alpha, conformity_score="lac", prefit=True)
    theirs.conformalize(p_NK[held_out].numpy(), labels_N[held_out].numpy())
    _, sets_NK1 = theirs.predict_set(p_NK[200:].numpy())
    limits = conformal.quantiles(p_NK[held_out], labels_N[held_out], alpha, "lac", per_class=False)
    assert torch.equal(label_sets(p_NK[200:], limits, "lac"), torch.from_numpy(sets_NK1[:, :, 0]))


@pytest.mark.parametrize("kind", conformal.CONFORMAL)
@pytest.mark.parametrize("per_class", [False, True])
def test_coverage_over_200_splits(kind, per_class):
    """Marginal coverage over splits: at least 1 - alpha, and no more than 1/(n + 1) above it where scores have no ties.

    The scores of APS have: of the least probable class it is always 1.
    """
    alpha, n, m, covered = 0.1, 300, 500, 0
    logits_NK, labels_N = random_case(200 * (n + m))
    p_NK = logits_NK.softmax(1)
    for split in torch.arange(len(p_NK)).split(n + m):
        chosen, new = split[:n], split[n:]
        limits = conformal.quantiles(p_NK[chosen], labels_N[chosen], alpha, kind, per_class)
        covered += label_sets(p_NK[new], limits, kind).gather(1, labels_N[new, None]).sum().item()
    smallest = n if not per_class else n / 8  # a class of five has at least so many of the 300
    # Binomial twice: the quantile varies with the calibration inputs, the hits with the new ones.
    spread = math.sqrt(alpha * (1 - alpha) / (200 * smallest) + alpha * (1 - alpha) / (200 * m))
    most = 1 - alpha + (1 / (smallest + 1) if kind == "lac" else 0.03)
    assert 1 - alpha - 4 * spread <= covered / (200 * m) <= most + 4 * spread


def test_every_class_is_covered_where_asked():
    """A class that is hard loses coverage marginally, and gets it back per class."""
    logits_NK, labels_N = random_case(20_000)
    logits_NK[labels_N == 0, 0] -= 1.5
    p_NK, half = logits_NK.softmax(1), 10_000
    worst = {}
    for per_class in (False, True):
        limits = conformal.quantiles(p_NK[:half], labels_N[:half], 0.1, "lac", per_class)
        hit_N = label_sets(p_NK[half:], limits, "lac").gather(1, labels_N[half:, None])[:, 0].double()
        worst[per_class] = min(hit_N[labels_N[half:] == k].mean().item() for k in range(5))
    assert worst[False] < 0.85 and worst[True] == pytest.approx(0.9, abs=0.025)


def test_scores_by_hand():
    p_NK = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    assert nonconformity(p_NK, "lac")[0].tolist() == pytest.approx([0.8, 0.5, 0.7])
    assert nonconformity(p_NK, "aps")[0].tolist() == pytest.approx([1.0, 0.5, 0.8])


@pytest.mark.parametrize(
    ("n", "alpha", "nth"), [(9, 0.1, 9), (10, 0.1, 10), (19, 0.1, 18), (99, 0.05, 95), (4, 0.5, 3)]
)
def test_the_quantile_is_the_order_statistic_of_split_conformal(n, alpha, nth):
    """ceil((n + 1)(1 - alpha)), in whole numbers."""
    scores_N = torch.randperm(n).double() + 1
    assert conformal.quantile(scores_N, alpha) == nth


def test_nineteen_of_twenty_reach_the_acceptance_threshold():
    scores_N = torch.randperm(100).double()
    assert acceptance_threshold(scores_N) == 5


def ensemble_case(N=400):
    logits_NK, labels_N = random_case(N)
    logits_NK[torch.arange(N), labels_N] += 2
    return torch.stack([logits_NK, logits_NK + 0.3 * torch.randn(N, 5, dtype=torch.float64)]), labels_N


def targets(**changes):
    return CalibrationConfig(
        **(
            {
                "alpha": 0.1,
                "conformal": "lac",
                "per_class": False,
                "risk": 0.2,
                "coverage": None,
                "source": "validation",
            }
            | changes
        )
    )


def test_what_is_chosen_is_what_was_asked_on_the_inputs_themselves():
    logits_MNK, labels_N = ensemble_case()
    seen = {"knn": logits_MNK.mean(0).softmax(1).amax(1)}
    fitted = calibration.fit(logits_MNK, labels_N, "logits", targets(), seen)
    found = calibration.tested(fitted, logits_MNK, labels_N, "logits", seen)
    assert found["risk"] <= 0.2 and found["set_coverage"] >= 0.9 and found["ood_accepted"] >= 0.95
    shown = calibration_table({"calibration": {**vars(fitted), "test": found}})
    promised = ("≤ 20 % wrong, 90 % sure", "90 ± 2.9 % right", "95 ± 2.2 % accepted")
    for line in ("chosen on 400 validation inputs", *promised):
        assert line in shown
    assert max(map(len, shown.splitlines())) <= 80, "the table fits a usual terminal"
    answered = calibration.fit(logits_MNK, labels_N, "logits", targets(coverage=0.5), {})
    assert calibration.tested(answered, logits_MNK, labels_N, "logits", seen)["answered"] == pytest.approx(0.5)
    assert answered.ood_threshold is None and answered.risk is None


@pytest.mark.parametrize(
    ("num_inputs", "fewest", "changes", "words"),
    [
        (
            6,
            1,
            {},
            ["6 images to", "no label sets (calibration.alpha=0.1 needs 9)", "risk=0.05 needs 45 right"],
        ),
        (20, 1, {}, ["label sets that are right in 90 ± 12 %", "the ensemble always abstains"]),
        (46, 1, {}, ["46 images to calibrate on are few: label sets that are right in 90 ± 7.7 %"]),
        (30, 1, {"coverage": 0.8}, ["30 images to calibrate on are few: label sets that are right in 90 ± 10 %"]),
        (100, 5, {"per_class": True}, ["no label sets (calibration.alpha=0.1 needs 9 of a class)"]),
        (30, 1, {"risk": 0.02}, ["calibration.risk=0.02 needs 114 right answers"]),
        (50, 1, {}, None),
    ],
)
def test_what_few_inputs_cannot_promise_is_said(num_inputs, fewest, changes, words):
    line = rests_on_few(num_inputs, fewest, "images", targets(**{"risk": 0.05, **changes}))
    assert line is None if words is None else all(word in line for word in words)


@pytest.mark.parametrize(("accuracy", "says"), [(0.3, True), (0.41, True), (0.52, False)])
def test_an_ensemble_that_guesses_is_named(accuracy, says):
    """40 of 100 test inputs are of one class: 48 right answers would be beyond chance."""
    result = {"per_class": {"count": [40, 30, 30]}, "ensemble": {"accuracy": accuracy}}
    line = no_better_than_guessing(result)
    assert (line is not None) == says
    if line:
        assert line.startswith(f"No better than guessing: {100 * accuracy:.1f} % of the test set is right, and 40.0 %")
        assert "no compression: method=ind" in line and "method=ind" in line


def test_too_few_inputs_cost_the_sets_of_a_training_and_refuse_a_wish(capsys):
    logits_MNK, labels_N = ensemble_case(8)
    assert calibration.fit(logits_MNK, labels_N, "logits", targets(), {}).quantiles is None
    line = "calibration.alpha=0.1 needs 9 calibration images"
    assert line in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"{line}.*there are 8, so write calibration.alpha=0.112"):
        calibration.fit(logits_MNK, labels_N, "logits", targets(), {}, strict=True)


@pytest.mark.parametrize("n", [20, 200])
def test_the_spread_of_coverage_is_that_of_many_calibrations(n):
    """The true coverage of a quantile of uniform scores is the quantile itself: 95 % of them lie in the interval."""
    alpha, draws = 0.1, torch.rand(4000, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    place = conformal.place(n, alpha)
    covered = draws.sort(1).values[:, place - 1]
    low, high = torch.quantile(covered, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert conformal.spread(place, n) == pytest.approx((high - low) / 2, rel=0.05)


def test_a_risk_takes_the_place_of_a_coverage():
    assert calibration.aimed(targets(coverage=0.8), {"risk": 0.1}) == targets(risk=0.1)
    assert calibration.aimed(targets(), {"risk": None, "alpha": 0.2}) == targets(alpha=0.2)


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("calibration.alpha=0", "a number"),
        ("calibration.alpha=1", "a number"),
        ("calibration.risk=1", "a number"),
        ("calibration.coverage=0", "a number"),
        ("calibration.guarantee=1", "a probability"),
        ("calibration.guarantee=perhaps", "a probability"),
        ("calibration.risk=null", "calibration.risk=0.05, or calibration.coverage=0.8"),
    ],
)
def test_impossible_targets_are_refused(setting, instead):
    with pytest.raises(ValueError, match=f"^{setting}(.0)?: write {instead}"):
        compose_config([setting])
