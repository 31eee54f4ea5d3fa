"""Draws docs/rooms.svg: which room imports which, as the import graph has it. Run it when rooms change.

python docs/draw_rooms.py
"""

from collections import Counter
from html import escape
from pathlib import Path

import grimp

ROOMS = {  # the order of the contract in pyproject.toml, and what each holds
    "commands": "train, evaluate, report, predict, export, sweep, evidence, paper, bench, ...; trainer: the loop",
    "benchmarks": "what bench measures",
    "training": "everything around the loop: start, resume, validation, records, listeners",
    "studies": "searches, and comparisons by a protocol",
    "tracking": "records, progress; mlflow/: the mirror, which training never imports",
    "reporting": "figures, tables, the page, the paper's figures",
    "evaluation": "readings, measures of a run, redundancy in nats, Ensemble, export formats",
    "runs": "Run: every file of a run; checkpoints, saving, resuming, jobs",
    "metrics": "pure functions of logits and labels; the one list of measures",
    "data": "sources, order, two pipelines, OOD sets",
    "cluster": "placement, exchange, control, world, heartbeat, signals, launcher",
    "plugins": "conditional redundancy in the loops of other libraries",
    "algorithm": "step, encoders, probes, parts, discriminator, schedules; objectives/, networks/",
    "config": "schema, checks, composition, help",
    "console": "lines, tables, progress",
}
OUTPUT = Path(__file__).with_name("rooms.svg")
LEFT, TOP, ROW, WIDTH, HEIGHT = 20, 20, 46, 660, 34
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24; } .holds { font-size: 11.5px; fill: #57606a; }
rect { fill: #f3f5f8; stroke: #c4cad2; } path { fill: none; stroke: #3b6fb6; stroke-opacity: .45; }
.name { font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ee; } .holds { fill: #a2abb6; } rect { fill: #22272e; stroke: #444c56; } path { stroke: #7aa7e6; } }
"""


def room_of(module: str) -> str | None:
    """The room of a module; everything at the top of the package is a command."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return parts[1] if parts[1] in ROOMS else "commands"


def imports_between_rooms() -> Counter[tuple[str, str]]:
    graph = grimp.build_graph("dicedist")
    found: Counter[tuple[str, str]] = Counter()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = room_of(importer), room_of(imported)
            if None not in pair and pair[0] != pair[1]:
                found[pair] += 1  # type: ignore[index]
    return found


def draw(imports: Counter[tuple[str, str]]) -> str:
    middle = {room: TOP + ROW * place + HEIGHT / 2 for place, room in enumerate(ROOMS)}
    shapes = []
    for (importer, imported), count in sorted(imports.items()):
        start, end, right = middle[importer], middle[imported], LEFT + WIDTH
        reach = right + 18 + abs(end - start) * 0.36
        thickness = min(7.0, 1 + count**0.5 / 2)
        title = f"<title>{importer} imports {imported}: {count}</title>"
        line = f"M{right} {start} C{reach} {start} {reach} {end} {right} {end}"
        shapes.append(f'<path d="{line}" stroke-width="{thickness:.1f}">{title}</path>')
    for room, holds in ROOMS.items():
        y = middle[room]
        shapes.append(f'<rect x="{LEFT}" y="{y - HEIGHT / 2}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        shapes.append(f'<text class="name" x="{LEFT + 12}" y="{y + 5}">{room}</text>')
        shapes.append(f'<text class="holds" x="{LEFT + 112}" y="{y + 4.5}">{escape(holds)}</text>')
    size = f"{LEFT + WIDTH + 210} {2 * TOP + ROW * len(ROOMS)}"
    words = "Rooms from commands at the top to console at the bottom; every import goes downwards."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{words}">'
        f"<style>{STYLE}</style>{''.join(shapes)}</svg>\n"
    )


if __name__ == "__main__":
    OUTPUT.write_text(draw(imports_between_rooms()))
    print(f"wrote {OUTPUT}")
