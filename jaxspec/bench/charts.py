"""Two kinds of plot as SVG, for a page that needs nothing from elsewhere: grouped bars, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Told apart with colour-blind eyes too (Okabe and Ito); plain decoding comes first, in grey.
COLOURS = ("#8a8a8a", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
_LEFT, _TOP, _BOTTOM, _HEIGHT = 46, 12, 44, 250
# Of one bar, and between groups of them.
_BAR, _GAP = 16, 26


def bars(
    values: Mapping[str, Mapping[str, float | None]],
    intervals: Mapping[str, Mapping[str, tuple[float, float] | None]],
    *,
    label: str,
    line: float | None = None,
) -> str:
    """Bars in groups, with intervals as whiskers.

    Args:
      values: by series and group; None where there is no bar.
      intervals: of each, or None.
      label: of the vertical axis.
      line: a value at which a line goes across.

    Returns:
      An `svg` element.

    Examples:
      >>> bars({"ngram": {"code": 1.5}}, {}, label="speed-up").count("<rect")
      1
    """
    groups = list(dict.fromkeys(group for by_group in values.values() for group in by_group))
    width = len(values) * _BAR + _GAP
    ends = [end for by_group in intervals.values() for pair in by_group.values() if pair for end in pair]
    given = [value for by_group in values.values() for value in by_group.values() if value is not None]
    axis = _Axis([*given, *ends, line or 0.0])
    parts = axis.grid(_LEFT + len(groups) * width, label)
    for at, group in enumerate(groups):
        left = _LEFT + at * width + _GAP / 2
        for number, (series, by_group) in enumerate(values.items()):
            value = by_group.get(group)
            if value is None:
                continue
            x, y = left + number * _BAR, axis.y(value)
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{_BAR - 2}" height="{axis.y(0) - y:.1f}" '
                f'fill="{colour(number)}"><title>{escape(f"{series}, {group}: {value:.2f}")}</title></rect>'
            )
            pair = intervals.get(series, {}).get(group)
            if pair:
                low, high = map(axis.y, pair)
                parts.append(f'<path d="M{x + _BAR / 2:.1f} {low:.1f}V{high:.1f}" class="whisker"/>')
        middle = left + (width - _GAP) / 2
        parts.append(_text(middle, axis.y(0) + 14 + 13 * (at % 2), group, "middle"))
    if line is not None:
        parts.append(f'<path d="M{_LEFT} {axis.y(line):.1f}H{_LEFT + len(groups) * width}" class="line"/>')
    return _svg(_LEFT + len(groups) * width + 8, parts)


def lines(values: Mapping[str, Sequence[float]], colours: Mapping[str, str], *, x: str, label: str) -> str:
    """One line a series, over 1, 2, 3, …

    Args:
      values: by series.
      colours: of each series.
      x, label: of the axes.

    Returns:
      An `svg` element.

    Examples:
      >>> lines({"ngram": [0.5, 0.2]}, {"ngram": "#000"}, x="position", label="accepted").count("<circle")
      2
    """
    longest = max(map(len, values.values()))
    step = min(60.0, 480 / longest)
    axis = _Axis([value for series in values.values() for value in series])
    right = _LEFT + (longest + 0.5) * step
    parts = axis.grid(right, label)
    for position in range(1, longest + 1):
        parts.append(_text(_LEFT + (position - 0.5) * step, axis.y(0) + 14, str(position), "middle"))
    parts.append(_text((_LEFT + right) / 2, axis.y(0) + 32, x, "middle"))
    for name, series in values.items():
        points = [(_LEFT + (at + 0.5) * step, axis.y(value)) for at, value in enumerate(series)]
        drawn = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        for (px, py), value in zip(points, series, strict=True):
            title = f"<title>{escape(f'{name}: {value:.2f}')}</title>"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colours[name]}">{title}</circle>')
    return _svg(right + 8, parts)


def colour(number: int) -> str:
    """The colour of a series, from 0; they come again after the last.

    Examples:
      >>> colour(0), colour(len(COLOURS) + 1) == colour(2)
      ('#8a8a8a', True)
    """
    return COLOURS[0] if number == 0 else COLOURS[1 + (number - 1) % (len(COLOURS) - 1)]


def legend(colours: Mapping[str, str]) -> str:
    """What the colours mean, as HTML.

    Examples:
      >>> "ngram" in legend({"ngram": "#0072b2"})
      True
    """
    entries = (
        f'<span><i style="background:{value}"></i>{escape(name)}</span>' for name, value in colours.items()
    )
    return f'<p class="legend">{"".join(entries)}</p>'


class _Axis:
    """A vertical axis from 0 to a round number at or above all values."""

    def __init__(self, values: Sequence[float]) -> None:
        most = max([value for value in values if math.isfinite(value)], default=0.0) or 1.0
        # Up to six steps of 1, 2 or 5 times a power of ten.
        rough = most / 6
        power = 10.0 ** math.floor(math.log10(rough))
        self._step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
        self._count = math.ceil(most / self._step - 1e-9)

    def y(self, value: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _HEIGHT - _BOTTOM - height * min(value / (self._step * self._count), 1.0)

    def grid(self, right: float, label: str) -> list[str]:
        """The axis with its marks, lines up to `right`, and what it measures."""
        parts = []
        digits = max(0, -math.floor(math.log10(self._step)))
        for number in range(self._count + 1):
            y = self.y(number * self._step)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{right:.1f}" class="grid"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{number * self._step:.{digits}f}", "end"))
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text transform="translate(11 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(label)}</text>'
        )
        return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {_HEIGHT}" width="{width:.0f}" '
        f'height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
    )
