"""The guarantees of every measure: invariance, JSON without NaN, clear refusals; and the layout of the results."""

import json
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dicedist.metrics import accuracy, ece, ensemble_log_probabilities, measure, nll, validation_measures
from dicedist.metrics.summary import _subsets

SCORES = {
    *("accuracy", "nll", "brier", "brier_per_class", "ece", "tace"),
    *("adaptive_ece", "classwise_ece", "mce", "aurc", "e_aurc", "augrc", "accuracy_at_90", "errors_fpr95"),
}
DIVERSITY = {"ratio_error", "q_statistic", "agreement", "agreement_oracle", "kohavi_wolpert", "entropy"}


def random_ensemble(M=4, N=200, K=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(K, (N,), generator=generator)
    logits_MNK = torch.randn(M, N, K, generator=generator)
    logits_MNK[:, torch.arange(N), labels_N] += 1.5
    return logits_MNK, labels_N


def leaves(nested):
    """Path and value of every number in nested dicts and lists; None is left out."""
    if isinstance(nested, dict | list):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        return {(key, *path): value for key, child in items for path, value in leaves(child).items()}
    return {} if nested is None else {(): nested}


def test_layout():
    logits_MNK, labels_N = random_ensemble()
    result = measure(logits_MNK, labels_N)
    assert result.keys() == {"ensemble", "ensemble_tempered", "members", "diversity", "uncertainty", "accuracy_by_size"}
    assert result["ensemble"].keys() == SCORES
    assert result["ensemble_tempered"].keys() == SCORES | {"temperature"}
    assert result["members"].keys() == {"accuracy", "per_member"}
    assert [row.keys() for row in result["members"]["per_member"]] == [{"accuracy", "nll", "ece"}] * 4
    assert result["diversity"].keys() == DIVERSITY
    assert list(result["accuracy_by_size"]) == ["1", "2", "3", "4"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_validation_layout_and_agreement_with_measure():
    logits_MNK, labels_N = random_ensemble(M=3)
    flat, full = validation_measures(logits_MNK, labels_N), measure(logits_MNK, labels_N)
    names = {f"ensemble/{name}" for name in ("accuracy", "nll", "ece")} | {"members/accuracy", "members/nll"}
    names.add("ensemble_tempered/nll")
    assert flat.keys() == names | {f"member_{i}/accuracy" for i in range(3)} | {f"diversity/{n}" for n in DIVERSITY}
    assert flat["ensemble/nll"] == full["ensemble"]["nll"]
    assert flat["ensemble_tempered/nll"] == full["ensemble_tempered"]["nll"]
    assert flat["members/accuracy"] == full["members"]["accuracy"]
    assert flat["member_2/accuracy"] == full["members"]["per_member"][2]["accuracy"]
    assert flat["diversity/ratio_error"] == full["diversity"]["ratio_error"]


def test_validation_leaves_out_what_has_no_value():
    logits_MNK, labels_N = random_ensemble(M=1)
    assert validation_measures(logits_MNK, labels_N).keys() == {
        *("ensemble/accuracy", "ensemble/nll", "ensemble/ece", "ensemble_tempered/nll"),
        *("members/accuracy", "members/nll", "member_0/accuracy"),
    }


def test_members_are_measured_as_ensembles_of_one():
    logits_MNK, labels_N = random_ensemble(M=2)
    log_p_NK = ensemble_log_probabilities(logits_MNK[1:])
    expected = {
        "accuracy": accuracy(log_p_NK, labels_N),
        "nll": nll(log_p_NK, labels_N),
        "ece": ece(log_p_NK, labels_N),
    }
    assert measure(logits_MNK, labels_N)["members"]["per_member"][1] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_accuracy_by_size_is_the_mean_over_subsets(average):
    logits_MNK, labels_N = random_ensemble(M=4, N=300)
    result = measure(logits_MNK, labels_N, average)
    for size in range(1, 5):
        log_p_NKs = [ensemble_log_probabilities(logits_MNK[list(s)], average) for s in combinations(range(4), size)]
        expected = sum(accuracy(log_p_NK, labels_N) for log_p_NK in log_p_NKs) / len(log_p_NKs)
        assert result["accuracy_by_size"][str(size)] == pytest.approx(expected, rel=1e-14)
    assert result["accuracy_by_size"]["4"] == pytest.approx(result["ensemble"]["accuracy"], rel=1e-14)
    assert result["accuracy_by_size"]["1"] == pytest.approx(result["members"]["accuracy"], rel=1e-14)


def test_many_members_use_twenty_fixed_subsets():
    subsets = _subsets(30, 15)
    assert len(set(subsets)) == 20 and all(len(set(subset)) == 15 for subset in subsets)
    assert subsets == _subsets(30, 15)


def test_the_seed_and_folds_choose_the_halves():
    logits_MNK, labels_N = random_ensemble()
    one, again, other, five = (
        measure(logits_MNK, labels_N, seed=seed, folds=folds)["ensemble_tempered"]
        for seed, folds in ((0, 1), (0, 1), (1, 1), (0, 5))
    )
    assert one == again
    assert len({row["nll"] for row in (one, other, five)}) == 3


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), M=st.integers(1, 5), N=st.integers(2, 60), K=st.integers(2, 6), ties=st.booleans())
def test_the_order_of_members_and_inputs_does_not_matter(seed, M, N, K, ties):
    logits_MNK, labels_N = random_ensemble(M, N, K, seed)
    if ties:
        logits_MNK = logits_MNK.round()
    generator = torch.Generator().manual_seed(seed)
    members, inputs = torch.randperm(M, generator=generator), torch.randperm(N, generator=generator)
    original = measure(logits_MNK, labels_N)
    shuffled = measure(logits_MNK[members][:, inputs], labels_N[inputs])
    for result in (original, shuffled):
        del result["ensemble_tempered"]  # the halves are chosen by the position of the inputs
    shuffled_members = shuffled["members"]["per_member"]
    shuffled["members"]["per_member"] = [shuffled_members[i] for i in members.argsort().tolist()]
    assert leaves(shuffled) == pytest.approx(leaves(original), rel=1e-12, abs=1e-14)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), N=st.integers(2, 60))
