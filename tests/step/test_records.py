"""The contract of record names: what training writes is what the report reads."""

import json
from collections import Counter

import pytest
import torch

from dicedist.algorithm import spans
from dicedist.algorithm.build import build_hosted
from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.objectives import Method
from dicedist.benchmarks.step import SPANS
from dicedist.data import sources
from dicedist.data.sources import some_of_each
from dicedist.evaluation import redundancy
from dicedist.evaluation.readings import read
from dicedist.reporting import adversary, dynamics
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from tests.support.tiny import CPU, records_of, train


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
    courses = (*dynamics.MAIN, *dynamics.OTHER_DIVERSITY, *dynamics.TRAINED, *dynamics.SCHEDULES, *of_w)
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
    """At the last step it is what one draw of the final evaluation's estimate gives, from the saved w and features."""
    train(tmp_path, "max_steps=4")
    run = Run(tmp_path / "tiny")
    config, source = run.config(), sources.load(run.config().data)
    method, found = Method(config.method), run.checkpoint()
    hosted = build_hosted(config, method, [0, 1], False, 2, source.num_classes, CPU, samples=True)
    checkpoint.restore(found, hosted.parts)
    rows = some_of_each(source.val.labels_N, redundancy.READ_BY_W)
    readings = read(hosted, source.val, source, 100, CPU).values()
    features = Features(
        *(torch.stack([getattr(r, name)[rows] for r in readings]) for name in ("means_ND", "scales_ND"))
    )
    w = redundancy.load_discriminator(config, method, source.num_classes, found)
    expected = redundancy.estimate(w, features, source.val.labels_N[rows], w.pairs_P2, num_draws=1).nats_P[0]
    (last,) = [record for record in records_of(run.directory) if "val/redundancy_nats" in record]
    assert last["val/redundancy_nats"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
