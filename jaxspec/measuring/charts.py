"""Bars and curves as SVG for files, pages and notebooks, drawn by matplotlib and legible on light and dark pages."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.console.tables import wrapped
from jaxspec.console.terminal import without_controls
from jaxspec.host.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguishable by colour-blind readers (Okabe and Ito); the first, grey, is for plain decoding.
COLOURS = ("#8a8a8a", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
_INK = "#7f7f7f"  # as far from white as from the dark background of pages
_WIDTH, _PER_ROW = 4.6, 2  # inches of a panel; panels beside each other
_MAX_DOTS = 40
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.fontsize": 8,
    # Text stays text, and equal charts are equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxspec",
}
Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Panels beside each other; `str` returns the `svg` element of them all, and a notebook shows it.

    Attributes:
      panels: the height of each panel in inches, and the function that draws it.
    """

    panels: tuple[tuple[float, Callable[[Axes], None]], ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        require("charts", "matplotlib")
        import matplotlib
        from matplotlib.figure import Figure

        columns = min(len(self.panels), _PER_ROW)
        rows = -(-len(self.panels) // columns)
        written = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            size = _WIDTH * columns, rows * max(height for height, _ in self.panels)
            figure = Figure(size, layout="constrained")
            for number, (_, draw) in enumerate(self.panels, 1):
                draw(figure.add_subplot(rows, columns, number))
            figure.savefig(written, format="svg", metadata={"Date": None})
        return written.getvalue()[written.getvalue().index("<svg") :]

    def _repr_svg_(self) -> str:
        return str(self)


def bars(values: Mapping[str, float | None], *, title: str, label: str, line: float | None = None) -> Chart:
    """Horizontal bars with their values.

    Args:
      values: by name; no bar for None or a value that is not finite.
      title: title of the chart.
      label: meaning of the values.
      line: value of a vertical line across the chart.
    """
    found = [None if value is None or not math.isfinite(value) else value for value in values.values()]
    names = [wrapped(without_controls(name), 24) for name in values]

    def draw(axes: Axes) -> None:
        places = range(len(found))
        colours = [COLOURS[place % len(COLOURS)] for place in places]
        drawn = axes.barh(places, [value or 0.0 for value in found], height=0.6, color=colours)
        axes.bar_label(drawn, ["" if value is None else f"{value:.2f}" for value in found], padding=4)
        axes.set_yticks(places, ["\n".join(lines) for lines in names])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.12)
        if line is not None:
            axes.axvline(line, color=_INK, linestyle="--", linewidth=1)
        axes.set(title=without_controls(title), xlabel=without_controls(label))

    return Chart(((0.9 + 0.17 * sum(len(lines) + 1 for lines in names), draw),))


def curves(
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    title: str,
    colours: Mapping[str, str] | None = None,
    faint: Collection[str] = (),
    log: bool = False,
    most: float | None = None,
) -> Chart:
    """One line per series, with dots where its points are few, and gaps where a point is not finite.

    Args:
      series: (x, y) by name.
      x, y: labels of the axes.
      title: title of the chart.
      colours: by name. Default: one by one, from the second of `COLOURS`.
      faint: the series whose line is thin.
      log: whether the vertical axis is logarithmic; values must then be positive. Else it begins at 0.
      most: the largest value of the vertical axis. Default: as large as necessary.
    """
    shown = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(series, 1)} | dict(
        colours or {}
    )

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogFormatter, MaxNLocator

        for name, points in series.items():
            thin = name in faint
            axes.plot(
                [point[0] for point in points],
                [point[1] for point in points],
                color=shown[name],
                linewidth=1 if thin else 2,
                marker="" if thin or len(points) > _MAX_DOTS else "o",
                markersize=4,
                label=without_controls(name),
            )
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if log:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(LogFormatter())  # the default has powers in TeX
            axes.yaxis.set_minor_formatter(LogFormatter())
        else:
            axes.set_ylim(0, most)
        # Between the title and the curves, which it cannot hide there.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.2)
        axes.set_title(without_controls(title), pad=8 + 13 * -(-len(series) // 2))
        axes.set(xlabel=without_controls(x), ylabel=without_controls(y))

    return Chart(((2.9 + 0.09 * len(series), draw),))


def beside(*charts: Chart) -> Chart:
    """The charts in one, two in a row."""
    return Chart(tuple(panel for chart in charts for panel in chart.panels))