def test_the_order_of_members_does_not_matter_after_temperature(seed, N):
    logits_MNK, labels_N = random_ensemble(3, N, 4, seed)
    original, shuffled = (measure(logits, labels_N)["ensemble_tempered"] for logits in (logits_MNK, logits_MNK.flip(0)))
    assert leaves(shuffled) == pytest.approx(
        leaves(original), rel=1e-7, abs=1e-12
    )  # the fit stops at a tolerance of 1e-10 in log T


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    M=st.integers(1, 4),
    N=st.integers(1, 40),
    K=st.integers(1, 5),
    kind=st.sampled_from(["saturated", "constant", "one class never predicted", "one-hot"]),
    average=st.sampled_from(["logits", "probabilities"]),
)
def test_extreme_logits_give_finite_numbers_or_none(seed, M, N, K, kind, average):
    logits_MNK, labels_N = random_ensemble(M, N, K, seed)
    if kind == "saturated":
        logits_MNK *= 1e4
    elif kind == "constant":
        logits_MNK[:] = 0.1
    elif kind == "one-hot":
        logits_MNK = 1e4 * torch.nn.functional.one_hot(labels_N, K).float().expand(M, N, K)
    elif K > 1:
        logits_MNK[..., 0] = -1e4
    json.dumps(measure(logits_MNK, labels_N, average, folds=2), allow_nan=False)
    flat = validation_measures(logits_MNK, labels_N)
    assert None not in flat.values()
    json.dumps(flat, allow_nan=False)


def test_labels_of_any_integer_type():
    logits_MNK, labels_N = random_ensemble()
    assert measure(logits_MNK, labels_N.to(torch.uint8)) == measure(logits_MNK, labels_N)


@pytest.mark.parametrize("entry", [measure, validation_measures])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda z, y: (z[0], y), r"\[members, inputs, classes\], none empty: got shape \[200, 5\]"),
        (lambda z, y: (z[:, :0], y[:0]), r"none empty: got shape \[4, 0, 5\]"),
        (lambda z, y: (z, y[:-1]), r"for 200 inputs, so labels must have shape \[200\]: got \[199\]"),
        (lambda z, y: (z, y + 1), r"5 classes, so labels must be 0 to 4: got 1 to 5"),
        (lambda z, y: (z, y - 1), r"labels must be 0 to 4: got -1 to 3"),
        (lambda z, y: (z.index_fill(0, torch.tensor(2), float("nan")), y), "member 2 gave NaN or infinite logits"),
        (lambda z, y: (z.index_fill(0, torch.tensor(1), float("inf")), y), "member 1 gave NaN or infinite logits"),
    ],
)
def test_bad_input_is_refused_in_one_line(entry, break_it, message):
    with pytest.raises(ValueError, match=message) as refusal:
        entry(*break_it(*random_ensemble()))
    assert "\n" not in str(refusal.value)
