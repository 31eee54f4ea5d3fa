"""One step of Algorithm 1, over the parts that this rank hosts.

    members     encode ──┐                    ┌── backward, SGD step ── encode the next batch ...
                       gather              scatter
    w                    └── gradients of w ──┘── learn: num_steps steps, class memory ...

The discriminator w first returns gradients, computed with its weights from the previous step, and learns afterwards
(the paper's order). On a rank of its own it learns while the members run backward and the next forward; on a GPU with
members, on a second stream while they run backward; on a CPU with members, before that. Methods that work on
predictions have no w: the gather brings each member the predictions of its peers. What stands here for w is any
counterpart of all members, a fusion for example. A companion of one member learns after it, inside `descend`.

dicedist.cluster.assembly builds the step of a rank, and the trainer calls it once per batch on every rank. In a single
process all parts are hosted here, and gather and scatter only hand tensors over.

Words: fields are what a member sends (means, scales, logits ...); answers are what w sends back, gradients of those
fields; a View is what the terms of the loss see of one member; `now` holds the values of all schedules at this step;
`values` are named scalars for the records; a replica is one of several ranks that train the same member, each on its
share of the batch. What a method may ask of the step (asks_average, differentiates_pixels ...) stands in objectives.

Legend: M members, B inputs, D features, K classes.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dicedist.algorithm.batch import Batch, share
from dicedist.algorithm.counterpart import Read
from dicedist.algorithm.grouped import Together
from dicedist.algorithm.member import Encode, Encoding, full
from dicedist.algorithm.messages import Carrier, Fields, Gathered
from dicedist.algorithm.mixing import Mixing, draw, partners
from dicedist.algorithm.networks.batch_norm import statistics_untouched
from dicedist.algorithm.objectives import Method, View
from dicedist.algorithm.optimizers import set_rate
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.randomness import drawing, generator
from dicedist.algorithm.schedules import Moment, Schedules
from dicedist.algorithm.spans import span
from dicedist.algorithm.targets import Loss, Targets

Values = dict[str, Tensor]  # named scalars, which stay on the device until they are logged
Lesson = list[tuple[nn.Parameter, Tensor]]  # parameters of a second optimiser, and their gradients
AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Outcome:
    """What a step reports; all of it stays on the device."""

    values: Values
    out_of_step_M: Tensor  # 1 for each member whose batch differed from this rank's


class Step:
    def __init__(
        self,
        method: Method,
        hosted: Hosted,
        exchange: Carrier,
        schedules: Schedules,
        steps_per_epoch: int,
        seed: int,
        precision: str = "fp32",
        sync_batch_norm: bool = False,
        records_graphs: bool = False,
        clip_norm: float | None = None,
        pieces: int = 1,
        loss: Loss | None = None,
        images_per_branch: bool = False,
        batched: bool = False,
    ):
        """sync_batch_norm: normalise over a member's replicas. records_graphs: compiled stages become CUDA graphs.

        clip_norm: the largest norm of a part's gradient. pieces: a batch goes through the networks in so many, to save
        memory. images_per_branch: every branch sends its own crops of the batch through the trunk. batched: the members
        hosted here run as one network.
        """
        self.images_per_branch = images_per_branch
        self.method, self.hosted, self.exchange = method, hosted, exchange
        self.schedules, self.steps_per_epoch, self.seed = schedules, steps_per_epoch, seed
        self.num_members, self.replicas, self.device = exchange.num_members, exchange.replicas, exchange.device
        self.precision = AUTOCAST[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        if sync_batch_norm and self.replicas > 1:  # before DistributedDataParallel takes hold of the modules below
            for part in (*hosted.members.values(), *([hosted.trunk] if hosted.trunk else [])):
                exchange.synchronise(part.module)
        self.encoders = {
            index: exchange.replicated(Encode(hosted.member(index), method.asks_maps)) for index in hosted.members
        }
        self.batch_members(batched)
        self.loss = loss or Loss()
        self.teacher: nn.Module | None = None  # inputs as members see them -> logits [B, T, K]
        self.records_graphs, self.clip_norm, self.pieces = records_graphs, clip_norm, pieces
        self.shares_gpu = self.device.type == "cuda" and hosted.w is not None and bool(hosted.members)

    def __call__(self, batch: Batch) -> Outcome:
        """All ranks call; gather, scatter and the sum inside `descend` are where they meet.

        On w's own rank there are no encodings, elsewhere nothing is read for w and w does not answer.
        """
        now = self.schedules.at(batch.epoch + batch.step_in_epoch / self.steps_per_epoch)
        encodings = self.encode(batch)
        fields = self.fields(encodings, batch)
        gathered = self.exchange.gather(fields, batch.size, self.mark(batch))
        read = self.read(gathered)
        answers, values = self.answers(read, batch, now)
        mine = self.exchange.scatter(answers, batch.size)
        views = self.views(encodings, fields, gathered, mine, batch)
        with self.beside_members():
            values |= self.learn(read, batch, now)
        values |= self.descend(views, len(batch.labels_B) / batch.size, now)
        self.join()
        return Outcome(values, gathered.out_of_step_M)

    def batch_members(self, batched: bool) -> None:
        """Whether the members hosted here run as one network from now on, or one after another: equal to rounding."""
        members = [self.hosted.member(index) for index in self.hosted.members]
        self.together = Together(members, self.method.asks_maps) if batched and len(members) > 1 else None

    @contextlib.contextmanager
    def beside_members(self) -> Iterator[None]:
        """On a GPU that hosts w and members, run the body on a second stream: w learns while members run backward."""
        if not self.shares_gpu:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            yield

    @functools.cached_property
    def side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def join(self) -> None:
        """Order later work on the device after w's learning: it sees the new w and may reuse the memory that w read."""
        if self.shares_gpu:
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    @span("encode")
    def encode(self, batch: Batch) -> dict[int, Encoding]:
        """Encode the batch with each member hosted here, behind the trunk if there is one."""
        if self.records_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # graphs may now overwrite their outputs of the previous step
        mixing, noise = self.mixing(batch), {member: self.noise(batch, member) for member in self.hosted.members}
        inputs = batch.images if mixing is None else [mixing.of_inputs(images) for images in batch.images]
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            pieces = [self.encode_rows(batch, inputs, noise, rows) for rows in self.rows_of_pieces(len(batch.labels_B))]
        return pieces[0] if len(pieces) == 1 else {m: Encoding.joined([each[m] for each in pieces]) for m in noise}

    def rows_of_pieces(self, batch: int) -> list[slice]:
        """At least two rows each: batch norms need them."""
        pieces = max(1, min(self.pieces, batch // 2))
        return [share(batch, pieces, piece) for piece in range(pieces)]

    def encode_rows(
        self, batch: Batch, inputs: Sequence[Tensor], noise: Mapping[int, Tensor | None], rows: slice
    ) -> dict[int, Encoding]:
        """Encode some rows of the batch."""
        where = (batch.epoch, batch.step_in_epoch, (batch.rows.start or 0) + rows.start)
        raw = inputs = [images[rows] for images in inputs]
        if self.hosted.trunk is not None:
            inputs = self.through_trunk(self.hosted.trunk, raw, where)
        # The same inputs for all members, or one view each (data.per_member).
        seen = [inputs[min(nth, len(inputs) - 1)] for nth in range(len(noise))]
        if self.method.differentiates_pixels:
            seen = [images.detach().requires_grad_() for images in seen]
        drawn = [None if noise_BD is None else noise_BD[rows] for noise_BD in noise.values()]
        encodings = dict(zip(noise, self.through_members(seen, drawn, where), strict=True))
        if self.method.differentiates_pixels:
            for own, images in zip(encodings.values(), seen, strict=True):
                own.images_BCHW = images
        if self.method.asks_average:
            for member, logits_BK in self.averaged_logits(raw).items():
                encodings[member].averaged_BK = logits_BK
        if self.method.asks_teacher:
            self.teach(encodings, raw)
        return encodings

    def through_members(
        self, seen: Sequence[Tensor], noise: Sequence[Tensor | None], where: tuple[int, ...]
    ) -> list[Encoding]:
        """As one network, or one after another. Dropout inside the networks is drawn by key, from where rows begin."""
        if self.together is not None:
            return self.run(self.together, seen, noise)
        encodings = []
        for member, images, noise_BD in zip(self.hosted.members, seen, noise, strict=True):
            with drawing(self.device, self.seed, "layers", *where, member):
                encodings.append(self.run(self.encoders[member], images, noise_BD))
        return encodings

    def teach(self, encodings: Mapping[int, Encoding], images: Sequence[Tensor]) -> None:
        """Every member learns what the teacher makes of the view that the member saw."""
        assert self.teacher is not None
        told = [full(self.teacher(view)) for view in images]
        for nth, own in enumerate(encodings.values()):
            own.teacher_BTK = told[min(nth, len(told) - 1)]

    def run(self, module: nn.Module, *inputs: Any) -> Any:
        """Forward. Of a batch in pieces only the outputs are kept, and backward runs forward again piece by piece.

        That second forward leaves the running statistics of batch norms alone: they have counted the piece before.
        """
        if self.pieces == 1 or not torch.is_grad_enabled():
            return module(*inputs)
        return checkpoint(
            module,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), statistics_untouched(module)),
        )

    def noise(self, batch: Batch, member: int) -> Tensor | None:
        """The noise on z, None for a deterministic member.

        It is drawn for the whole batch, so that an input gets the same noise whichever replica sees it.
        """
        if self.hosted.member(member).bottleneck is None:
            return None
        draws = generator(self.device, self.seed, "z", batch.epoch, batch.step_in_epoch, member)
        width = self.hosted.member(member).encoder.feature_dim
        return torch.randn(batch.size, width, generator=draws, device=self.device)[batch.rows]

    def through_trunk(self, trunk: Part, images: Sequence[Tensor], where: tuple[int, ...]) -> list[Tensor]:
        with drawing(self.device, self.seed, "layers of the trunk", *where):
            outputs = self.in_turn(trunk.module, images) if self.images_per_branch else self.one_by_one(trunk, images)
        if self.method.averages_trunk:  # CL-ILR divides the gradient where branches leave the trunk
            for output in (each for each in outputs if each.requires_grad):  # the trunk may be frozen
                output.register_hook(lambda gradient: gradient / self.num_members)
        return outputs

    def one_by_one(self, trunk: Part, images: Sequence[Tensor]) -> list[Tensor]:
        return [self.run(trunk.module, seen) for seen in images]

    def in_turn(self, trunk: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
        """Every branch's images meet the same running statistics, which then move once, by the mean over all branches.

        So the trunk is the same however its branches are spread over ranks, which meet here.
        """
        statistics = [buffer.data for buffer in trunk.buffers() if buffer.is_floating_point()]
        counters = [buffer for buffer in trunk.buffers() if not buffer.is_floating_point()]
        before, outputs = [value.clone() for value in statistics], []
        totals = [torch.zeros_like(value) for value in statistics]
        readers = len(self.hosted.members) if len(images) == 1 else 1
        for seen in images:
            for value, old in zip(statistics, before, strict=True):
                value.copy_(old)
            outputs.append(self.run(trunk, seen))
            for total, value in zip(totals, statistics, strict=True):
                total.add_(value, alpha=readers)
        flat = torch.cat([total.flatten() for total in totals]) if totals else torch.zeros(0, device=self.device)
        means = self.exchange.sum_over_members(flat) / self.num_members
        for value, mean in zip(statistics, means.split([total.numel() for total in totals]), strict=True):
            value.copy_(mean.view_as(value))
        for counter in counters:
            counter -= len(images) - 1
        return outputs

    @torch.no_grad()
    def averaged_logits(self, images: Sequence[Tensor]) -> dict[int, Tensor]:
        """Logits of the moving averages hosted here, normalised by the batch, as the members themselves are."""
        averaged = self.hosted.averaged
        with contextlib.ExitStack() as stack:
            for part in (*averaged.members.values(), *averaged.common):
                stack.enter_context(statistics_untouched(part.module.train()))
            inputs = images if averaged.trunk is None else [averaged.trunk.module(seen) for seen in images]
            return {
                member: full(averaged.member(member)(inputs[min(nth, len(inputs) - 1)]))
                for nth, member in enumerate(averaged.members)
            }

    def fields(self, encodings: Mapping[int, Encoding], batch: Batch) -> dict[int, Fields]:
        """What each member hosted here sends: only what some term or w asks for, so `ind` sends nothing."""
        targets = self.targets(batch)
        return {member: self.method.fields(self.view(member, own, targets)) for member, own in encodings.items()}

    def view(self, member: int, own: Encoding, targets: Targets) -> View:
        return View(member, self.num_members, self.hosted.member(member), own, targets, self.hosted.shared_modules)

    def mark(self, batch: Batch) -> Tensor:
        """Travels with the fields: all members must see the same batch, or the pairs of w would mean nothing."""
        checksum = torch.tensor([batch.checksum])
        return checksum.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else checksum

    def read(self, gathered: Gathered) -> Read | None:
        """What w reads of the members that it compares, all but a student; None where w is not hosted."""
        if self.hosted.w is None:
            return None
        return {name: gathered.stacked(name, self.exchange.compared) for name in self.exchange.features}

    @span("redundancy")
    def answers(self, read: Read | None, batch: Batch, now: Moment) -> tuple[Fields | None, Values]:
        """Nothing where w is not hosted."""
        # w, its optimiser (in the part `discriminator`) and what it reads are all here or all elsewhere: one question
        # would do, here and in `learn`, and the others are for the type checker.
        if self.hosted.w is None or read is None:
            return None, {}
        where = (batch.epoch, batch.step_in_epoch)
        with self.precision_of_w():
            return self.hosted.w.answers(read, self.targets(batch), now, where)

    @span("learn")
    def learn(self, read: Read | None, batch: Batch, now: Moment) -> Values:
        if self.hosted.w is None or self.hosted.discriminator is None or read is None:
            return {}
        where = (batch.epoch, batch.step_in_epoch)
        with self.precision_of_w():
            values = self.hosted.w.study(self.hosted.discriminator.optimizer, read, self.targets(batch), now, where)
        self.hosted.discriminator.follow()
        return values

    def precision_of_w(self) -> torch.autocast:
        """bf16 on a GPU if members use it; never fp16: log f may leave its range, and the gradients of log f do."""
        halved = self.device.type == "cuda" and self.precision == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=halved)

    def views(
        self,
        encodings: Mapping[int, Encoding],
        fields: Mapping[int, Fields],
        gathered: Gathered,
        answers: Mapping[int, Fields],
        batch: Batch,
    ) -> list[View]:
        # What was gathered is detached; a member's own fields keep their graph.
        everyone, targets = gathered.fields, self.targets(batch)
        return [
            replace(
                self.view(member, own, targets),
                fields=everyone | {member: fields[member]},
                answers=answers.get(member, {}),
            )
            for member, own in encodings.items()
        ]

    def mixing(self, batch: Batch) -> Mixing | None:
        """How mixup or CutMix mixes this batch: drawn by key, so that inputs and targets, asked in turn, agree."""
        return draw(self.loss.mixup, self.loss.cutmix, self.seed, batch.epoch, batch.step_in_epoch)

    def targets(self, batch: Batch) -> Targets:
        labels_B, mixing, loss = batch.labels_B, self.mixing(batch), self.loss
        if mixing is None or not batch.images:
            return Targets(labels_B, None, 1.0, loss.label_smoothing, loss.weights_K)
        others_B, own = labels_B[partners(len(labels_B), labels_B.device)], mixing.own_share(batch.images[0])
        return Targets(labels_B, others_B, own, loss.label_smoothing, loss.weights_K)

    @span("backward")
    def descend(self, views: Sequence[View], fraction: float, now: Moment) -> Values:
        """Run backward from every member's (loss, mean) with (1, w's gradient), then update all parts but w.

        fraction: of the batch, that this rank sees. A member's gradient is the mean over its replicas, so
        `replicas * fraction` makes each replica count for the inputs that it saw. The gradients of w are already those
        of a mean over the whole batch.
        """
        values: Values = {}
        heads: list[Tensor] = []
        initial_gradients: list[Tensor | None] = []
        for view in views:
            losses = self.method.losses(view, now)
            loss = torch.stack(list(losses.values())).sum()
            heads.append(self.scaler.scale(self.replicas * fraction * loss))
            initial_gradients.append(None)
            # An answer named like a field is that field's gradient; terms read the other answers themselves.
            for name in [name for name in view.answers if name in view.fields[view.index]]:
                heads.append(view.fields[view.index][name])
                initial_gradients.append(self.scaler.scale(self.replicas * view.answers[name]))
            right_B = view.own.logits_BK.argmax(1) == view.labels_B
            named = {"loss": loss, **losses, "accuracy": right_B.float().mean()}
            values |= {f"member_{view.index}/{name}": value.detach() for name, value in named.items()}
        if heads:
            lessons, given = self.lessons(views, now)
            torch.autograd.backward(heads, initial_gradients)
            values |= given | self.update(now, lessons)
            values |= self.companions_study(views, now)
        return values

    def lessons(self, views: Sequence[View], now: Moment) -> tuple[dict[str, Lesson], Values]:
        """What companions teach the encoders hosted here: gradients for second optimisers, by part, and losses."""
        found, values = {}, {}
        for view in [view for view in views if view.index in self.hosted.companions]:
            part = self.hosted.members[view.index]
            assert part.second is not None
            taught = [parameter for group in part.second.param_groups for parameter in group["params"]]
            companion = self.hosted.companion(view.index)
            loss = companion.lesson(view.fields)
            gradients = torch.autograd.grad(loss, taught, retain_graph=True)
            found[part.name] = list(zip(taught, gradients, strict=True))
            values[f"member_{view.index}/lesson"] = loss.detach()
            set_rate(part.second, companion.rate(now))
        return found, values

    def companions_study(self, views: Sequence[View], now: Moment) -> Values:
        values = {}
        for view in [view for view in views if view.index in self.hosted.companions]:
            companion, part = self.hosted.companion(view.index), self.hosted.companions[view.index]
            values[f"member_{view.index}/companion"] = companion.study(part.optimizer, view.fields, now)
        return values

    @span("optimiser")
    def update(self, now: Moment, lessons: Mapping[str, Lesson]) -> Values:
        """One optimiser step of every part hosted here but w; a part that has a second optimiser takes its step next.

        With fp16 these parts share one loss scale, because their losses run backward together. A part whose gradients
        overflow skips its own step alone, and the scale falls for all. Each rank has a scale of its own, and w none.
        """
        # Summed before they are unscaled: ranks that share parameters never use fp16 (build.check_members).
        self.exchange.sum_gradients(self.hosted.common_parameters)
        for part in self.hosted.learners:
            self.scaler.unscale_(part.optimizer)
        norms = {f"member_{i}/gradient_norm": gradient_norm(p.module) for i, p in self.hosted.members.items()}
        for part in self.hosted.learners:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(part.module.parameters(), self.clip_norm)
            set_rate(part.optimizer, now.learning_rate)
            self.scaler.step(part.optimizer)
            part.optimizer.zero_grad(set_to_none=True)
            if part.second is not None:
                self.learn_lesson(part.second, lessons[part.name])
            part.follow()
        self.scaler.update()
        return norms

    def learn_lesson(self, optimizer: torch.optim.Optimizer, lesson: Lesson) -> None:
        """Its gradients were taken at the weights before the first step, as two losses of one batch."""
        for parameter, gradient in lesson:
            parameter.grad = gradient
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_([parameter for parameter, _ in lesson], self.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def gradient_norm(module: nn.Module) -> Tensor:
    """The norm over all parameters; 0 where it is not finite, as in a step that fp16 skips.

    A gradient that overflows otherwise shows in the next loss, which ends the run.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nan_to_num(nn.utils.get_total_norm(gradients), nan=0.0, posinf=0.0)
