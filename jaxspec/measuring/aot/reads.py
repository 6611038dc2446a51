"""Counts the bytes that a part of a compiled program must read from main memory: each outer array once."""

from __future__ import annotations

import collections
from collections.abc import Callable

from jaxspec.measuring.aot.compiled_rounds import HANDED_ON, WRITES, entered, moved, trips
from jaxspec.measuring.aot.hlo import Buffer, Instruction, Module

# The source of an array: its computation, its instruction, and the number of the instruction's result.
_Origin = tuple[str, str, int | None]
# Opcodes that pass on their first operand, whole or in part; a loop's results share the buffers of its operands.
_PASSES = ("bitcast", "while", "optimization-barrier", "copy-start", "slice-start", *WRITES)
_TAKES_A_PART = ("dynamic-slice", "slice", "gather")


def bytes_read(
    module: Module, loop: Instruction, stage: Callable[[Instruction], str]
) -> collections.Counter[str]:
    """Returns the bytes, by stage, that one round of a loop reads from arrays that existed before the round.

    A stage reads each array once, even if several instructions use it. If instructions take only slices of an array,
    only the slices count. A loop with a known number of trips reads its arrays once per trip. Intermediate results and
    writes do not count.

    Args:
      module: the program.
      loop: one of its `while` instructions.
      stage: returns the name of an instruction's stage.

    Examples:
      >>> from jaxspec.measuring.aot.hlo import parse
      >>> module = parse('''HloModule f
      ... %body (t: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
      ...   %t = (f32[8]{0}, f32[4,8]{1,0}) parameter(0)
      ...   %x = f32[8]{0} get-tuple-element(%t), index=0
      ...   %w = f32[4,8]{1,0} get-tuple-element(%t), index=1
      ...   %y = f32[4]{0} dot(%w, %x)
      ...   %z = f32[8]{0} dot(%w, %y)
      ...   ROOT %next = (f32[8]{0}, f32[4,8]{1,0}) tuple(%z, %w)
      ... }
      ... ENTRY %main (s: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
      ...   %s = (f32[8]{0}, f32[4,8]{1,0}) parameter(0)
      ...   ROOT %l = (f32[8]{0}, f32[4,8]{1,0}) while(%s), condition=%more, body=%body
      ... }''')
      >>> bytes_read(module, module.computations["main"][-1], lambda one: "all")["all"]
      160
    """
    total: collections.Counter[str] = collections.Counter()
    reads = Reads(module, stage)
    for (of_stage, count, _), size in reads.of(loop.called["body"][0]).items():
        total[of_stage] += count * size
    return total


