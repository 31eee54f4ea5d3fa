"""This rank's share of the ensemble: the parts that it saves, and the members that it evaluates."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.trajectories import Trajectories
from dicedist.cluster.world import World
from dicedist.config.plan import Plan
from dicedist.evaluation.about import described
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.evaluator import Evaluator
from dicedist.evaluation.loading import describe, load_heads
from dicedist.evaluation.redundancy import build_w
from dicedist.runs.checkpoint import Checkpoint
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.job import Job


@dataclass(frozen=True)
class Share:
    job: Job
    world: World
    hosted: Hosted
    paths: Trajectories
    tracker: SilentTracker

    def parts_to_save(self) -> list[Part]:
        """Return the parts that this rank saves; of several ranks with the same part, the first saves it."""
        placement, rank, hosted = self.job.placement, self.world.rank, self.hosted
        led = [part for member, part in hosted.members.items() if placement.host_of[member] == rank]
        mine = [*led, *(part for member in led for part in member.attached)]
        mine += hosted.common if rank == placement.member_ranks[0] else []
        mine += [hosted.discriminator] if hosted.discriminator and rank == placement.discriminator else []
        return mine + self.paths.parts

    @property
    def members(self) -> Hosted:
        """Return the members that this rank evaluates; one replica of each member does."""
        hosted = self.hosted.averaged if self.job.config.uses_average else self.hosted
        leading = {m: part for m, part in hosted.members.items() if self.job.placement.host_of[m] == self.world.rank}
        return replace(hosted, members=leading)

    def evaluator_of_members(self, step: int) -> Evaluator:
        """Build the evaluator of the present weights of members and w. All ranks call this."""
        plan = replace(self.job.plan, samples=1)
        return self.evaluator(plan, self.shard(plan, self.members, step), self.copy_of_w())

    def copy_of_w(self) -> Discriminator | None:
        """Return a copy of w on rank 0, averaged over its last steps; None if the method has no w."""
        job, part = self.job, self.hosted.discriminator
        if job.method.estimator is None or job.placement.discriminator is None:
            return None
        own: dict[int, Tensor] = {}
        if part is not None and part.average is not None:
            own[0] = parameters_to_vector(part.average.module.parameters()).cpu()[None]
        received = self.world.control.collect(own, [job.placement.discriminator])
        if received is None:
            return None
        w = build_w(job.config, job.method, job.plan, job.source.num_classes)
        vector_to_parameters(received[0][0], w.parameters())
        return w

    def evaluator_of_predictors(self, step: int, found: Checkpoint | None) -> Evaluator:
        """Build the evaluator of the whole ensemble: the members, or all their samples. found: on rank 0."""
        job, follows_paths = self.job, self.paths.kind is not None
        predictors = replace(self.hosted, members=self.paths.samples) if follows_paths else self.members
        shard, w = self.shard(job.plan, predictors, step), None
        if found is not None:
            w = load_heads(shard, job.config, job.method, job.plan, found, job.source.num_classes)
        return self.evaluator(job.plan, shard, w)

    def shard(self, plan: Plan, hosted: Hosted, step: int) -> Ensemble:
        job = self.job
        return Ensemble.shard(describe(job.config, job.method, plan, job.run.name, step, described(job.source)), hosted)

    def evaluator(self, plan: Plan, shard: Ensemble, w: Discriminator | None) -> Evaluator:
        hosts = [self.job.placement.host_of[number // plan.samples] for number in shard.about.members]
        student = self.job.method.student(plan.num_predictors)
        return Evaluator(shard, self.job.source, self.world.control, hosts, self.tracker.stage, w, student)
