"""The output of training: the record names that the report reads, and the lines on the console."""

import fcntl
import json
import pty
import re
import struct
import sys
import termios
import threading
from collections import Counter
from itertools import chain

import pytest
import torch

from dicedist.algorithm import spans
from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.objectives import Method
from dicedist.benchmarks.step import SPANS
from dicedist.data import sources
from dicedist.data.sources import some_of_each
from dicedist.evaluation import redundancy
from dicedist.evaluation.about import described
from dicedist.evaluation.loading import describe, load_ensemble, load_shard
from dicedist.evaluation.readings import KEPT, Reader
from dicedist.evaluation.redundancy import DRAWS
from dicedist.reporting import adversary, dynamics
from dicedist.runs.run import Run
from dicedist.training.forecast import Rehearsal, seconds_to_go
from tests.support.tiny import build, records_of, train


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The names in the records of a short run with DICE."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder)
    records = records_of(folder / "tiny")
    return records, {name for record in records for name in record}


def test_every_figure_of_the_report_finds_its_records(recorded):
    _, written = recorded
    of_w = (adversary.LOSS, adversary.ACCURACY)
    courses = (*dynamics.MAIN, *chain(*dynamics.FOLDED.values()), *of_w)
    assert {course.record for course in courses} <= written


def test_schedules_are_those_of_the_last_step(recorded):
    records, _ = recorded
    scheduled = [record for record in records if "schedule/learning_rate" in record]
    assert [record["step"] for record in scheduled] == [4, 8, 12]
    assert [record["schedule/learning_rate"] for record in scheduled] == [0.1, 0.001, 0.0001]
    assert {record["schedule/delta"] for record in scheduled} == {0.1}
    assert all(record[f"train/member_{member}/gradient_norm"] > 0 for record in scheduled for member in (0, 1))


def test_a_method_records_the_schedules_that_it_follows(tmp_path):
    train(tmp_path, "method=ind", "max_steps=4")
    names = {name for record in records_of(tmp_path / "tiny") for name in record if name.startswith("schedule/")}
    assert names == {"schedule/learning_rate"}


@pytest.mark.parametrize(("method", "estimates"), [("dice", DRAWS * 200 / 16 / 4 / 2), ("ind", 0)])
def test_the_forecast_counts_validation_evaluation_and_the_estimate_of_redundancy(
    tmp_path, monkeypatch, method, estimates
):
    """12 steps with validation after 6 and 12; 200 images held out, 48 of training, 250 of the test, and w's."""
    monkeypatch.setattr(Rehearsal, "seconds", lambda rehearsal: (1.0, 0.01))
    trainer = build(tmp_path, f"method={method}")
    found = seconds_to_go(trainer.job, trainer.world, trainer.exchange, None, trainer.total_steps)
    images = 2 * (200 + 48) + 250 + (200 if method == "dice" else 0)
    assert found == pytest.approx(12 + estimates + 0.01 * images, abs=0.001)


def test_a_trace_names_the_spans_of_a_step(tmp_path):
    train(tmp_path, "profile=true")
    traced = json.loads(Run(tmp_path / "tiny").trace_file(0).read_text())["traceEvents"]
    names = Counter(event["name"] for event in traced if event.get("cat") == "user_annotation")
    assert {name: names[name] for name in SPANS if name != "wait"} == {name: 5 for name in SPANS if name != "wait"}
    assert spans.listener is None


def test_diversity_of_training_images_may_be_left_out(tmp_path):
    train(tmp_path, "max_steps=4", "evaluate.train_images=0")
    names = {name for record in records_of(tmp_path / "tiny") for name in record}
    assert "val/diversity/ratio_error" in names and not any(name.startswith("train_set/") for name in names)


def test_redundancy_of_held_out_features_is_that_of_the_same_w(tmp_path):
    """At the last step it is what one draw of the final evaluation's estimate gives, from the saved w and features.

    That w is an average over steps, so that the last of them, which may be a jump, weighs a tenth.
    """
    average = {}

    def follow(trainer, done):
        network = trainer.hosted.w.network
        if done == 4:
            network.second.weight.data += 100  # after the average was taken: w itself is not what is read
        for name, value in network.state_dict().items():
            average[name] = value.clone() if done == 1 else 0.9 * average[name] + 0.1 * value

    train(tmp_path, "max_steps=4", after_step=follow)
    average["second.weight"] -= 0.1 * 100
    run = Run(tmp_path / "tiny")
    config, source = run.config(), sources.load(run.config().data)
    found, method = run.checkpoint(), Method(config.method)
    about = describe(config, method, run.plan(), "tiny", 4, described(source))
    shard = load_shard(about, config, found, [0, 1], trusted=False)
    rows = some_of_each(source.val.labels_N, redundancy.READ_BY_W)
    (readings,) = Reader(shard, source).read(source.val, "images", KEPT, rows)
    features = Features(*(torch.stack([columns[name] for columns in readings.values()]) for name in KEPT))
    w = redundancy.saved_w(config, method, run.plan(), found, source.num_classes)
    exported = load_ensemble(run, tell=lambda text: None).w.state_dict()
    for name, value in average.items():
        torch.testing.assert_close(w.network.state_dict()[name], value, msg=name)
        torch.testing.assert_close(exported[name], value, msg=name)
    expected = redundancy.estimate(w, features, source.val.labels_N[rows], w.pairs_P2, num_draws=1).nats_P[0]
    (last,) = [record for record in records_of(run.directory) if "val/redundancy_nats" in record]
    assert last["val/redundancy_nats"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_piped_progress_tells_every_validation_and_the_end_once(tmp_path, capsys):
    train(tmp_path)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in told] == ["6/12", "12/12"], "validated steps, no line twice"
    assert all("val ens" in line for line in told)
    assert " left " in told[0] and " left " not in told[-1], "what follows the last step takes time too"
    train(tmp_path / "unvalidated", "data.split=full")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["12/12"]


def test_a_bar_on_a_terminal_is_one_line_that_is_cleared_in_the_end(tmp_path, monkeypatch):
    """Standard output is a real terminal of 40 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    seen = bytearray()

    def watch():
        try:
            while piece := reading.read(10_000):
                seen.extend(piece)
        except OSError:  # the terminal is closed
            return

    with open(master, "rb", buffering=0) as reading:
        watching = threading.Thread(target=watch)
        watching.start()
        with open(slave, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            trainer = build(tmp_path)
            trainer.tracker.begin()
            trainer.train()
            trainer.tracker.say("done")
        watching.join(10)
    drawn = seen.decode().split("\r\x1b[2K")
    bars = [text for text in drawn if "░" in text or "█" in text]
    steps = [re.search(r"[█░]+ (\S+ (?:images )?\d+/\d+)", text)[1] for text in bars]
    assert steps[0] == "step 0/12" and steps[-1] == "step 12/12" and "validation images 0/200" in steps
    assert all(len(text) < 40 and "\n" not in text for text in bars), "a line that wraps cannot be cleared"
    assert drawn[-1] == "done\r\n" and drawn.index("done\r\n") > drawn.index(bars[-1])
