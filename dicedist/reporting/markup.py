"""The pieces of the page: sections, figures, tables, legends. Text comes in plain and is escaped here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dicedist.metrics import paired_over_seeds
from dicedist.metrics.measures import Measure
from dicedist.reporting import svg
from dicedist.reporting.records import Group, Pooled


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    lead: str  # how to read what follows
    body: str  # HTML


def figure(title: str, picture: str, note: str = "") -> str:
    under = f" <small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{under}</figcaption>{picture}</figure>"


def grid(figures: Iterable[str], kind: str = "") -> str:
    return f'<div class="grid {kind}">{"".join(figures)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Pictures and what they stand for."""
    items = "".join(f"<li>{picture}{escape(text)}</li>" for picture, text in entries)
    return f'<ul class="legend">{items}</ul>'


def ensembles(groups: Sequence[Group]) -> str:
    return legend((svg.legend_key(group.style), group.label) for group in groups)


def remark(text: str) -> str:
    return f'<p class="remark">{escape(text)}</p>' if text else ""


def without(groups: Sequence[Group], what: str) -> str:
    """Says which ensembles a figure leaves out."""
    return remark(f"{what}: {', '.join(group.label for group in groups)}." if groups else "")


def unevaluated(groups: Sequence[Group]) -> str:
    return without([group for group in groups if not group.evaluations], "Not evaluated yet")


def folded(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"


def table(caption: str, head: str, bodies: Sequence[tuple[str, Sequence[str]]], columns: int) -> str:
    """Rows in blocks, each under its own heading if it has one; on a narrow screen the table scrolls sideways."""
    parts = []
    for heading, rows in bodies:
        title = f'<tr class="block"><th colspan="{columns}">{escape(heading)}</th></tr>' if heading else ""
        parts.append(f"<tbody>{title}{''.join(rows)}</tbody>")
    return (
        f'<p class="caption">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead>{head}</thead>{''.join(parts)}</table></div>"
    )


def cell(value: Pooled | None, decimals: int, scale: float = 1, best: bool = False) -> str:
    return f"<td>{estimate(value, decimals, scale, best)}</td>"


def estimate(value: Pooled | None, decimals: int, scale: float = 1, best: bool = False) -> str:
    """Mean and deviation over seeds."""
    if value is None:
        return '<span class="none">–</span>'
    shown = value.times(scale)
    mean = fixed(shown.mean, decimals)
    spread = f" <small>± {fixed(shown.deviation, decimals)}</small>" if shown.deviation is not None else ""
    return f"<b>{mean}</b>{spread}" if best else mean + spread


def fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".replace("-", "−")


def best_of(values: Sequence[Pooled | None], measure: Measure) -> list[bool]:
    """Marks the one that is `apart` from every other and better, if there is one."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or measure.better is None:
        return [False] * len(values)
    best = (max if measure.better == "higher" else min)(known, key=lambda value: value.mean)
    clear = all(apart(best, other) for other in known if other is not best)
    return [clear and value is best for value in values]


def apart(one: Pooled, other: Pooled) -> bool:
    """Beyond both deviations, and where seeds can be paired also beyond the t interval of their differences.

    A single run has no deviation, so that nothing can be said of it.
    """
    if one.deviation is None or other.deviation is None:
        return False
    if len(one.values) == len(other.values) > 1 and not paired_over_seeds(one.values, other.values).excludes_zero:
        return False
    return abs(one.mean - other.mean) > one.deviation + other.deviation
