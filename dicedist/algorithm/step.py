"""One step of Algorithm 1, over the parts that this rank hosts.

    members     encode ──┐                    ┌── backward, SGD step ── encode the next batch ...
                       gather              scatter
    w                    └── gradients of w ──┘── learn: num_steps steps, class memory ...

A part is a member, a module that members share (a trunk, a gate), or the counterpart. The counterpart reads all members
at once. In DICE it is the discriminator, w in the paper; in ffl it is a fusion. This file calls every counterpart w.
Methods that work on predictions have no counterpart: the gather then brings each member the predictions of its peers.

w first returns gradients, computed with its weights from the previous step, and learns afterwards (the paper's order).
On its own rank, w learns while the members run backward and the next forward. On a GPU with members, w learns on a
second stream while the members run backward. On a CPU with members, w learns before the members run backward.

dicedist.algorithm.build.build_step builds the step of a rank; the trainer calls it once per batch on every rank. In a
single process all parts are hosted here, and gather and scatter only hand tensors over.

fields      the tensors that a member sends: means, scales, logits ...
answers     the tensors that w sends back: gradients of the redundancy loss in the means of each member
view        everything that the terms of the loss see of one member
now         the values of all schedules at this step: learning rate, log(beta), ramp-up ...
values      named scalars for the records
replica     one of several ranks that train the same member, each on its share of the batch

Legend: M members, B inputs, D features, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dicedist.algorithm.batch import Batch, StepKey
from dicedist.algorithm.counterpart import Read
from dicedist.algorithm.encoders import Encoders
from dicedist.algorithm.member import Encoding
from dicedist.algorithm.messages import Answers, Carrier, Fields, Gathered, Values, times
from dicedist.algorithm.objectives import Method, View
from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.schedules import Schedules, ScheduleValues
from dicedist.algorithm.spans import span
from dicedist.algorithm.streams import SideStream
from dicedist.algorithm.targets import Loss, Targets


@dataclass(frozen=True)
class Outcome:
    """The results of a step, which stay on the device."""

    values: Values
    out_of_step_M: Tensor  # 1 for each member whose batch differed from this rank's; the recorder then ends the run


class Step:
    """The step of one rank. It knows neither rank numbers nor methods: a part of another rank is None or absent."""

    def __init__(
        self,
        method: Method,
        hosted: Hosted,
        exchange: Carrier,
        encoders: Encoders,
        schedules: Schedules,
        loss: Loss,
    ):
        self.method, self.hosted, self.exchange = method, hosted, exchange
        self.encoders, self.schedules, self.loss = encoders, schedules, loss
        self.device = exchange.device
        self.one = torch.ones((), device=self.device)  # the gradient of a loss with respect to itself
        self.side = SideStream(self.device, overlaps=hosted.w is not None and bool(hosted.members))

    def __call__(self, batch: Batch) -> Outcome:
        """Run one step. All ranks call together and meet in gather and scatter; ranks with members also in `descend`.

        A rank without members has no views. A rank without the counterpart reads nothing and answers None.
        """
        now = self.schedules.at_step(*batch.key)
        batch, targets = self.loss.prepare(batch)
        views = self.views(self.encoders.encode(batch), targets)
        fields = {view.index: self.method.fields(view) for view in views}
        gathered = self.exchange.gather(fields, batch.size, self.mark(batch))
        read = self.read(gathered)
        answers, values = self.answer(read, targets, now, batch.key)
        self.receive(views, fields, gathered, self.exchange.scatter(answers, batch.size))
        with self.side.running():
            values |= self.learn(read, targets, now, batch.key)
        values |= self.descend(views, batch.fraction, now)
        self.side.join()
        return Outcome(values, gathered.out_of_step_M)

    def views(self, encodings: Mapping[int, Encoding], targets: Targets) -> list[View]:
        """Return the view of each member hosted here, before anything is gathered."""
        size, shared = self.exchange.num_members, self.hosted.shared_modules
        return [View(i, size, self.hosted.member(i), own, targets, shared) for i, own in encodings.items()]

    def receive(
        self,
        views: Sequence[View],
        fields: Mapping[int, Fields],
        gathered: Gathered,
        answers: Mapping[int, Answers],
    ) -> None:
        """Complete the views: peers' fields are detached, a member's own fields keep their graph."""
        for view in views:
            view.fields = gathered.fields | {view.index: fields[view.index]}
            view.answers = answers.get(view.index, Answers())

    def mark(self, batch: Batch) -> Tensor:
        """Return the checksum that is sent with the fields: pairs are only valid if all members see the same batch."""
        checksum = torch.tensor([batch.checksum])
        return checksum.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else checksum

    def read(self, gathered: Gathered) -> Read | None:
        """Stack the fields that w reads, of all members but a student; None on ranks without w."""
        if self.hosted.w is None:
            return None
        return {name: gathered.stacked(name, self.exchange.compared) for name in self.exchange.features}

    @span("redundancy")
    def answer(
        self, read: Read | None, targets: Targets, now: ScheduleValues, key: StepKey
    ) -> tuple[Answers | None, Values]:
        """Compute the answers of w with its weights from the previous step; None on ranks without w."""
        # w, its optimizer (in the part `discriminator`) and the fields that it reads are on the same rank. One test
        # would do, here and in `learn`; the others are for the type checker.
        if self.hosted.w is None or read is None:
            return None, {}
        with self.hosted.precision.for_discriminator():
            return self.hosted.w.answers(read, targets, now, key)

    @span("learn")
    def learn(self, read: Read | None, targets: Targets, now: ScheduleValues, key: StepKey) -> Values:
        """Train w on the same fields; do nothing on ranks without w."""
        if self.hosted.w is None or self.hosted.discriminator is None or read is None:
            return {}
        with self.hosted.precision.for_discriminator():
            values = self.hosted.w.study(self.hosted.discriminator.optimizer, read, targets, now, key)
        self.hosted.discriminator.follow()
        return values

    @span("backward")
    def descend(self, views: Sequence[View], fraction: float, now: ScheduleValues) -> Values:
        """Run backward and update every part but the counterpart.

        Backward starts from each member's loss, with gradient 1, and from the fields that w answered (the means), with
        the gradients of w. The gradient of a member is averaged over its replicas, so `replicas * fraction` weights
        each replica by the share of the batch that it saw. The gradients of w are already of a mean over the whole
        batch.
        """
        if not views:
            return {}
        values: Values = {}
        heads: list[Tensor] = []
        initial_gradients: list[Tensor] = []
        scale, replicas = self.hosted.precision.scaler.scale, self.exchange.replicas
        for view in views:
            losses = self.method.losses(view, now)
            loss = reduce(torch.add, losses.values())
            heads.append(scale(times(replicas * fraction, loss)))
            initial_gradients.append(self.one)
            for name, gradient in view.answers.gradients.items():
                heads.append(view.fields[view.index][name])
                initial_gradients.append(scale(times(replicas, gradient)))
            right_B = view.own.logits_BK.argmax(1) == view.labels_B
            accuracy = right_B.mean(dtype=torch.float32)
            values |= view.as_records({"loss": loss.detach(), **losses, "accuracy": accuracy})
        parts = [(view, self.hosted.members[view.index]) for view in views]
        for view, part in parts:
            values |= view.as_records(part.before_backward(view.fields, now))
        torch.autograd.backward(heads, initial_gradients)
        # Summed before unscaling: ranks that share parameters never use fp16 (checks.check_members).
        self.exchange.sum_gradients(self.hosted.common_parameters)
        values |= self.hosted.update(now)
        for view, part in parts:
            values |= view.as_records(part.after_update(view.fields, now))
        return values
