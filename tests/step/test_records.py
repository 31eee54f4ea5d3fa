"""The contract of record names: what training writes is what the report reads."""

import json
from collections import Counter

import pytest

from dicedist.algorithm import spans
from dicedist.benchmarks.step import SPANS
from dicedist.reporting import adversary, dynamics
from dicedist.runs.run import Run
from tests.support.tiny import records_of, train


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The names in the records of a short run with DICE."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder)
    records = records_of(folder / "tiny")
    return records, {name for record in records for name in record}


def test_every_figure_of_the_report_finds_its_records(recorded):
    _, written = recorded
    courses = (*dynamics.MAIN, *dynamics.OTHER_DIVERSITY, *dynamics.SCHEDULES, adversary.LOSS, adversary.ACCURACY)
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
