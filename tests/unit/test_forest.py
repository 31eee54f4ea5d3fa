"""Intervals as rows of bars: what is drawn stands where the numbers say."""

import re

import pytest

from dicedist.metrics.statistics import Interval
from dicedist.reporting.forest import Bar, forest

BEFORE = Bar(Interval(2.0, 0.5, 1.0, 3.0, 5), 1, "ceb before T +2.00", hollow=True)
AFTER = Bar(Interval(-1.0, 0.5, -1.5, -0.5, 5), 1, "ceb after T −1.00")
ONE_SEED = Bar(Interval(4.0, None, None, None, 1), 2, "dice +4.00")


def drawn(picture):
    """The bars' ends and the marks, in the picture's coordinates, and the places of the ticks on the axis."""
    bars = re.findall(r'class="line thin [^"]*" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', picture)
    marks = re.findall(r'class="(mark|hollow) [^"]*" transform="translate\(([\d.]+) ([\d.]+)\)"', picture)
    ticks = re.findall(r'class="tick middle" x="([\d.]+)" y="[\d.]+">([^<]+)<', picture)
    places = {float(text.replace("−", "-")): float(x) for x, text in ticks}
    return [tuple(map(float, bar)) for bar in bars], [(kind, float(x), float(y)) for kind, x, y in marks], places


def test_bars_and_marks_stand_at_their_values():
    picture = forest("Difference", "difference, %", {"ceb": [BEFORE, AFTER], "dice": [ONE_SEED]}, zero=True).svg
    bars, marks, ticks = drawn(picture)
    scale = (ticks[4.0] - ticks[0.0]) / 4
    found = [tuple((x - ticks[0.0]) / scale for x in (bar[0], bar[2])) for bar in bars]
    assert found == [pytest.approx(ends, abs=0.01) for ends in ((1, 3), (-1.5, -0.5), (4, 4))]
    assert [(x - ticks[0.0]) / scale for _, x, _ in marks] == pytest.approx([2, -1, 4], abs=0.01)
    assert [kind for kind, _, _ in marks] == ["hollow", "mark", "mark"]
    heights = [y for _, _, y in marks]
    assert heights == sorted(heights) and heights == [bar[1] for bar in bars], "the first row is the topmost"
    assert f'class="reference" d="M{ticks[0.0]:.1f}' in picture
    assert all(bar.tip in picture for bar in (BEFORE, AFTER, ONE_SEED)) and ">dice<" in picture


def test_zero_belongs_to_the_axis_of_differences_alone():
    high = {"ind": [Bar(Interval(70.0, 1.0, 68.0, 72.0, 5), 0, "ind 70.0")]}
    of_scores = forest("AUROC", "AUROC, %", high).svg
    assert 0.0 not in drawn(of_scores)[2] and 'class="reference"' not in of_scores
    assert 0.0 in drawn(forest("Difference", "difference, %", high, zero=True).svg)[2]
