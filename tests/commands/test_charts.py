"""Charts: the values and names that a page shows; tables: complete in a narrow terminal."""

from __future__ import annotations

import io
import math
import re
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from jaxspec.console.tables import Table
from jaxspec.host.extras import MissingExtra
from jaxspec.measuring.charts import Chart, bars, beside, curves

LONG = "layerskip --exit-layer 3 --stop-rule confidence --gamma 0.5"
HOSTILE = "a\x00\x1b[2J\x0b\u202e\ud800\ufffe<b>$x"


def texts(chart: Chart) -> list[str]:
    """The texts of a chart, in the order of the file."""
    elements = ElementTree.fromstring(str(chart).encode()).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in elements]


def test_bars_have_names_and_values():
    chart = bars(
        {LONG: 1.0, "ngram": 2.0, "none": None, "n": math.nan}, title="code", label="speed", line=1.0
    )
    found = texts(chart)
    assert {"1.00", "2.00", "ngram", "none", "code", "speed"} <= {*found}
    assert "nan" not in found
    assert max(map(len, found)) <= 24
    assert LONG in " ".join(found)
    assert str(chart) == chart._repr_svg_() == str(chart)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_curve_is_interrupted_where_there_is_no_value(wrong, log):
    points = [(1, 1.0), (2, wrong), (3, 2.0), (4, 3.0), (5, 2.0)]
    chart = curves({"a": points, "empty": []}, x="step", y="loss", title="t", log=log)
    assert {"a", "empty", "step", "loss", "t"} <= {*texts(chart)}
    assert len(re.findall(r"<use [^>]*fill: #0072b2", str(chart))) == 5  # with that of the legend
    assert len({*texts(beside(chart, curves({"b": points}, x="x", y="y", title="u")))} & {"t", "u"}) == 2


def test_labels_with_control_characters_are_escaped():
    for chart in (
        bars({HOSTILE: 1.0}, title=HOSTILE, label=HOSTILE),
        curves({HOSTILE: [(1, 1.0)], "b": []}, x=HOSTILE, y=HOSTILE, title=HOSTILE),
    ):
        found = [
            text for text in texts(chart) if "a\\x00\\x1b[2J\\x0b\\u202e\\ud800" in text and "<b>$x" in text
        ]
        assert len(found) >= 2


def test_a_chart_without_matplotlib_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtra, match=r"needs matplotlib, of the extra `charts`: pip install '\.\[charts\]'"
    ):
        str(bars({"a": 1.0}, title="t", label="l"))


def test_a_table_is_as_wide_as_the_terminal_and_complete():
    rows = [["code (10)"], [LONG, *(["1234.5"] * 7)]]
    printed = io.StringIO()
    Console(file=printed, width=80).print(Table(["run", *["heading\nof two"] * 7], rows))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert printed.getvalue().count("1234.5") == 7
    assert "…" not in printed.getvalue()
