"""Training from Python: `fit` trains an ensemble and returns its `Run`; `score` measures any logits."""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from markupsafe import Markup
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dicedist import metrics, trainer
from dicedist.algorithm.objectives import Objective
from dicedist.cluster.process import EXIT_STOPPED, EXIT_UNSENT, EXIT_USER
from dicedist.cluster.spread import number_of
from dicedist.config import Config, compose_config
from dicedist.config.literal import in_hydras_words
from dicedist.config.schema import AVERAGES
from dicedist.config.targets import LOCAL, hand_over, name_of, standing_for
from dicedist.data.given import Given
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.loading import load_ensemble
from dicedist.evaluation.logits import warn_of_probabilities
from dicedist.evaluation.tables import show
from dicedist.reporting.page import figures, write_own_report, write_report
from dicedist.reporting.svg import Figure
from dicedist.runs import run as folder
from dicedist.runs.run import whole_records

PREFIX = "dicedist: "  # begins the line with the reason why a command ended


class Run(folder.Run):
    """A run: its config, records, results, checkpoints and report.

    `Run.open("runs/NAME")` opens one, `fit` returns one.

    Examples:
        >>> run = Run.open("runs/tiny")
        >>> run.records()[-1]["step"], len(run.ensemble())
        (2, 2)
    """

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, ready for pandas.DataFrame: losses, schedules and validation by epoch."""
        return whole_records(self.records_file)

    @property
    def results(self) -> dict[str, Any]:
        """The results in evaluation.json: `results["ensemble"]["accuracy"]` and so on."""
        found = self.result()
        if found is None:
            raise ValueError(f"{self} is not evaluated yet: finish its training, or run dicedist evaluate run={self}")
        return found

    def ensemble(self, **settings: Any) -> Ensemble:
        """Return the ensemble of the last checkpoint. settings: as in `Ensemble.load`."""
        with standing_for("network", settings.pop("model", None)):
            return load_ensemble(self, **settings)

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the report by name. Notebooks show them, and `figure.svg` is the text of a file."""
        return figures([self])

    def report(self, output: str | Path | None = None) -> Path:
        """Write a report of all records so far, by default to the run's report.html, and return its path."""
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


def fit(
    *overrides: str,
    model: str | Callable[[], nn.Module] | None = None,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    method: str | Objective | type[Objective] | None = None,
    size: int | None = None,
    epochs: int | None = None,
    nproc: int | str = 1,
    **keys: Any,
) -> Run:
    """Train an ensemble and return its run. The same call continues a run that was stopped.

    Settings are words of the command line, or your own objects:
    overrides: as in fit("experiment=quickstart", "ensemble.size=3"); keys: the same as **{"optimizer.lr": 0.01}.
    model: the name of a network, or a function that returns one member's network, which returns features [B, D].
    train, test: a Dataset of (input, class), a DataLoader, or arrays (inputs, classes); without `test` a fifth of
        `train` is the test set. val: the same, or the share of `train` to hold out.
    method: the name of a method, or a term of your own, which is added to cross-entropy.
    nproc: processes to start, or "auto" for one on each GPU.

    With objects, training runs in this process. With nproc > 1 the objects are sent to other processes, which must be
    able to import their code. With strings only, training runs in separate processes. Ctrl-C saves a checkpoint.

    Examples:
        >>> settings = "data=shapes", "data.train_limit=32", "batch_size=16", "network=resnet8", "ensemble.size=2"
        >>> run = fit(*settings, "max_steps=2", "tracking=none", "run.name=tiny")  # doctest: +ELLIPSIS
        dice on shapes: 2 x resnet8 (net), one process on cpu...
        >>> run
        Run('runs/tiny')
    """
    if "RANK" in os.environ:
        raise ValueError("fit starts the ranks itself: call it in a process that torchrun has not started")
    if strange := [value for value in overrides if not isinstance(value, str)]:
        kind = type(strange[0]).__name__
        raise ValueError(f"fit was given a {kind} without a name: write fit(model=..., train=..., test=...)")
    objects = Objects.of(model, train, val, test, method)
    numbers = {name: value for name, value in (("ensemble.size", size), ("epochs", epochs)) if value is not None}
    words = [*objects.words, *(f"{key}={in_hydras_words(value)}" for key, value in {**numbers, **keys}.items())]
    config = compose_config([*words, *overrides])
    if objects.things:
        train_objects(config, objects, nproc)
    else:
        train_in_processes([*words, *overrides], nproc)
    return Run.of(config)


