"""What the members hosted here say of a split of the data, from the means of their features.

Legend: N inputs, D features, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dicedist.algorithm.parts import Hosted
from dicedist.data.pipeline import evaluation_batches
from dicedist.data.sources import Source, Split


@dataclass
class Readings:
    """Of one member, on the CPU; a deterministic member has no scales."""

    logits_NK: Tensor
    means_ND: Tensor
    scales_ND: Tensor


@torch.inference_mode()
def read(hosted: Hosted, split: Split, source: Source, batch_size: int, device: torch.device) -> dict[int, Readings]:
    """Every hosted member over the whole split, batch norm in evaluation mode; compiled stages run as plain code."""
    rows: Mapping[int, list[tuple[Tensor, Tensor, Tensor]]] = {member: [] for member in hosted.members}
    for part in hosted.learners:
        part.module.eval()
    batches = evaluation_batches(split, source, batch_size, device) if hosted.members else []
    with torch.compiler.set_stance("force_eager"):
        for images_BCHW, _ in batches:
            inputs = images_BCHW if hosted.trunk is None else hosted.trunk.module(images_BCHW)
            for index, chunks in rows.items():
                member = hosted.member(index)
                mean_BD = member.encoder(inputs)
                scale_BD = torch.ones_like(mean_BD) if member.bottleneck is None else member.bottleneck(mean_BD)
                chunks.append((member.classifier(mean_BD), mean_BD, scale_BD))
    for part in hosted.learners:
        part.module.train()
    return {
        index: Readings(*(torch.cat(column).float().cpu() for column in zip(*chunks, strict=True)))
        for index, chunks in rows.items()
    }
