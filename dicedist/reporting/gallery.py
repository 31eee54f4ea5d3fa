"""The gallery: test images on which the members disagree most, and what each of them says."""

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from dicedist.reporting.markup import Section, folded, remark
from dicedist.reporting.records import Group, Recorded

MOST_IMAGES = 12  # per run
WIDEST = 64  # pixels, as stored


def section(groups: Sequence[Group]) -> Section | None:
    chosen = [(group, run) for group in groups if (run := first_shown(group)) is not None]
    if not chosen:
        return None
    walls = [
        folded(f"{group.label}, seed {run.config.seed}", wall(run), is_open=place == 0)
        for place, (group, run) in enumerate(chosen)
    ]
    return Section(
        "gallery",
        "Where members disagree",
        "The test images on which the members' probabilities lie furthest apart, with what each member says and how "
        "sure it is. ✓ marks the true class.",
        "".join(walls)
        + remark("Of each ensemble, the run with the lowest seed." if any(len(g.runs) > 1 for g in groups) else ""),
    )


def first_shown(group: Group) -> Recorded | None:
    return next((run for run in group.runs if run.gallery and run.evaluation), None)


def wall(run: Recorded) -> str:
    gallery = run.gallery
    num_images, num_members = len(gallery["images"]), len(gallery["predictions"])
    members = run.evaluation["member_ids"]
    if len(members) != num_members:  # only some members were evaluated after the gallery was made
        members = range(num_members)
    names = run.evaluation.get("class_names") or []
    cards = [card(gallery, place, members, names) for place in range(min(num_images, MOST_IMAGES))]
    return f'<div class="gallery">{"".join(cards)}</div>'


def card(gallery: dict[str, np.ndarray], place: int, members: Sequence[int], names: Sequence[str]) -> str:
    truth, ensemble = int(gallery["labels"][place]), int(gallery["ensemble"][place])
    said = [
        (number, int(prediction), float(confidence))
        for number, prediction, confidence in zip(
            members, gallery["predictions"][:, place], gallery["confidences"][:, place], strict=True
        )
    ]
    words = "; ".join(f"member {number} says {name_of(k, names)} with {sure:.0%}" for number, k, sure in said)
    lines = "".join(
        f'<li class="{"right" if k == truth else "wrong"}"><span class="who">{number}</span>'
        f'<span class="what">{escape(name_of(k, names))}{" ✓" if k == truth else ""}</span>'
        f'<span class="sure">{sure:.0%}</span><span class="meter" style="--share:{sure:.3f}"></span></li>'
        for number, k, sure in said
    )
    verdict = "the ensemble is right" if ensemble == truth else f"the ensemble says {name_of(ensemble, names)}"
    alt = f"A test image of class {name_of(truth, names)}; {words}; {verdict}."
    return (
        f'<article><img src="{data_uri(gallery["images"][place])}" alt="{escape(alt)}" width="96" height="96">'
        f"<div><h3>{escape(name_of(truth, names))}</h3><p>{escape(verdict)}</p></div><ul>{lines}</ul></article>"
    )


def name_of(k: int, names: Sequence[str]) -> str:
    return names[k] if k < len(names) else f"class {k}"


def data_uri(pixels: np.ndarray) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((WIDEST, WIDEST))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
