"""What a GPU must compute as the CPU does, or as its own plain fp32 step does: a table of short trainings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicedist.diagnosis.finding import FAILED, OK, Finding, Lacking
from dicedist.diagnosis.trials import Machine, Values

# The largest relative difference of any recorded value: in the first steps, and later, when rounding has grown.
EARLY, EARLY_STEPS, LATER = 2e-3, 3, 0.1
HALF = 0.25  # in half precision values only stay near
MEMBERS = 4


@dataclass(frozen=True)
class Comparison:
    ranks: int
    keys: tuple[str, ...]
    against: tuple[str, ...] | None = None  # one process on the same device; None: `keys` in one process on the CPU
    of: str = ""  # the beginning of the values that must agree
    later: float = LATER
    on_gpus_only: bool = False

    def __call__(self, machine: Machine) -> Finding:
        if self.on_gpus_only and not machine.on_gpu:
            raise Lacking("only a GPU has this")
        here = machine.trial(self.ranks, self.keys).values
        alone = [key for key in self.keys if not key.startswith(("ensemble.replicas", "ensemble.sync_batch_norm"))]
        expected = machine.trial(1, self.against or tuple(alone), on_cpu=self.against is None).values
        return judge(here, expected, self.of, self.later)


def judge(here: Sequence[Values], expected: Sequence[Values], of: str = "", later: float = LATER) -> Finding:
    by_step = [difference(one, other, of) for one, other in zip(here, expected, strict=True)]
    early, late = max(by_step[:EARLY_STEPS]), max(by_step)
    agrees = late <= later and early <= (EARLY if later == LATER else later)
    what = f"values differ by at most {early:.1e} in {EARLY_STEPS} steps, {late:.1e} in {len(by_step)}"
    return Finding(OK if agrees else FAILED, what, "" if agrees else f"{EARLY:g} and {later:g} are expected")


def difference(one: Mapping[str, float], other: Mapping[str, float], of: str) -> float:
    """The largest relative difference between values of the same name. Accuracies jump, so they do not count."""
    names = [name for name in one.keys() & other.keys() if name.startswith(of) and "accuracy" not in name]
    assert names, f"no values in common: {sorted(one)}, {sorted(other)}"
    return max(abs(one[name] - other[name]) / max(1.0, abs(other[name])) for name in names)


def comparisons() -> dict[str, Comparison]:
    dice, two = ("method=dice", f"ensemble.size={MEMBERS}"), ("method=dice", "ensemble.size=2", "data.pipeline=torch")
    synced = ("ensemble.replicas=2", "ensemble.sync_batch_norm=true")
    others = [("ind", "net", 2), ("adp", "net", 2), ("one", "branch", 3), ("okddip_dice", "net", 3)]
    return {
        **{
            f"DICE, {structure}, {ranks} ranks": Comparison(ranks, (*dice, f"structure={structure}"))
            for structure in ("net", "branch")
            for ranks in (1, 2, MEMBERS, MEMBERS + 1)
        },
        **{
            f"{method}, {structure}, 2 ranks": Comparison(
                2, (f"method={method}", f"structure={structure}", f"ensemble.size={size}")
            )
            for method, structure, size in others
        },
        # A replica records the losses of its share of the batch; w sees the whole.
        "replicas with synchronised batch norm": Comparison(5, (*two, *synced), of="discriminator"),
        "DALI's pipeline": Comparison(1, (*two[:-1], "data.pipeline=dali"), against=two),
        # w computes in bf16 on a GPU, so only members are compared.
        "bf16": Comparison(1, (*two, "precision=bf16"), against=two, of="member", later=HALF),
        "fp16": Comparison(1, (*two, "precision=fp16"), against=two, of="member", later=HALF),
        "members as one grouped network": Comparison(1, (*dice, "ensemble.batched=true"), against=dice),
        "compiled": Comparison(1, (*two, "compile=true"), against=two, on_gpus_only=True),
        "CUDA graphs": Comparison(1, (*two, "compile=graphs"), against=two, on_gpus_only=True),
    }
