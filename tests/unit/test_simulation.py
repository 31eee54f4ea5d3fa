"""The model of a step over nodes: its limits are known, and loopback agrees with it."""

import pytest

from dicedist.bench import simulated
from dicedist.benchmarks.overlap import Durations, seconds_a_step
from dicedist.benchmarks.simulation import Assumed, assumed, step_time
from dicedist.config import compose_config

TIMES = dict(forward=0.1, backward=0.2, gradient=0.02)


@pytest.fixture(scope="module")
def config():
    return compose_config([])


def test_without_links_only_compute_remains(config):
    times = Assumed(**TIMES, learn=0.1, latency=1e-12, latency_inside=1e-12, gbit_inside=1e12)
    for nodes in (1, 2, 5):
        found = step_time(config, times, 4, nodes, 1e12)
        assert found.step == pytest.approx(0.32, abs=1e-6) and found.waits_for == "members"


def test_w_sets_the_pace_when_it_compares_many_pairs(config):
    times = Assumed(**TIMES, learn=0.1)
    assert step_time(config, times, 4, 1, 10).waits_for == "members"
    found = step_time(config, times, 8, 1, 10)  # 28 pairs, not 6
    assert found.waits_for == "w" and found.step == pytest.approx(28 / 6 * 0.12, rel=1e-3)
    limited = compose_config(["redundancy.max_pairs=6"])
    assert step_time(limited, times, 8, 1, 10).waits_for == "members"


def test_bytes_that_leave_nodes_meet_at_the_link_of_w(config):
    times = Assumed(latency=1e-12)
    sent = 2 * 4 * 128 * 64 + 8
    one, other = (step_time(config, times, 4, nodes, 1.0).gather for nodes in (2, 5))
    assert one == pytest.approx(2 * 8e-9 * sent, rel=1e-3)  # two of the four members are elsewhere (3 + 2 ranks)
    assert other == pytest.approx(4 * 8e-9 * sent, rel=1e-3)


def test_loopback_agrees(config):
    """Except for the time of its own messages, on a machine that may be busy."""
    measured = seconds_a_step(config, 3, Durations(**TIMES, learn=0.1), num_steps=5, ranks_of_w=1)
    expected = step_time(config, Assumed(forward=0.1, backward=0.2, gradient=0.04, learn=0.2), 3, 1, 10).step
    assert 0.95 * expected < measured < 1.5 * expected


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("simulate.gbits=3", "simulate.gbits: there is no such key \\(did you mean gbit"),
        ("simulate.forward=soon", "simulate.forward=soon: write a number above 0"),
        ("simulate.members=2,0", "simulate.members=2,0: write numbers above 0"),
    ],
)
def test_bad_words_are_named(word, line):
    with pytest.raises(ValueError, match=line):
        assumed([word])


def test_rows_name_what_was_asked_for():
    rows = simulated(["--simulate", "simulate.members=4", "simulate.nodes=2", "simulate.gbit=25", "batch_size=256"])
    assert [(row["members"], row["nodes"], row["Gbit/s between"]) for row in rows] == [(4, 2, 25.0)]
