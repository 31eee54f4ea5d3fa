"""The findings of an evaluation; saving them keeps the findings of earlier evaluations."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dicedist.runs.results import Results

KEPT = ("redundancy_fresh",)  # measured by some evaluations only


@dataclass
class Findings:
    result: dict[str, Any]  # for evaluation.json
    tensors: dict[str, Tensor]  # logits and labels of the test set, logits of each OOD set
    gallery: dict[str, Tensor]  # empty for vectors

    def save(self, results: Results, dropped: Collection[str] = ()) -> tuple[Results, dict[str, Any]]:
        """Write the files. Return their folder, and the new content of evaluation.json.

        OOD sets and estimates from an earlier evaluation of the same weights are kept if this evaluation did not
        measure them, except for sets that the user dropped. Results of a later step are not overwritten: these findings
        then go to a folder of their step.
        """
        with results.writing():
            earlier = results.result() or {}
            if earlier.get("step", 0) <= self.result["step"]:
                if same_ensemble(earlier, self.result):
                    self.add_earlier(earlier, earlier_tensors(results, earlier), dropped)
                results.write_result(self.result, self.tensors, self.gallery)
                return results, self.result
        return self.save(results.aside(self.result["step"]), dropped)

    def add_earlier(self, earlier: dict[str, Any], tensors: dict[str, Tensor], dropped: Collection[str]) -> None:
        result = self.result
        kept = {name: found for name, found in earlier.get("ood", {}).items() if name not in {*result["ood"], *dropped}}
        self.tensors |= {f"ood.{name}": tensors[f"ood.{name}"] for name in kept if f"ood.{name}" in tensors}
        # The means of a group are invalid if the user dropped one of its sets.
        groups = {k: v for k, v in earlier.get("ood_groups", {}).items() if not set(v["sets"]) & set(dropped)}
        result["ood"] |= kept
        result["ood_groups"] = groups | result.get("ood_groups", {})
        result["ood_missing"] = [line for line in result["ood_missing"] if line.partition(":")[0] not in kept]
        if "shift" in earlier:
            result["shift"] = earlier["shift"] | result.get("shift", {})
        result |= {key: earlier[key] for key in KEPT if key in earlier and key not in result}


def same_ensemble(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    """Return whether both describe the same members of the same checkpoint; old files lack some of these keys."""
    named = ("step", "checkpoint", "weights", "member_ids", "average")
    return all(earlier.get(key, later.get(key)) == later.get(key) for key in named) and "member_ids" in earlier


def earlier_tensors(results: Results, earlier: dict[str, Any]) -> dict[str, Tensor]:
    try:
        return results.tensors(results.logits_file, earlier)
    except (OSError, ValueError):
        return {}
