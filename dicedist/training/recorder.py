"""Records and checkpoints: ranks synchronize here, and agree on the next action."""

from collections.abc import Sequence
from typing import Any, NoReturn

from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.schedules import Schedules
from dicedist.cluster import signals
from dicedist.cluster.process import EndedElsewhere
from dicedist.cluster.world import World
from dicedist.evaluation.about import described
from dicedist.runs import resume
from dicedist.runs.saver import Saver
from dicedist.tracking import environment
from dicedist.tracking.environment import Pace
from dicedist.tracking.tracker import SilentTracker
from dicedist.training.job import Job
from dicedist.training.ledger import Ledger

GO_ON, SAVE, FAULT = 0, 1, 2  # the ranks' next action at log time; the largest wins


class Recorder:
    """Writes records and checkpoints. Every rank has a recorder; only rank 0's tracker writes."""

    def __init__(
        self,
        job: Job,
        world: World,
        hosted: Hosted,
        schedules: Schedules,
        saver: Saver,
        tracker: SilentTracker,
        done: int,
    ):
        self.job, self.world, self.hosted, self.schedules = job, world, hosted, schedules
        self.saver, self.tracker, self.ledger = saver, tracker, Ledger()
        self.pace = Pace(job.config.batch_size, done)
        self.loss_scales: dict[str, Any] = {}  # on rank 0, by part
        self.validated = 0  # steps at the last validation, saved in checkpoints
        self.best: dict[str, Any] | None = None  # on rank 0: the best validation so far, with checkpoint.best

    def sync(self, done: int, validation_due: bool) -> None:
        """Synchronize with the device, send values to rank 0, and agree on the next action. All ranks call this."""
        if self.world.reports and not self.saver.run.follow():
            signals.ask()  # all ranks save and end after the next step
        values, fault = self.ledger.drain()
        scaler = self.hosted.precision.scaler
        records = self.world.control.report(
            {
                "values": values,
                "fault": fault,
                "written": self.saver.report(),
                "loss_scales": {part.name: scaler.state_dict() for part in self.hosted.learners},
                "system": environment.node_figures(self.world),
            }
        )
        self.saver.receive([record["written"] for record in records])
        due = self.world.reports and not validation_due and self.saver.due(done)
        agreed = self.world.control.maximum(FAULT if fault else SAVE if due else GO_ON)
        if agreed == FAULT:
            raise_first([record["fault"] for record in records])
        for record in records:
            self.tracker.add(record["values"])
            self.loss_scales |= record["loss_scales"]
        if done % self.job.config.log.every_steps == 0 or done == self.job.extent.total_steps:
            self.tracker.summarize(done, self.job.epoch(done), self.scheduled(done), validation_due)
            figures = self.pace.figures(done)
            for record in records:
                figures |= record["system"]
            self.tracker.log_system(done, figures)
        if agreed == SAVE:
            self.start_saving(done)

    def scheduled(self, done: int) -> dict[str, float]:
        """Return the values of the method's schedules at the last step."""
        now, method = self.schedules.at_step(*divmod(done - 1, self.job.extent.steps_per_epoch)), self.job.method
        delta = self.job.config.redundancy.delta_for(len(method.compared(self.job.plan.num_members)))
        values = {"log_beta": now.log_beta, "ramp_up": now.ramp_up, "covariance": now.covariance, "delta": delta}
        followed = {name: value for name, value in values.items() if name in method.follows}
        return {"learning_rate": now.learning_rate, **followed}

    def start_saving(self, done: int, is_last: bool = False) -> None:
        """Start a checkpoint of the present state. is_last: training ends here, perhaps early. All ranks call this."""
        source = self.job.source
        about = {
            "run": resume.identity(self.job.config, self.job.plan),
            "total_steps": done if is_last else self.job.extent.total_steps,
            "best": self.best,
            "loss": self.tracker.latest.get("loss"),
            "records": self.tracker.state(),
            "validated": self.validated,
            "loss_scales": {**self.loss_scales},
            "data": source.data_digest,
            "source": described(source),
        }
        self.saver.start(done, about, self.tracker.records())

    def save_soon(self, done: int) -> None:
        """Start a checkpoint of the present state after the one that is being written. All ranks call this."""
        self.saver.finish()
        self.start_saving(done)

    def save_now(self, done: int, is_last: bool) -> bool:
        """Save the present state, wait for it, and return whether it is on the disk. All ranks call this."""
        safe = self.saver.finish()
        early = is_last and done < self.job.extent.total_steps  # an earlier checkpoint of this step lacks is_last
        if early or not safe or self.saver.step != done:
            self.start_saving(done, is_last)
            safe = self.saver.finish()
        return safe


def raise_first(faults: Sequence[str | None]) -> NoReturn:
    """Raise the first fault on rank 0; the other ranks received no records and just end."""
    found = [fault for fault in faults if fault]
    raise ValueError(found[0]) if found else EndedElsewhere
