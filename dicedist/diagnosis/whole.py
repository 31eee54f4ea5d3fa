"""Complete runs for `gpu-check`: a checkpoint that moves between devices, a training with its final evaluation."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from dicedist.diagnosis.comparisons import SINGLE, differences, judge
from dicedist.diagnosis.faults import training_records
from dicedist.diagnosis.finding import FAILED, OK, Finding, judged
from dicedist.diagnosis.trials import Check, Machine, Trial, Values
from dicedist.runs.run import Run

MEMBERS, RANKS = 2, 3
APART = 1e-3  # tolerance between evaluations of the same float32 weights, where rounding does not multiply
LR = 0.1


def moved(machine: Machine) -> Finding:
    """Check that a run that moves from the CPU to the GPU and back ends as it does on the CPU alone.

    The twin that shows the effect of rounding has a learning rate that differs in the last place of a float32.
    """
    keys = [*machine.keys, "method=ind", "ensemble.size=2", "data.train_limit=64", "batch_size=16", "epochs=3"]
    keys += ["checkpoint.every_steps=4", "evaluate.test=false", f"run.dir={machine.folder}"]
    runs = {
        "alone": (LR, [(12, True)]),
        "twin": (LR * (1 + SINGLE.unit), [(12, True)]),
        "moved": (LR, [(4, True), (8, False), (12, True)]),
    }
    for name, (rate, starts) in runs.items():
        for steps, on_cpu in starts:
            words = ["dicedist.train", *keys, f"optimizer.lr={rate!r}", f"run.name={name}", f"max_steps={steps}"]
            machine.start(words, on_cpu=on_cpu)
    alone, twin, other = (training_records(Run(machine.folder / name)) for name in runs)
    return judge(other, Trial(alone, twin, []), "", SINGLE)


def trained(machine: Machine) -> Finding:
    """Train and evaluate DICE briefly over several ranks, with MLflow if installed; then evaluate it on the CPU."""
    ranks = max(1, min(RANKS, machine.most_ranks))
    tracking = "mlflow" if find_spec("mlflow") else "none"
    keys = [*machine.keys, "method=dice", f"ensemble.size={MEMBERS}", "epochs=1", "max_steps=4", "data.test_limit=500"]
    keys += [f"tracking={tracking}", f"tracking.uri=sqlite:///{machine.folder}/mlflow.db"]
    run = Run(machine.folder / "trained")
    # A training whose records did not all reach MLflow has its own exit code, which is an error here.
    machine.start(["dicedist.train", *keys, f"run.dir={machine.folder}", f"run.name={run.name}"], ranks)
    here = dict(smooth(run.result() or {}))
    machine.start(["dicedist.evaluate", f"run={run.directory}"], on_cpu=True)
    apart = max(differences(here, dict(smooth(run.result() or {}))).values())
    what = f"{ranks} ranks, tracking={tracking}: {len(here)} measures differ by at most {apart:.1e} from the CPU's"
    return judged(what, "" if apart <= APART else f"{APART:g} is expected", state=FAILED)


def smooth(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield by name the measures that do not jump when the prediction for one image changes."""
    yield "nll", result["ensemble"]["nll"]
    yield from ((f"nll {nth}", member["nll"]) for nth, member in enumerate(result["members"]["per_member"]))
    yield from result["uncertainty"].items()
    yield from ((f"redundancy {nth}", nats) for nth, nats in enumerate(result["redundancy"]["nats_P"]))


def images(machine: Machine) -> Finding:
    """Check that every pipeline makes the same images on this device as torch on the CPU, up to rounding."""
    keys = [*machine.keys, "method=ind", "ensemble.size=2"]
    file = machine.folder / "images.json"
    machine.start(["dicedist.diagnosis.images", str(file), *keys])
    found: Values = json.loads(file.read_text())
    wrong = [name for name, apart in found.items() if apart > APART]
    what = ", ".join(f"{name} {apart:.1e}" for name, apart in found.items())
    return Finding(FAILED if wrong else OK, f"pixels differ by at most: {what}", ", ".join(wrong))


def whole_runs() -> dict[str, Check]:
    return {
        "images of every pipeline": images,
        "a run from CPU to GPU and back": moved,
        "a training of DICE with its evaluation and MLflow": trained,
    }
