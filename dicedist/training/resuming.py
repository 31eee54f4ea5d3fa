"""Begin a run, or resume the run in its folder: all ranks reach the same state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dicedist.algorithm.parts import Hosted, Part
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
    """The state from which a run continues."""

    plan: Plan
    done: int  # steps
    validated: int  # steps at the last validation
    records: dict[str, Any] | None  # the saved state of the run's records
    sees_folder: bool  # this rank sees rank 0's folder of the run


def begin_or_resume(job: Job, world: World, hosted: Hosted, paths: Trajectories, teacher: Teacher | None) -> State:
    """Restore the run in the folder, or load pretrained weights for a new run. All ranks call this.

    The folder changes only when every rank has its state, so a refusal leaves the run unchanged.
    """
    run, digest, plan, note = job.run, job.source.data_digest, job.plan, {}
    begins = resume.find(run, job.config, plan, digest, warn, job.pretrained.digests) if world.reports else None
    if begins is not None:
        found, plan = begins.checkpoint, begins.plan
        note = {
            "step": found.step if found else None,
            "files": [*found.files] if found else [],
            "data": digest,
            "mark": resume.leave_mark(run),
            "weights": plan.weights_sha256,
            "teacher": plan.teacher_sha256,
        }
    from_rank_0 = world.control.broadcast(note)
    if from_rank_0["data"] != digest:
        raise ValueError(f"the {job.source.kind} on {world.host} are not those of rank 0: give all nodes the same data")
    if teacher is not None and from_rank_0["teacher"] != plan.teacher_sha256:
        raise ValueError(f"the teacher on {world.host} is not that of rank 0: give all nodes the same run")
    sees_folder = resume.sees(run, from_rank_0["mark"])
    if from_rank_0["step"] is None:
        job.pretrained.load(hosted, from_rank_0["weights"], world.host)
        state = State(plan, 0, 0, None, sees_folder)
    else:
        paths.expect(from_rank_0["files"])
        about = restore(job, world, hosted, [*hosted.parts, *paths.parts], from_rank_0["step"], sees_folder)
        state = State(plan, from_rank_0["step"], about["validated"], about["records"], sees_folder)
    world.control.barrier()
    if begins is not None:
        resume.commit(run, job.config, begins, warn)
        environment.note(run, job.placement.parts, digest)
    return state


def restore(
    job: Job, world: World, hosted: Hosted, parts: Sequence[Part], step: int, sees_folder: bool
) -> dict[str, Any]:
    """Load the parts of this rank. Return the rest of the checkpoint. All ranks call this."""
    names = [part.name for part in parts]
    saved, lacking = checkpoint.path_of(job.run.checkpoints, step), [] if sees_folder else names
    with reachable(saved, lacking, world.control, world.transfer) as path:
        found = checkpoint.read(path, names, expected=step)
        checkpoint.restore(found, parts)
    if hosted.learners:  # all parts of a rank share one loss scale, saved under the name of each
        hosted.precision.scaler.load_state_dict(found.about["loss_scales"][hosted.learners[0].name])
    return found.about
