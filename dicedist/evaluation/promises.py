"""The decisions of `predict` in words: the promise for new inputs, its spread, and the result on the test set.

The number after ± is half the width of an interval that holds 95 of 100 calibrations on as many inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import bdtrc

from dicedist.config.schema import CalibrationConfig
from dicedist.evaluation.calibration import targets_of
from dicedist.metrics import conformal
from dicedist.metrics.abstention import NEVER, answers_needed
from dicedist.metrics.measures import OOD_SCORES

FEW = 50  # fewer held-out inputs give a warning
MEANING = "±: the range of 95 of 100 calibrations on as many inputs"


@dataclass(frozen=True)
class Promise:
    what: str
    promised: str
    tested: str


def promises(found: Mapping[str, Any]) -> list[Promise]:
    """List the promises. found: `calibration` of evaluation.json."""
    test, n = found["test"], found["num_inputs"]
    measures, spread = test["measures"], found.get("temperature_spread")
    temperature = f"{found['temperature']:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
    listed = [
        Promise("most probable label", "", f"{percent(measures['accuracy'])} right, NLL {measures['nll']:.4g}"),
        Promise(f"temperature {temperature}", "", f"ECE {100 * measures['ece']:.2f} %"),
        Promise(abstains(found), answers(found), answered(test)),
    ]
    if found["quantiles"] is not None:
        kind = f"{found['conformal']}, per class" if found["per_class"] else found["conformal"]
        fewest = found.get("fewest", None if found["per_class"] else n)  # not in results of earlier versions
        place = None if fewest is None else conformal.place(fewest, found["alpha"])
        promised = around(1 - found["alpha"], place, fewest)
        size = f"{percent(test['set_coverage'])} right, {test['set_size']:.2f} labels"
        listed.append(Promise(f"label sets ({kind})", f"{promised} right", size))
    if found["ood_threshold"] is not None:
        promised = around(conformal.ACCEPTED, math.ceil(conformal.ACCEPTED * n), n)
        score = OOD_SCORES.get(found.get("ood_score") or "", "OOD")  # earlier versions had one
        unlike = f"unlike below {found['ood_threshold']:.4g} ({score})"
        accepted = f"{percent(test['ood_accepted'])} accepted" if "ood_accepted" in test else ""
        listed.append(Promise(unlike, f"{promised} accepted", accepted))
    return listed


def chosen_on(found: Mapping[str, Any]) -> str:
    return f"chosen on {found['num_inputs']:,} {found['source']} inputs"


def few_behind(found: Mapping[str, Any]) -> str | None:
    """Return a warning if the promises are based on few inputs. found: `calibration` of evaluation.json."""
    total = found["num_inputs"]
    return rests_on_few(total, found.get("fewest", total), f"{found['source']} inputs", targets_of(found))


def abstains(found: Mapping[str, Any]) -> str:
    threshold = found["threshold"]
    return "always abstains" if threshold == NEVER else f"abstains below {threshold:.4g}"


def answers(found: Mapping[str, Any]) -> str:
    """Return the promise of the abstention threshold."""
    n, coverage, guarantee = found["num_inputs"], found["coverage"], found.get("guarantee")
    if coverage is not None:
        return f"{around(coverage, math.ceil(coverage * n), n)} answered"
    target = f"{100 * found['risk']:g} % wrong"
    if guarantee is None:
        return f"{target}, no guarantee"
    if isinstance(guarantee, str):
        return f"{target} on average"
    return f"≤ {target}, {100 * guarantee:g} % sure"


def answered(test: Mapping[str, Any]) -> str:
    risk = "" if test["risk"] is None else f", {percent(test['risk'])} wrong"
    return f"answers {100 * test['answered']:.0f} %{risk}"


def around(target: float, nth: int | None, num_inputs: int | None) -> str:
    """Return a share with its spread, if known."""
    if nth is None or num_inputs is None:
        return f"{100 * target:g} %"
    return f"{100 * target:g} ± {100 * conformal.spread(nth, num_inputs):.2g} %"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def rests_on_few(num_inputs: int, fewest: int, noun: str, targets: CalibrationConfig) -> str | None:
    """Return a warning of what so few held-out inputs cannot promise; None if they are enough.

    fewest: the inputs of the smallest class. noun: images or vectors.
    """
    behind_sets = fewest if targets.per_class else num_inputs
    for_sets, for_answers = math.ceil(1 / targets.alpha - 1 - 1e-9), 0.0
    if targets.coverage is None and targets.risk is not None:
        for_answers = answers_needed(targets.risk, targets.guarantee)
    if num_inputs >= max(FEW, for_answers) and behind_sets >= for_sets:
        return None
    lacking = []
    if behind_sets < for_sets:
        of_class = " of a class" if targets.per_class else ""
        lacking.append(f"no label sets (calibration.alpha={targets.alpha:g} needs {for_sets}{of_class})")
    if num_inputs < for_answers:
        needed = f"calibration.risk={targets.risk:g} needs {for_answers:g} right answers"
        lacking.append(f"no answers, the ensemble always abstains ({needed})")
    if behind_sets >= for_sets:
        covered = around(1 - targets.alpha, conformal.place(behind_sets, targets.alpha), behind_sets)
        lacking.append(f"label sets that are right in {covered}")
    return f"{num_inputs:,} {noun} to calibrate on are few: {'; '.join(lacking)}"


def no_better_than_guessing(result: Mapping[str, Any]) -> str | None:
    """Return a warning and what to try; None if the ensemble is better than guessing.

    The guess is always the most frequent class of the test set. result: evaluation.json.
    """
    counts = result.get("per_class", {}).get("count", [])
    total, accuracy = sum(counts), result["ensemble"]["accuracy"]
    if not total or bdtrc(round(accuracy * total) - 1, total, max(counts) / total) < 0.05:
        return None
    return (
        f"No better than guessing: {percent(accuracy)} of the test set is right, and {percent(max(counts) / total)} is "
        "of the most frequent class. Check the labels; then try more epochs, another optimizer.lr, pretrained weights "
        "(recipe=finetune, recipe=heads), and no compression: method=ind."
    )
