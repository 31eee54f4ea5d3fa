"""Laplace's approximation by Kronecker factors (Ritter et al., 2018), as in Ashukha et al., 2020, with one correction.

After training, one pass over the training set: for each convolution and dense layer, with a column for its bias,
X = sum over inputs and positions of a a^T, and G = sum of g g^T, g the gradient of each input's own cross-entropy (the
empirical Fisher). Damped by e = N weight_decay positions: X' = X + sqrt(e pi) I, G' = G + sqrt(e / pi) I with
pi = (tr X / dim X) / (tr G / dim G). A sample is

    W + scale sqrt(positions) A Z B^T,   A A^T = G'^-1, B B^T = X'^-1.

With Cholesky factors G' = L L^T this needs A = L^-T. The reference uses L^-1, which has other directions, so its tuned
scales do not apply here. scale=auto chooses the scale with the highest held-out likelihood. Batch norms stay at the
mode.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.member import Member
from dicedist.algorithm.schedules import Knots
from dicedist.algorithm.trajectories import Collector, Kind, Labeled, Surroundings, TrainingSet

GRID = torch.logspace(-2, 1, 25).tolist()


class Trajectory(Kind):
    def __init__(self, samples: int, learning_rate: Knots, scale: float | str = "auto"):
        super().__init__(samples, learning_rate)
        if scale != "auto" and not (isinstance(scale, int | float) and scale >= 0):
            raise ValueError(f"trajectory.scale={scale}: write auto or a number from 0")
        self.scale = scale
        self.tunes = scale == "auto"

    def collector(self, member: Member, surroundings: Surroundings) -> Collector:
        return Laplace(self.scale, surroundings)


@dataclass
class Factors:
    """The Kronecker factors of one layer, in double precision."""

    inputs: Tensor  # X
    outputs: Tensor  # G
    positions: int

    @classmethod
    def none(cls, inputs: int, outputs: int, positions: int, device: torch.device) -> Self:
        sides = (torch.zeros(side, side, dtype=torch.float64, device=device) for side in (inputs, outputs))
        return cls(next(sides), next(sides), positions)

    def root(self, decay: float) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        damping = decay * self.positions
        ratio = (self.inputs.trace() / len(self.inputs)) / (self.outputs.trace() / len(self.outputs))
        return (
            inverse_root(self.outputs, math.sqrt(damping / float(ratio))),
            inverse_root(self.inputs, math.sqrt(damping * float(ratio))),
        )


def inverse_root(matrix: Tensor, damping: float) -> Tensor:
    """Return R with R R^T = (matrix + damping I)^-1."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    lower = torch.linalg.cholesky(matrix + damping * identity)
    return torch.linalg.solve_triangular(lower, identity, upper=False).T


class Laplace(Collector):
    """A collector without state: one pass after the last step computes everything."""

    def __init__(self, scale: float | str, surroundings: Surroundings):
        super().__init__()
        self.scale, self.decay = scale, surroundings.num_images * surroundings.weight_decay

    def samples(self, member: Member, draws: Sequence[torch.Generator], data: TrainingSet) -> list[Member]:
        steps = self.directions(kronecker_factors(member, data.plain), draws)
        scale = best_scale(member, steps, data.held_out) if isinstance(self.scale, str) else self.scale
        return [moved(member, step, scale) for step in steps]

    def directions(self, factors: dict[str, Factors], draws: Sequence[torch.Generator]) -> list[dict[str, Tensor]]:
        """Return for each draw and layer the change of its weights [outputs, inputs] at scale 1."""
        roots = {path: (*found.root(self.decay), found.positions) for path, found in factors.items()}
        return [
            {
                path: math.sqrt(positions) * left @ noise(left, right, one) @ right.T
                for path, (left, right, positions) in roots.items()
            }
            for one in draws
        ]


def noise(left: Tensor, right: Tensor, draws: torch.Generator) -> Tensor:
    return torch.randn(len(left), len(right), generator=draws, dtype=torch.float64).to(left.device)


@torch.no_grad()
def moved(member: Member, step: dict[str, Tensor], scale: float) -> Member:
    sample = copy.deepcopy(member)
    for path, move in step.items():
        layer = sample.get_submodule(path)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        move = (scale * move).to(layer.weight.dtype)
        if layer.bias is not None:
            layer.bias += move[:, -1]
            move = move[:, :-1]
        layer.weight += move.view(layer.weight.shape)
    return sample


@torch.no_grad()
def best_scale(member: Member, steps: Sequence[dict[str, Tensor]], held_out: Labeled) -> float:
    return max(GRID, key=lambda scale: held_out_likelihood([moved(member, step, scale) for step in steps], held_out))


def held_out_likelihood(samples: Sequence[Member], held_out: Labeled) -> float:
    total = 0.0
    for images, labels_B in held_out():
        p_BK = torch.stack([sample.eval()(images).softmax(1) for sample in samples]).mean(0)
        total += float(p_BK.gather(1, labels_B[:, None]).double().clamp_min(1e-300).log().sum())
    return total


def kronecker_factors(member: Member, batches: Labeled) -> dict[str, Factors]:
    """Sum the factors over all inputs in evaluation mode; the order of the inputs does not matter."""
    network = copy.deepcopy(member).requires_grad_(True).eval()
    found: dict[str, Factors] = {}
    hooks = [
        module.register_forward_hook(summing(found, path))
        for path, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    for images, labels_B in batches():
        F.cross_entropy(network(images), labels_B, reduction="sum").backward()
        network.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return found


def summing(found: dict[str, Factors], path: str) -> Callable[[Any, tuple[Tensor, ...], Tensor], None]:
    """Return a forward hook that adds the inputs' products at once, and the gradients' products during backward."""

    def hook(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows_XI = patches(layer, inputs[0].detach())
        if layer.bias is not None:
            rows_XI = torch.cat([rows_XI, rows_XI.new_ones(len(rows_XI), 1)], 1)
        positions = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        own = found.setdefault(path, Factors.none(rows_XI.shape[1], output.shape[1], positions, output.device))
        own.inputs += (rows_XI.T @ rows_XI).double()

        def add(gradient: Tensor) -> None:
            rows_XO = gradient.flatten(2).transpose(1, 2).flatten(0, 1) if gradient.dim() == 4 else gradient
            own.outputs += (rows_XO.T @ rows_XO).double()

        output.register_hook(add)

    return hook


def patches(layer: nn.Conv2d | nn.Linear, inputs: Tensor) -> Tensor:
    """Return one row for each input and position: the values that a row of weights multiplies."""
    if isinstance(layer, nn.Linear):
        return inputs
    if layer.groups != 1 or not isinstance(layer.padding, tuple):
        raise ValueError("kfac_laplace supports plain convolutions only: name another network")
    columns_BIX = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return columns_BIX.transpose(1, 2).flatten(0, 1)
