"""Automata over the bytes of UTF-8 text: built backwards from their ends, then made deterministic.

Every construction has a limit, so that a hostile grammar costs a second or two and a line, not the memory of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

# Limits. A table of `jaxspec.grammar.table` has at most `MAX_STATES` states, which fit into int16.
MAX_STATES = 12_000
MAX_WORK = 1_000_000
UNICODE = 0x10FFFF
# The first and the last code point of each length in UTF-8; surrogates have no encoding.
_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, UNICODE))
# JSON's short escapes, by code point. Other control characters are left out of strings.
ESCAPES = {ord(raw): f"\\{short}".encode() for raw, short in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)}

Ranges = Sequence[tuple[int, int]]
# A node of `Nodes`; None where no text is possible.
Node = int | None
# A function from the node where a text ends to the node where it begins.
Build = Callable[[Node], Node]
# The next state by state and byte, -1 for none, int[S, 256], and whether a text may end in a state, bool[S].
Table = tuple[np.ndarray, np.ndarray]


class GrammarError(ValueError):
    """A grammar that is wrong, cannot be expressed as a finite table, or is too large; one line."""


class Nodes:
    """A nondeterministic automaton that is built backwards; equal nodes are one node.

    Nodes are numbers. Each construction takes the node `end` where its text ends and returns the node where it begins;
    None means that no text is possible, so that every node reaches an end.
    """

    def __init__(self) -> None:
        self.edges: list[tuple[tuple[int, int, int], ...]] = []
        self.empty: list[tuple[int, ...]] = []
        self._known: dict[object, int] = {}
        self._work = 0

    def spend(self, work: int = 1) -> None:
        """Counts work.

        Raises:
          GrammarError: the limit is exceeded.
        """
        self._work += work
        if self._work > MAX_WORK:
            raise GrammarError("the grammar is too large; shorten its repetitions, alternatives or nesting")

    def fresh(self) -> int:
        """Returns a new node without edges: an end, or a loop to be closed by `close`."""
        self.spend(4)
        self.edges.append(())
        self.empty.append(())
        return len(self.edges) - 1

    def close(self, loop: int, *targets: int | None) -> int:
        """Continues a fresh node at any of the targets."""
        self.empty[loop] = tuple(target for target in targets if target is not None)
        return loop

    def step(self, edges: Iterable[tuple[int, int, int | None]]) -> int | None:
        """Returns a node that reads one byte; an edge has the first and the last byte and the target."""
        self.spend()
        key = tuple(sorted({(low, high, to) for low, high, to in edges if to is not None}))
        if not key:
            return None
        if key not in self._known:
            self._known[key] = self.fresh()
            self.edges[self._known[key]] = key
        return self._known[key]

    def either(self, *starts: int | None) -> int | None:
        """Returns a node that continues at any of the given ones."""
        self.spend(len(starts) + 1)
        targets = tuple(sorted({start for start in starts if start is not None}))
        if len(targets) < 2:
            return targets[0] if targets else None
        key = "either", targets
        if key not in self._known:
            self._known[key] = self.close(self.fresh(), *targets)
        return self._known[key]

    def literal(self, text: bytes, end: int | None) -> int | None:
        """Returns the node that reads these bytes."""
        for byte in reversed(text):
            end = self.step([(byte, byte, end)])
        return end

    def chars(self, ranges: Ranges, end: int | None, quoted: bool = False) -> int | None:
        """Returns the node that reads one character.

        Args:
          ranges: the first and the last code point of each range.
          end: the node after the character.
          quoted: whether the character is inside a JSON string: those of `ESCAPES` are escaped.
        """
        edges: list[tuple[int, int, int | None]] = []
        if quoted:
            escaped = [code for code in ESCAPES if any(low <= code <= high for low, high in ranges)]
            edges += [(0x5C, 0x5C, self.literal(ESCAPES[code][1:], end)) for code in escaped]
            ranges = intersect(ranges, [(0x20, 0x21), (0x23, 0x5B), (0x5D, UNICODE)])
        for low, high in intersect(ranges, _LENGTHS):
            edges += self._span(chr(low).encode(), chr(high).encode(), end)
        return self.step(edges)

    def _span(self, low: bytes, high: bytes, end: int | None) -> list[tuple[int, int, int | None]]:
        """Returns the first edges of the characters between two of equal length."""
        first, last, num_more = low[0], high[0], len(low) - 1
        if not num_more:
            return [(first, last, end)]
        smallest, largest = b"\x80" * num_more, b"\xbf" * num_more
        if first == last:
            return [(first, first, self.step(self._span(low[1:], high[1:], end)))]
        edges = [
            (first, first, self.step(self._span(low[1:], largest, end))),
            (last, last, self.step(self._span(smallest, high[1:], end))),
        ]
        if last - first > 1:
            edges.append((first + 1, last - 1, self.step(self._span(smallest, largest, end))))
        return edges

    def repeat(self, build: Build, low: int, high: int | None, end: int | None) -> int | None:
        """Returns the node that reads a text `low` to `high` times; None: any number of times."""
        if end is None:
            return None
        if high is None:
            start: int | None = self.fresh()
            assert start is not None
            self.close(start, end, build(start))
        else:
            start = end
            for _ in range(high - low):
                before, start = start, self.either(end, build(start))
                if start == before:  # the repeated text is empty or impossible
                    break
        for _ in range(low):
            before, start = start, build(start)
            if start == before:
                break
        return start


def intersect(some: Ranges, others: Ranges) -> list[tuple[int, int]]:
    """Returns the ranges of what is in both."""
    both = [(max(low, a), min(high, b)) for low, high in some for a, b in others]
    return [(low, high) for low, high in both if low <= high]


def deterministic(nodes: Nodes, start: int, end: int) -> Table:
    """Returns `next` [S, 256] int16, -1 where a byte is impossible, and `final` [S] bool; the first state is the start.

    Raises:
      GrammarError: there are more than `MAX_STATES` states, or the limit of work is exceeded.
    """
    closures: dict[int, frozenset[int]] = {}

    def closure(node: int) -> frozenset[int]:
        if node not in closures:
            seen, left = {node}, [node]
            while left:
                new = [to for to in nodes.empty[left.pop()] if to not in seen]
                nodes.spend(len(new) + 1)
                seen.update(new)
                left += new
            closures[node] = frozenset(one for one in seen if nodes.edges[one] or one == end)
        return closures[node]

    number: dict[frozenset[int], int] = {}
    after: dict[frozenset[int], int] = {}
    order: list[frozenset[int]] = []

    def state(targets: frozenset[int]) -> int:
        if targets not in after:
            members = frozenset().union(*map(closure, targets))
            nodes.spend(len(members))
            if members not in number:
                number[members] = len(order)
                order.append(members)
            after[targets] = number[members]
        return after[targets]

    state(frozenset([start]))
    rows: list[np.ndarray] = []
    for members in order:  # grows
        if len(order) > MAX_STATES:
            raise GrammarError(
                f"the grammar needs more than {MAX_STATES} states; shorten its repetitions, alternatives or nesting"
            )
        edges = [edge for node in members for edge in nodes.edges[node]]
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        place = {cut: at for at, cut in enumerate(cuts)}
        between: list[set[int]] = [set() for _ in cuts]
        for low, high, target in edges:
            nodes.spend(place[high + 1] - place[low])
            for at in range(place[low], place[high + 1]):
                between[at].add(target)
        row = np.full(256, -1, np.int16)
        for at, targets in enumerate(between):
            if targets:
                row[cuts[at] : cuts[at + 1]] = state(frozenset(targets))
        rows.append(row)
    return np.stack(rows), np.array([end in members for members in order])


def both(nodes: Nodes, builds: Sequence[Build], end: int | None) -> int | None:
    """Returns the node that reads a text that all of the given functions read."""
    if len(builds) == 1 or end is None:
        return builds[0](end)
    left, right = (_table(nodes, build) for build in (builds[0], lambda to: both(nodes, builds[1:], to)))
    return None if left is None or right is None else _product(nodes, left, right, end)


def without(nodes: Nodes, build: Build, other: Build, end: int | None) -> int | None:
    """Returns the node that reads a text that the first function reads and the second does not."""
    left, right = _table(nodes, build), _table(nodes, other)
    if left is None or right is None or end is None:
        return build(end)
    edges, final = right  # and a state for the texts that no text of the second begins with
    edges = np.vstack([np.where(edges < 0, len(edges), edges), np.full(256, len(edges))])
    return _product(nodes, left, (edges, ~np.append(final, False)), end)


def _table(nodes: Nodes, build: Build) -> Table | None:
    start = build(last := nodes.fresh())
    return None if start is None else deterministic(nodes, start, last)


def _product(nodes: Nodes, one: Table, other: Table, end: int) -> int | None:
    (left, left_final), (right, right_final) = one, other
    pairs = {(0, 0): nodes.fresh()}
    for a, b in (order := [(0, 0)]):  # grows
        edges: list[tuple[int, int, int]] = []
        for byte in np.flatnonzero((left[a] >= 0) & (right[b] >= 0)).tolist():
            pair = int(left[a, byte]), int(right[b, byte])
            if pair not in pairs:
                pairs[pair] = nodes.fresh()
                order.append(pair)
            begin = edges.pop()[0] if edges and edges[-1][1:] == (byte - 1, pairs[pair]) else byte
            edges.append((begin, byte, pairs[pair]))
        nodes.spend(len(edges))
        nodes.edges[pairs[a, b]] = tuple(edges)
        if left_final[a] and right_final[b]:
            nodes.close(pairs[a, b], end)
    return _reaching(nodes, set(pairs.values()), end, pairs[0, 0])


def _reaching(nodes: Nodes, some: set[int], end: int, start: int) -> int | None:
    """Cuts the edges to those of `some` that do not reach the end; returns the start, None if it does not."""
    before: dict[int, list[int]] = {}
    for node in some:
        for target in (*(edge[2] for edge in nodes.edges[node]), *nodes.empty[node]):
            before.setdefault(target, []).append(node)
    alive, left = {end}, [end]
    while left:
        new = [node for node in before.get(left.pop(), ()) if node not in alive]
        alive.update(new)
        left += new
    for node in some:
        nodes.edges[node] = tuple(edge for edge in nodes.edges[node] if edge[2] in alive)
    return start if start in alive else None
