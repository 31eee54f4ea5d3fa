"""Resuming: find the run in a folder, and refuse to continue it with another config. A run is never overwritten."""

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dicedist.cluster.placement import REPORTER
from dicedist.cluster.process import attempt, this_rank
from dicedist.config import Config, Scope, changed_keys, flatten, parse_config
from dicedist.config.checks import CHANGEABLE
from dicedist.config.plan import Plan
from dicedist.runs import checkpoint
from dicedist.runs.bucket import Bucket
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.files import open_own, read_plain, replace_text
from dicedist.runs.run import CONFIG, LARGEST_CONFIG, LARGEST_RECORDS, PLAN, Run

RATES = "schedules.learning_rate."
FIXED = {Scope.RESULT, Scope.IDENTITY}  # keys of these scopes must not change


class Found(NamedTuple):
    """The state from which a run starts or resumes."""

    checkpoint: Checkpoint | None  # None: a new run
    plan: Plan
    changes: list[str]  # changed keys that resume.allow names


class Saved(NamedTuple):
    """The config and the plan of an existing run."""

    config: Config
    plan: Plan


def saved_in(run: Run, config: Config) -> Saved | None:
    """Return the config and the plan of the run that this command continues; None if there is none."""
    continues = config.resume != "never" and run.config_file.is_file()
    return Saved(run.config(), run.plan()) if continues else None


def saved_anywhere(run: Run, config: Config) -> Saved | None:
    """Return `saved_in`, or the config and the plan in the bucket. Called on rank 0."""
    if run.config_file.exists() or config.resume == "never" or this_rank() != REPORTER:
        return saved_in(run, config)
    bucket = Bucket.of(config)
    return saved_in_bucket(bucket) if bucket is not None else None


def saved_in_bucket(bucket: Bucket) -> Saved | None:
    """Return the config and the plan of the run in a bucket; None if the bucket is empty."""
    try:
        texts = [bucket.read(name, LARGEST_CONFIG) for name in (CONFIG, PLAN)]
    except OSError as error:
        raise ValueError(str(error)) from error
    config, plan = (text.decode(errors="replace") if text is not None else None for text in texts)
    if config is None:
        return None
    parsed = parse_config(config, Path(f"{bucket}/{CONFIG}"))
    return Saved(parsed, Plan.of_older(parsed) if plan is None else Plan.parse(plan, f"{bucket}/{PLAN}"))


def ensemble_size(config: Config) -> int | str:
    """Return the number of members. A resumed run keeps its size on any number of ranks, unless the command sets it."""
    found = saved_anywhere(Run.of(config), config) if config.ensemble.size == "auto" else None
    return found.plan.num_members if found else config.ensemble.size


def as_begun(config: Config) -> Config:
    """Return the config with the validation set and the knots of log(beta) of the run that it continues.

    Earlier versions had no `auto`: they held out a fixed share, did not limit the validation set, and compressed by the
    knots of the paper.
    """
    data = config.data
    keys = [key for key in ("val_limit", "val_fraction") if getattr(data, key) == "auto"]
    if data.train_limit is None and "val_limit" in keys:
        keys.remove("val_limit")
    is_auto = config.bottleneck.log_beta == "auto"
    found = saved_anywhere(Run.of(config), config) if keys or is_auto else None
    if found is None:
        return config
    before = {key: getattr(found.config.data, key) for key in keys}
    bottleneck = found.config.bottleneck if is_auto else config.bottleneck
    return replace(config, data=replace(data, **before), bottleneck=bottleneck)


def is_new_run(run: Run, config: Config) -> bool:
    """Return whether there is surely no checkpoint to resume from. False if only the bucket can answer."""
    return config.run.remote is None and not checkpoint.saved(run.checkpoints)


