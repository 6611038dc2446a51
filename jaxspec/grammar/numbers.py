"""Decimal numbers between two bounds, as automata over their digits."""

from __future__ import annotations

import functools
import math
from decimal import Decimal

from jaxspec.grammar.automaton import Nodes
from jaxspec.grammar.regex import Regex

# A bound, and whether it is excluded.
Bound = tuple[Decimal, bool]


def between(nodes: Nodes, low: Bound | None, high: Bound | None, whole: bool, end: int | None) -> int | None:
    """Returns the node that reads a number of JSON without an exponent.

    Args:
      nodes: where the automaton is built.
      low, high: the bounds; None: there is none.
      whole: whether the number is an integer.
      end: the node after the number.
    """
    if whole:
        low = low and (Decimal(math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])), False)
        high = high and (Decimal(math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])), False)
    zero = Decimal(0)
    start = minus = None
    if high is None or high[0] >= 0:
        least = (zero, False) if low is None or low[0] < 0 else low
        start = _magnitudes(nodes, least, high, whole, end)
    if low is None or low[0] < 0:
        least = (zero, True) if high is None or high[0] >= 0 else (high[0].copy_negate(), high[1])
        most = low and (low[0].copy_negate(), low[1])  # arithmetic would round it
        minus = nodes.literal(b"-", _magnitudes(nodes, least, most, whole, end))
    return nodes.either(start, minus)


def _magnitudes(nodes: Nodes, low: Bound, high: Bound | None, whole: bool, end: int | None) -> int | None:
    """Returns the node that reads a number without a sign."""
    if high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    starts: list[int | None] = []
    if high is None:  # longer numbers than the lower bound
        rest = "" if whole else r"(\.[0-9]+)?"
        starts.append(Regex(f"[1-9][0-9]{{{len(_parts(low)[0])},}}{rest}", nodes).whole(end))
        high = Decimal("9" * len(_parts(low)[0])) + 1, True
    for length in range(len(_parts(low)[0]), len(_parts(high)[0]) + 1):
        starts.append(_of_length(nodes, low, high, length, whole, end))
    return nodes.either(*starts)


def _parts(bound: Bound) -> tuple[str, str]:
    """Returns the digits before and after the point, without zeros at the end."""
    whole, _, rest = f"{bound[0]:f}".partition(".")
    return whole, rest.rstrip("0")


def _of_length(
    nodes: Nodes, low: Bound, high: Bound, length: int, whole: bool, end: int | None
) -> int | None:
    """Returns the node that reads a number with `length` digits before the point."""
    digits = ["".join(_parts(low)), "".join(_parts(high))]
    # From this place on only zeros follow in the bounds, so that all places are equal.
    last = length + max(len(_parts(bound)[1]) for bound in (low, high)) + 1

    @functools.cache
    def after(at: int, is_low: bool, is_high: bool) -> int | None:
        """The node after `at` digits; whether they are those of the lower and of the upper bound."""
        at_low, at_high = (not text[at:].strip("0") for text in digits)
        stops = (
            at >= length and not (is_low and (not at_low or low[1])) and not (is_high and at_high and high[1])
        )
        if at >= length and is_high and at_high and high[1]:
            return None
        if at == length:
            more = None if whole else nodes.literal(b".", following(at, is_low, is_high, None))
            return nodes.either(end if stops else None, more)
        if at < last:
            return nodes.either(end if stops else None, following(at, is_low, is_high, None))
        loop = nodes.fresh()
        return nodes.close(loop, end if stops else None, following(at, is_low, is_high, loop))

    def following(at: int, is_low: bool, is_high: bool, loop: int | None) -> int | None:
        least, most = (int(text[at : at + 1] or 0) for text in digits)
        edges = []
        for digit in range(least if is_low else at == 0 and length > 1, (most if is_high else 9) + 1):
            tight = is_low and digit == least, is_high and digit == most
            free = at >= length and not any(tight)
            same = loop is not None and tight == (is_low, is_high)
            edges.append(
                (48 + digit, 48 + digit, loop if same else after(last if free else min(at + 1, last), *tight))
            )
        return nodes.step(edges)

    return after(0, length == len(_parts(low)[0]), length == len(_parts(high)[0]))
