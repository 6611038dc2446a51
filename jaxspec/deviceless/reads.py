"""Which bytes a part of a compiled program must read from a device's main memory: each array from outside it, once."""

from __future__ import annotations

import collections
from collections.abc import Callable

from jaxspec.deviceless.hlo import Buffer, Instruction, Module
from jaxspec.deviceless.rounds import HANDED_ON, WRITES, entered, moved, trips

# Where an array comes from: the computation and the instruction that has it, and which of its results.
_Origin = tuple[str, str, int | None]
# What passes its first operand on, whole or in parts; a loop's results lie where its operands do.
_PASSES = ("bitcast", "while", "optimization-barrier", "copy-start", "slice-start", *WRITES)
_TAKES_A_PART = ("dynamic-slice", "slice", "gather")


def bytes_read(
    module: Module, loop: Instruction, stage: Callable[[Instruction], str]
) -> collections.Counter[str]:
    """Bytes that one round of a loop reads of what was there before it, by stage.

    A stage reads each array once, however often it is used, and of an array of which parts are taken only these. A loop
    of a known number of trips reads its arrays once a trip. Intermediate results and writes do not count.

    Args:
      module: the program.
      loop: one of its `while` instructions.
      stage: names the stage of an instruction.

    Examples:
      >>> from jaxspec.deviceless.hlo import parse
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
    reads = _Reads(module, stage)
    for (of_stage, count, _), size in reads.of(loop.called["body"][0]).items():
        total[of_stage] += count * size
    return total


class _Reads:
    """Finds what is read; `callers` fills as computations are entered, from the outermost."""

    def __init__(self, module: Module, stage: Callable[[Instruction], str]) -> None:
        self._module, self._stage = module, stage
        self._named = {name: {one.name: one for one in body} for name, body in module.computations.items()}
        # By computation: the one around it, and which operand of it its parameters are.
        self._callers: dict[str, tuple[str, list[str]]] = {}

    def of(self, at: str, count: int = 1) -> dict[tuple[str, int, _Origin], int]:
        """Bytes by stage, by how often they are read, and by origin."""
        found: dict[tuple[str, int, _Origin], int] = {}
        for one in self._module.computations[at]:
            within = [self._within(at, one, index, name, count) for index, name in enumerate(entered(one))]
            if one.opcode == "conditional":  # one of its branches runs
                within = [max(within, key=lambda reads: sum(reads.values()))]
            for reads in within:
                for key, size in reads.items():
                    found[key] = max(found.get(key, 0), size)
            if one.opcode in HANDED_ON or one.opcode.endswith("-done"):
                continue
            for number, operand in enumerate(one.operands):
                origin = self._origin(at, operand, None)
                size, whole = self._taken(at, one, number)
                if size and origin is not None:
                    key = (self._stage(one), count, origin)
                    found[key] = min(found.get(key, 0) + size, max(whole, found.get(key, 0)))
        return found

    def _within(
        self, at: str, one: Instruction, index: int, name: str, count: int
    ) -> dict[tuple[str, int, _Origin], int]:
        """The same of a computation that an instruction enters; of a condition, `index` says which branch it is."""
        branch = one.opcode == "conditional"
        self._callers[name] = (at, [one.operands[index + 1]] if branch else list(one.operands))
        return self.of(name, count * (trips(one) or 1) if one.opcode == "while" else count)

    def _taken(self, at: str, one: Instruction, number: int) -> tuple[int, int]:
        """Bytes that an instruction takes from main memory of an operand, and the bytes of all of it."""
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
        """Bytes that a fusion reads of a parameter: of slices that it takes, or all; none where it writes to it."""
        body = self._module.computations[inside]
        (given,) = (one for one in body if one.opcode == "parameter" and one.index == number)
        names, size = {given.name}, 0
        for one in body:
            if not names & set(one.operands):
                continue
            if one.opcode == "bitcast" and not one.root:
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

    def _origin(self, at: str, name: str, part: int | None) -> _Origin | None:
        """Where an array from outside the loop comes from; None for what was made in it."""
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
        if one.opcode == "fusion" and (number := self._written(one, part)) is not None:
            return self._origin(at, one.operands[number], None)
        return None

    def _written(self, fusion: Instruction, part: int | None) -> int | None:
        """The number of the parameter into which a fusion writes a result in place, if it does."""
        inside = self._named[fusion.called["calls"][0]]
        (one,) = (inner for inner in inside.values() if inner.root)
        if one.opcode == "tuple":
            one = inside[one.operands[part or 0]]
        while one.opcode in ("bitcast", "fusion", *WRITES):
            number = self._written(one, None) if one.opcode == "fusion" else 0
            if number is None:
                return None
            one = inside[one.operands[number]]
        return one.index if one.opcode == "parameter" else None


def _size(results: tuple[Buffer, ...]) -> int:
    return sum(made.size_bytes for made in results)
