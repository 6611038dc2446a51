"""Optimised HLO as text: its computations, and what happens in its loops. Pure functions; nothing is compiled here.

Only what the questions of this file need is read: of each instruction its name, its results, its operands, the
computations that it calls and the name of the operation that it came from.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
# Instructions that hand on a buffer, or write a part of it in place.
_IN_PLACE = {
    *(
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
    ),
    *("dynamic-update-slice", "scatter"),
}
# Scopes of `decoding` and `drafting.chain`: the loop that drafts token by token, and those that verify, of which a
# round takes one.
_CHAIN, _VERIFY = "chain", re.compile(r"verify_(\d+)")

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = ")
_BUFFER = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"\b(\w+)=(?:%([\w.-]+)|\{((?:%[\w.-]+(?:, )?)+)\})")
_CALLS = {"calls", "body", "condition", "to_apply", "branch_computations", "called_computations"}
_CALLS |= {"true_computation", "false_computation"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that an instruction makes.

    Attributes:
      dtype: such as bf16.
      dims: its shape.
      space: number of the memory that it is in; 0 is the device's main memory, others are small and fast.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its own.
      opcode: what it does, such as fusion.
      results: the arrays that it makes; several for a tuple.
      operands: names of other instructions.
      called: names of computations, by attribute, such as body.
      scope: the name of the operation that it came from, such as jit(f)/while/body/dot_general; "" if unknown.
      target: of a custom call, what is called.
      root: whether the computation gives its result back.
    """

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    scope: str
    target: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: their instructions by name, in order.
      entry: the name of the one that begins.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> Module:
    """Reads the text of an HLO module, as `jax.stages.Compiled.as_text` gives it.

    Raises:
      ValueError: it has no entry computation.

    Examples:
      >>> module = parse('''HloModule f
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} copy(%x)
      ... }''')
      >>> [one.opcode for one in module.computations[module.entry]]
      ['parameter', 'copy']
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = "", "", list[Instruction]()
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            name, body = begins[2], []
            entry = name if begins[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(body)
        elif name and (instruction := _instruction(line)) is not None:
            body.append(instruction)
    if not entry:
        raise ValueError(
            "the text is no HLO module: it has no ENTRY computation; give what as_text() returns"
        )
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    begins = _INSTRUCTION.match(line)
    if begins is None:
        return None
    rest = line[begins.end() :]
    end = _closed(rest, 0) if rest.startswith("(") else rest.index(" ")
    results = tuple(_buffer(*found) for found in _BUFFER.findall(rest[:end]))
    rest = rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closed(rest, len(opcode))
    operands = re.findall(r"%([\w.-]+)", rest[len(opcode) : end])
    rest = rest[end:]
    called = {
        kind: tuple(re.findall(r"%([\w.-]+)", f"%{one}" if one else several))
        for kind, one, several in _CALLED.findall(rest)
        if kind in _CALLS
    }
    scope, target = (re.search(rf'\b{name}="([^"]*)"', rest) for name in ("op_name", "custom_call_target"))
    return Instruction(
        name=begins[2],
        opcode=opcode,
        results=results,
        operands=tuple(operands),
        called=called,
        scope=scope[1] if scope else "",
        target=target[1] if target else "",
        root=bool(begins[1]),
    )


def _closed(text: str, at: int) -> int:
    """Just after the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index + 1
    return len(text)


def _buffer(dtype: str, dims: str, layout: str) -> Buffer:
    space = re.search(r"S\((\d+)\)", layout)
    return Buffer(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else 0)


def main_loop(module: Module) -> Instruction:
    """The loop of the entry computation with the largest body: of `engine.compiled.run_rounds`, its rounds.

    Raises:
      ValueError: there is no loop.
    """
    loops = [one for one in module.computations[module.entry] if one.opcode == "while"]
    if not loops:
        raise ValueError("the program's entry has no loop")
    return max(loops, key=lambda loop: sum(1 for _ in executed(module, *loop.called["body"])))


def executed(module: Module, *names: str) -> Iterator[tuple[str, Instruction]]:
    """Every instruction that runs where these computations do, each once, with the name of its computation.

    What is within a fusion is no instruction of its own: it leaves nothing in memory.
    """
    seen, waiting = set(names), list(names)
    while waiting:
        name = waiting.pop()
        for one in module.computations[name]:
            yield name, one
            for other in _entered(one):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def _entered(one: Instruction) -> list[str]:
    """The computations that an instruction runs step by step."""
    if one.opcode == "fusion":
        return []
    return [
        name
        for kind, names in one.called.items()
        if kind != "to_apply" or one.opcode == "call"
        for name in names
    ]


