"""Logits and features of the members hosted on this rank for a split of the data; logits come from feature means.

Legend: N inputs, D features, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    fused_NK: Tensor | None = None  # the logits of a fused classifier, on the reporter


@torch.inference_mode()
def read(
    hosted: Hosted,
    split: Split,
    source: Source,
    batch_size: int,
    device: torch.device,
    progress: SilentProgress = SILENT,
    fusing: Fusing | None = None,
) -> dict[int, Readings]:
    """Runs every hosted member on the whole split, with batch norm in evaluation mode and without compiled code.

    fusing: is given what the members of this rank make of each batch; then all ranks that host members call.
    """
    rows: Mapping[int, list[tuple[Tensor, Tensor, Tensor]]] = {member: [] for member in hosted.members}
    parts = [*hosted.members.values(), *hosted.common]
    for part in parts:
        part.module.eval()
    batches = evaluation_batches(split, source, batch_size, device) if hosted.members else []
    done = 0
    progress.begin()
    with torch.compiler.set_stance("force_eager"):
        for images_BCHW, _ in batches:
            inputs = images_BCHW if hosted.trunk is None else hosted.trunk.module(images_BCHW)
            told = {}
            for index, chunks in rows.items():
                member = hosted.member(index)
                mean_BD, _, map_BCHW = member.encoder.read(inputs)
                told[index] = mean_BD if map_BCHW is None or fusing is None or fusing.reads == "mean" else map_BCHW
                scale_BD = torch.ones_like(mean_BD) if member.bottleneck is None else member.bottleneck(mean_BD)[0]
                chunks.append((member.classifier(mean_BD), mean_BD, scale_BD))
            if fusing is not None:
                fusing({index: read.flatten(1) for index, read in told.items()}, len(images_BCHW))
            done += len(images_BCHW)
            advance()
            progress.show(done)
    for part in parts:
        part.train()
    return {
        index: Readings(*(torch.cat(column).float().cpu() for column in zip(*chunks, strict=True)))
        for index, chunks in rows.items()
    }
