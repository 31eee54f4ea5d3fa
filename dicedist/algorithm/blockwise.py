"""The gradients of the training loss of the discriminator w, one block of rows at a time.

Autograd would write every activation of every row to memory and read it back. On a CPU that costs as much as the
arithmetic; a block that stays in the cache avoids it. Tests hold the values equal to autograd's.

Legend: X rows, B inputs, Y and Z rows of summands, H hidden, L last hidden.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SLOPE = 0.2  # of w's leaky ReLU
BLOCK = 8  # rows of B inputs: 1 MB of activations per layer at B = 128
leaky_relu_backward_ = torch.ops.aten.leaky_relu_backward.grad_input


@torch.no_grad()
def blockwise_gradients(
    stays_YBH: Tensor,
    moves_ZBH: Tensor,
    second_BH: Tensor,
    second_HH: Tensor,
    third_LH: Tensor,
    third_L: Tensor,
    last_BL: Tensor,
    last_B: Tensor,
    first_X: Tensor,
    second_X: Tensor,
    targets_X1: Tensor,
    weights_XB: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return w's logits, and the gradients of their weighted binary cross-entropy in the first 8 arguments."""
    inputs = (stays_YBH, moves_ZBH, second_BH, second_HH, third_LH, third_L, last_BL, last_B)
    gradients = tuple(map(torch.zeros_like, inputs))
    d_stays, d_moves, d_second, d_second_HH, d_third_LH, d_third, d_last, d_bias = gradients
    (batch, hidden), last = stays_YBH.shape[1:], len(third_L)
    logits_XB = torch.empty_like(weights_XB)
    # Reused by every block: fresh memory from the system would cost more than the arithmetic done in it.
    spaces = [stays_YBH.new_empty(BLOCK * batch, width) for width in (hidden, hidden, last, last, hidden, hidden)]
    places = list(zip(first_X.tolist(), second_X.tolist(), strict=True))
    for start in range(0, len(places), BLOCK):
        rows = slice(start, start + BLOCK)
        h1, h2, h3, d3, d2, d1 = spaces = [space[: len(places[rows]) * batch] for space in spaces]
        h1_XBH, h2_XBH, h3_XBL, d3_XBL, d2_XBH, d1_XBH = (space.unflatten(0, (-1, batch)) for space in spaces)
        for row, (first, second) in enumerate(places[rows]):
            torch.add(stays_YBH[first], moves_ZBH[second], out=h1_XBH[row])
        F.leaky_relu_(h1, SLOPE)
        torch.mm(h1, second_HH.T, out=h2)
        F.leaky_relu_(h2_XBH.add_(second_BH), SLOPE)
        F.leaky_relu_(torch.addmm(third_L, h2, third_LH.T, out=h3), SLOPE)
        logits_XB[rows] = torch.mul(h3_XBL, last_BL, out=d3_XBL).sum(-1).add_(last_B)
        d_XB = (logits_XB[rows].sigmoid() - targets_X1[rows]).mul_(weights_XB[rows])
        d_bias += d_XB.sum(0)
        d_last += torch.mul(h3_XBL, d_XB[..., None], out=d3_XBL).sum(0)
        torch.mul(d_XB[..., None], last_BL, out=d3_XBL)
        leaky_relu_backward_(d3, h3, SLOPE, True, grad_input=d3)
        d_third += d3.sum(0)
        d_third_LH.addmm_(d3.T, h2)
        torch.mm(d3, third_LH, out=d2)
        leaky_relu_backward_(d2, h2, SLOPE, True, grad_input=d2)
        d_second += d2_XBH.sum(0)
        d_second_HH.addmm_(d2.T, h1)
        torch.mm(d2, second_HH, out=d1)
        leaky_relu_backward_(d1, h1, SLOPE, True, grad_input=d1)
        for row, (first, second) in enumerate(places[rows]):
            d_stays[first].add_(d1_XBH[row])
            d_moves[second].add_(d1_XBH[row])
    return logits_XB, gradients
