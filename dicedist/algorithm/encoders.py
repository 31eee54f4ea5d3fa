"""Encode a batch with the members of this rank: trunk, noise, autocast, micro-batches and grouped execution.

    images ── trunk ──┬── member 0 ── Encoding
       (branches)     ├── member 1 ── Encoding
                      └── ...                       a net reads the images themselves

Legend: B inputs, D features.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dicedist.algorithm.batch import Batch, Views, share
from dicedist.algorithm.grouped import Together
from dicedist.algorithm.member import Encode, Encoding
from dicedist.algorithm.messages import Carrier
from dicedist.algorithm.networks.batch_norm import counted_together, plain_norms, statistics_untouched
from dicedist.algorithm.networks.freezing import frozen_norms
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.randomness import drawing, generator
from dicedist.algorithm.spans import span
from dicedist.config.plan import Plan
from dicedist.config.schema import Config


class Encoders:
    """Encodes batches with the members hosted here."""

    def __init__(
        self,
        config: Config,
        method: Method,
        plan: Plan,
        hosted: Hosted,
        exchange: Carrier,
        teacher: nn.Module | None = None,
        replaced: Mapping[int, nn.Module] | None = None,
    ):
        """teacher: for methods that distill one. replaced: by member, the module that encodes in its place."""
        self.hosted, self.exchange, self.seed = hosted, exchange, config.seed
        self.pieces = config.optimizer.accumulate  # micro-batches per batch, to save memory
        # Every branch sends its own crops of the batch through the trunk.
        self.images_per_branch = config.structure == "branch" and config.data.per_member
        self.records_graphs = config.compile == "graphs"  # compiled stages become CUDA graphs
        wanted = method.probes.items() if hosted.members else ()
        self.probes = [probe(term, hosted, plan.num_members, teacher) for probe, term in wanted]
        keeps = tuple(dict.fromkeys(name for probe in self.probes for name in probe.keeps))
        trunk = [hosted.trunk] if hosted.trunk else []
        if config.ensemble.sync_batch_norm and exchange.replicas > 1:  # before DistributedDataParallel wraps modules
            for part in (*hosted.members.values(), *trunk):
                frozen = [*frozen_norms(part.module)]
                exchange.synchronize(part.module, frozen)
                if part.average is not None:  # a probe may run the average in training mode
                    exchange.synchronize(part.average.module, frozen)
        members = {index: hosted.member(index) for index in hosted.members}
        own = {index: exchange.replicated(Encode(member, keeps)) for index, member in members.items()}
        self.modules: dict[int, nn.Module] = own | {**(replaced or {})}
        # As one network, if the plan says so; the result is equal up to rounding.
        self.together = Together([*members.values()], keeps) if plan.grouped and len(members) > 1 else None
        run = [*self.modules.values(), *([self.together] if self.together else []), *(part.module for part in trunk)]
        self.norms = {module: plain_norms(module) for module in run}

    @span("encode")
    def encode(self, batch: Batch) -> dict[int, Encoding]:
        """Encode the batch with each member hosted here, behind the trunk if there is one."""
        if self.records_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # graphs may now overwrite their outputs of the previous step
        images = Views(batch.images, [*self.hosted.members])
        noise = {member: self.noise(batch, member) for member in self.hosted.members}
        with self.hosted.precision.for_members():
            pieces = [self.encode_rows(batch, images, noise, rows) for rows in self.rows_of(len(batch.labels_B))]
        return pieces[0] if len(pieces) == 1 else {m: Encoding.joined([each[m] for each in pieces]) for m in noise}

    def rows_of(self, batch: int) -> list[slice]:
        """Return the rows of each micro-batch, at least two: batch norms need them."""
        pieces = max(1, min(self.pieces, batch // 2))
        return [share(batch, pieces, piece) for piece in range(pieces)]

    def encode_rows(
        self, batch: Batch, images: Views, noise: Mapping[int, Tensor | None], rows: slice
    ) -> dict[int, Encoding]:
        key = (*batch.key, (batch.rows.start or 0) + rows.start)
        images = images.map(lambda view: view[rows])
        for probe in self.probes:
            images = probe.on_images(images)
        inputs = images
        if self.hosted.trunk is not None:
            inputs = self.through_trunk(self.hosted.trunk, images, key)
            for probe in self.probes:
                inputs = probe.on_branches(inputs)
        drawn = {member: None if noise_BD is None else noise_BD[rows] for member, noise_BD in noise.items()}
        encodings = self.through_members(inputs, drawn, key)
        for probe in self.probes:
            probe.on_encodings(encodings, images)
        return encodings

    def through_members(
        self, inputs: Views, noise: Mapping[int, Tensor | None], key: tuple[int, ...]
    ) -> dict[int, Encoding]:
        """Run the members as one network or one after another. The key of the rows seeds dropout."""
        if self.together is not None:
            encodings = self.run(self.together, inputs.apart().tensors, [*noise.values()])
            return dict(zip(noise, encodings, strict=True))
        encodings = {}
        for member, noise_BD in noise.items():
            with drawing(self.exchange.device, self.seed, "layers", *key, member):
                encodings[member] = self.run(self.modules[member], inputs[member], noise_BD)
        return encodings

    def run(self, module: nn.Module, *inputs: Any) -> Any:
        """Run a module forward. With several pieces, keep only the outputs; backward then runs forward again.

        The second forward does not change the running statistics of batch norms: they have counted the piece already.
        """
        with counted_together(self.norms[module]):
            if self.pieces == 1 or not torch.is_grad_enabled():
                return module(*inputs)
            return checkpoint(
                module,
                *inputs,
                use_reentrant=False,
                context_fn=lambda: (contextlib.nullcontext(), statistics_untouched(module)),
            )

    def noise(self, batch: Batch, member: int) -> Tensor | None:
        """Draw the noise on z; None for a deterministic member.

        The noise is drawn for the whole batch, so that an input gets the same noise on every replica.
        """
        if self.hosted.member(member).bottleneck is None:
            return None
        device, width = self.exchange.device, self.hosted.member(member).encoder.feature_dim
        draws = generator(device, self.seed, "z", *batch.key, member)
        return torch.randn(batch.size, width, generator=draws, device=device)[batch.rows]

    def through_trunk(self, trunk: Part, images: Views, key: tuple[int, ...]) -> Views:
        with drawing(self.exchange.device, self.seed, "layers of the trunk", *key):
            if self.images_per_branch:
                return self.branch_by_branch(trunk.module, images)
            return images.map(lambda view: self.run(trunk.module, view))

    def branch_by_branch(self, trunk: nn.Module, images: Views) -> Views:
        """Run the trunk on each branch's images with the same running statistics, then update these once by their mean.

        The result does not depend on how branches are spread over ranks. All ranks with members call this.
        """
        statistics = [buffer.data for buffer in trunk.buffers() if buffer.is_floating_point()]
        counters = [buffer for buffer in trunk.buffers() if not buffer.is_floating_point()]
        before = [value.clone() for value in statistics]
        totals = [torch.zeros_like(value) for value in statistics]
        readers = len(images.members) // len(images.tensors)

        def read(view: Tensor) -> Tensor:
            for value, old in zip(statistics, before, strict=True):
                value.copy_(old)
            output = self.run(trunk, view)
            for total, value in zip(totals, statistics, strict=True):
                total.add_(value, alpha=readers)
            return output

        outputs = images.map(read)
        flat = torch.cat([torch.zeros(0, device=self.exchange.device), *(total.flatten() for total in totals)])
        means = self.exchange.sum_over_members(flat) / self.exchange.num_members
        for value, mean in zip(statistics, means.split([total.numel() for total in totals]), strict=True):
            value.copy_(mean.view_as(value))
        for counter in counters:
            counter -= len(images.tensors) - 1
        return outputs
