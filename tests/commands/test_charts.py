"""Charts and tables: marks at the places of their values, and labels that fit."""

from __future__ import annotations

import io
import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from jaxspec.console.tables import Table
from jaxspec.measuring import charts
from jaxspec.measuring.charts import Curve, bars, curves

LONG = "layerskip --exit-layer 3 --stop-rule confidence --gamma 0.5"


def texts(chart: charts.Chart) -> list[tuple[float, float, str]]:
    """Position and content of each text."""
    found = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)<', str(chart))
    return [(float(x), float(y), text) for x, y, text in found]


def test_bars_are_as_long_as_their_values_and_have_intervals():
    chart = bars(
        {"x": 1.0, "y": 2.0, "z": None},
        {"y": (1.5, 2.5)},
        title="code",
        label="speed",
        line=1.0,
    )
    drawn = str(chart)
    ElementTree.fromstring(drawn)
    widths = [float(width) for width in re.findall(r'<rect[^>]*width="([\d.]+)"', drawn)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert drawn.count('class="ink"') == drawn.count('class="line"') == 1
    low, high = map(float, re.search(r'd="M([\d.]+) [\d.]+H([\d.]+)M', drawn).groups())
    left = float(re.search(r'<rect x="([\d.]+)"', drawn)[1])
    assert (low - left, high - left) == pytest.approx((1.5 * widths[0], 2.5 * widths[0]), rel=0.01)
    assert {"1.00", "2.00"} <= {text for _, _, text in texts(chart)}


def test_long_labels_wrap_and_stay_in_their_column():
    chart = bars({LONG: 1.0, "ngram": 2.0}, {}, title="a", label="b")
    label = [(y, text) for x, y, text in texts(chart) if x == 0 and text != "a"]
    assert " ".join(text for _, text in label[:-1]) == LONG
    assert max(len(text) for _, text in label) <= 17
    assert all(later - earlier >= 15 for (earlier, _), (later, _) in itertools.pairwise(label))
    assert max(x for x, _, _ in texts(chart)) < chart.width


def test_a_curve_is_interrupted_where_there_is_no_value():
    drawn = str(curves({"a": Curve([(1, 1.0), (2, math.nan), (3, 2.0), (4, 3.0)])}, x="x", y="y", title="t"))
    ElementTree.fromstring(drawn)
    assert (drawn.count("<polyline"), drawn.count("<circle")) == (2, 3)


HOSTILE = "a\x00\x1b[2J\x0b\u202e\ud800\ufffe<b>"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_have_no_mark(wrong):
    chart = bars({"x": 1.0, "y": wrong, "z": 1.0}, {"x": (0.5, wrong)}, title="t", label="y", line=wrong)
    assert str(chart) == str(bars({"x": 1.0, "y": None, "z": 1.0}, {}, title="t", label="y"))
    points = [(1, 1.0), (2, 2.0), (wrong, 3.0), (4, wrong), (5, 2.0)]
    drawn = str(curves({"a": Curve(points)}, x="x", y="y", title="t", most=wrong))
    ElementTree.fromstring(drawn)
    assert (drawn.count("<polyline"), drawn.count("<circle")) == (2, 3)


def test_labels_with_control_characters_are_escaped():
    for chart in (
        bars({HOSTILE: 1.0}, {}, title=HOSTILE, label=HOSTILE),
        curves({HOSTILE: Curve([(1, 1.0)]), "b": Curve([])}, x=HOSTILE, y=HOSTILE, title=HOSTILE),
    ):
        ElementTree.fromstring(str(chart).encode())
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]|<b>", str(chart))


@pytest.mark.parametrize("log", [False, True])
def test_higher_values_are_higher(log):
    drawn = str(curves({"a": Curve([(1, 0.2), (2, 0.5), (3, 5.0)])}, x="x", y="y", title="t", log=log))
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights == sorted(heights, reverse=True)
    assert (heights[0] - heights[1] > 20) == log


def test_the_legend_has_as_many_lines_as_necessary():
    names = [f"a rather long name {number}" for number in range(7)]
    chart = curves({name: Curve([(1, 1.0)]) for name in names}, x="x", y="y", title="t")
    where = {text: (x, y) for x, y, text in texts(chart) if text in names}
    assert list(where) == names
    assert len({y for _, y in where.values()}) > 2
    assert all(x + 6 * len(names[0]) < chart.width for x, _ in where.values())


def test_a_table_is_as_wide_as_the_terminal_and_complete():
    rows = [["code (10)"], [LONG, *(["1234.5"] * 7)]]
    printed = io.StringIO()
    Console(file=printed, width=80).print(Table(["run", *["heading\nof two"] * 7], rows))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert printed.getvalue().count("1234.5") == 7
    assert "…" not in printed.getvalue()