def copies(module: Module, loop: Instruction, shapes: Iterable[tuple[int, ...]]) -> int:
    """How many arrays of these shapes the body of a loop writes whole: copies, and whatever else is not in place.

    Moves between main memory and a fast one do not count: so an array is read; see `write_backs` for the way back. In
    which order the axes lie, and axes of length 1, do not matter.

    Args:
      module: the program.
      loop: one of its `while` instructions.
      shapes: of the arrays; on a mesh, of one device's part.

    Examples:
      >>> module = parse('''HloModule f
      ... %body (t: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
      ...   %t = (s32[], f32[2,8]{1,0}) parameter(0)
      ...   %i = s32[] get-tuple-element(%t), index=0
      ...   %x = f32[2,8]{1,0} get-tuple-element(%t), index=1
      ...   %y = f32[2,8]{0,1} copy(%x)
      ...   ROOT %next = (s32[], f32[2,8]{0,1}) tuple(%i, %y)
      ... }
      ... %more (t: (s32[], f32[2,8])) -> pred[] {
      ...   ROOT %p = pred[] constant(false)
      ... }
      ... ENTRY %main (s: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
      ...   %s = (s32[], f32[2,8]{1,0}) parameter(0)
      ...   ROOT %w = (s32[], f32[2,8]{1,0}) while(%s), condition=%more, body=%body
      ... }''')
      >>> copies(module, main_loop(module), [(8, 2)]), copies(module, main_loop(module), [(8, 3)])
      (1, 0)
    """
    wanted = {_squeezed(shape) for shape in shapes}
    count = 0
    for computation, one in executed(module, *loop.called["body"]):
        # A TPU reads a large array ahead in slices; this only says that they are one.
        if one.opcode in _IN_PLACE or one.opcode.endswith("-done") or one.target == "ConcatBitcast":
            continue
        moved = _moved(module, computation, one)
        if moved is not None:
            source, made = moved
            count += _squeezed(made.dims) in wanted and source.space == made.space
        else:
            roots = _roots(module, one) or [one.opcode] * len(one.results)
            written = zip(one.results, roots, strict=True)
            count += sum(_squeezed(made.dims) in wanted and root not in _IN_PLACE for made, root in written)
    return count


def write_backs(module: Module, loop: Instruction, shapes: Iterable[tuple[int, ...]]) -> int:
    """How many arrays of these shapes the body of a loop moves whole from a fast memory to the main one.

    The arguments are those of `copies`. A compiler does so where it has read an array ahead, and updated it there.
    """
    wanted = {_squeezed(shape) for shape in shapes}
    moves = (_moved(module, name, one) for name, one in executed(module, *loop.called["body"]))
    return sum(
        _squeezed(move[1].dims) in wanted and move[0].space > move[1].space == 0
        for move in moves
        if move is not None
    )


def _moved(module: Module, computation: str, one: Instruction) -> tuple[Buffer, Buffer] | None:
    """What a copy, or the start of a transfer, is made of, and what it makes; None for other instructions."""
    if one.opcode == "copy-start":  # its results are (what is made, what it is made of, …)
        return one.results[1], one.results[0]
    if one.opcode.endswith("-start") and len(one.results) > 1:  # (what it is made of, what is made, …)
        return one.results[0], one.results[1]
    if one.opcode == "copy":
        (source,) = (other for other in module.computations[computation] if other.name == one.operands[0])
        return source.results[0], one.results[0]
    return None


def _roots(module: Module, one: Instruction) -> list[str]:
    """What makes each result of a fusion: the opcodes at its root, seen through bitcasts; of others none."""
    if one.opcode != "fusion":
        return []
    (name,) = one.called["calls"]
    inside = {inner.name: inner for inner in module.computations[name]}
    (root,) = [inner for inner in inside.values() if inner.root]

    def origin(inner: Instruction) -> str:
        while inner.opcode == "bitcast" and inner.operands[0] in inside:
            inner = inside[inner.operands[0]]
        if inner.opcode == "fusion":
            return _roots(module, inner)[0]
        return inner.opcode

    if root.opcode == "tuple":
        return [origin(inside[part]) for part in root.operands]
    return [origin(root)] * len(one.results)


def _squeezed(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def collectives(module: Module, loop: Instruction, num_draft_tokens: int) -> dict[str, int]:
    """The exchanges between devices in one round, by kind: of a whole draft, and its verification.

    Counted as a round runs: the loop that drafts goes around once a draft token, of the verifications of several widths
    the widest runs, of the branches of a condition the one with most, and any other loop once. Which loop is which
    follows from the scopes `chain` and `verify_WIDTH` of its name.

    Args:
      module: the program.
      loop: the loop of its rounds.
      num_draft_tokens: K.
    """
    total = _counted(module, loop.called["body"][0], num_draft_tokens)
    return {kind: total[kind] for kind in COLLECTIVES if total[kind]}


def _counted(module: Module, computation: str, num_draft_tokens: int) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    verified: dict[int, collections.Counter[str]] = {}
    for one in module.computations[computation]:
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            total[kind] += 1
        elif one.opcode == "while":
            within = _counted(module, one.called["body"][0], num_draft_tokens)
            scope = one.scope.split("/")[-2:-1]
            width = _VERIFY.fullmatch(scope[0]) if scope else None
            if width:
                verified[int(width[1])] = within
            else:
                for _ in range(num_draft_tokens if scope == [_CHAIN] else 1):
                    total.update(within)
        elif one.opcode == "conditional":
            branches = [_counted(module, name, num_draft_tokens) for name in _entered(one)]
            total.update(max(branches, key=lambda branch: branch.total()))
        else:
            for name in _entered(one):
                total.update(_counted(module, name, num_draft_tokens))
    if verified:
        total.update(verified[max(verified)])
    return total