def find(
    run: Run,
    config: Config,
    plan: Plan,
    data_digest: str,
    warn: Callable[[str], None],
    digests: Callable[[], list[str] | None] = lambda: None,
) -> Found:
    """Find the state to start from, on rank 0, which holds the lock. Refuse another run. Write nothing: `commit` does.

    digests: of the pretrained weights, for the plan; called only for a new run.
    """
    saved = checkpoint.saved(run.checkpoints)
    begun = bool(saved) or has_records(run)
    if config.resume == "never" and begun and not restarted(run):
        raise ValueError(
            f"{run} holds a run already: choose another run.name, or leave out resume=never to continue it"
        )
    found = chosen_checkpoint(run, config, warn)
    if found is None and (saved or config.resume == "must"):
        reason = f"{run} has no intact checkpoint{checkpoint.what_is_wrong(run.checkpoints)}"
        must = config.resume == "must"
        raise ValueError(f"resume=must, but {reason}" if must else f"{reason}; choose another run.name")
    if found is None and attempt() > 0 and not run.launch_file.exists():
        warn(f"{run} is not here, though this launch has begun it: share run.dir between nodes, or set run.remote")
    plan = replace(plan, weights_sha256=digests() if found is None else run.plan().weights_sha256)
    changes: list[str] = []
    if begun:
        refuse_another_teacher(run, config, plan)
        changes, before = refuse_another(run, config, plan, found), run.config().run.remote
        if before and not config.run.remote:
            warn(f"{run} was also kept in {before}, and is not now: add run.remote={before}")
    if found is not None and found.about["data"] != data_digest:
        raise ValueError(f"the images are not those that {run} was trained on: choose another run.name")
    return Found(found, plan, changes)


def commit(run: Run, config: Config, found: Found, warn: Callable[[str], None]) -> None:
    """Write config and plan, on rank 0 after every rank has its state. From here on the folder holds this run.

    A run that goes back to an earlier step (resume.step) removes the later checkpoints before the config changes.
    Results that the config no longer produces are moved away.
    """
    checkpoint.discard(run.checkpoints)
    last = found.checkpoint
    if last is not None and config.resuming.step == last.step:
        checkpoint.forget_after(run.checkpoints, last.step)
    if last is not None:
        mend_records(run, last, warn)
    if run.result() is not None and changed_keys(flatten(run.config()), flatten(config), {Scope.MEASURE}):
        run.set_results_aside()
    if found.changes:
        with open_own(run.changes_file, "a") as file:
            file.write(json.dumps({"after_step": last.step if last else 0, "changed": found.changes}) + "\n")
    run.save_plan(found.plan)
    run.save_config(config)
    replace_text(run.launch_file, this_launch())


