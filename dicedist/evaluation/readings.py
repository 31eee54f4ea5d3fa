"""Logits and features of the members hosted on this rank for a split of the data; logits come from feature means.

Legend: B inputs of a batch, N inputs, D features, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dicedist.algorithm.parts import Hosted
from dicedist.cluster.heartbeat import advance
from dicedist.console.progress import SILENT, SilentProgress
from dicedist.data.pipeline import evaluation_batches
from dicedist.data.sources import Source, Split
from dicedist.evaluation.fusing import Fusing


@dataclass
class Readings:
    """The outputs of one member, on the CPU; the scales of a deterministic member are 1."""

    logits_NK: Tensor
    means_ND: Tensor
    scales_ND: Tensor

    def with_features_of(self, rows_X: Tensor | slice) -> "Readings":
        return replace(self, means_ND=self.means_ND[rows_X], scales_ND=self.scales_ND[rows_X])

    @classmethod
    def joined(cls, batches: Sequence["Readings"]) -> "Readings":
        columns = ("logits_NK", "means_ND", "scales_ND")
        return cls(*(torch.cat([getattr(batch, column) for batch in batches]) for column in columns))


def read(
    hosted: Hosted,
    split: Split,
    source: Source,
    batch_size: int,
    device: torch.device,
    progress: SilentProgress = SILENT,
    rows_N: Tensor | None = None,
) -> dict[int, Readings]:
    """What every hosted member makes of the whole split. rows_N: whose features are kept; None: those of all."""
    batches: list[dict[int, Readings]] = []
    for nth, found in enumerate(read_batches(hosted, split, source, batch_size, device, progress)):
        kept_X = slice(None) if rows_N is None else inside(rows_N, nth * batch_size, batch_size)
        batches.append({member: own.with_features_of(kept_X) for member, own in found.items()})
    return {member: Readings.joined([batch[member] for batch in batches]) for member in hosted.members}


def inside(rows_N: Tensor, start: int, size: int) -> Tensor:
    """Those of the rows that lie in a batch, as places in it."""
    return rows_N[(start <= rows_N) & (rows_N < start + size)] - start


@torch.inference_mode()
def read_batches(
    hosted: Hosted,
    split: Split,
    source: Source,
    batch_size: int,
    device: torch.device,
    progress: SilentProgress = SILENT,
    fusing: Fusing | None = None,
) -> Iterator[dict[int, Readings]]:
    """Runs every hosted member on one batch after another, with batch norm in evaluation mode, nothing compiled.

    A rank that hosts none gets as many empty batches. fusing: is given what the members of this rank make of each
    batch; then all ranks that host members call.
    """
    if not hosted.members:
        yield from ({} for _ in range(0, len(split), batch_size))
        return
    parts = [*hosted.members.values(), *hosted.common]
    for part in parts:
        part.module.eval()
    done = 0
    progress.begin()
    with torch.compiler.set_stance("force_eager"):
        for images_BCHW, _ in evaluation_batches(split, source, batch_size, device):
            inputs = images_BCHW if hosted.trunk is None else hosted.trunk.module(images_BCHW)
            told, found = {}, {}
            for index in hosted.members:
                member = hosted.member(index)
                mean_BD, _, map_BCHW = member.encoder.outputs(inputs)
                told[index] = mean_BD if map_BCHW is None or fusing is None or fusing.reads == "mean" else map_BCHW
                scale_BD = torch.ones_like(mean_BD) if member.bottleneck is None else member.bottleneck(mean_BD)[0]
                columns = (member.classifier(mean_BD), mean_BD, scale_BD)
                found[index] = Readings(*(column.float().cpu() for column in columns))
            if fusing is not None:
                fusing({index: read.flatten(1) for index, read in told.items()}, len(images_BCHW))
            done += len(images_BCHW)
            advance()
            progress.show(done)
            yield found
    for part in parts:
        part.train()
