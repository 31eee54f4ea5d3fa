"""The gallery: the test images on which the members disagree most, with each member's prediction."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from dicedist.config.schema import RGB
from dicedist.reporting.markup import Section
from dicedist.reporting.records import Group, Recorded

MOST_IMAGES = 12  # per run
WIDEST = 64  # pixels, as stored


def section(groups: Sequence[Group]) -> Section | None:
    """Return the gallery of each ensemble's first run that has images."""
    chosen = [next((run for run in group.runs if run.gallery and run.evaluation), None) for group in groups]
    walls = [
        (f"{group.label}, seed {run.config.seed}", cards(run)) for group, run in zip(groups, chosen, strict=True) if run
    ]
    several = any(len(group.runs) > 1 for group in groups)
    return Section("report/gallery", "Where members disagree", {"walls": walls, "several": several}) if walls else None


def cards(run: Recorded) -> list[dict[str, Any]]:
    gallery, members = run.gallery, run.evaluation["member_ids"]
    if len(members) != len(gallery["predictions"]):  # only some members were evaluated after the gallery was made
        members = range(len(gallery["predictions"]))
    names = run.evaluation.get("class_names") or []
    return [card(gallery, place, members, names) for place in range(min(len(gallery["images"]), MOST_IMAGES))]


def card(gallery: dict[str, np.ndarray], place: int, members: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Return an image with each member's class, confidence and correctness."""
    truth, ensemble = int(gallery["labels"][place]), int(gallery["ensemble"][place])
    predictions, confidences = gallery["predictions"][:, place].tolist(), gallery["confidences"][:, place].tolist()
    answers = [
        (member, name_of(k, names), sure, k == truth)
        for member, k, sure in zip(members, predictions, confidences, strict=True)
    ]
    verdict = "the ensemble is right" if ensemble == truth else f"the ensemble says {name_of(ensemble, names)}"
    image = png(gallery["images"][place])
    return {"png": image, "label": name_of(truth, names), "verdict": verdict, "answers": answers}


def name_of(k: int, names: Sequence[str]) -> str:
    return names[k] if k < len(names) else f"class {k}"


def png(pixels_HWC: np.ndarray) -> str:
    """Return RGB as it is; of any other number of channels, gray and their mean."""
    shown = pixels_HWC if pixels_HWC.shape[2] == RGB else pixels_HWC.mean(2).round().astype(np.uint8)
    image = Image.fromarray(shown)
    image.thumbnail((WIDEST, WIDEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
