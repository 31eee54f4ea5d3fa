"""A training from its first step to its last: the loop, what ranks agree on in between, saving, validation, results."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, NoReturn

import torch

from dicedist import metrics
from dicedist.algorithm import trajectories
from dicedist.algorithm.build import check_batch_of_one, check_members
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.footprint import footprint
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.parts import Hosted, Part
from dicedist.algorithm.trajectories import Clock, Surroundings, TrainingSet, Trajectories
from dicedist.cluster import signals
from dicedist.cluster.assembly import assemble
from dicedist.cluster.devices import refuse_compile, refuse_too_large
from dicedist.cluster.handshake import shake_hands
from dicedist.cluster.heartbeat import advance
from dicedist.cluster.placement import REPORTER, Placement, place
from dicedist.cluster.process import EndedElsewhere, Unsent, this_rank, tune_malloc, world_size
from dicedist.cluster.world import World, joined
from dicedist.config import Config, flatten
from dicedist.console.lines import warn
from dicedist.data import sources
from dicedist.data.ood import refuse_unreadable
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader, evaluation_batches
from dicedist.data.prepared import refuse_unwritable
from dicedist.data.sources import Split, some_of_each
from dicedist.evaluation.about import described
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.evaluator import Evaluator
from dicedist.evaluation.loading import describe, evaluator_of
from dicedist.evaluation.readings import KEPT, LOGITS, Collected, Readings
from dicedist.evaluation.redundancy import READ_BY_W, sent_w
from dicedist.evaluation.tables import show
from dicedist.evaluation.teacher import Teacher
from dicedist.reporting.page import write_report
from dicedist.runs import checkpoint, resume
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.lock import run_lock
from dicedist.runs.pretrained import Pretrained, normalised_as_published
from dicedist.runs.run import Run
from dicedist.runs.saver import Saver, reachable
from dicedist.runs.uploads import NoUploads, uploading
from dicedist.tracking import environment
from dicedist.tracking.announcement import announce
from dicedist.tracking.environment import Pace
from dicedist.tracking.forecast import pairs_that_hide
from dicedist.tracking.ledger import Ledger
from dicedist.tracking.trace import SilentTrace, Trace
from dicedist.tracking.tracker import SilentTracker, Tracker
from dicedist.tracking.ways import faster_way

GO_ON, SAVE, FAULT = 0, 1, 2  # what the ranks agree on at log time; the largest wins


def train(config: Config) -> None:
    """Every rank calls. What cannot be is refused before ranks wait for each other."""
    tune_malloc()
    method, run = Method(config.method), Run.of(config)
    config.network.inputs = sources.vector_width(config.data)
    if config.network.is_dense and config.network.inputs is None:
        config.network.pixels = config.data.size
    needs_w, replicas, size = method.counterpart is not None, config.ensemble.replicas, resume.ensemble_size(config)
    called = method.counterpart.part if method.counterpart else ""
    if this_rank() == REPORTER:
        refuse_unwritable(run.directory, "write run.dir=FOLDER")
        refuse_compile(config.compile)
        refuse_unreadable(config.ood.sets, config.network.inputs)
        place(world_size(), size, needs_w, replicas, ranks_of_w=config.redundancy.ranks, called=called)
        if (bucket := Bucket.of(config)) is not None:
            bucket.refuse_unwritable(f"run.remote={config.run.remote}")
    node_of, size = shake_hands(flatten(config), size, config.distributed.timeout)
    placement = place(world_size(), size, needs_w, replicas, node_of, config.redundancy.ranks, called)
    config.ensemble.size = placement.num_members
    check_members(config, method, placement.num_members, len(placement.member_ranks), len(placement.discriminators))
    images = sources.load(config.data, labels_only=not placement.members_on(this_rank()))
    source = normalised_as_published(images, config)
    pretrained = Pretrained(config)
    if this_rank() == REPORTER and resume.begins(run, config):
        pretrained.digests()  # weights that do not fit, or cannot be had
    with joined(config.distributed.timeout, placement.parts) as world:
        with contextlib.ExitStack() as held:
            uploads = NoUploads()
            if world.reports:
                held.enter_context(run_lock(run))
                uploads = held.enter_context(uploading(run, config, warn))
            trainer = Trainer(config, method, placement, source, world, uploads, pretrained)
            unsent = trainer.train_and_evaluate()
    if unsent:
        raise Unsent(f"{run} is complete, but {' '.join(unsent)}")


class Trainer:
    def __init__(
        self,
        config: Config,
        method: Method,
        placement: Placement,
        source: sources.Source,
        world: World,
        uploads: NoUploads | None = None,
        pretrained: Pretrained | None = None,
    ):
        self.uploads, self.pretrained = uploads or NoUploads(), pretrained or Pretrained(config)
        self.config, self.source, self.world, self.placement = config, source, world, placement
        self.method, self.control = method, world.control
        self.steps_per_epoch = num_batches(len(source.train), config.batch_size)
        refuse_empty_shares(len(source.train), config.batch_size, placement.replicas)
        if len(source.train) % config.batch_size == 1:
            check_batch_of_one(config)
        self.total_steps = min(config.epochs * self.steps_per_epoch, config.max_steps or 10**12)
        mine, hosts_w = placement.members_on(world.rank), world.rank in placement.discriminators
        self.footprint = footprint(config, method, mine, hosts_w, source.num_classes)
        self.teacher = self.load_teacher(bool(mine))
        refuse_too_large(world.device, self.footprint)
        counts = source.train.labels_N.bincount(minlength=source.num_classes).tolist()
        self.step, self.exchange = assemble(
            config, placement, world, source.num_classes, self.steps_per_epoch, class_counts=counts
        )
        self.hosted, self.step.teacher = self.step.hosted, self.teacher
        self.trajectories = self.build_trajectories()
        self.step.encoders |= self.trajectories.encoders
        self.sees_folder = True  # whether this rank's folder of the run is that of rank 0
        of_replicas = (placement.replica_on(world.rank), placement.replicas) if mine else (0, 1)
        self.loader = Loader(
            source.train, config.data, source, config.batch_size, config.seed, world.device, mine, *of_replicas
        )
        self.ledger = Ledger()
        self.run = Run.of(config)
        self.told: list[str] = []  # what was measured, for people
        self.uploads.begin()
        self.settle()
        self.loss_scales: dict[str, Any] = {}  # on the reporter, by part
        self.done = self.validated = 0  # steps
        self.stopping = False
        self.asked: Callable[[], int] = lambda: False  # whether any rank was asked to stop before the last step
        records = self.continue_run()
        self.tracker = (
            Tracker(self.run, self.total_steps, self.done, records, config) if world.reports else SilentTracker()
        )
        self.pace = Pace(config.batch_size, self.done)
        self.trace = Trace(self.run.trace_file(world.rank), world.device) if config.profile else SilentTrace()
        self.saver = Saver(
            self.run,
            config.checkpoint,
            self.steps_per_epoch,
            self.parts_to_save,
            self.control,
            self.done,
            self.tracker.warn,
            world.transfer,
            self.sees_folder,
            self.uploads,
        )

    def build_trajectories(self) -> Trajectories:
        config = self.config
        return Trajectories(
            trajectories.build(config.trajectory),
            self.hosted,
            Clock(self.step.schedules.pace, self.steps_per_epoch),
            self.total_steps,
            Surroundings(len(self.source.train), config.optimizer.weight_decay),
            config.seed,
        )

    def load_teacher(self, has_members: bool) -> Teacher | None:
        """Where members are taught, and on the reporter, which keeps whose predictions they learn."""
        if not self.method.asks_teacher or not (has_members or self.world.reports):
            return None
        teacher = Teacher.of(self.config, self.source, self.world.device)
        self.method.check_teacher(len(teacher), self.placement.num_members)
        self.config.teacher.sha256 = teacher.digests
        self.footprint["teacher"] = teacher.bytes
        return teacher

    def settle(self) -> None:
        """All ranks: what is `auto` is measured when a run begins, and its config keeps what it has come to."""
        redundancy, ensemble = self.config.redundancy, self.config.ensemble
        if redundancy.max_pairs == "auto":
            redundancy.max_pairs = self.settled(lambda saved: saved.redundancy.budget, self.measured_pairs)
        if ensemble.batched == "auto":
            ensemble.batched = self.settled(lambda saved: saved.ensemble.known_batched, self.measured_way)
            self.step.batch_members(ensemble.batched is True)

    def settled(self, known: Callable[[Config], Any], measured: Callable[[], Any]) -> Any:
        """As in the run that is continued; in a new one, or where that does not know it, as it is measured."""
        before = resume.config_before(self.run, self.config) if self.world.reports else None
        found = self.control.tell({"found": known(before) if before else None})["found"]
        return self.control.tell({"found": measured()})["found"] if found is None else found

    def measured_pairs(self) -> int:
        return pairs_that_hide(self.config, self.world, self.step, self.source)

    def measured_way(self) -> bool | str:
        """Left open on a CPU and where no rank hosts two members: it may still go on elsewhere."""
        shared = any(len(self.placement.members_on(rank)) > 1 for rank in self.placement.member_ranks)
        if self.world.device.type == "cpu" or not shared:
            return "auto"
        batched, why = faster_way(self.config, self.world, self.step, self.source)
        self.told.append(why)
        return batched

    def continue_run(self) -> dict[str, Any] | None:
        """Restore what a run found in the folder has come to; what it remembers of its records."""
        found, note, pretrained = None, {}, self.pretrained
        if self.world.reports:
            found = resume.find(self.run, self.config, self.source.data_digest, warn, pretrained.digests)
            if found:
                resume.mend_records(self.run, found, warn)
            environment.note(self.run, self.placement.parts, self.source.data_digest)
            mark = resume.leave_mark(self.run)
            note = {
                "step": found.step if found else None,
                "files": [*found.files] if found else [],
                "data": self.source.data_digest,
                "mark": mark,
                "weights": self.config.network.sha256,
                "teacher": self.config.teacher.sha256,
            }
        told = self.control.tell(note)
        if told["data"] != self.source.data_digest:
            raise ValueError(
                f"the {self.source.kind} on {self.world.host} are not those of rank 0: give all nodes the same data"
            )
        if self.teacher is not None and told["teacher"] != self.config.teacher.sha256:
            raise ValueError(f"the teacher on {self.world.host} is not that of rank 0: give all nodes the same run")
        self.sees_folder = resume.sees(self.run, told["mark"])
        step = told["step"]
        if step is None:
            pretrained.load(self.hosted, told["weights"], self.world.host)
            return None
        self.trajectories.expect(told["files"])
        parts = [*self.hosted.parts, *self.trajectories.parts]
        names = [part.name for part in parts]
        saved, lacking = checkpoint.path_of(self.run.checkpoints, step), [] if self.sees_folder else names
        with reachable(saved, lacking, self.control, self.world.transfer) as path:
            found = found or checkpoint.read(path, names, expected=step)
            checkpoint.restore(found, parts)
        for part in self.hosted.learners[:1]:
            self.step.scaler.load_state_dict(found.about["loss_scales"][part.name])
        self.done, self.validated = step, found.about["validated"]
        return found.about["records"]

    @property
    def parts_to_save(self) -> list[Part]:
        """The parts that this rank saves: of those that several ranks hold, the first of them."""
        placement, rank = self.placement, self.world.rank
        mine = [part for member, part in self.hosted.members.items() if placement.host_of[member] == rank]
        mine += self.hosted.companions.values()
        mine += self.hosted.common if rank == placement.member_ranks[0] else []
        mine += [self.hosted.discriminator] if self.hosted.discriminator and rank == placement.discriminator else []
        return mine + self.trajectories.parts

    @property
    def members_to_evaluate(self) -> Hosted:
        """The members that this rank evaluates: one of their replicas does."""
        hosted = self.hosted.averaged if self.config.uses_average else self.hosted
        leading = {m: part for m, part in hosted.members.items() if self.placement.host_of[m] == self.world.rank}
        return replace(hosted, members=leading)

    def train_and_evaluate(self) -> list[str]:
        """On the reporter, of a run that is complete: whom its results did not reach, and what sends them."""
        left = self.total_steps - self.done
        result = self.run.result(self.done) if left <= 0 and self.world.reports else None
        if result is not None:
            self.tracker.say(f"{self.run} is finished, after {self.done:,} steps\n\n{show(result)}")
        if self.control.agree(result is not None):
            return self.unsent(True)
        if self.world.reports:
            self.run.stopped_file.unlink(missing_ok=True)
            if left > 0:
                self.run.set_results_aside()
        self.tracker.open()
        if left > 0:
            for line in self.told:
                self.tracker.say(line)
            announce(self.config, self.world, self.step, self.exchange, self.source, self.footprint, left, self.tracker)
            self.tracker.say(f"{'continues after step ' + str(self.done) if self.done else 'begins'} in {self.run}")
            self.tracker.begin()
        try:
            self.train()
            self.loader.close()
            self.evaluate()
        except signals.Stopped:
            if self.world.reports:
                self.run.stopped_file.touch()
            self.tracker.close(finished=False)
            raise
        unsent = self.unsent(self.tracker.close(finished=True))
        self.tracker.say(f"done: {self.run.report_file}")
        return unsent

    def unsent(self, mirrored: bool) -> list[str]:
        by_hand = f"`python -m dicedist.mirror {self.run}` sends it"
        lines = [] if mirrored else [f"MLflow has not received all of it; {by_hand}"]
        if not self.uploads.finish():
            lines.append(f"{self.config.run.remote} has not received all of it; the same command sends it")
        return lines

    def train(self) -> None:
        """Trains to the last step; asked to stop, all ranks save after the same step and raise Stopped."""
        with signals.deferred():
            while not self.stopping and (self.validation_due or self.done < self.total_steps):
                self.validate() if self.validation_due else self.train_epoch()
            self.trace.close()
            if not self.stopping:
                self.draw_samples()
            safe = self.save_now()
            if self.stopping:
                self.uploads.finish()
                self.control.barrier()  # the first rank to end would end the one that sends
        if self.stopping:
            kept = "saved" if safe else "NOT saved, the checkpoint before it stays"
            raise signals.Stopped(f"stopped after step {self.done}, {kept}; the same command continues the run")
        if not safe:
            raise ValueError(f"{self.run}: the last checkpoint could not be written; make room and run this again")

    def train_epoch(self) -> None:
        """What is left of the epoch, or as much of it as there is time for."""
        epoch, start = divmod(self.done, self.steps_per_epoch)
        for batch in self.loader.epoch(epoch, start):
            self.trajectories.before_step(self.done)
            self.ledger.add(self.done, self.step(batch))
            self.trace.step()
            self.done += 1
            self.trajectories.after_step(self.done)
            self.stopping = bool(self.asked())
            self.asked = self.control.agree_later(signals.asked())  # read a step later: no rank waits for it
            last = self.done == self.total_steps
            every = (self.config.log.every_steps, self.config.checkpoint.every_steps, self.steps_per_epoch)
            if self.stopping or last or any(steps and self.done % steps == 0 for steps in every):
                self.sync_and_log()
            if self.stopping or last:
                return
            if not self.validation_due:  # else its line says more
                self.tracker.show(self.done, self.done / self.steps_per_epoch)

    def sync_and_log(self) -> None:
        """All ranks: one host synchronisation, values and reports to rank 0, an agreement on what comes next."""
        values, fault = self.ledger.drain()
        scales = {part.name: self.step.scaler.state_dict() for part in self.hosted.learners}
        records = self.control.report(
            {
                "values": values,
                "fault": fault,
                "written": self.saver.report(),
                "loss_scales": scales,
                "system": environment.node_figures(self.world),
            }
        )
        self.saver.receive([record["written"] for record in records])
        due = self.world.reports and not self.validation_due and self.saver.due(self.done)
        agreed = self.control.agree(FAULT if fault else SAVE if due else GO_ON)
        if agreed == FAULT:
            raise_first([record["fault"] for record in records])
        for record in records:
            self.tracker.add(record["values"])
            self.loss_scales |= record["loss_scales"]
        if self.done % self.config.log.every_steps == 0 or self.done == self.total_steps:
            self.tracker.summarise(self.done, self.done / self.steps_per_epoch, self.schedules(), self.validation_due)
            figures = self.pace.figures(self.done)
            for record in records:
                figures |= record["system"]
            self.tracker.log_system(self.done, figures)
        if agreed == SAVE:
            self.start_saving()

    def schedules(self) -> dict[str, float]:
        """The values of the last step, of the schedules that the method follows."""
        epoch, step = divmod(self.done - 1, self.steps_per_epoch)
        now = self.step.schedules.at(epoch + step / self.steps_per_epoch)
        delta = self.config.redundancy.delta_for(len(self.method.compared(self.config.num_members)))
        values = {"log_beta": now.log_beta, "ramp_up": now.ramp_up, "covariance": now.covariance, "delta": delta}
        followed = {name: value for name, value in values.items() if name in self.method.follows}
        return {"learning_rate": now.learning_rate, **followed}

    def about(self) -> dict[str, Any]:
        """What a checkpoint must say beside its parts."""
        return {
            "run": resume.identity(self.config),
            "total_steps": self.total_steps,
            "loss": self.tracker.latest.get("loss"),
            "records": self.tracker.kept(),
            "validated": self.validated,
            "loss_scales": {**self.loss_scales},
            "data": self.source.data_digest,
            "source": {name: list(getattr(self.source, name)) for name in ("class_names", "mean", "std")},
        }

    def start_saving(self) -> None:
        self.saver.parts = self.parts_to_save  # samples are added on the way
        self.saver.start(self.done, self.about(), self.tracker.records())

    def draw_samples(self) -> None:
        """Draws, after the last step, the samples of trajectories that were not kept on the way."""
        held = len(self.trajectories.samples)
        source, device = self.source, self.world.device

        def augmented() -> Iterator[torch.Tensor]:
            for batch in self.loader.epoch(self.config.epochs):
                advance()
                yield batch.images[0]

        def plain(split: Split) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for images_BCHW, labels_B in evaluation_batches(split, source, self.config.batch_size, device):
                advance()
                yield images_BCHW, labels_B

        self.trajectories.finish(TrainingSet(augmented, partial(plain, source.train), partial(plain, source.val)))
        if len(self.trajectories.samples) > held:
            self.saver.step = -1  # a checkpoint of this step may be there, without them

    def save_now(self) -> bool:
        """All ranks: wait until the present state is on the disk; whether it is."""
        safe = self.saver.finish()
        if not safe or self.saver.step != self.done:
            self.start_saving()
            safe = self.saver.finish()
        return safe

    @property
    def validation_due(self) -> bool:
        epochs, rest = divmod(self.done, self.steps_per_epoch)
        at_the_end = self.done >= self.total_steps or (rest == 0 and epochs % self.config.evaluate.every_epochs == 0)
        return self.validated < self.done and at_the_end and len(self.source.val) > 0

    def validate(self) -> None:
        """Reads the held-out images, and some of the training set; all ranks together, or none if one is stopped."""
        splits = {name: split for name, split in (("val", self.source.val), ("train_set", self.watched)) if len(split)}
        rows_N = some_of_each(self.source.val.labels_N, READ_BY_W)  # whose features w reads
        columns = {"val": (LOGITS, *KEPT) if self.method.estimator else (LOGITS,), "train_set": (LOGITS,)}
        config = replace(self.config, trajectory={"kind": "none"})  # the members themselves, not their samples
        w = sent_w(config, self.placement, self.control, self.hosted, self.source.num_classes)
        evaluator = self.evaluator(config, self.members_to_evaluate, w=w)
        readings: dict[str, list[Readings]] = {}
        with contextlib.suppress(signals.Stopped), signals.interruptible():
            for name, split in splits.items():
                noun = f"{'validation' if name == 'val' else 'training'} {self.source.kind}"
                readings[name] = list(evaluator.read(split, noun, columns[name], rows_N))
        self.stopping = bool(self.control.agree(len(readings) < len(splits)))
        if self.stopping:
            return
        gathered = {name: evaluator.gather(readings[name], columns[name]) for name in splits}
        held_out, named = gathered["val"], {}
        if held_out is not None:
            estimated = evaluator.redundancy(held_out.features, self.source.val.labels_N[rows_N], num_draws=1)
            named = {"val/redundancy_nats": fmean(estimated["nats_P"])} if estimated else {}
        for name, found in gathered.items():
            if found is not None:
                measures = metrics.validation_measures if name == "val" else metrics.training_measures
                measured = measures(found.logits_MNK, splits[name].labels_N)
                named |= {f"{name}/{measure}": value for measure, value in measured.items()}
        if self.world.reports:
            self.tracker.log(self.done, self.done / self.steps_per_epoch, named)
        self.weigh_members(held_out)
        self.validated = self.done
        self.sync_and_log()

    @functools.cached_property
    def watched(self) -> Split:
        """Training images on which diversity is read beside validation, as many of each class as possible."""
        labels_N = self.source.train.labels_N
        return sources.part(self.source.train, some_of_each(labels_N, self.config.evaluate.train_images))

    def weigh_members(self, held_out: Collected | None) -> None:
        """All ranks, if the method wants it: members' weights from their held-out logits, which rank 0 has."""
        if (weighing := self.method.weighing) is None:
            return
        found = weighing.weigh(held_out.logits_MNK, self.source.val.labels_N) if held_out is not None else []
        told = self.control.tell({"weights": found})
        if self.hosted.shared_modules is not None:
            weighing.take_weights(told["weights"], self.hosted.shared_modules)

    def evaluator(
        self, config: Config, hosted: Hosted, found: Checkpoint | None = None, w: Discriminator | None = None
    ) -> Evaluator:
        """Of members in memory; found and w as in `evaluator_of`."""
        about = describe(config, self.run.name, self.done, described(self.source))
        hosts = [self.placement.host_of[number // config.samples] for number in about.members]
        shard, stage = Ensemble.shard(about, hosted), self.tracker.stage
        return evaluator_of(config, shard, self.source, self.control, hosts, stage, found, w)

    @property
    def predictors(self) -> Hosted:
        """The ensemble that is evaluated in the end: the members, or all of their samples."""
        if self.config.trajectory["kind"] == "none":
            return self.members_to_evaluate
        return replace(self.hosted, members=self.trajectories.samples)

    def evaluate(self) -> None:
        """The last weights, never the best on test (docs/choices.md, 20)."""
        config, found = self.config, None
        if not config.evaluate.test:
            if self.world.reports:
                write_report([self.run], self.run.report_file)
            return
        if self.world.reports:
            path, needed = checkpoint.path_of(self.run.checkpoints, self.done), ["discriminator", "fusion", "shared"]
            found = checkpoint.read(path, needed)
        evaluator = self.evaluator(config, self.predictors, found=found)
        with signals.interruptible():  # everything is saved: nothing is lost by ending at once
            findings = evaluator.evaluate(config.evaluate.folds, config.ood, config.calibration, config.data.root)
            if findings is not None:
                self.tracker.say(show(findings.save(self.run)))
                write_report([self.run], self.run.report_file)


def refuse_empty_shares(num_images: int, batch_size: int, replicas: int) -> None:
    last = num_images % batch_size or batch_size
    if last < replicas:
        raise ValueError(
            f"the last batch of an epoch has {last} of {num_images:,} images, too few for "
            f"ensemble.replicas={replicas}: write batch_size={batch_size + 1}, or any that leaves more"
        )


def raise_first(faults: list[str | None]) -> NoReturn:
    """On rank 0 the fault of whoever had one; the others received no records and just end."""
    told = [fault for fault in faults if fault]
    raise ValueError(told[0]) if told else EndedElsewhere
