"""Logits and features of all members for a split of the data, over all ranks; logits come from means.

Every rank reads its own members batch by batch. Rank 0 gathers the columns that it needs.

Legend: M members, B inputs of a batch, N inputs, X rows that are kept, D features, K classes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dicedist.algorithm.counterpart import Features
from dicedist.cluster.control import ALONE, Control
from dicedist.cluster.heartbeat import advance
from dicedist.cluster.placement import REPORTER
from dicedist.console.progress import Stage, silent
from dicedist.data.pipeline import evaluation_batches
from dicedist.data.sources import Source, Split
from dicedist.evaluation.ensemble import Ensemble

BATCH = 500
LOGITS, MEANS, FIELDS = "logits", "means", "fields"  # [B, K], [B, D], and the fused classifier's input
KEPT = ("kept_means", "kept_scales")  # [X, D] of the requested rows
Scores = dict[str, Tensor]  # by name, one value per input, higher for images like the training images
ScoreFeatures = Callable[[Tensor, Tensor], Scores]  # of the logits [M, B, K] and feature means [M, B, D] of a batch
Readings = Mapping[int, Mapping[str, Tensor]]  # by place of the member in the ensemble: columns, on the CPU


@dataclass(frozen=True)
class Collected:
    """All members' readings of a split, on rank 0, with the features of some rows."""

    logits_MNK: Tensor
    feature_scores: Scores  # of every input
    features: Features  # of the requested rows
    fused_NK: Tensor | None = None  # the logits of a fused classifier
    labels_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # of a split


@dataclass
class Reader:
    """Reads all members. All ranks create a reader and call its methods together; only rank 0 gets the results.

    An ensemble whose members are all in this process needs only the data.
    """

    ensemble: Ensemble  # the members that this rank reads, on rank 0 with the heads of the whole ensemble
    source: Source
    control: Control = ALONE
    hosts: Sequence[int] | None = None  # the rank that reads each member; None: this rank reads all
    stage: Stage = silent  # shows the progress of reading a split

    def __post_init__(self) -> None:
        self.about = self.ensemble.about
        self.source = replace(self.source, mean=tuple(self.about.mean), std=tuple(self.about.std))

    @torch.inference_mode()
    def read(self, split: Split, noun: str, columns: Sequence[str], keep_X: Tensor | None = None) -> Iterator[Readings]:
        """Run every member of this rank on one batch after another, in evaluation mode and uncompiled.

        A rank without members yields as many empty batches. keep_X: the rows of the KEPT columns, ascending.
        """
        assert keep_X is None or bool((keep_X.diff() > 0).all()), "batches are read in order"
        ensemble, progress, done = self.ensemble, self.stage(len(split), noun), 0
        if not ensemble.held:
            yield from ({} for _ in range(0, len(split), BATCH))
            return
        split = self.source.seen(split)
        progress.begin()
        with in_evaluation_mode(ensemble), torch.compiler.set_stance("force_eager"):
            for inputs, labels_B in evaluation_batches(split, self.source, BATCH, ensemble.device):
                end = done + len(labels_B)
                kept_X = torch.arange(0) if keep_X is None else keep_X[(done <= keep_X) & (keep_X < end)] - done
                yield read_batch(ensemble, inputs, columns, kept_X)
                done = end
                advance()
                progress.show(done, progress.rate(done))
        progress.clear()

    def collect(
        self,
        split: Split,
        noun: str,
        columns: Sequence[str],
        score_features: ScoreFeatures | None = None,
        keep_X: Tensor | None = None,
    ) -> Collected | None:
        """Read a split and gather it batch by batch, so that its features are never in memory together.

        score_features: called with each batch. keep_X: the rows whose features are kept, ascending.
        """
        wanted = [*columns, *((MEANS,) if score_features else ()), *(KEPT if keep_X is not None else ())]
        found = self.gather(self.read(split, noun, wanted, keep_X), wanted, score_features)
        return None if found is None else replace(found, labels_N=split.labels_N)

    def gather(
        self, batches: Iterable[Readings], columns: Sequence[str], score_features: ScoreFeatures | None = None
    ) -> Collected | None:
        """Gather the readings of all ranks for the same inputs. All ranks call this."""
        gathered = (self.gather_batch(own, columns, score_features) for own in batches)
        found = [batch for batch in gathered if batch is not None]
        return joined(found) if found else None

    @torch.no_grad()
    def gather_batch(
        self, own: Readings, columns: Sequence[str], score_features: ScoreFeatures | None
    ) -> Collected | None:
        hosts = [REPORTER] * len(self.about.members) if self.hosts is None else self.hosts
        found: dict[str, list[Tensor]] = {}
        for name in columns:
            received = self.control.collect({place: read[name] for place, read in own.items()}, hosts)
            found |= {} if received is None else {name: received}
        if not self.control.reports:
            return None
        nothing = [torch.empty(1, 0)] * len(hosts)
        logits_MBK, means_MXD, scales_MXD = (stacked(found.get(name, nothing)) for name in (LOGITS, *KEPT))
        fused_BK = None
        if FIELDS in found and self.ensemble.fusion is not None:
            fields = [own_BX.to(self.ensemble.device) for own_BX in found[FIELDS]]
            fused_BK = self.ensemble.fusion(fields).float().cpu()
        scores = {} if score_features is None else score_features(logits_MBK, stacked(found[MEANS]))
        return Collected(logits_MBK, scores, Features(means_MXD, scales_MXD), fused_BK)

    def features(self, split: Split, noun: str) -> Features | None:
        """Return the features of all inputs of a split on rank 0, which must have room for them."""
        found = self.collect(split, noun, (), keep_X=torch.arange(len(split)))
        return None if found is None else found.features


def read_batch(ensemble: Ensemble, inputs: Tensor, columns: Sequence[str], kept_X: Tensor) -> Readings:
    """Run the members of this rank on a batch."""
    means, fields = ensemble.encode(inputs)
    found = {LOGITS: ensemble.classify(means), MEANS: means, FIELDS: fields}
    found |= dict(zip(KEPT, (means, ensemble.scales(means)), strict=True))

    def column(name: str, nth: int) -> Tensor:
        own = found[name][nth].float().cpu()
        return own[kept_X] if name in KEPT else own

    return {place: {name: column(name, nth) for name in columns} for nth, place in enumerate(ensemble.held)}


@contextlib.contextmanager
def in_evaluation_mode(ensemble: Ensemble) -> Iterator[None]:
    """Switch to evaluation mode; afterwards every module, frozen batch norms included, gets its old mode back."""
    modes = {module: module.training for module in ensemble.modules()}
    ensemble.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return [M, B, D], narrower rows padded with zeros."""
    widest = max(row.shape[1] for row in rows)
    return torch.stack([pad(row, (0, widest - row.shape[1])) for row in rows])


def joined(batches: Sequence[Collected]) -> Collected:
    """Join batches of a split, or several splits."""
    fused = [batch.fused_NK for batch in batches if batch.fused_NK is not None]
    features = [batch.features for batch in batches]
    return Collected(
        torch.cat([batch.logits_MNK for batch in batches], 1),
        {name: torch.cat([batch.feature_scores[name] for batch in batches]) for name in batches[0].feature_scores},
        Features(torch.cat([own.means_MBD for own in features], 1), torch.cat([own.scales_MBD for own in features], 1)),
        torch.cat(fused) if fused else None,
    )
