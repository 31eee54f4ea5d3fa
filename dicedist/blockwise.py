"""The discriminator's learning loss and its gradients, a block of rows at a time.

Autograd would write every activation of every row to memory and read it back. On a CPU that costs as much as the
arithmetic; a block that stays in the cache does not. The values are autograd's, which tests hold them to.

Legend: X rows, B inputs, Y and Z rows of summands, H hidden, L last hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 8  # rows of B inputs: 1 MB of activations a layer at B = 128
leaky_relu_backward_ = torch.ops.aten.leaky_relu_backward.grad_input


class BlockwiseLoss(torch.autograd.Function):
    """Weighted binary cross-entropy of w's logits: (loss, logits). Only the loss can be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
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
        targets_XB: Tensor,
        weights_XB: Tensor,
        slope: float,
    ) -> tuple[Tensor, Tensor]:
        inputs = (stays_YBH, moves_ZBH, second_BH, second_HH, third_LH, third_L, last_BL, last_B)
        d_stays, d_moves, d_second, d_second_HH, d_third_LH, d_third, d_last, d_bias = map(torch.zeros_like, inputs)
        (batch, hidden), last = stays_YBH.shape[1:], len(third_L)
        logits_XB = torch.empty_like(targets_XB)
        for start in range(0, len(first_X), BLOCK):
            rows = slice(start, start + BLOCK)
            first, second = first_X[rows], second_X[rows]
            h1_XBH = F.leaky_relu_(stays_YBH[first].add_(moves_ZBH[second]), slope)
            h1 = h1_XBH.view(-1, hidden)
            h2 = F.leaky_relu_((h1 @ second_HH.T).view_as(h1_XBH).add_(second_BH), slope).view(-1, hidden)
            h3 = F.leaky_relu_(torch.addmm(third_L, h2, third_LH.T), slope)
            h3_XBL = h3.view(-1, batch, last)
            logits_XB[rows] = (h3_XBL * last_BL).sum(-1).add_(last_B)
            d_XB = (logits_XB[rows].sigmoid() - targets_XB[rows]).mul_(weights_XB[rows])
            d_bias += d_XB.sum(0)
            d_last += h3_XBL.mul(d_XB[..., None]).sum(0)
            d3 = (d_XB[..., None] * last_BL).view(-1, last)
            leaky_relu_backward_(d3, h3, slope, True, grad_input=d3)
            d_third += d3.sum(0)
            d_third_LH.addmm_(d3.T, h2)
            d2 = d3 @ third_LH
            leaky_relu_backward_(d2, h2, slope, True, grad_input=d2)
            d_second += d2.view_as(h1_XBH).sum(0)
            d_second_HH.addmm_(d2.T, h1)
            d1 = d2 @ second_HH
            leaky_relu_backward_(d1, h1, slope, True, grad_input=d1)
            d_stays.index_add_(0, first, d1.view_as(h1_XBH))
            d_moves.index_add_(0, second, d1.view_as(h1_XBH))
        ctx.save_for_backward(d_stays, d_moves, d_second, d_second_HH, d_third_LH, d_third, d_last, d_bias)
        ctx.mark_non_differentiable(logits_XB)
        loss = F.binary_cross_entropy_with_logits(logits_XB, targets_XB, weights_XB, reduction="sum")
        return loss, logits_XB

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*(d_loss * gradient for gradient in ctx.saved_tensors), None, None, None, None, None)
