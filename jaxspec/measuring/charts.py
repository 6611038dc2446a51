"""Charts as self-contained SVG for pages, files and notebooks: bars with intervals, curves and heat maps.

The text is never scaled: a chart has the width of a small screen, and a page places as many beside each other as fit.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxspec.console.tables import wrapped
from jaxspec.console.terminal import without_controls

# Distinguishable by colour-blind readers (Okabe and Ito); the first, grey, is for plain decoding.
COLOURS = ("#8a8a8a", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
# Pixels: width of a chart, of a character of text (on average, rounded up), and height of a line of text.
WIDTH, _CHARACTER, _LINE = 356, 6.6, 15
_STYLE = """
.chart { background: #fff; font: 12px system-ui, sans-serif }
.chart text { fill: #222 } .chart .bold { font-weight: 600 } .chart .note { fill: #666 }
.chart .grid { stroke: #e2e2e2 } .chart .ink { stroke: #222; stroke-width: 1.5; fill: none }
.chart .line { stroke: #666; stroke-dasharray: 4 3; fill: none }
@media (prefers-color-scheme: dark) { .chart { background: #1b1b1b } .chart text { fill: #ddd }
.chart .note { fill: #999 } .chart .grid { stroke: #3a3a3a } .chart .ink { stroke: #eee }
.chart .line { stroke: #aaa } }
"""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart; `str` returns its `svg` element, and a notebook shows it.

    Attributes:
      width, height: pixels.
      parts: the content of the element.
    """

    width: float
    height: float
    parts: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        size = f"{self.width:.0f} {self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" class="chart" role="img"><style>{_STYLE}</style>{self.parts}</svg>'
        )

    def _repr_svg_(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class Curve:
    """One series of `curves`.

    Attributes:
      points: (x, y); the line is interrupted where one is not finite.
      faint: whether the line is thin.
    """

    points: Sequence[tuple[float, float]]
    faint: bool = False


def bars(
    values: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float] | None],
    *,
    title: str,
    label: str,
    line: float | None = None,
) -> Chart:
    """Horizontal bars with their values, and intervals as whiskers.

    Args:
      values: by name; no bar for None or a value that is not finite.
      intervals: (low, high) by name; no whiskers for None or an end that is not finite.
      title: title of the chart.
      label: meaning of the values.
      line: value of a vertical line across the chart.

    Examples:
      >>> str(bars({"ngram": 1.5}, {"ngram": (1.2, 1.8)}, title="code", label="speed-up")).count("<rect")
      1
    """
    spans = {name: pair for name, pair in intervals.items() if pair and all(map(math.isfinite, pair))}
    ends = [end for pair in spans.values() for end in pair]
    axis = _Axis([*(value for value in values.values() if value is not None), *ends, line or 0.0], 4)
    left, right = 122.0, WIDTH - 112.0
    parts, top = _headed(title)
    parts.append(_text(left, top + 11, label, "note"))
    top += _LINE + 3
    rows, y = [], top
    for number, (name, value) in enumerate(values.items()):
        words = _wrapped(name, left - 8)
        height = max(_LINE * len(words) + 5, 22)
        middle = y + height / 2
        first = middle - _LINE * (len(words) - 1) / 2 + 4
        rows += [_text(0, first + _LINE * at, word) for at, word in enumerate(words)]
        if value is not None and math.isfinite(value):
            length = axis.share(value) * (right - left)
            pair = spans.get(name)
            told = f"{name}: {value:.2f}" + (f", {pair[0]:.2f} to {pair[1]:.2f}" if pair else "")
            rows.append(
                f'<rect x="{left:.1f}" y="{middle - 7:.1f}" width="{length:.1f}" height="14" '
                f'fill="{colour(number)}"><title>{_escaped(told)}</title></rect>'
            )
            if pair:
                low, high = (left + axis.share(end) * (right - left) for end in pair)
                caps = "".join(f"M{end:.1f} {middle - 4:.1f}v8" for end in (low, high))
                rows.append(f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{caps}" class="ink"/>')
            rows.append(_text(right + 8, middle + 4, f"{value:.2f}"))
        y += height
    for tick in axis.ticks:
        x = left + axis.share(tick) * (right - left)
        parts.append(f'<path d="M{x:.1f} {top}V{y}" class="grid"/>')
        rows.append(_text(x, y + 13, axis.text(tick), "note", "middle"))
    if line is not None and math.isfinite(line):
        rows.append(f'<path d="M{left + axis.share(line) * (right - left):.1f} {top}V{y}" class="line"/>')
    return Chart(WIDTH, y + 20, "".join([*parts, *rows]))


def curves(
    series: Mapping[str, Curve],
    *,
    x: str,
    y: str,
    title: str,
    colours: Mapping[str, str] | None = None,
    log: bool = False,
    most: float | None = None,
) -> Chart:
    """One line per series, with dots where its points are few.

    Args:
      series: by name.
      x, y: labels of the axes.
      title: title of the chart.
      colours: by name. Default: one by one, from the second of `COLOURS`.
      log: whether the vertical axis is logarithmic; values must then be positive.
      most: the largest value of the vertical axis. Default: as large as necessary.

    Examples:
      >>> drawn = curves({"ngram": Curve([(1, 0.5), (2, 0.2)])}, x="position", y="accepted", title="Acceptance")
      >>> str(drawn).count("<circle")
      2
    """
    shown = {name: colour(number) for number, name in enumerate(series, 1)} | dict(colours or {})
    points = [one for curve in series.values() for one in curve.points if all(map(math.isfinite, one))]
    parts, top = _headed(title)
    legend, top = _legend({name: shown[name] for name in series}, top)
    parts += [*legend, _text(0, top + 12, y, "note")]
    left, right, upper = 40.0, WIDTH - 12.0, top + 22
    lower = upper + 180
    down, across = (
        _Axis([*(one[1] for one in points), most or 0.0], 6, log=log),
        _Extent([one[0] for one in points]),
    )

    def place(at: float, value: float) -> tuple[float, float]:
        return left + across.share(at) * (right - left), lower - down.share(value) * (lower - upper)

    for tick in down.ticks:
        height = place(across.low, tick)[1]
        parts.append(f'<path d="M{left} {height:.1f}H{right}" class="grid"/>')
        parts.append(_text(left - 6, height + 4, down.text(tick), "note", "end"))
    parts += [_text(place(tick, 0)[0], lower + 16, f"{tick:g}", "note", "middle") for tick in across.ticks]
    parts.append(_text((left + right) / 2, lower + 32, x, "note", "middle"))
    for name, curve in series.items():
        for finite, group in itertools.groupby(curve.points, lambda one: all(map(math.isfinite, one))):
            if finite:
                parts += _drawn(name, curve, shown[name], [(one, place(*one)) for one in group])
    return Chart(WIDTH, lower + 40, "".join(parts))


def beside(*charts: Chart) -> Chart:
    """The charts in one, two in a row.

    Examples:
      >>> beside(Chart(10, 20, ""), Chart(10, 30, "")).height
      30
    """
    parts, width, top = [], 0.0, 0.0
    for row in (charts[at : at + 2] for at in range(0, len(charts), 2)):
        left = 0.0
        for one in row:
            parts.append(f'<g transform="translate({left:.0f} {top:.0f})">{one.parts}</g>')
            left += one.width + 24
        width, top = max(width, left - 24), top + max(one.height for one in row)
    return Chart(width, top, "".join(parts))


def colour(number: int) -> str:
    """The colour of series `number`, from 0; colours repeat after the last one, except for the first.

    Examples:
      >>> colour(0), colour(len(COLOURS) + 1) == colour(2)
      ('#8a8a8a', True)
    """
    return COLOURS[0] if number == 0 else COLOURS[1 + (number - 1) % (len(COLOURS) - 1)]


class _Axis:
    """An axis from 0, or logarithmic, to a round number at or above all values.

    Args:
      values: the values.
      steps: the approximate maximum number of steps between ticks.
      log: whether it is logarithmic.
    """

    def __init__(self, values: Sequence[float], steps: int, *, log: bool = False) -> None:
        given = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        most, self._log = max(given, default=0.0) or 1.0, log
        if log:
            sizes = [10.0**power * size for power in range(-9, 40) for size in (1, 2, 5)]
            first = max((at for at, size in enumerate(sizes) if size <= min(given, default=1.0)), default=0)
            last = next(at for at, size in enumerate(sizes) if size >= most and at > first)
            self.ticks = sizes[first : last + 1]
        else:
            step = _step(most / steps)
            self.ticks = [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def share(self, value: float) -> float:
        """The position of a value: 0 … 1."""
        low, high = self.low, self.high
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def text(self, tick: float) -> str:
        """The label of a tick; on a linear axis all labels have the same number of digits."""
        digits = max(0, -math.floor(math.log10(self.ticks[1]) + 1e-9))
        return f"{tick:g}" if self._log else f"{tick:.{digits}f}"


class _Extent:
    """A horizontal axis from the least to the largest value."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)
        step = _step((self.high - self.low) / 8)
        if all(value == round(value) for value in values):
            step = max(step, 1.0)
        self.ticks = [
            step * number for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)
        ]

    def share(self, value: float) -> float:
        """The position of a value: 0 … 1."""
        return (value - self.low) / (self.high - self.low)


def _step(rough: float) -> float:
    """The least of 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)


def _drawn(
    name: str, curve: Curve, ink: str, points: Sequence[tuple[tuple[float, float], tuple[float, float]]]
) -> list[str]:
    """A curve's line through placed points, and dots where these are few."""
    parts = []
    line = " ".join(f"{px:.1f},{py:.1f}" for _, (px, py) in points)
    width = 1 if curve.faint else 2
    parts.append(f'<polyline points="{line}" fill="none" stroke="{ink}" stroke-width="{width}"/>')
    if (len(points) <= 40 and not curve.faint) or len(points) == 1:
        for (_, value), (px, py) in points:
            told = f"<title>{_escaped(f'{name}: {value:.3g}')}</title>"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{ink}">{told}</circle>')
    return parts


def _headed(title: str) -> tuple[list[str], float]:
    """The title, and the height that it needs."""
    heads = _wrapped(title, WIDTH / 1.08)
    return [_text(0, 13 + _LINE * at, line, "bold") for at, line in enumerate(heads)], _LINE * len(
        heads
    ) + 5.0


def _legend(colours: Mapping[str, str], top: float) -> tuple[list[str], float]:
    """The names of several series with their colours, in as many lines as necessary, and the height below them."""
    parts: list[str] = []
    if len(colours) < 2:
        return parts, top
    x, y = 0.0, top
    for name, ink in colours.items():
        wide = 16 + _CHARACTER * len(name) + 12
        if x and x + wide > WIDTH:
            x, y = 0.0, y + _LINE
        parts.append(f'<rect x="{x:.1f}" y="{y + 3:.1f}" width="10" height="10" fill="{ink}"/>')
        parts.append(_text(x + 14, y + 12, name))
        x += wide
    return parts, y + _LINE + 5


def _wrapped(text: str, width: float) -> list[str]:
    return wrapped(text, int(width / _CHARACTER))


def _escaped(text: str) -> str:
    """Returns a text for an SVG element; control characters, which XML does not allow, become escapes."""
    return html.escape(without_controls(text))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{_escaped(text)}</text>'
