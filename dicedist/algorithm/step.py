"""One step of Algorithm 1, over the parts that this rank hosts.

    members     encode ──┐                    ┌── backward, SGD step ── encode the next batch ...
                       gather              scatter
    w                    └── gradients of w ──┘── learn: num_steps steps, class memory ...

The discriminator w first returns gradients, computed with its weights from the previous step, and learns afterwards
(the paper's order). On a rank of its own it learns while the members run backward and the next forward; on a GPU with
members, on a second stream while they run backward; on a CPU with members, before that. Methods that work on
predictions have no w: the gather brings each member the predictions of its peers.

dicedist.cluster.assembly builds the step of a rank, and the trainer calls it once per batch on every rank. In a single
process all parts are hosted here, and gather and scatter only hand tensors over.

Legend: M members, B inputs, D features, K classes.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dicedist.algorithm.adversary import Features
from dicedist.algorithm.batch import Batch
from dicedist.algorithm.member import Encode, Encoding
from dicedist.algorithm.messages import Carrier, Fields, Gathered
from dicedist.algorithm.networks.batch_norm import synchronise
from dicedist.algorithm.objectives import Method, View
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import Moment, Schedules

Values = dict[str, Tensor]  # named scalars, which stay on the device until they are logged
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
    ):
        """sync_batch_norm: normalise over a member's replicas. records_graphs: compiled stages become CUDA graphs."""
        self.method, self.hosted, self.exchange = method, hosted, exchange
        self.schedules, self.steps_per_epoch, self.seed = schedules, steps_per_epoch, seed
        self.num_members, self.replicas, self.device = exchange.num_members, exchange.replicas, exchange.device
        self.precision = AUTOCAST[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        if sync_batch_norm and self.replicas > 1:  # before DistributedDataParallel takes hold of the modules below
            for part in (*hosted.members.values(), *([hosted.trunk] if hosted.trunk else [])):
                synchronise(part.module, exchange.sum_over_replicas)
        self.encoders = {index: exchange.replicated(Encode(hosted.member(index))) for index in hosted.members}
        self.records_graphs = records_graphs
        self.shares_gpu = self.device.type == "cuda" and hosted.w is not None and bool(hosted.members)

    def __call__(self, batch: Batch) -> Outcome:
        """All ranks call; gather, scatter and the sum inside `descend` are where they meet.

        On w's own rank there are no encodings, elsewhere no features and no gradients of w.
        """
        now = self.schedules.at(batch.epoch + batch.step_in_epoch / self.steps_per_epoch)
        encodings = self.encode(batch)
        fields = self.fields(encodings)
        gathered = self.exchange.gather(fields, batch.size, self.mark(batch))
        features = self.features(gathered)
        gradients_MBD, values = self.redundancy_gradients(features, batch, now)
        mine = self.exchange.scatter(gradients_MBD, batch.size)
        views = self.views(encodings, fields, gathered, batch.labels_B)
        with self.beside_members():
            values |= self.learn(features, batch, now)
        values |= self.descend(views, mine, len(batch.labels_B) / batch.size, now)
        self.join()
        return Outcome(values, gathered.out_of_step_M)

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

    def encode(self, batch: Batch) -> dict[int, Encoding]:
        """Encode the batch with each member hosted here, behind the trunk if there is one (run once per view)."""
        encodings = {}
        if self.records_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # graphs may now overwrite their outputs of the previous step
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            inputs = batch.images if self.hosted.trunk is None else self.through_trunk(self.hosted.trunk, batch.images)
            for nth, member in enumerate(self.hosted.members):
                seen = inputs[min(nth, len(inputs) - 1)]  # one view for all members, or one for each in their order
                encodings[member] = self.encoders[member](seen, self.noise(batch, member))
        return encodings

    def noise(self, batch: Batch, member: int) -> Tensor | None:
        """The noise on z, None for a deterministic member.

        It is drawn for the whole batch, so that an input gets the same noise whichever replica sees it.
        """
        if self.hosted.member(member).bottleneck is None:
            return None
        draws = generator(self.device, self.seed, "z", batch.epoch, batch.step_in_epoch, member)
        width = self.hosted.member(member).encoder.feature_dim
        return torch.randn(batch.size, width, generator=draws, device=self.device)[batch.rows]

    def through_trunk(self, trunk: Part, images: Sequence[Tensor]) -> list[Tensor]:
        outputs = [trunk.module(view) for view in images]
        if self.method.averages_trunk:  # CL-ILR divides the gradient where branches leave the trunk
            for output in outputs:
                output.register_hook(lambda gradient: gradient / self.num_members)
        return outputs

    def fields(self, encodings: Mapping[int, Encoding]) -> dict[int, Fields]:
        shared = self.hosted.shared_modules
        return {member: self.method.fields(member, self.num_members, own, shared) for member, own in encodings.items()}

    def mark(self, batch: Batch) -> Tensor:
        checksum = torch.tensor([batch.checksum])
        return checksum.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else checksum

    def features(self, gathered: Gathered) -> Features | None:
        if self.hosted.w is None:
            return None
        compared = self.exchange.compared  # all members but a student
        means_MBD = gathered.stacked("mean", compared)
        # Deterministic members send no scale: w then adds noise of variance 1, or none (redundancy.scale).
        sent = all("scale" in gathered.fields[member] for member in compared)
        return Features(means_MBD, gathered.stacked("scale", compared) if sent else torch.ones_like(means_MBD))

    def redundancy_gradients(
        self, features: Features | None, batch: Batch, now: Moment
    ) -> tuple[Tensor | None, Values]:
        if self.hosted.w is None or features is None:
            return None, {}
        where = (batch.epoch, batch.step_in_epoch)
        with self.precision_of_w():
            return self.hosted.w.redundancy_gradients(features, batch.labels_B, now, where)

    def learn(self, features: Features | None, batch: Batch, now: Moment) -> Values:
        if self.hosted.w is None or self.hosted.discriminator is None or features is None:
            return {}
        where = (batch.epoch, batch.step_in_epoch)
        with self.precision_of_w():
            return self.hosted.w.learn(self.hosted.discriminator.optimizer, features, batch.labels_B, now, where)

    def precision_of_w(self) -> torch.autocast:
        """bf16 on a GPU if members use it; never fp16: log f may leave its range, and the gradients of log f do."""
        halved = self.device.type == "cuda" and self.precision == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=halved)

    def views(
        self,
        encodings: Mapping[int, Encoding],
        fields: Mapping[int, Fields],
        gathered: Gathered,
        labels_B: Tensor,
    ) -> list[View]:
        everyone, size = gathered.fields, self.num_members
        # What was gathered is detached; a member's own fields keep their graph.
        return [
            View(member, size, self.hosted.member(member), own, labels_B, everyone | {member: fields[member]})
            for member, own in encodings.items()
        ]

    def descend(
        self, views: Sequence[View], redundancy_gradients: Mapping[int, Tensor], fraction: float, now: Moment
    ) -> Values:
        """Run backward from every member's (loss, mean) with (1, redundancy gradient), then update all parts but w.

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
            if view.index in redundancy_gradients:
                heads.append(view.own.mean_BD)
                initial_gradients.append(self.scaler.scale(self.replicas * redundancy_gradients[view.index]))
            right_B = view.own.logits_BK.argmax(1) == view.labels_B
            named = {"loss": loss, **losses, "accuracy": right_B.float().mean()}
            values |= {f"member_{view.index}/{name}": value.detach() for name, value in named.items()}
        if heads:
            torch.autograd.backward(heads, initial_gradients)
            values |= self.update(now)
        return values

    def update(self, now: Moment) -> Values:
        # Summed before they are unscaled: ranks that share parameters never use fp16 (build.check_members).
        self.exchange.sum_gradients(self.hosted.common_parameters)
        for part in self.hosted.learners:
            self.scaler.unscale_(part.optimizer)
        norms = {f"member_{i}/gradient_norm": gradient_norm(p.module) for i, p in self.hosted.members.items()}
        for part in self.hosted.learners:
            for group in part.optimizer.param_groups:
                group["lr"] = now.learning_rate
            self.scaler.step(part.optimizer)
            part.optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        return norms


def gradient_norm(module: nn.Module) -> Tensor:
    """The norm over all parameters; 0 where it is not finite, as in a step that fp16 skips.

    A gradient that overflows otherwise shows in the next loss, which ends the run.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nan_to_num(nn.utils.get_total_norm(gradients), nan=0.0, posinf=0.0)
