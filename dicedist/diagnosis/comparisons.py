"""Short trainings whose results on a GPU must equal the CPU's, or the GPU's own in another configuration.

Training multiplies rounding errors: weights that differ in their last bit give values that differ by half after twenty
steps in float32. So trainings are compared in float64, and every comparison measures the effect of rounding. A twin of
the reference starts with weights that differ by one unit in the last place. A value may differ from the reference by a
multiple of the twin's difference.

The multiples were measured on CPUs, over ten steps of DICE (tests/step/test_acceptance.py). If every operation changes
the last bit of its result, values differ by up to 72 times the twin's difference in float64, and 21 times in float32.
If a sign is wrong, or w's weights are read too early once, they differ by at least 2e13 times in float64, and 3e3 in
float32.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dicedist.diagnosis.finding import FAILED, OK, Finding, Lacking, judged
from dicedist.diagnosis.trial import Case
from dicedist.diagnosis.trials import Machine, Start, Trial, Values

MEMBERS = 4
ONLY_A_GPU = "only a GPU has this"
BLOCKING, SANITIZER = ("CUDA_LAUNCH_BLOCKING=1",), ("TORCH_CUDA_SANITIZER=1",)


@dataclass(frozen=True)
class Rounding:
    """The precision of a training, and the multiple of its twin's difference that is allowed."""

    dtype: str
    unit: float  # unit in the last place
    times: float


DOUBLE = Rounding("float64", 2.0**-52, 1e4)
SINGLE = Rounding("float32", 2.0**-23, 1e3)
BF16, FP16 = Rounding("float32", 2.0**-8, 30), Rounding("float32", 2.0**-11, 30)  # values agree only roughly


@dataclass(frozen=True)
class Comparison:
    ranks: int
    keys: tuple[str, ...]
    against: tuple[str, ...] | None = None  # one process on the same device; None: `keys` in one process on the CPU
    of: str = ""  # the prefix of the values that must agree
    rounding: Rounding = DOUBLE
    in_a_row: bool = False  # with the device's own random numbers; nothing is read between steps
    variables: tuple[str, ...] = ()  # environment variables of the reference
    on_gpus_only: bool = False

    @property
    def reference(self) -> Case:
        alone = [key for key in self.keys if not key.startswith(("ensemble.replicas", "ensemble.sync_batch_norm"))]
        keys = tuple(alone) if self.against is None else self.against
        return Case(keys, self.rounding.dtype, self.rounding.unit, self.in_a_row)

    def starts(self, machine: Machine) -> list[Start]:
        """Return the training and its reference. On the CPU a training in one process is its own reference."""
        on_cpu = self.against is None and not self.on_gpus_only
        reference = Start(1, self.reference, on_cpu, self.variables)
        if self.ranks == 1 and self.keys == self.reference.keys and not machine.on_gpu:
            return [reference, reference]
        return [Start(self.ranks, replace(self.reference, keys=self.keys, disturbed=None)), reference]

    def __call__(self, machine: Machine) -> Finding:
        if self.on_gpus_only and not machine.on_gpu:
            raise Lacking(ONLY_A_GPU)
        here, expected = map(machine.trial, self.starts(machine))
        return judge(here.values, expected, self.of, self.rounding)


def judge(here: Sequence[Values], expected: Trial, of: str, rounding: Rounding) -> Finding:
    """Compare every value of every step; the effect of rounding grows from step to step."""
    unit, grown, largest, worst = rounding.unit, dict[str, float](), 0.0, (0.0, "")
    for nth, (found, known, disturbed) in enumerate(zip(here, expected.values, expected.disturbed, strict=True), 1):
        twin = differences(disturbed, known, of)
        for name, apart in differences(found, known, of).items():
            grown[name] = max(grown.get(name, unit), twin[name])
            share = apart / (rounding.times * grown[name])
            largest, worst = max(largest, apart), max(worst, (share, f"{name} in step {nth}"))
    what = f"values of {len(here)} steps differ by at most {largest:.1e}, {worst[0]:.1g} of the tolerance for rounding"
    return judged(what, "" if worst[0] <= 1 else f"the results differ, most of all {worst[1]}", state=FAILED)


