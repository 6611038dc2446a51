"""Regular expressions as automata; Python's own parser reads them."""

from __future__ import annotations

import functools
import re
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from jaxspec.grammar.automaton import UNICODE, GrammarError, Nodes, Ranges, both, without

_CLASSES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
# Other white space, which is in neither `\s` nor `\S`, because JavaScript and Python count it as space.
_SPACES: Ranges = [
    *((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_ANYTHING: Ranges = [(0, UNICODE)]
_BEGINS, _ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")


class Regex:
    """A regular expression of Python's syntax; `\\d`, `\\s` and `\\w` are ASCII, as in JSON Schema.

    Args:
      pattern: the expression.
      nodes: where its automaton is built.
      quoted: whether its text is inside a JSON string, see `Nodes.chars`.

    Raises:
      GrammarError: the expression is wrong.
    """

    def __init__(self, pattern: str, nodes: Nodes, quoted: bool = False) -> None:
        self._pattern, self._nodes, self._quoted = pattern, nodes, quoted
        try:
            # JavaScript's named groups.
            self._tree = _parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", pattern), re.ASCII)
        except (re.error, ValueError, OverflowError) as error:
            raise GrammarError(f"the regular expression {self._shown} is wrong: {error}") from None

    @property
    def _shown(self) -> str:
        return repr(self._pattern if len(self._pattern) < 80 else f"{self._pattern[:77]}...")

    def whole(self, end: int | None) -> int | None:
        """Returns the node that reads a text which the whole expression matches."""
        return self._alternatives(list(self._tree), end, self._tree.state.flags, search=False)

    def search(self, end: int | None) -> int | None:
        """Returns the node that reads a text in which the expression matches somewhere."""
        return self._alternatives(list(self._tree), end, self._tree.state.flags, search=True)

    def _alternatives(
        self, items: list[Any], end: int | None, flags: int, search: bool, begins: bool = False
    ) -> int | None:
        """Anchors are possible at both ends of an alternative of the whole expression, and look-aheads at its begin."""
        anchored = bool(items) and self._is_anchor(items[0], _BEGINS)
        items, begins = items[anchored:], begins or anchored
        value: Any
        name, value = (str(items[0][0]), items[0][1]) if items else ("", None)
        if len(items) == 1 and name == "BRANCH":
            return self._nodes.either(
                *(self._alternatives([*one], end, flags, search, begins) for one in value[1])
            )
        if len(items) == 1 and name == "SUBPATTERN":
            return self._alternatives([*value[3]], end, (flags | value[1]) & ~value[2], search, begins)
        if "ASSERT" in name and value[0] > 0 and (begins or not search):
            rest, ahead = (
                functools.partial(self._alternatives, part, flags=flags, search=anywhere, begins=True)
                for part, anywhere in ((items[1:], search), ([*value[1]], True))
            )
            if name == "ASSERT":
                return both(self._nodes, [rest, ahead], end)
            return without(self._nodes, rest, ahead, end)
        ends = bool(items) and self._is_anchor(items[-1], _ENDS)
        items = items[: len(items) - ends]
        if search and not ends:
            end = self._anything(end)
        start = self._sequence(items, end, flags)
        return self._anything(start) if search and not begins else start

    @staticmethod
    def _is_anchor(item: Any, which: tuple[str, ...]) -> bool:
        return str(item[0]) == "AT" and str(item[1]) in which

    def _anything(self, end: int | None) -> int | None:
        return self._nodes.repeat(lambda to: self._nodes.chars(_ANYTHING, to, self._quoted), 0, None, end)

    def _sequence(self, items: Any, end: int | None, flags: int) -> int | None:
        for item in reversed(list(items)):
            end = self._item(str(item[0]), item[1], end, flags)
        return end

    def _item(self, name: str, value: Any, end: int | None, flags: int) -> int | None:
        nodes = self._nodes
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return nodes.chars(self._ranges(name, value, flags), end, self._quoted)
        if name == "BRANCH":
            return nodes.either(*(self._sequence(one, end, flags) for one in value[1]))
        if name == "SUBPATTERN":
            return self._sequence(value[3], end, (flags | value[1]) & ~value[2])
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inside = value
            most = None if high == _parser.MAXREPEAT else int(high)
            return nodes.repeat(lambda to: self._sequence(inside, to, flags), int(low), most, end)
        if name == "FAILURE" or (name == "ASSERT_NOT" and not value[1]):
            return None  # an empty negative look-around, as Python's parser gives it since 3.13 and before
        known = {"AT": "an anchor or `\\b` inside", "GROUPREF": "a reference to a group"}
        what = "a look-around inside" if "ASSERT" in name else known.get(name, name.lower().replace("_", " "))
        raise GrammarError(
            f"the regular expression {self._shown} has {what}, which cannot be expressed as a finite table; "
            "write it without"
        )

    def _ranges(self, name: str, value: Any, flags: int) -> Ranges:
        if name == "ANY":
            return _ANYTHING if flags & re.DOTALL else _without([(10, 10)])
        found, negated = [(value, value)], name == "NOT_LITERAL"
        if name == "IN":
            found, negated = [], str(value[0][0]) == "NEGATE"
            for kind, given in ((str(one[0]), one[1]) for one in value):
                if kind == "LITERAL":
                    found.append((given, given))
                elif kind == "RANGE":
                    found.append(given)
                elif kind == "CATEGORY":
                    ranges, others = _CLASSES[str(given).replace("NOT_", "")], "NOT_" in str(given)
                    if "SPACE" in str(given) and others != negated:
                        ranges = [*ranges, *_SPACES]
                    found += _without(ranges) if others else ranges
        if flags & re.IGNORECASE:
            shifts = ((0x41, 0x5A, 32), (0x61, 0x7A, -32))
            found += [
                (max(low, a) + by, min(high, b) + by)
                for low, high in found
                for a, b, by in shifts
                if max(low, a) <= min(high, b)
            ]
        return _without(found) if negated else found


def _without(ranges: Ranges) -> list[tuple[int, int]]:
    """Returns the ranges of all other characters."""
    found, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, UNICODE)] if begin <= UNICODE else found
