"""The acceptance of a GPU machine: everything that this project has never run on a GPU, run and compared with the CPU.

    ./launch/gpu-check                     on the GPUs of this machine
    ./launch/gpu-check --device cpu        the same script on tiny sizes, to know that it works
    ./launch/gpu-check --out FOLDER        where results.json and page.html go (gpu-check)

Comparisons draw the same random numbers on both devices and switch TF32 off, so that only rounding differs.
"""

import json
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
from dicedist.diagnosis.comparisons import MEMBERS, comparisons, judge
from dicedist.diagnosis.faults import faults, training_records
from dicedist.diagnosis.finding import FAILED, OK, Finding, findings, refuse_failures, stopwatch
from dicedist.diagnosis.trials import Check, Machine
from dicedist.reporting.markup import Head, Section, Table
from dicedist.reporting.page import document
from dicedist.runs.files import replace_text
from dicedist.runs.run import Run

APART = 0.1  # the start table leaves out running statistics and scalars


def moved(machine: Machine) -> Finding:
    """A run that goes from the CPU to the GPU and back ends as it would have on the CPU alone."""
    keys = [*machine.keys, "method=ind", "ensemble.size=2", "data.train_limit=64", "batch_size=16", "epochs=3"]
    keys += ["log.every_steps=1", "checkpoint.every_steps=4", f"run.dir={machine.folder}"]
    for name, starts in (("alone", [(12, True)]), ("moved", [(4, True), (8, False), (12, True)])):
        for steps, on_cpu in starts:
            words = ["dicedist.train", *keys, f"run.name={name}", f"max_steps={steps}"]
            machine.start(words, on_cpu=on_cpu)
    one, other = (training_records(Run(machine.folder / name)) for name in ("moved", "alone"))
    return judge(one, other)


def memory(machine: Machine) -> Finding:
    """What a rank's parts hold after a step is what the start table says; on a GPU also the most that was allocated."""
    found = [
        (f"{ranks} ranks, rank {rank}", one)
        for ranks in (1, MEMBERS + 1)
        if ranks <= machine.most_ranks
        for rank, one in enumerate(machine.trial(ranks, ("method=dice", f"ensemble.size={MEMBERS}")).bytes)
    ]
    wrong = [name for name, one in found if abs(one["held"] - one["said"]) > APART * one["said"]]
    told = "; ".join(
        f"{name}: " + ", ".join(f"{what} {b / MIB:,.2f} MiB" for what, b in one.items()) for name, one in found
    )
    remedy = f"more than {APART:.0%} apart: {', '.join(wrong)}" if wrong else ""
    return Finding(FAILED if wrong else OK, told, remedy)


def measured(words: Sequence[str], ranks: int, machine: Machine) -> Finding:
    """A benchmark, which is told and not judged."""
    return Finding(OK, machine.start(["dicedist.bench", *words, *machine.keys], ranks).rstrip())


def checks() -> dict[str, Check]:
    size = f"ensemble.size={MEMBERS}"
    steps = [("dice", ranks) for ranks in (1, 2, MEMBERS, MEMBERS + 1)] + [("ind", ranks) for ranks in (1, 2, MEMBERS)]
    return {
        **comparisons(),
        "memory against the start table": memory,
        "a run from CPU to GPU and back": moved,
        **faults(),
        **{
            f"the time of a step of {method} on {ranks} ranks": partial(
                measured, ("step", f"method={method}", size), ranks
            )
            for method, ranks in steps
        },
        "w in bf16, on one rank": partial(measured, ("step", "method=dice", size, "precision=bf16"), 1),
        "members of one device: in turn, grouped, on streams": partial(measured, ("batched", size), 1),
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
        raise ValueError("there is no GPU here: --device cpu tries the script itself")
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder, stopwatch() as seconds:
        machine = Machine(device, Path(folder))
        for name, one in findings({name: partial(check, machine) for name, check in checks().items()}):
            gap = "\n" if "\n" in one.what else " "  # a table keeps its columns
            say(f"{one.state:>8}  {name}:{gap}{one.what} {one.remedy}".rstrip())
            found[name] = one
        taken = seconds()
    about = {"device": device, "gpus": names_of_gpus(), "torch": torch.__version__, "seconds": round(taken)}
    written = [{"name": name, **asdict(one)} for name, one in found.items()]
    replace_text(out / "results.json", json.dumps({**about, "findings": written}, indent=1))
    replace_text(out / "page.html", page(about, found))
    say(f"done in {duration(taken)}: {out / 'page.html'}, {out / 'results.json'}")
    refuse_failures(found)


def names_of_gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def page(about: Mapping[str, Any], found: Mapping[str, Finding]) -> str:
    heads = [Head("check"), Head("state", kind="text"), Head("what was found", kind="text wrap pre")]
    rows = [[name, one.state, f"{one.what}\n{one.remedy}".rstrip()] for name, one in found.items()]
    lead = "Each line compares short trainings, or measures one. The CPU is the reference; TF32 is off."
    values = {"lead": lead, "table": Table("One row per check", heads, rows)}
    title = "Acceptance on " + (", ".join(about["gpus"]) or "CPUs, to try the script")
    described = f"torch {about['torch']} · {duration(about['seconds'])}"
    return document(title, described, [Section("table", "Checks", values, "checks")])


if __name__ == "__main__":
    command(run)
