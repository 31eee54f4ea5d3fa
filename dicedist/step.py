"""One step of Algorithm 1, over the parts that this rank hosts.

    members     encode ──┐                    ┌── backward, SGD step ── encode the next batch ...
                       gather              scatter
    w                    └── gradients of w ──┘── learn: 4 RMSProp steps, memory ...

The discriminator answers with the w of the step before and learns afterwards (the paper's order), so on a rank of its
own it learns while the members run backward and the next forward.

Legend: M members, B inputs, D features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dicedist.config import Config
from dicedist.data.pipeline import Batch
from dicedist.discriminator import Features
from dicedist.exchange import Exchange, Gathered
from dicedist.member import Encoding
from dicedist.objectives import Method, View
from dicedist.parts import Hosted
from dicedist.randomness import generator
from dicedist.schedules import Moment

Values = dict[str, Tensor]  # named scalars, on the device until someone logs them
AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step:
    def __init__(
        self,
        config: Config,
        method: Method,
        hosted: Hosted,
        exchange: Exchange,
        steps_per_epoch: int,
    ):
        self.method, self.hosted, self.exchange = method, hosted, exchange
        self.seed, self.steps_per_epoch = config.seed, steps_per_epoch
        self.schedules = config.schedule()
        self.device = exchange.device
        self.precision = AUTOCAST[config.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")

    def __call__(self, batch: Batch) -> Values:
        now = self.schedules.at(batch.epoch + batch.step_in_epoch / self.steps_per_epoch)
        size = len(batch.labels_B)
        encodings = self.encode(batch)
        gathered = self.exchange.gather(self.fields(encodings), size, self.mark(batch))
        features = self.features(gathered)
        gradients_MBD, values = self.redundancy_gradients(features, batch, now)
        mine = self.exchange.scatter(gradients_MBD, size)
        values |= self.descend(encodings, gathered, mine, batch.labels_B, now)
        values |= self.learn(features, batch, now)
        for member, late in enumerate(gathered.out_of_step_M):
            values[f"out_of_step/member_{member}"] = late
        return values

    def encode(self, batch: Batch) -> dict[int, Encoding]:
        """Each member hosted here sees the batch, through the trunk where there is one (run once for all of them)."""
        encodings = {}
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            inputs = batch.views if self.hosted.trunk is None else [self.hosted.trunk.module(v) for v in batch.views]
            for nth, member in enumerate(self.hosted.members):
                noise = generator(self.device, self.seed, "z", batch.epoch, batch.step_in_epoch, member)
                encodings[member] = self.hosted.member(member).encode(inputs[min(nth, len(inputs) - 1)], noise)
        return encodings

    def fields(self, encodings: Mapping[int, Encoding]) -> dict[int, dict[str, Tensor]]:
        names = {*self.exchange.to_discriminator, *self.exchange.to_members}
        return {member: {name: own.field(name) for name in names} for member, own in encodings.items()}

    def mark(self, batch: Batch) -> Tensor:
        checksum = torch.tensor([batch.checksum])
        return checksum.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else checksum

    def features(self, gathered: Gathered) -> Features | None:
        if self.hosted.w is None:
            return None
        width = max(self.exchange.widths["mean"])
        means_MBD = gathered.stacked("mean", width)
        sent = "scale" in self.exchange.to_discriminator
        return Features(means_MBD, gathered.stacked("scale", width) if sent else torch.ones_like(means_MBD))

    def redundancy_gradients(
        self, features: Features | None, batch: Batch, now: Moment
    ) -> tuple[Tensor | None, Values]:
        if self.hosted.w is None or features is None:
            return None, {}
        where = (batch.epoch, batch.step_in_epoch)
        return self.hosted.w.redundancy_gradients(features, batch.labels_B, now, where)

    def learn(self, features: Features | None, batch: Batch, now: Moment) -> Values:
        if self.hosted.w is None or self.hosted.discriminator is None or features is None:
            return {}
        where = (batch.epoch, batch.step_in_epoch)
        return self.hosted.w.learn(self.hosted.discriminator.optimizer, features, batch.labels_B, now, where)

    def descend(
        self,
        encodings: Mapping[int, Encoding],
        gathered: Gathered,
        redundancy_gradients: Mapping[int, Tensor],
        labels_B: Tensor,
        now: Moment,
    ) -> Values:
        """Backward from every member's (loss, mean) with (1, redundancy gradient), then a step of everything hosted."""
        values: Values = {}
        heads: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for member, own in encodings.items():
            view = View(member, self.hosted.member(member), own, labels_B, self.peers(member, own, gathered))
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                losses = self.method.losses(view, now)
            loss = torch.stack(list(losses.values())).sum()
            heads.append(self.scaler.scale(loss))
            seeds.append(None)
            if member in redundancy_gradients:
                heads.append(own.mean_BD)
                seeds.append(self.scaler.scale(redundancy_gradients[member]))
            named = {"loss": loss, **losses, "accuracy": (own.logits_BK.argmax(1) == labels_B).float().mean()}
            values |= {f"member_{member}/{name}": value.detach() for name, value in named.items()}
        if heads:
            torch.autograd.backward(heads, seeds)
            self.update(now)
        return values

    def peers(self, member: int, own: Encoding, gathered: Gathered) -> dict[str, list[Tensor]]:
        everyone = range(self.exchange.placement.num_members)
        return {
            name: [own.field(name) if peer == member else gathered.fields[peer][name] for peer in everyone]
            for name in self.method.sends
        }

    def update(self, now: Moment) -> None:
        if self.hosted.trunk is not None:
            self.exchange.sum_gradients(list(self.hosted.trunk.module.parameters()))
        for part in self.hosted.learners:
            for group in part.optimizer.param_groups:
                group["lr"] = now.learning_rate
            self.scaler.step(part.optimizer)
            part.optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
