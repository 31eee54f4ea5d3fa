"""Out-of-distribution detection by hand, against scikit-learn, and against a literal loop over thresholds."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from dicedist.algorithm.counterpart import Features
from dicedist.evaluation.evaluator import UNION, UNITED, union_of
from dicedist.evaluation.readings import Collected
from dicedist.evaluation.tables import group_tables, ood_tables
from dicedist.metrics import ood
from dicedist.metrics.measures import OOD, OOD_SCORES


def random_scores(num_in, num_out, seed, decimals=16):
    """Few decimals make many ties."""
    generator = torch.Generator().manual_seed(seed)
    scores_in = torch.rand(num_in, generator=generator, dtype=torch.float64).sqrt()
    scores_out = torch.rand(num_out, generator=generator, dtype=torch.float64)
    return scores_in.round(decimals=decimals), scores_out.round(decimals=decimals)


def literal_thresholds(scores_in, scores_out):
    """(TPR, FPR) of accepting scores >= t, for each t that matters, from the strictest down."""
    scores_in, scores_out = scores_in.tolist(), scores_out.tolist()
    for t in [float("inf"), *sorted({*scores_in, *scores_out}, reverse=True)]:
        yield sum(s >= t for s in scores_in) / len(scores_in), sum(s >= t for s in scores_out) / len(scores_out)


@pytest.mark.parametrize("decimals", [16, 2, 1, 0])
@pytest.mark.parametrize(("num_in", "num_out"), [(200, 300), (100, 17), (1, 1)])
def test_equals_oracles(num_in, num_out, decimals):
    scores_in, scores_out = random_scores(num_in, num_out, seed=num_in, decimals=decimals)
    is_in = np.r_[np.ones(num_in), np.zeros(num_out)]
    scores = torch.cat([scores_in, scores_out]).numpy()
    rates = list(literal_thresholds(scores_in, scores_out))
    opposite = list(literal_thresholds(-scores_in, -scores_out))  # accepts what lies outside
    assert ood(scores_in, scores_out) == pytest.approx(
        {
            "fpr95": next(fpr for tpr, fpr in rates if tpr >= 0.95),
            "fpr95_ood_positive": next(tpr for tpr, fpr in opposite if fpr >= 0.95),
            "detection": min((1 - tpr + fpr) / 2 for tpr, fpr in rates),
            "auroc": roc_auc_score(is_in, scores),
            "aupr_in": average_precision_score(is_in, scores),
            "aupr_out": average_precision_score(1 - is_in, -scores),
        },
        rel=1e-12,
    )


def test_perfect_and_reversed():
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9])
    assert ood(high, low) == {
        **dict.fromkeys(("fpr95", "fpr95_ood_positive", "detection"), 0.0),
        **dict.fromkeys(("auroc", "aupr_in", "aupr_out"), 1.0),
    }
    backwards = ood(low, high)
    assert (backwards["fpr95"], backwards["detection"], backwards["auroc"]) == (1.0, 0.5, 0.0)
    assert backwards["aupr_in"] == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_equal_scores_tell_nothing():
    measures = ood(torch.full((30,), 0.5), torch.full((10,), 0.5))
    rates = dict.fromkeys(("fpr95", "fpr95_ood_positive"), 1.0)
    assert measures == {**rates, "detection": 0.5, "auroc": 0.5, "aupr_in": 0.75, "aupr_out": 0.25}


def test_fpr95_at_exactly_95_percent():
    # 19 of 20 in-distribution images are at 1: the threshold is 1, and the last one need not be accepted.
    scores_in = torch.tensor([1.0] * 19 + [0.0])
    assert ood(scores_in, torch.tensor([0.5, 1.0, 0.2, 0.9]))["fpr95"] == 0.25


@pytest.mark.parametrize("scores", [torch.tensor([]), torch.tensor([0.5, float("nan")])])
def test_unusable_scores(scores):
    with pytest.raises(ValueError, match="finite scores for at least one"):
        ood(torch.tensor([0.5]), scores)


def test_the_union_of_the_papers_sets_is_all_their_images_as_one():
    draws = torch.Generator().manual_seed(0)
    read = {
        name: Collected(
            torch.randn(2, 3 + nth, 4, generator=draws),
            {"knn": torch.randn(3 + nth, generator=draws)},
            Features(torch.empty(2, 0, 5), torch.empty(2, 0, 5)),
        )
        for nth, name in enumerate((*UNITED, "svhn"))
    }
    union = union_of(read)[UNION]
    assert union.logits_MNK.shape == (2, 3 + 4 + 5 + 6 + 7, 4)
    torch.testing.assert_close(union.logits_MNK[:, 3:7], read[UNITED[1]].logits_MNK)
    torch.testing.assert_close(union.feature_scores["knn"][3:7], read[UNITED[1]].feature_scores["knn"])
    assert union_of({name: found for name, found in read.items() if name != "isun"}) == {}


def test_tables_of_ood_sets_fit_a_terminal():
    own = {measure.name: 0.98765 for measure in OOD}
    scores = dict.fromkeys(OOD_SCORES, own)
    group = {"sets": ["svhn", "textures"], "missing": [], "scores": {"knn": {**own, "auroc_interval": (0.9, 1.0)}}}
    result = {"ood": {"svhn": scores}, "ood_missing": ["isun"], "ood_groups": {"far": group}}
    shown = "\n".join([*ood_tables(result), *group_tables(result)])
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("OOD: svhn", "Mahalanobis", "98.77", "not found: isun", "OOD group far: svhn, textures"):
        assert words in shown
