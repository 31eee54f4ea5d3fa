"""What an evaluation found, and how it is kept: nothing that an earlier one found is lost."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from dicedist.runs.files import load_tensors, save_tensors
from dicedist.runs.run import Results

KEPT = ("redundancy_fresh",)  # what only some evaluations measure


@dataclass
class Findings:
    result: dict[str, Any]  # for evaluation.json
    tensors: dict[str, Tensor]  # logits and labels of the test set, logits of each OOD set
    gallery: dict[str, Tensor]  # empty for vectors

    def save(self, results: Results, dropped: Collection[str] = ()) -> dict[str, Any]:
        """Writes the files, and returns what evaluation.json now says.

        An earlier evaluation of the same weights keeps the OOD sets and estimates that this one did not measure, but
        for sets that the user dropped.
        """
        earlier = results.result() or {}
        if same_ensemble(earlier, self.result):
            replaced = {*self.result["ood"], *dropped}
            kept = {name: found for name, found in earlier.get("ood", {}).items() if name not in replaced}
            tensors = earlier_tensors(results)
            self.tensors |= {f"ood.{name}": tensors[f"ood.{name}"] for name in kept if f"ood.{name}" in tensors}
            self.result["ood"] |= kept
            self.result["ood_groups"] = {**groups_without(earlier, dropped), **self.result.get("ood_groups", {})}
            self.result["ood_missing"] = [line for line in self.result["ood_missing"] if name_of(line) not in kept]
            if "shift" in earlier:
                self.result["shift"] = {**earlier["shift"], **self.result.get("shift", {})}
            self.result |= {key: earlier[key] for key in KEPT if key in earlier and key not in self.result}
        results.directory.mkdir(parents=True, exist_ok=True)
        save_tensors(self.tensors, results.logits_file)
        if self.gallery:
            save_tensors(self.gallery, results.gallery_file)
        results.write_result(self.result)
        return self.result


def same_ensemble(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    """Whether both are about the same members after the same step; old files do not say their step."""
    return all(earlier.get(key, later[key]) == later[key] for key in ("step", "member_ids", "average")) and (
        "member_ids" in earlier
    )


def groups_without(earlier: dict[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Groups of OOD sets; their means say nothing any more where the user dropped one of their sets."""
    groups = earlier.get("ood_groups", {})
    return {name: group for name, group in groups.items() if not set(group["sets"]) & set(dropped)}


def earlier_tensors(results: Results) -> dict[str, Tensor]:
    try:
        return load_tensors(results.logits_file)
    except (OSError, SafetensorError):
        return {}


def name_of(line: str) -> str:
    """The OOD set that a line of `ood_missing` is about."""
    return line.partition(":")[0]
