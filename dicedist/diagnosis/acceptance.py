"""The acceptance of a GPU machine: run everything that needs a GPU, and compare it with the CPU.

    ./launch/gpu-check                     on the GPUs of this machine
    ./launch/gpu-check --device cpu        the same script with tiny sizes, to test the script
    ./launch/gpu-check --out FOLDER        the folder of results.json and page.html (gpu-check)

Comparisons use the same random numbers on both devices and switch TF32 off, so that only rounding differs.
"""

import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dicedist.cluster.devices import MIB
from dicedist.cluster.process import command
from dicedist.config.options import Parser
from dicedist.console.lines import duration, say
from dicedist.console.tables import table
from dicedist.diagnosis.comparisons import MEMBERS, comparisons, prepare
from dicedist.diagnosis.faults import faults
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, SLOW, Finding, findings, refuse_failures, stopwatch
from dicedist.diagnosis.speed import speeds
from dicedist.diagnosis.trial import Case
from dicedist.diagnosis.trials import Check, Machine, Start
from dicedist.diagnosis.whole import whole_runs
from dicedist.reporting.markup import Head, Section, Table
from dicedist.reporting.page import document
from dicedist.runs.files import replace_text

APART = 0.1  # tolerance: the start table leaves out running statistics and scalars
VERDICTS = {FAILED: "broken", SLOW: "slower than expected", OK: "works", SKIPPED: "not tried"}  # in this order


def memory(machine: Machine) -> Finding:
    """Compare the memory of a rank's parts after a step with the start table; on a GPU report the peak as well."""
    case = Case(("method=dice", f"ensemble.size={MEMBERS}"), "float32")
    found = [
        (f"{ranks} ranks, rank {rank}", one)
        for ranks in (1, MEMBERS + 1)
        if ranks <= machine.most_ranks
        for rank, one in enumerate(machine.trial(Start(ranks, case)).bytes)
    ]
    wrong = [name for name, one in found if abs(one["held"] - one["said"]) > APART * one["said"]]
    what = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {b / MIB:,.2f} MiB" for kind, b in one.items()) for name, one in found
    )
    remedy = f"more than {APART:.0%} apart: {', '.join(wrong)}" if wrong else ""
    return Finding(FAILED if wrong else OK, what, remedy)


def checks(machine: Machine) -> dict[str, Check]:
    return {
        **comparisons(machine.most_ranks),
        "memory against the start table": memory,
        **whole_runs(),
        **faults(),
        **speeds(),
    }


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    parser = Parser("launch/gpu-check", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    options = parser.parse_args(arguments)
    device, out = options.device, options.out
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here: write --device cpu to test the script itself")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, stopwatch() as seconds:
        found = examine(Machine(device, Path(folder)))
        about = described(device) | {"seconds": round(seconds())}
    written = [{"name": name, "verdict": VERDICTS[one.state], **asdict(one)} for name, one in found.items()]
    replace_text(out / "results.json", json.dumps({**about, "findings": written}, indent=1))
    replace_text(out / "page.html", page(about, found))
    say("\n" + summary(found))
    say(f"done in {duration(about['seconds'])}: {out / 'page.html'}; please send back {out / 'results.json'}")
    refuse_failures(found)


def examine(machine: Machine) -> dict[str, Finding]:
    """Run every check and print its outcome."""
    planned, found = checks(machine), dict[str, Finding]()
    say(f"{len(planned)} checks; the trainings of the first ones run together")
    prepare(machine, planned.values())
    for name, one in findings({name: partial(check, machine) for name, check in planned.items()}):
        gap = "\n" if "\n" in one.what else " "  # a table keeps its columns
        say(f"{one.state:>8}  {name}:{gap}{one.what} {one.remedy}".rstrip())
        found[name] = one
    return found


def summary(found: Mapping[str, Finding]) -> str:
    """Return one row per check: broken checks first, then slow ones."""
    order = list(VERDICTS)
    rows = sorted(found.items(), key=lambda item: order.index(item[1].state))
    return table(["outcome", "check"], [[VERDICTS[one.state], name] for name, one in rows])


def described(device: str) -> dict[str, Any]:
    """Describe the machine for readers elsewhere, without its name or its user's name."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    return {
        "device": device,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "capability": [torch.cuda.get_device_capability(index) for index in range(count)],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if count else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def page(about: Mapping[str, Any], found: Mapping[str, Finding]) -> str:
    heads = [Head("check"), Head("outcome", kind="text"), Head("what was found", kind="text wrap pre")]
    rows = [[name, VERDICTS[one.state], f"{one.what}\n{one.remedy}".rstrip()] for name, one in found.items()]
    lead = "Each line compares short trainings, or measures one. The CPU is the reference; TF32 is off."
    values = {"lead": lead, "table": Table("One row per check", heads, rows)}
    title = "Acceptance on " + (", ".join(about["gpus"]) or "CPUs, to try the script")
    described = f"torch {about['torch']} · {duration(about['seconds'])}"
    return document(title, described, [Section("table", "Checks", values, "checks")])


if __name__ == "__main__":
    command(run)
