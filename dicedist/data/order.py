"""The order of the training inputs: a function of (seed, epoch), equal on every rank.

Legend: N inputs of the split, B inputs of the batch.
"""

import torch
from torch import Tensor

from dicedist.algorithm.randomness import generator, seed_for

ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64


def epoch_order(seed: int, epoch: int, num_inputs: int) -> Tensor:
    """Return a permutation of the inputs, int64 [N]."""
    return torch.randperm(num_inputs, generator=generator("cpu", seed, "order", epoch))


def balanced_order(seed: int, epoch: int, labels_N: Tensor) -> Tensor:
    """Return an order of N inputs in which every class is equally frequent; the inputs of a class take turns."""
    draws = generator("cpu", seed, "order", epoch)
    classes = labels_N.unique()
    each, extra = divmod(len(labels_N), len(classes))
    chosen = []
    for place, label in enumerate(classes[torch.randperm(len(classes), generator=draws)]):
        own = (labels_N == label).nonzero().flatten()
        wanted = each + (place < extra)
        rounds = [own[torch.randperm(len(own), generator=draws)] for _ in range(-(-wanted // len(own)))]
        chosen.append(torch.cat([own[:0], *rounds])[:wanted])
    order_N = torch.cat(chosen)
    return order_N[torch.randperm(len(order_N), generator=draws)]


def num_batches(num_inputs: int, batch_size: int) -> int:
    """Return the number of batches, with the last, smaller one: each input is seen once per epoch."""
    return -(-num_inputs // batch_size)


def checksum(indices_B: Tensor, epoch: int, step_in_epoch: int) -> int:
    """Return 63 bits that change with any input, its place in the batch, the epoch or the step."""
    places_B = (2 * torch.arange(len(indices_B)) + 1) * ODD
    return seed_for(int(((indices_B + 1) * places_B).sum()), "batch", epoch, step_in_epoch)