def differences(one: Mapping[str, float], other: Mapping[str, float], of: str = "") -> dict[str, float]:
    """Return relative differences of values with the same name; infinite for NaN. Accuracies jump: leave them out."""
    names = [name for name in one.keys() & other.keys() if name.startswith(of) and "accuracy" not in name]
    assert names, f"no values in common: {sorted(one)}, {sorted(other)}"
    found = {name: abs(one[name] - other[name]) / max(1.0, abs(other[name])) for name in names}
    return {name: math.inf if math.isnan(apart) else apart for name, apart in found.items()}


@dataclass(frozen=True)
class Survives:
    """A training that must only reach its end while a checker watches for faults. On GPUs only."""

    ranks: int
    case: Case
    variables: tuple[str, ...] = ()

    def __call__(self, machine: Machine) -> Finding:
        if not machine.on_gpu:
            raise Lacking(ONLY_A_GPU)
        trial = machine.trial(Start(self.ranks, self.case, variables=self.variables))
        return Finding(OK, f"{len(trial.values)} steps without a fault")


def comparisons(most_ranks: int) -> dict[str, Comparison | Survives]:
    dice, two = ("method=dice", f"ensemble.size={MEMBERS}"), ("method=dice", "ensemble.size=2")
    mixed = (*two, "network.per_member=[resnet8,resnet20]")
    synced = ("ensemble.replicas=2", "ensemble.sync_batch_norm=true")
    others = [("ind", "net", 2), ("adp", "net", 2), ("one", "branch", 3), ("okddip_dice", "net", 3)]
    many = {most_ranks: most_ranks - 1} if most_ranks > MEMBERS + 1 else {}
    sizes = {ranks: MEMBERS for ranks in (1, 2, MEMBERS, MEMBERS + 1)} | many
    return {
        **{
            f"DICE, {structure}, {ranks} ranks": Comparison(
                ranks, ("method=dice", f"ensemble.size={size}", f"structure={structure}")
            )
            for structure in ("net", "branch")
            for ranks, size in sizes.items()
        },
        **{
            f"{method}, {structure}, 2 ranks": Comparison(
                2, (f"method={method}", f"structure={structure}", f"ensemble.size={size}")
            )
            for method, structure, size in others
        },
        # A replica records the losses of its share of the batch; w sees the whole batch.
        "replicas with synchronized batch norm": Comparison(5, (*two, *synced), of="discriminator"),
        "w divided among all ranks": Comparison(MEMBERS, (*dice, "redundancy.ranks=all"), of="member"),
        # w computes in bf16 on a GPU, so only members are compared.
        "bf16": Comparison(1, (*two, "precision=bf16"), against=two, of="member", rounding=BF16),
        "fp16": Comparison(1, (*two, "precision=fp16"), against=two, of="member", rounding=FP16),
        "members as one grouped network": Comparison(1, (*dice, "ensemble.batched=true"), against=dice),
        "compiled": Comparison(1, (*two, "compile=true"), against=two, on_gpus_only=True),
        "different members compiled": Comparison(1, (*mixed, "compile=true"), against=mixed, on_gpus_only=True),
        "CUDA graphs": Comparison(1, (*two, "compile=graphs"), against=two, on_gpus_only=True),
        "w's learning as a graph": Comparison(
            1, (*two, "redundancy.graph=true"), against=two, in_a_row=True, on_gpus_only=True
        ),
        "float32": Comparison(1, dice, rounding=SINGLE),
        # Every value is read in every step above, which hides races: here the GPU runs ahead of the host.
        "all kernels in a row, and one by one": Comparison(
            1, dice, against=dice, in_a_row=True, variables=BLOCKING, on_gpus_only=True
        ),
        "the host waits nowhere": Survives(1, Case(dice, "float32", in_a_row=True, refuses_waits=True)),
        "CUDA sanitizer": Survives(1, Case(two, "float32"), SANITIZER),
    }


def prepare(machine: Machine, checks: Iterable[object]) -> None:
    """Run the trainings of all comparisons that this machine supports, with few process starts."""
    possible = [
        check for check in checks if isinstance(check, Comparison) and (machine.on_gpu or not check.on_gpus_only)
    ]
    machine.prepare(start for check in possible for start in check.starts(machine))
