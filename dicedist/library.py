"""Training from Python: `fit` starts the ranks of a training and returns its `Run`; `score` measures any logits."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from numpy.typing import ArrayLike
from torch import Tensor

from dicedist import metrics
from dicedist.cluster.process import EXIT_STOPPED, EXIT_UNSENT, EXIT_USER
from dicedist.config import compose_config
from dicedist.config.schema import AVERAGES
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.loading import load_ensemble
from dicedist.evaluation.logits import warn_of_probabilities
from dicedist.evaluation.tables import show
from dicedist.reporting.page import figures, write_own_report, write_report
from dicedist.reporting.svg import Figure
from dicedist.runs import run as folder
from dicedist.runs.run import whole_records

PREFIX = "dicedist: "  # of the line in which a command says why it ended


class Run(folder.Run):
    """A run's folder: what it was asked to do, its records, results, checkpoints and page.

    `Run.open("runs/NAME")` opens one, `fit` returns one.

    Examples:
        >>> run = Run.open("runs/tiny")
        >>> run.records()[-1]["step"], len(run.ensemble())
        (2, 2)
    """

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, ready for pandas.DataFrame: losses, schedules and, by epoch, validation."""
        return whole_records(self.records_file)

    @property
    def results(self) -> dict[str, Any]:
        """What evaluation measured, as in evaluation.json: `results["ensemble"]["accuracy"]` and so on."""
        found = self.result()
        if found is None:
            raise ValueError(f"{self} is not evaluated yet: finish its training, or run dicedist evaluate run={self}")
        return found

    def ensemble(self, **settings: Any) -> Ensemble:
        """The ensemble of the last checkpoint, to predict with; settings as in `Ensemble.load`."""
        return load_ensemble(self, **settings)

    def figures(self) -> dict[str, Figure]:
        """The figures of the page by name: a notebook shows them, and `figure.svg` is the text of a file."""
        return figures([self])

    def report(self, output: str | Path | None = None) -> Path:
        """Writes the page of what has been recorded so far, by default the run's report.html, and returns its path."""
        if output is None:
            write_own_report(self)
            return self.report_file
        write_report([self], Path(output))
        return Path(output)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        found = self.result()
        table = show(found) if found is not None else "not evaluated yet"
        return Markup("<b>{}</b><pre>{}</pre>").format(str(self), table)


def fit(*overrides: str, nproc: int | str = 1) -> Run:
    """Trains as `dicedist train` does, in processes of its own, and returns the run; what they print is printed.

    overrides: keys of the command line, as in fit("experiment=quickstart", "ensemble.size=3"). nproc: how many
    processes to start, or "auto" for one on each GPU. The same call continues a run that was stopped. Ctrl-C (in a
    notebook: interrupt) stops as in a terminal: a checkpoint is saved first, a second one ends at once.

    Examples:
        >>> settings = "data=shapes", "data.train_limit=32", "batch_size=16", "network=resnet8", "ensemble.size=2"
        >>> run = fit(*settings, "max_steps=2", "tracking=none", "run.name=tiny")  # doctest: +ELLIPSIS
        rank  device  ...
        >>> run
        Run('runs/tiny')
    """
    if "RANK" in os.environ:
        raise ValueError("fit starts the ranks itself: call it in a process that torchrun has not started")
    config = compose_config(overrides)
    command = [sys.executable, "-m", "dicedist", "train", *overrides, "--nproc", str(nproc)]
    if not sys.executable:
        raise ValueError("this Python does not know its own program, so no process can be started: run dicedist train")
    # In a session of its own, so that Ctrl-C in a terminal reaches it once, from here, as it does from a notebook.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    last, interrupted = shown(process)
    code = process.wait()
    if interrupted:
        raise KeyboardInterrupt(last)
    if code == EXIT_USER:
        raise ValueError(last)
    if code == EXIT_STOPPED:
        raise RuntimeError(f"{last}: the same call continues the run")
    if code not in (0, EXIT_UNSENT):
        raise RuntimeError(last or f"training ended with exit code {code}")
    return Run.of(config)


def shown(process: "subprocess.Popen[str]") -> tuple[str, bool]:
    """Prints what the process prints until it ends: the last reason that it gave, and whether Ctrl-C was pressed."""
    last, interrupted = "", False
    assert process.stdout is not None
    while True:
        try:
            line = process.stdout.readline()
            if not line:
                return last, interrupted
            print(line, end="", flush=True)
            last = line.removeprefix(PREFIX).strip() if line.startswith(PREFIX) else last
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)


def score(
    logits: ArrayLike | Tensor, labels: ArrayLike | Tensor, average: str = "logits", folds: int = 1
) -> dict[str, Any]:
    """Every measure that needs only logits [M, N, K] and labels [N], for anyone's ensemble.

    Accuracy, likelihood, calibration before and after temperature scaling, uncertainty, diversity, by class and by
    size. average: of "logits" or "probabilities". folds: how often the halves for the temperature are drawn anew.

    Examples:
        >>> logits = [[[3.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [1.5, 0.0]]]  # two members, two inputs, two classes
        >>> score(logits, [0, 1])["ensemble"]["accuracy"]
        0.5
    """
    if average not in AVERAGES:
        raise ValueError(f"average={average}: write {' or '.join(AVERAGES)}")
    try:
        given = [values if isinstance(values, Tensor) else torch.as_tensor(values) for values in (logits, labels)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"logits [M, N, K] and labels [N] must be numbers ({error})") from error
    if given[1].is_floating_point() or given[1].dtype == torch.bool:
        raise ValueError(f"labels are {given[1].dtype}: give whole numbers from 0")
    warn_of_probabilities(given[0])
    return metrics.full_measures(given[0].float(), given[1].long(), average, folds)
