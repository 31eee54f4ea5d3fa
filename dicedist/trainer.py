"""The training of an ensemble. The loop is `Trainer.train`; everything around it is in dicedist.training.

prepare        refuse invalid settings, load the data, place the parts        training/job.py
Trainer        build this rank's step, begin or resume                        training/auto.py, resuming.py
train          steps and validations, until the last step or a request to stop
               listeners are called around every step and epoch               training/listeners.py
               the recorder logs and saves at the same steps on all ranks     training/recorder.py
evaluate       measure the final weights on the test set, once

job        the config, the method, the plan (resolved settings), the placement of parts on ranks, and the data
world      this rank in the group: its number, its device, and whether it reports; rank 0 reports
control    small agreements between ranks (barrier, maximum, broadcast), on the CPU
exchange   the messages of a step; hosted: the parts on this rank; paths: the trajectories of its members
tracker    console and records; silent on all ranks but rank 0
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from dicedist.algorithm.build import build_step
from dicedist.algorithm.footprint import footprint
from dicedist.cluster import heartbeat, signals
from dicedist.cluster.assembly import connect, host
from dicedist.cluster.devices import make_deterministic, refuse_too_large
from dicedist.cluster.process import EndedElsewhere, Unsent, tune_malloc
from dicedist.cluster.world import World, joined
from dicedist.config import Config
from dicedist.config.schema import TRACKERS
from dicedist.console.lines import warn
from dicedist.data.pipeline import Loader
from dicedist.evaluation.tables import printed
from dicedist.evaluation.teacher import Teacher
from dicedist.reporting.page import write_own_report
from dicedist.runs import checkpoint
from dicedist.runs.lock import run_lock
from dicedist.runs.pretrained import read_once
from dicedist.runs.results import origin
from dicedist.runs.saver import Saver
from dicedist.runs.uploads import NoUploads, uploading
from dicedist.tracking.mirroring import command_for
from dicedist.tracking.tracker import SilentTracker, Tracker
from dicedist.training.announcement import announce, folder_moved, last_lines
from dicedist.training.auto import resolve_auto
from dicedist.training.job import Job, prepare, refuse_small_batches
from dicedist.training.listeners import FollowingTrajectories, Listener, WeighingMembers
from dicedist.training.recorder import Recorder
from dicedist.training.resuming import begin_or_resume, restore
from dicedist.training.selection import Selection
from dicedist.training.share import Share
from dicedist.training.trace import Trace
from dicedist.training.validation import Validation


def train(config: Config) -> None:
    """Train an ensemble, on every rank. Refusals come before ranks wait for each other."""
    tune_malloc()
    if config.deterministic:
        make_deterministic()
    job = prepare(config)
    heartbeat.starts(True)
    with joined(config.distributed.timeout, job.placement.parts) as world:
        with contextlib.ExitStack() as held:
            uploads = NoUploads()
            if world.reports:
                held.enter_context(run_lock(job.run))
                uploads = held.enter_context(uploading(job.run, config, warn))
            unsent = Trainer(job, world, uploads).train_and_evaluate()
    if unsent:
        raise Unsent(f"{job.run} is complete, but {' '.join(unsent)}")


class Trainer:
    """The training on one rank. Methods that communicate are called by all ranks in the same order."""

    def __init__(self, job: Job, world: World, uploads: NoUploads | None = None):
        # 1. Refuse invalid settings before the first message: the heartbeat of a rank that refuses ends all ranks.
        refuse_small_batches(job)
        self.run = job.run  # shared with the uploads, which follow a renamed folder
        config, method, placement, source = job.config, job.method, job.placement, job.source
        self.world, self.control, self.uploads = world, world.control, uploads or NoUploads()
        mine = placement.members_on(world.rank)
        self.teacher = self.load_teacher(job, bool(mine))
        if self.teacher is not None:
            job = replace(job, plan=replace(job.plan, teacher_sha256=self.teacher.digests))
        refuse_too_large(world.device, self.footprint(job))
        # 2. Connect. From here on all ranks make the same calls in the same order.
        self.exchange = connect(config, method, job.plan, placement, world, source.num_classes)
        self.uploads.begin()
        # 3. Resolve `auto` settings. They change the plan, so they come before the parts are built.
        plan, self.messages = resolve_auto(job, world, self.exchange, self.teacher)
        job = replace(job, plan=plan)
        if plan.divided:
            job = replace(job, placement=placement.divided)
            self.exchange = connect(config, method, plan, job.placement, world, source.num_classes)
        # 4. Build the parts, then restore them. A checkpoint may replace the plan once more.
        self.hosted = host(config, method, plan, self.exchange, source.num_classes)
        self.step, self.paths = build_step(config, method, plan, self.hosted, self.exchange, job.extent, self.teacher)
        state = begin_or_resume(job, world, self.hosted, self.paths, self.teacher)
        source = read_once(source, config, plan, self.hosted.frozen.module if self.hosted.frozen else None)
        self.job, self.done = replace(job, plan=state.plan, source=source), state.done
        if state.sees_folder:
            self.run.pin()
        if config.resuming.step == self.done:
            self.uploads.go_back(self.done)
        # 5. Build the recorder and the listeners.
        self.loader = Loader.of(config, source, placement, world.rank, world.device)
        self.tracker = (
            Tracker(self.run, self.total_steps, self.done, state.records, config) if world.reports else SilentTracker()
        )
        self.share = Share(self.job, world, self.hosted, self.paths, self.tracker)
        saver = self.build_saver(state.sees_folder)
        self.recorder = Recorder(self.job, world, self.hosted, self.step.schedules, saver, self.tracker, self.done)
        self.recorder.validated = state.validated
        self.validation = Validation(self.share)
        self.selection = Selection(config, self.control, self.tracker, self.recorder)
        self.listeners = [*self.build_listeners(saver), self.selection]
        self.sees_folder = state.sees_folder
        self.stopping = False
        self.stop_requested: Callable[[], int] = lambda: 0  # waits for the flags that the previous step sent

    def load_teacher(self, job: Job, has_members: bool) -> Teacher | None:
        """Load the teacher on ranks that host members, and on rank 0, which records its digest."""
        if job.config.teacher.run is None or not (has_members or self.world.reports):
            return None
        return Teacher.of(job.config, job.source, self.world.device)

    def footprint(self, job: Job) -> dict[str, int]:
        """Return the bytes that the parts of this rank need, by kind."""
        placement, rank = job.placement, self.world.rank
        mine, hosts_w = placement.members_on(rank), rank in placement.discriminators
        needed = footprint(job.config, job.method, job.plan, mine, hosts_w, job.source.num_classes)
        return needed | ({"teacher": self.teacher.bytes} if self.teacher else {})

    def build_saver(self, sees_folder: bool) -> Saver:
        steps, parts, control = self.job.extent.steps_per_epoch, self.share.parts_to_save, self.control
        settings = (self.run, self.job.config.checkpoint, steps, parts, control, self.done)
        return Saver(*settings, self.tracker.warn, self.world.transfer, sees_folder, self.uploads)

    def build_listeners(self, saver: Saver) -> list[Listener]:
        job, found = self.job, list[Listener]([self.recorder.ledger])
        if job.config.profile:
            found.append(Trace(self.run.trace_file(self.world.rank), self.world.device))
        if self.paths.kind is not None:
            found.append(FollowingTrajectories(job, self.paths, self.loader, saver, self.world.device))
        if job.method.weighing is not None:
            found.append(WeighingMembers(job.method.weighing, self.hosted, job.source.val.labels_N, self.control))
        return found

    @property
    def total_steps(self) -> int:
        return self.job.extent.total_steps

    @property
    def step_to_evaluate(self) -> int:
        """Step of the best validation with checkpoint.best, else the last step. Read on rank 0."""
        return self.recorder.best["step"] if self.recorder.best else self.done

    @property
    def validation_due(self) -> bool:
        return self.validation.due(self.done, self.recorder.validated)

    def train_and_evaluate(self) -> list[str]:
        """Train what is left and evaluate; a finished run only shows its results.

        Return, on rank 0, the destinations that did not receive the results, with the command that sends them.
        """
        left = 0 if self.selection.over else self.total_steps - self.done
        result = self.run.result(self.step_to_evaluate) if left <= 0 and self.world.reports else None
        if result is not None:
            self.tracker.say(f"{self.run} is finished, after {self.done:,} steps")
            self.tracker.say(printed(result, self.job.config.log.verbose))
        if self.control.maximum(result is not None):  # only rank 0 knows; all ranks return together
            return self.finish_sending([])
        if self.world.reports:
            self.run.stopped_file.unlink(missing_ok=True)
            if left > 0:
                self.run.set_results_aside()
        self.tracker.open()
        if left > 0:
            self.announce(left)
        try:
            self.train()
            self.loader.close()
            self.evaluate()
        except signals.Stopped:
            if self.world.reports:
                self.run.stopped_file.touch()
            self.tracker.close(finished=False)
            raise
        unsent = self.finish_sending(self.tracker.close(finished=True))
        self.tracker.say(last_lines(self.run))
        return unsent

    def announce(self, left: int) -> None:
        for line in self.messages:
            self.tracker.say(line)
        if self.loader.pipeline is not None and self.job.config.log.verbose:
            self.tracker.say(self.loader.pipeline.described)
        bytes_needed = self.footprint(self.job)
        announce(self.job, self.world, self.step, self.exchange, self.teacher, bytes_needed, left, self.tracker)
        self.tracker.say(f"{'continues after step ' + str(self.done) if self.done else 'begins'} in {self.run}")
        self.tracker.begin()

    def finish_sending(self, trackers: list[str]) -> list[str]:
        """Wait for uploads. Return a line for each destination that lacks results. trackers: those that lack some."""
        lines = [
            f"{TRACKERS[tracker]} has not received all of it; `{command_for(self.run, tracker)}` sends it"
            for tracker in trackers
        ]
        if not self.uploads.finish():
            lines.append(f"{self.job.config.run.remote} has not received all of it; the same command sends it")
        return lines

    def train(self) -> None:
        """Train to the last step, or until early stopping. A validation that is due comes before the next epoch.

        On a request to stop, all ranks save after the same step and raise Stopped.
        """
        with signals.deferred():
            while (
                not self.stopping and not self.selection.over and (self.validation_due or self.done < self.total_steps)
            ):
                self.validate() if self.validation_due else self.train_epoch()
            heartbeat.starts(False)
            for listener in self.listeners:
                listener.finish(self.stopping)
            safe = self.recorder.save_now(self.done, is_last=not self.stopping)
            if self.stopping:
                self.uploads.finish()
                self.control.barrier()  # a rank that ends would end the rank that still sends
        if self.control.maximum(self.run.moved_from is not None):
            raise ValueError(folder_moved(self.run, self.done, safe)) if self.world.reports else EndedElsewhere
        if self.stopping:
            kept = "saved" if safe else "NOT saved, the checkpoint before it stays"
            raise signals.Stopped(f"stopped after step {self.done}, {kept}; the same command continues the run")
        if not safe:
            raise ValueError(f"{self.run}: the last checkpoint could not be written; make room and run this again")

    def train_epoch(self) -> None:
        """Train the rest of the epoch, or until a request to stop."""
        config, steps_per_epoch = self.job.config, self.job.extent.steps_per_epoch
        for batch in self.loader.epoch(*divmod(self.done, steps_per_epoch)):
            for listener in self.listeners:
                listener.before_step(self.done)
            outcome = self.step(batch)
            heartbeat.starts(False)
            self.done += 1
            for listener in self.listeners:
                listener.after_step(self.done, outcome)
            self.stopping = bool(self.stop_requested())
            # Sent now and read after the next step: no rank waits, and all ranks stop after the same step.
            self.stop_requested = self.control.maximum_later(signals.asked())
            last = self.done == self.total_steps
            every = (config.log.every_steps, config.checkpoint.every_steps, steps_per_epoch)
            if self.stopping or last or any(steps and self.done % steps == 0 for steps in every):
                self.recorder.sync(self.done, self.validation_due)
            if self.stopping or last:
                return
            if not self.validation_due:  # validation prints its own line
                self.tracker.show(self.done, self.job.epoch(self.done))

    def validate(self) -> None:
        """Measure the held-out set on all ranks, unless a rank was asked to stop."""
        self.stopping, logits_MNK = self.validation(self.done)
        if self.stopping:
            return
        self.recorder.validated = self.done
        for listener in self.listeners:
            listener.after_epoch(self.done, logits_MNK)
        self.recorder.sync(self.done, self.validation_due)

    @heartbeat.computing()
    def evaluate(self) -> None:
        """Evaluate the last weights, or with checkpoint.best those of the best validation (docs/choices.md, 20)."""
        config, found = self.job.config, None
        if not config.evaluate.test:
            if self.world.reports:
                write_own_report(self.run)
            return
        step = int(self.control.broadcast({"step": self.step_to_evaluate})["step"])
        if step != self.done:
            restore(self.job, self.world, self.hosted, self.hosted.parts, step, self.sees_folder)
        if self.world.reports:
            path, needed = checkpoint.path_of(self.run.checkpoints, step), ["discriminator", "fusion", "shared"]
            found = checkpoint.read(path, needed)
        evaluator = self.share.evaluator_of_predictors(step, found)
        with signals.interruptible():  # everything is saved, so ending at once loses nothing
            findings = evaluator.evaluate(config.evaluate.folds, config.ood, config.calibration, config.data.root)
            if findings is not None and found is not None:
                findings.result |= origin(config, found)
                result = findings.save(self.run)[1]
                self.tracker.say(printed(result, config.log.verbose))
                write_own_report(self.run)
