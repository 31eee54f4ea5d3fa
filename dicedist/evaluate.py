"""Evaluate an ensemble: accuracy, calibration, uncertainty, diversity, redundancy, OOD detection.

Examples:
    python -m dicedist.evaluate run=runs/NAME                          a run, finished or stopped
    python -m dicedist.evaluate run=runs/NAME members=[0,2]            some of its members
    python -m dicedist.evaluate run=runs/NAME average=probabilities folds=5
    python -m dicedist.evaluate run=runs/NAME estimator=fresh          redundancy by a new estimator, to compare runs
    python -m dicedist.evaluate run=runs/NAME ood.sets.mine=photos/    another OOD set; ood.sets.mine=none drops it
    python -m dicedist.evaluate logits=FILE.npz                        any ensemble: logits [M, N, K] and labels [N],
                                                                       optionally val_logits and val_labels
    python -m dicedist.evaluate --nproc 4 run=runs/NAME                members spread over 4 processes, or auto
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dicedist.cluster.process import command, tune_malloc
from dicedist.cluster.spread import spread
from dicedist.config import compose_request, show_help
from dicedist.config.requests import EvaluateRequest


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "evaluate", EvaluateRequest)
        return
    arguments = spread("evaluate", arguments, partial(num_members, arguments))
    request = compose_request("evaluate", arguments, EvaluateRequest)
    if (request.run is None) == (request.logits is None):
        raise ValueError("write run=runs/NAME, or logits=FILE.npz")
    # Not above: importing torch takes seconds.
    from dicedist.evaluation.logits import evaluate_logits
    from dicedist.evaluation.saved import evaluate_run
    from dicedist.evaluation.tables import show
    from dicedist.reporting.page import write_own_report
    from dicedist.runs.run import Run
    from dicedist.tracking.mirroring import refresh

    tune_malloc()
    if request.run is None:
        assert request.logits is not None
        results, result = evaluate_logits(Path(request.logits), request)
        print(f"{show(result)}\n\ndone: {results.result_file}")
        return
    measured = Run.open(request.run)
    where, found = evaluate_run(measured, request)
    if found is None:
        return  # another rank reports
    print(f"{show(found)}\n\nof the members {found['member_ids']} after step {found['step']} of {measured}")
    if where is measured:
        write_own_report(measured)
        refresh(measured)
    print(f"done: {where.report_file if where is measured else where.result_file}")


def num_members(arguments: Sequence[str]) -> int:
    """Count the members of the run: more processes would have nothing to read."""
    from dicedist.runs.run import Run

    named = [word.removeprefix("run=") for word in arguments if word.startswith("run=")]
    return Run.open(named[-1]).plan().num_predictors if named else 1


if __name__ == "__main__":
    command(run)
