"""Parses the text of optimised HLO into computations and instructions.

The parser reads only the fields that `rounds`, `reads` and `cycles` use: the name of each instruction, its results, its
operands, the computations that it calls, the name of its source operation, and the TPU compiler's cycle estimate.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = ")
_BUFFER = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"\b(\w+)=(?:%([\w.-]+)|\{((?:%[\w.-]+(?:, )?)+)\})")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLS = {"calls", "body", "condition", "to_apply", "branch_computations", "called_computations"}
_CALLS |= {"true_computation", "false_computation"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that an instruction produces.

    Attributes:
      dtype: element type in HLO's notation, such as bf16.
      dims: shape.
      space: number of its memory space; 0 is the device's main memory, others are small and fast.

    Examples:
      >>> Buffer("bf16", (2, 8)).size_bytes, Buffer("s4", (3,)).size_bytes, Buffer("pred", ()).size_bytes
      (32, 2, 1)
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the elements in bytes, without padding."""
        bits = re.search(r"\d+", self.dtype)
        return -(-math.prod(self.dims) * (int(bits[0]) if bits else 8) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: name of the instruction.
      opcode: its operation, such as fusion.
      results: the arrays that it produces; several for a tuple.
      operands: names of the instructions that produce its operands.
      called: names of the called computations, by attribute, such as body.
      scope: name of the source operation, such as jit(f)/while/body/dot_general; "" if unknown.
      target: name of the called function for a custom call; "" otherwise.
      root: whether its result is the result of the computation.
      index: number of a parameter, or of the element that a get-tuple-element takes; None for other opcodes.
      cycles: the compiler's estimate; None if there is none, for example for transfers and collectives.
    """

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    scope: str
    target: str
    root: bool
    index: int | None = None
    cycles: int | None = None


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO program.

    Attributes:
      computations: the instructions of each computation, in order, by the computation's name.
      entry: name of the entry computation.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> Module:
    """Parses the text of an HLO module, as `jax.stages.Compiled.as_text` returns it.

    Raises:
      ValueError: the text has no entry computation.

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
    given, rest = rest[len(opcode) : end], rest[end:]
    number = re.search(r"\((\d+)\)", given) if opcode == "parameter" else re.search(r"\bindex=(\d+)", rest)
    called = {
        kind: tuple(re.findall(r"%([\w.-]+)", f"%{one}" if one else several))
        for kind, one, several in _CALLED.findall(rest)
        if kind in _CALLS
    }
    scope, target = (re.search(rf'\b{name}="([^"]*)"', rest) for name in ("op_name", "custom_call_target"))
    cycles = _CYCLES.search(rest)
    return Instruction(
        name=begins[2],
        opcode=opcode,
        results=results,
        operands=tuple(re.findall(r"%([\w.-]+)", given)),
        called=called,
        scope=scope[1] if scope else "",
        target=target[1] if target else "",
        root=bool(begins[1]),
        index=int(number[1]) if number else None,
        cycles=int(cycles[1]) if cycles else None,
    )


def _closed(text: str, at: int) -> int:
    """Returns the index after the parenthesis that closes the one at index `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index + 1
    return len(text)


def _buffer(dtype: str, dims: str, layout: str) -> Buffer:
    space = re.search(r"S\((\d+)\)", layout)
    return Buffer(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else 0)