@dataclass(frozen=True)
class Objects:
    """Objects that a caller of `fit` hands over, by name, and the overrides that name them in the config."""

    words: list[str]
    things: dict[str, Any]

    @classmethod
    def of(cls, model: Any, train: Any, val: Any, test: Any, method: Any) -> Self:
        if isinstance(model, nn.Module) or not (model is None or isinstance(model, str) or callable(model)):
            raise ValueError(
                f"model is a {type(model).__name__}: give a name, or a function that builds a new network for each "
                "member, as model=MyNetwork or model=lambda: MyNetwork(width=64)"
            )
        words, things = [], {}
        for group, given in (("network", model), ("method", method)):
            if isinstance(given, str):
                words.append(f"{group}={given}")
            elif given is not None:
                name = name_of(given)
                things[name] = given
                words += [f"{group}._target_={name}", f"{group}.trusted=true"]
        if model is not None and not isinstance(model, str):
            words.append(f"network.name={words[0].rpartition('.')[2].rpartition(':')[2]}")
            words.append("network.pretrained=null")  # the function has set the weights
        if method is not None and not isinstance(method, str):
            words.append("method=ind")
        if train is None:
            if val is not None or test is not None:
                raise ValueError("val= and test= come with train=: give the training set, too")
            return cls(words, things)
        is_share = isinstance(val, float)
        given = Given(train, None if is_share else val, test)
        things[f"{LOCAL}data"] = given
        words += ["data=own", f"data._target_={LOCAL}data", "data.trusted=true"]
        words += [f"data.val_fraction={val}"] if is_share else ["data.split=given"] if val is not None else []
        words += [f"data.size={side}"] if (side := given.side()) is not None else []
        return cls(words, things)

    def hand_over(self) -> None:
        for name, thing in self.things.items():
            hand_over(thing, name)


def train_objects(config: Config, objects: Objects, nproc: int | str) -> None:
    """Train in this process, or in processes that receive the objects."""
    processes = number_of(str(nproc), option="nproc")
    if processes == 1:
        objects.hand_over()
        trainer.train(config)
        return
    try:
        pickle.dumps(objects)
    except Exception as error:
        raise ValueError(
            f"nproc={nproc} needs objects whose code other processes can import ({error}): use 1"
        ) from error
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(as_rank, (processes, port, config, objects), processes)
    except torch.multiprocessing.ProcessRaisedException as error:
        kind, _, reason = str(error).strip().splitlines()[-1].partition(": ")
        raise (ValueError if kind == "ValueError" else RuntimeError)(reason or kind) from None


def as_rank(rank: int, processes: int, port: int, config: Config, objects: Objects) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    objects.hand_over()
    trainer.train(config)


def train_in_processes(overrides: Sequence[str], nproc: int | str) -> None:
    """Run `dicedist train`, and forward its output."""
    command = [sys.executable, "-m", "dicedist", "train", *overrides, "--nproc", str(nproc)]
    if not sys.executable:
        raise ValueError("this Python does not know its own program, so no process can be started: run dicedist train")
    # A new session, so that Ctrl-C in a terminal reaches the process once, from here, as it does in a notebook.
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


def shown(process: "subprocess.Popen[str]") -> tuple[str, bool]:
    """Forward the output of a process until it ends. Return its last message, and whether Ctrl-C was pressed."""
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
    """Return every measure that needs only logits [M, N, K] and labels [N], for any ensemble.

    The measures are accuracy, likelihood, calibration before and after temperature scaling, uncertainty, diversity,
    and accuracy by class and by size. average: "logits" or "probabilities". folds: number of random splits into
    halves for the temperature.

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