class Reads:
    """Finds the arrays that are read; entering a computation, outermost first, adds it to `_callers`."""

    def __init__(self, module: Module, stage: Callable[[Instruction], str]) -> None:
        self._module, self._stage = module, stage
        self._named = {name: {one.name: one for one in body} for name, body in module.computations.items()}
        # By computation: the calling computation, and the operands that it passes as parameters.
        self._callers: dict[str, tuple[str, list[str]]] = {}

    def of(self, at: str, count: int = 1) -> dict[tuple[str, int, _Origin], int]:
        """Returns bytes by stage, number of reads and origin."""
        found: dict[tuple[str, int, _Origin], int] = {}
        for one in self._module.computations[at]:
            within = [self._within(at, one, index, name, count) for index, name in enumerate(entered(one))]
            if one.opcode == "conditional":  # only one branch runs
                within = [max(within, key=lambda reads: sum(reads.values()))]
            for reads in within:
                for key, size in reads.items():
                    found[key] = max(found.get(key, 0), size)
            if one.opcode in HANDED_ON or one.opcode.endswith("-done"):
                continue
            for number, operand in enumerate(one.operands):
                origin = self._origin(at, operand, None)
                size, whole = self.taken(at, one, number)
                if size and origin is not None:
                    key = (self._stage(one), count, origin)
                    found[key] = min(found.get(key, 0) + size, max(whole, found.get(key, 0)))
        return found

    def _within(
        self, at: str, one: Instruction, index: int, name: str, count: int
    ) -> dict[tuple[str, int, _Origin], int]:
        """Returns the same for a computation that an instruction enters; `index` is the branch of a condition."""
        branch = one.opcode == "conditional"
        self._callers[name] = (at, [one.operands[index + 1]] if branch else list(one.operands))
        return self.of(name, count * (trips(one) or 1) if one.opcode == "while" else count)

    def taken(self, at: str, one: Instruction, number: int) -> tuple[int, int]:
        """Returns the bytes of an operand that an instruction reads from main memory, and the operand's size."""
        results = self._named[at][one.operands[number]].results
        if len(results) != 1 or results[0].space:
            return 0, 0
        whole = results[0].size_bytes
        if one.opcode == "fusion":
            (inside,) = one.called["calls"]
            return self._used(inside, number, whole), whole
        if one.opcode in (*_TAKES_A_PART, *WRITES):
            return (_size(one.results) if one.opcode in _TAKES_A_PART and not number else 0), whole
        move = moved(self._module, at, one)
        return (whole if move is None else move[1].size_bytes), whole

    def _used(self, inside: str, number: int, whole: int) -> int:
        """Returns the bytes of a parameter that a fusion reads: its slices or all of it; 0 if it only writes to it."""
        body = self._module.computations[inside]
        (given,) = (one for one in body if one.opcode == "parameter" and one.index == number)
        names, size = {given.name}, 0
        for one in body:
            if not names & set(one.operands):
                continue
            if self._changes_nothing(one) and not one.root:
                names.add(one.name)
            elif one.opcode in _TAKES_A_PART and one.operands[0] in names:
                size += _size(one.results)
            elif one.opcode == "fusion":
                (nested,) = one.called["calls"]
                size += max(
                    self._used(nested, k, whole) for k, name in enumerate(one.operands) if name in names
                )
            elif one.opcode not in WRITES or one.operands[0] not in names:
                return whole
        return min(size, whole)

    def _changes_nothing(self, one: Instruction) -> bool:
        """Whether an instruction within a fusion is a bitcast, or a fusion that only changes the layout."""
        if one.opcode != "fusion":
            return one.opcode == "bitcast"
        inside = self._module.computations[one.called["calls"][0]]
        return all(inner.opcode in ("parameter", "copy", "bitcast") for inner in inside)

    def _origin(self, at: str, name: str, part: int | None) -> _Origin | None:
        """Returns the origin of an array from outside the loop; None for an array made within it."""
        one = self._named[at][name]
        if one.opcode == "parameter":
            if at not in self._callers:
                return at, name, part
            outer, operands = self._callers[at]
            return self._origin(outer, operands[one.index or 0], part)
        if one.opcode == "get-tuple-element":
            return self._origin(at, one.operands[0], one.index)
        if one.opcode == "tuple":
            return None if part is None else self._origin(at, one.operands[part], None)
        if one.opcode in _PASSES or one.opcode.endswith("-done") or one.target == "ConcatBitcast":
            return self._origin(at, one.operands[0], part if one.opcode == "while" else None)
        if one.opcode == "fusion" and (number := self.written(one, part)) is not None:
            return self._origin(at, one.operands[number], None)
        return None

    def written(self, fusion: Instruction, part: int | None) -> int | None:
        """Returns the number of the parameter that a fusion updates in place to form a result; None without one."""
        inside = self._named[fusion.called["calls"][0]]
        (one,) = (inner for inner in inside.values() if inner.root)
        if one.opcode == "tuple":
            one = inside[one.operands[part or 0]]
        while one.opcode in ("bitcast", "fusion", *WRITES):
            number = self.written(one, None) if one.opcode == "fusion" else 0
            if number is None:
                return None
            one = inside[one.operands[number]]
        return one.index if one.opcode == "parameter" else None


def _size(results: tuple[Buffer, ...]) -> int:
    return sum(made.size_bytes for made in results)