def chosen_checkpoint(run: Run, config: Config, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint of resume.step, or the newest intact one."""
    step = config.resuming.step
    if step is None or restarted(run):
        return run.newest_checkpoint(lambda text: warn(f"{text}; the checkpoint before it is tried"))
    known = [checkpoint.step_of(path) for path in checkpoint.saved(run.checkpoints)]
    if step not in known:
        raise ValueError(
            f"resume.step={step}: {run} has checkpoints of the steps {', '.join(map(str, known)) or 'none'}"
        )
    return checkpoint.read(checkpoint.path_of(run.checkpoints, step))


def mend_records(run: Run, found: Checkpoint, warn: Callable[[str], None]) -> None:
    """Restore metrics.jsonl from the copy in the checkpoint, if it does not begin with that copy."""
    lines, copy = int(found.about["records"]["lines"]), checkpoint.unpack_records(found)
    held = read_plain(run.records_file, LARGEST_RECORDS) if run.records_file.exists() else b""
    whole = held.splitlines(keepends=True)[:lines]
    if copy is None:
        if len(whole) < lines:
            warn(f"{run.records_file} lacks {lines - len(whole)} of the {lines} records up to step {found.step}")
    elif b"".join(whole) != copy:
        warn(f"{run.records_file} was removed, shortened or changed: it is mended from the checkpoint")
        replace_text(run.records_file, copy.decode())


def identity(config: Config, plan: Plan) -> dict[str, Any]:
    """Return the values that identify a run in the manifests of its checkpoints."""
    return {
        "name": config.run.name, "seed": config.seed, "data": config.data.name, "method": config.method.name,
        "members": plan.num_members,
    }  # fmt: skip


def this_launch() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def leave_mark(run: Run) -> str:
    """Write a mark into the folder, on rank 0. Other ranks look for it with `sees`."""
    mark = uuid.uuid4().hex
    replace_text(run.mark_file, mark)
    return mark


def sees(run: Run, mark: str) -> bool:
    """Return whether this rank sees the folder of rank 0, which holds the mark."""
    try:
        return read_plain(run.mark_file, len(mark)) == mark.encode()
    except (OSError, ValueError):
        return False


def restarted(run: Run) -> bool:
    """Return whether this is a restart of the launch that began the run. Restarts continue the run for any `resume`."""
    # The id alone may be the same for every launch.
    return attempt() > 0 and run.launch_file.is_file() and run.launch_file.read_text() == this_launch() != ""


def has_records(run: Run) -> bool:
    return run.records_file.exists() and run.records_file.stat().st_size > 0


def refuse_another_teacher(run: Run, config: Config, plan: Plan) -> None:
    """Refuse a teacher with other weights. Its folder may have moved."""
    before, now = run.plan().teacher_sha256, plan.teacher_sha256
    if before and now and before != now:
        raise ValueError(
            f"the ensemble in {config.teacher.run} is not the one that {run} has learned from so far: bring back its "
            "checkpoint, or choose another run.name"
        )


def refuse_another(run: Run, config: Config, plan: Plan, found: Checkpoint | None) -> list[str]:
    """Refuse changes of keys that make another run. Return the changes that resume.allow permits."""
    saved = run.config()
    allowed = refuse_changes(Saved(saved, run.plan()), Saved(config, plan), str(run))
    moves = saved.schedules.scale or saved.optimizer.schedule not in ("step", "constant")
    if saved.epochs != config.epochs and moves:
        raise ValueError(
            f"epochs: {saved.epochs} -> {config.epochs} would move every schedule of {run}, which has begun: choose "
            "another run.name (a run with schedules.scale=false and optimizer.schedule=step or constant may change its "
            "epochs, any run its max_steps)"
        )
    if found is not None and found.about.get("run", identity(config, plan)) != identity(config, plan):
        raise ValueError(f"{found.path} belongs to another run: {found.about['run']}")
    return allowed


def refuse_changes(saved: Saved, now: Saved, where: str) -> list[str]:
    """Refuse changes of keys that resume.allow does not name. Return the other changes."""
    changed = changed_keys(compared(saved), compared(now), FIXED)
    allowed = [line for line in changed if line.partition(":")[0] in now.config.resuming.allow]
    if refused := [line for line in changed if line not in allowed]:
        may_change = any(line.startswith(CHANGEABLE) for line in refused)
        hint = " (resume.allow=[optimizer.lr] changes such a key on purpose)" if may_change else ""
        raise ValueError(
            f"{where} was trained with another config ({'; '.join(refused)}): choose another run.name{hint}"
        )
    return allowed


def refuse_foreign(saved: Saved, config: Config, where: str, begun: bool) -> None:
    """Refuse another run before any file is copied between the bucket and the disk."""
    if begun and config.resume == "never" and not restarted(Run.of(config)):
        raise ValueError(f"{where} holds a run already: choose another run.name, or leave out resume=never")
    size, pairs = config.ensemble.size, config.redundancy.max_pairs
    asked = replace(
        saved.plan,
        num_members=saved.plan.num_members if isinstance(size, str) else size,
        max_pairs=saved.plan.max_pairs if isinstance(pairs, str) else pairs,
    )
    refuse_changes(saved, Saved(config, asked), where)


def compared(run: Saved) -> dict[str, Any]:
    """Return every key with its resolved value, but of the named learning rates only the chosen one.

    A later version may add other rates. `find` compares digests, and shapes follow from the data.
    """
    config, plan = run
    chosen = {f"{RATES}{name}" for name in (config.optimizer.lr, "paper")}  # a number scales the paper's rates
    flat = flatten(plan.resolve(config))
    known = {key: value for key, value in flat.items() if key in chosen or not key.startswith(RATES)}
    return known | dict.fromkeys(("network.inputs", "network.pixels", "network.sha256", "teacher.sha256"))
