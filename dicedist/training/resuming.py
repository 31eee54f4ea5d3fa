"""Begin a run, or continue the one in its folder: all ranks end up with the same state."""

from dataclasses import dataclass
from typing import Any

from dicedist.algorithm.parts import Hosted
from dicedist.algorithm.trajectories import Trajectories
from dicedist.cluster.world import World
from dicedist.config.plan import Plan
from dicedist.console.lines import warn
from dicedist.evaluation.teacher import Teacher
from dicedist.runs import checkpoint, resume
from dicedist.runs.saver import reachable
from dicedist.tracking import environment
from dicedist.training.job import Job


@dataclass(frozen=True)
class State:
    """Where a run goes on."""

    plan: Plan
    done: int  # steps
    validated: int  # steps at the last validation
    records: dict[str, Any] | None  # what the run remembers of its records
    sees_folder: bool  # this rank's folder of the run is that of rank 0


def begin_or_resume(job: Job, world: World, hosted: Hosted, paths: Trajectories, teacher: Teacher | None) -> State:
    """All ranks call: restore what a run found in the folder has come to, or load pretrained weights."""
    run, digest, plan, found, note = job.run, job.source.data_digest, job.plan, None, {}
    if world.reports:
        found, plan = resume.find(run, job.config, plan, digest, warn, job.pretrained.digests)
        if found:
            resume.mend_records(run, found, warn)
        environment.note(run, job.placement.parts, digest)
        note = {
            "step": found.step if found else None,
            "files": [*found.files] if found else [],
            "data": digest,
            "mark": resume.leave_mark(run),
            "weights": plan.weights_sha256,
            "teacher": plan.teacher_sha256,
        }
    told = world.control.tell(note)
    if told["data"] != digest:
        raise ValueError(f"the {job.source.kind} on {world.host} are not those of rank 0: give all nodes the same data")
    if teacher is not None and told["teacher"] != plan.teacher_sha256:
        raise ValueError(f"the teacher on {world.host} is not that of rank 0: give all nodes the same run")
    sees_folder, step = resume.sees(run, told["mark"]), told["step"]
    if step is None:
        job.pretrained.load(hosted, told["weights"], world.host)
        return State(plan, 0, 0, None, sees_folder)
    paths.expect(told["files"])
    parts = [*hosted.parts, *paths.parts]
    names = [part.name for part in parts]
    saved, lacking = checkpoint.path_of(run.checkpoints, step), [] if sees_folder else names
    with reachable(saved, lacking, world.control, world.transfer) as path:
        found = found or checkpoint.read(path, names, expected=step)
        checkpoint.restore(found, parts)
    for part in hosted.learners[:1]:
        hosted.precision.scaler.load_state_dict(found.about["loss_scales"][part.name])
    return State(plan, step, found.about["validated"], found.about["records"], sees_folder)
