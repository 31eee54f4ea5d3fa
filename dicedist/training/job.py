"""Prepare a training before ranks join: check the settings, load the data, place the parts."""

from dataclasses import dataclass
from functools import cached_property

from dicedist.algorithm.build import Extent
from dicedist.algorithm.checks import check_batch_of_one, check_members
from dicedist.algorithm.objectives import Method
from dicedist.cluster.devices import refuse_compile, refuse_graph
from dicedist.cluster.handshake import shake_hands
from dicedist.cluster.placement import REPORTER, Placement, place
from dicedist.cluster.process import this_rank, world_size
from dicedist.config import Config, flatten
from dicedist.config.plan import Plan
from dicedist.data import sources
from dicedist.data.duplicates import warn_of_duplicates
from dicedist.data.ood import refuse_unreadable
from dicedist.data.order import num_batches
from dicedist.data.prepared import refuse_unwritable
from dicedist.data.sources import Source
from dicedist.runs import resume
from dicedist.runs.bucket import Bucket
from dicedist.runs.pretrained import Pretrained, normalized_as_published
from dicedist.runs.run import Run


@dataclass(frozen=True)
class Job:
    """Everything that a training is defined by, before parts are built. Equal on all ranks."""

    config: Config  # the settings of the user
    method: Method
    plan: Plan  # the values that these settings resolved to
    placement: Placement  # the parts of each rank
    source: Source  # the data

    @cached_property
    def run(self) -> Run:
        return Run.of(self.config)

    @property
    def pretrained(self) -> Pretrained:
        return Pretrained(self.config, self.plan)

    @cached_property
    def extent(self) -> Extent:
        config, source = self.config, self.source
        steps_per_epoch = num_batches(len(source.train), config.batch_size)
        total_steps = min(config.epochs * steps_per_epoch, config.max_steps or 10**12)
        counts = source.train.labels_N.bincount(minlength=source.num_classes).tolist()
        return Extent(source.num_classes, steps_per_epoch, total_steps, counts)

    def epoch(self, done: int) -> float:
        """Convert steps to epochs."""
        return done / self.extent.steps_per_epoch


def prepare(config: Config) -> Job:
    """Check everything and load the data. All ranks call this before they join, so that a refusal waits for no rank."""
    config = resume.as_begun(config)
    method, run = Method.to_train(config.method), Run.of(config)
    width, columns = sources.vector_columns(config.data) or (None, None)
    shape = config.data.image_shape if width is None else (width,)
    size, replicas, ranks_of_w = resume.ensemble_size(config), config.ensemble.replicas, config.redundancy.ranks
    needs_w, called = method.counterpart is not None, method.counterpart.part if method.counterpart else ""
    if this_rank() == REPORTER:
        refuse_unwritable(run.directory, "write run.dir=FOLDER")
        refuse_compile(config.compile)
        refuse_graph(config.redundancy.graph)
        refuse_unreadable(config.ood.sets, shape, columns)
        # Placed once without nodes, to refuse an impossible number of ranks before ranks wait for each other.
        place(world_size(), size, needs_w, replicas, ranks_of_w=ranks_of_w, called=called)
        if (bucket := Bucket.of(config)) is not None:
            bucket.refuse_unwritable(f"run.remote={config.run.remote}")
    node_of, size = shake_hands(flatten(config), size, config.distributed.timeout)
    placement = place(world_size(), size, needs_w, replicas, node_of, ranks_of_w, called)
    plan = Plan.of(config, placement.num_members, shape, placement.parts)
    check_members(config, method, plan, len(placement.member_ranks), len(placement.discriminators))
    source = sources.load(config.data, labels_only=not placement.members_on(this_rank()))
    job = Job(config, method, plan, placement, normalized_as_published(source, config, plan))
    if this_rank() == REPORTER and resume.is_new_run(run, config):
        job.pretrained.digests()  # refuses weights that do not fit or cannot be downloaded
        warn_of_duplicates(source)
    return job


def refuse_small_batches(job: Job) -> None:
    """Raise a ValueError if the last batch of an epoch is too small for replicas or batch norms."""
    num_inputs, batch_size = len(job.source.train), job.config.batch_size
    refuse_empty_shares(num_inputs, batch_size, job.placement.replicas)
    if num_inputs % batch_size == 1:
        check_batch_of_one(job.config, job.plan)


def refuse_empty_shares(num_inputs: int, batch_size: int, replicas: int) -> None:
    last = num_inputs % batch_size or batch_size
    if last < replicas:
        raise ValueError(
            f"the last batch of an epoch has {last} of {num_inputs:,} images, too few for "
            f"ensemble.replicas={replicas}: write batch_size={batch_size + 1}, or any that leaves more"
        )
