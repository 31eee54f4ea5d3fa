"""The redundancy loss for your own training loop, with the trainer's discriminator: Steps 2 and 3 of Algorithm 1.

Legend: M members, B inputs, D features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.losses import refuse_labels
from dicedist.algorithm.member import to_float32
from dicedist.algorithm.randomness import initializing
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.checks import check_limits, check_noise
from dicedist.config.schema import RedundancyConfig

Stacked = Tensor | Sequence[Tensor]  # [M, B, D], or M tensors [B, D]


@dataclass(frozen=True)
class Lesson:
    """The batch that the discriminator has yet to learn from."""

    features: Features
    labels_B: Tensor
    now: ScheduleValues
    where: tuple[int, int]


class ConditionalRedundancy(nn.Module):
    """A loss that reduces the conditional redundancy of members' features: what they share beyond the class.

        redundancy = ConditionalRedundancy(num_members=4, feature_dim=64, num_classes=100, delta=0.2)
        loss = cross_entropies + redundancy(means, scales, labels)
        loss.backward(); optimizer.step()
        redundancy.learn()

    The module holds the discriminator, its optimizer and its class memory. `learn` leaves no gradients behind, so the
    members' optimizer cannot change the discriminator, even if it holds the discriminator's parameters. `state_dict`
    contains everything, so a stopped loop resumes exactly.

    - `learn` trains on the batch of the last call. Call `learn` after each batch, also when you accumulate gradients
      over several batches. Repeated calls before one `learn` draw the same noise, unless `where` differs.
    - Under `torch.no_grad` or `torch.inference_mode` a call only reads: it returns the value, and changes neither the
      batch to learn from nor the discriminator.
    - The discriminator computes in float32, also inside autocast. In fp16 its gradients were 16 % off.

    The settings are the config keys `redundancy.*`, with the paper's values for CIFAR-100. delta is the weight of the
    loss. The paper uses 0.1 for CIFAR-10 and for two members on CIFAR-100, and 0.15, 0.2, 0.22 and 0.25 for three to
    six members on CIFAR-100. `dicedist train` uses 0.1 for other data. conditional=False draws partners from any class.

    Examples:
        >>> redundancy = ConditionalRedundancy(num_members=2, feature_dim=8, num_classes=3, delta=0.1)
        >>> means, labels = torch.randn(2, 12, 8, requires_grad=True), torch.arange(12) % 3
        >>> redundancy(means, torch.ones(2, 12, 8), labels).backward()
        >>> means.grad.shape
        torch.Size([2, 12, 8])
        >>> sorted(redundancy.learn())[:2]
        ['discriminator/accuracy', 'discriminator/loss']
    """

    def __init__(
        self,
        num_members: int,
        feature_dim: int,
        num_classes: int,
        delta: float = 0.1,
        *,
        conditional: bool = True,
        tau: float = 10.0,
        num_samples: int = 4,
        num_steps: int = 4,
        negatives: int = 4,
        max_pairs: int | None = None,
        memory: int = 4,
        lr: float = 0.005,
        scale: float | str = "predicted",
        floor: float = 0.0,
        terms: str = "lhs",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, minimum in (
            ("num_members", num_members, 2), ("feature_dim", feature_dim, 1), ("num_classes", num_classes, 1),
        ):  # fmt: skip
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}={value}: write a whole number from {minimum}")
        if not math.isfinite(delta):
            raise ValueError(f"delta={delta}: write a number")
        settings = RedundancyConfig(
            delta=delta, delta_by_size=[], tau=tau, num_samples=num_samples, num_steps=num_steps, negatives=negatives,
            max_pairs=max_pairs, memory=memory, lr=lr, scale=scale, terms=terms, floor=floor,
        )  # fmt: skip
        check_limits(settings)
        check_noise(settings)
        with initializing(seed, "discriminator"):
            self.discriminator = Discriminator(settings, num_members, feature_dim, num_classes, conditional, seed)
        self.discriminator.requires_grad_(True)
        self.optimizer = self.discriminator.build_optimizer()
        self.num_classes = num_classes
        self.steps = 0  # of `learn`, the key of random draws
        self.lesson: Lesson | None = None
        self.values: dict[str, Tensor] = {}  # of the last step, by the names that records have

    def forward(
        self,
        means: Stacked,
        scales: Stacked | None,
        labels: Tensor,
        ramp_up: float = 1.0,
        covariance: float = 1.0,
        where: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return delta ramp_up / (M - 1) times the redundancy summed over pairs, differentiable in the means.

        scales: None for deterministic members; they get no gradient. covariance: 0 adds noise of variance 1 to the
        features, 1 adds noise of the given scales, values between blend both. where: the key of the random draws, by
        default (0, number of `learn` calls so far).
        """
        if not torch.is_grad_enabled():
            return self.read(means, scales, labels, ramp_up, covariance, where)
        gradients_MBD = self.gradients(means, scales, labels, ramp_up, covariance, where)
        loss = WithGradient.apply(self.stacked("means", means), self.loss, gradients_MBD)
        assert isinstance(loss, Tensor)
        return loss

    @property
    def loss(self) -> Tensor:
        """Return the value of the last call, before `learn`."""
        assert self.lesson is not None
        return self.discriminator.weight(self.lesson.now) * self.values["redundancy"]

    def read(
        self,
        means: Stacked,
        scales: Stacked | None,
        labels: Tensor,
        ramp_up: float = 1.0,
        covariance: float = 1.0,
        where: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the value only; `learn` ignores this batch. A call under `torch.no_grad` does this."""
        # Leave inference mode: the discriminator caches tables of pairs, which autograd must be able to read later.
        with torch.inference_mode(False), torch.no_grad(), self.in_float32():
            lesson = self.lesson_of(means, scales, labels, ramp_up, covariance, where)
            estimate = self.discriminator.estimate(lesson.features, labels, lesson.now, lesson.where)
            return self.discriminator.weight(lesson.now) * estimate

    def gradients(
        self,
        means: Stacked,
        scales: Stacked | None,
        labels: Tensor,
        ramp_up: float = 1.0,
        covariance: float = 1.0,
        where: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return d(loss)/d(means) [M, B, D], to send to members on other ranks; arguments as in `forward`."""
        with torch.enable_grad(), self.in_float32():
            self.lesson = lesson = self.lesson_of(means, scales, labels, ramp_up, covariance, where)
            gradients_MBD, self.values = self.discriminator.redundancy_gradients(
                lesson.features, labels, lesson.now, lesson.where
            )
        return gradients_MBD

    def lesson_of(
        self,
        means: Stacked,
        scales: Stacked | None,
        labels: Tensor,
        ramp_up: float,
        covariance: float,
        where: tuple[int, int] | None,
    ) -> Lesson:
        means_MBD = to_float32(self.stacked("means", means).detach())
        scales_MBD = (
            torch.ones_like(means_MBD) if scales is None else to_float32(self.stacked("scales", scales).detach())
        )
        self.refuse_unfit(means_MBD, scales_MBD, labels)
        now = ScheduleValues(learning_rate=0.0, log_beta=0.0, ramp_up=ramp_up, covariance=covariance)
        return Lesson(Features(means_MBD, scales_MBD), labels, now, where or (0, self.steps))

    def learn(self) -> dict[str, Tensor]:
        """Train the discriminator on the batch of the last call, then add the batch to the class memory.

        Return named values: redundancy in nats, loss and accuracy of the discriminator.
        """
        if self.lesson is None:
            raise ValueError("there is no batch to learn from: call the object with means, scales and labels first")
        lesson, self.lesson = self.lesson, None
        with torch.enable_grad(), self.in_float32():
            self.values |= self.discriminator.learn(
                self.optimizer, lesson.features, lesson.labels_B, lesson.now, lesson.where
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return self.values

    @torch.no_grad()
    def independence(self, means: Stacked, labels: Tensor) -> Tensor:
        """Return [B], the mean over pairs of 1 - w: low for redundant features. Times logits, it is an OOD score."""
        means_MBD = to_float32(self.stacked("means", means))
        with self.in_float32():
            return self.discriminator.network.independence(means_MBD, labels, self.discriminator.pairs_P2)

    def in_float32(self) -> torch.autocast:
        """Return a context without autocast: log f may leave the range of fp16, and its gradients do."""
        return torch.autocast(self.discriminator.pairs_P2.device.type, enabled=False)

    def stacked(self, name: str, values: Stacked) -> Tensor:
        try:
            rows_MBD = values if isinstance(values, Tensor) else torch.stack(list(values))
        except RuntimeError as error:
            raise ValueError(f"{name} differ in shape: give one [B, D] for each member") from error
        M, D = self.discriminator.num_members, self.discriminator.network.slots_MDH.shape[1]
        if rows_MBD.ndim != 3 or (len(rows_MBD), rows_MBD.shape[2]) != (M, D) or not rows_MBD.shape[1]:
            raise ValueError(f"{name} have shape {list(rows_MBD.shape)}: give [{M}, inputs, {D}]")
        if not rows_MBD.is_floating_point():
            raise ValueError(f"{name} are {rows_MBD.dtype}: give floats")
        return rows_MBD

    def refuse_unfit(self, means_MBD: Tensor, scales_MBD: Tensor, labels_B: Tensor) -> None:
        if scales_MBD.shape != means_MBD.shape:
            raise ValueError(f"scales have shape {list(scales_MBD.shape)}, and means {list(means_MBD.shape)}")
        refuse_labels(labels_B, means_MBD.shape[1], self.num_classes)
        kind = self.discriminator.network.first_bias.dtype
        if kind in (torch.float16, torch.bfloat16):
            raise ValueError(f"the discriminator is {kind}: keep it in float32, and use autocast for the members")

    def get_extra_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


class WithGradient(torch.autograd.Function):
    """A value with a precomputed gradient with respect to `inputs`."""

    @staticmethod
    def forward(context: FunctionCtx, inputs: Tensor, value: Tensor, gradients: Tensor) -> Tensor:
        context.save_for_backward(gradients)
        return value.clone()

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = context.saved_tensors
        return upstream * gradients, None, None
