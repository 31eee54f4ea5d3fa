"""The decisions of `predict` in words: what each promises for new inputs, how far that varies, what the test set says.

The number after a ± is half the width of an interval: of 100 calibrations with as many inputs, 95 come to lie in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dicedist.metrics import conformal
from dicedist.metrics.abstention import NEVER

MEANING = "±: where 95 of 100 calibrations with as many inputs come to lie"


@dataclass(frozen=True)
class Promise:
    what: str
    promised: str
    tested: str


def promises(found: Mapping[str, Any]) -> list[Promise]:
    """found: `calibration` of evaluation.json."""
    test, n = found["test"], found["num_inputs"]
    measures, spread = test["measures"], found.get("temperature_spread")
    temperature = f"{found['temperature']:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
    listed = [
        Promise(f"temperature {temperature}", "", f"ECE {100 * measures['ece']:.2f} %, NLL {measures['nll']:.4g}"),
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
        unlike = f"unlike below {found['ood_threshold']:.4g} (OOD)"
        listed.append(Promise(unlike, f"{promised} accepted", f"{percent(test['ood_accepted'])} accepted"))
    return listed


def chosen_on(found: Mapping[str, Any]) -> str:
    return f"chosen on {found['num_inputs']:,} {found['source']} images"


def abstains(found: Mapping[str, Any]) -> str:
    threshold = found["threshold"]
    return "abstains always" if threshold == NEVER else f"abstains below {threshold:.4g}"


def answers(found: Mapping[str, Any]) -> str:
    """The promise of the abstention threshold."""
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
    """A share with its spread, where that is known."""
    if nth is None or num_inputs is None:
        return f"{100 * target:g} %"
    return f"{100 * target:g} ± {100 * conformal.spread(nth, num_inputs):.2g} %"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
