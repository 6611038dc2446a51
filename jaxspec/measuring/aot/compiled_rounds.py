"""Counts copies, collectives and kernels in one round of a compiled loop, from its optimised HLO."""

from __future__ import annotations

import collections
import functools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jaxspec.measuring.aot.hlo import Buffer, Instruction, Module

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
# Instructions that pass a buffer on, and those that update a part of it in place.
HANDED_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call")
WRITES = ("dynamic-update-slice", "scatter")
_IN_PLACE = {*HANDED_ON, *WRITES, "optimization-barrier"}
# Instructions that compute new numbers. Their results, such as attention scores, are not copies of a cache even if they
# have its shape.
_MAKES = ("dot", "convolution", "reduce", "reduce-window", "custom-call", "iota", "constant", "rng")
# Scopes in a loop's name: its maximum number of trips (`drafting.chain`, `sampling`), or the width of its verification
# (`verification`). A round runs the verification of one width.
_TRIPS, _VERIFY = re.compile(r"trips_(\d+)"), re.compile(r"verify_(\d+)")
# Scopes of the model's layers (`model.llama.run_layers`).
_LAYER = re.compile(r"\blayer_\d+\b")
_Kind = TypeVar("_Kind")
# Instructions that start no kernel on a GPU.
_STARTS_NOTHING = {*HANDED_ON, "constant", "optimization-barrier", "after-all", "async-start", "async-update"}


def main_loop(module: Module) -> Instruction:
    """Returns the largest loop of the entry computation, by number of instructions.

    In `run_rounds` this is the loop over rounds.

    Raises:
      ValueError: the entry computation has no loop.
    """
    loops = [one for one in module.computations[module.entry] if one.opcode == "while"]
    if not loops:
        raise ValueError("the program's entry has no loop")
    return max(loops, key=lambda loop: sum(1 for _ in executed(module, *loop.called["body"])))


def executed(module: Module, *names: str) -> Iterator[tuple[str, Instruction]]:
    """Yields each instruction that these computations run, with the name of its computation.

    An instruction is yielded once even if it runs several times. Instructions within a fusion are left out, because
    their results are not stored in memory.
    """
    seen, waiting = set(names), list(names)
    while waiting:
        name = waiting.pop()
        for one in module.computations[name]:
            yield name, one
            for other in entered(one):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def entered(one: Instruction) -> list[str]:
    """Returns the names of the computations that an instruction runs, such as a loop's body; [] for a fusion."""
    if one.opcode == "fusion":
        return []
    return [
        name
        for kind, names in one.called.items()
        if kind != "to_apply" or one.opcode == "call"
        for name in names
    ]


def copies(module: Module, loop: Instruction, shapes: Iterable[tuple[int, ...]]) -> int:
    """Counts the arrays of these shapes that the body of a loop writes completely.

    They are written by a copy or by an update that is not in place.

    Transfers between main memory and a fast memory do not count, since a TPU reads arrays that way; see `write_backs`
    for the opposite direction. A result counts only if it contains data of an existing array of such a shape. A result
    computed by a product or a sum does not count. The order of axes and axes of length 1 are ignored.

    Args:
      module: the program.
      loop: one of its `while` instructions.
      shapes: shapes of the arrays; on a mesh, of one device's part.

    Examples:
      >>> from jaxspec.measuring.aot.hlo import parse
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
    origins = _Origins(module, wanted)
    count = 0
    for computation, one in executed(module, *loop.called["body"]):
        # ConcatBitcast joins the slices of an array that a TPU has prefetched. It copies nothing.
        if one.opcode in _IN_PLACE or one.opcode.endswith("-done") or one.target == "ConcatBitcast":
            continue
        move = moved(module, computation, one)
        if move is not None:
            source, made = move
            written = _squeezed(made.dims) in wanted and source.space == made.space
            count += written and origins.held(computation, one.operands[0])
        else:
            roots = _roots(module, one) or [one.opcode] * len(one.results)
            count += sum(
                _squeezed(made.dims) in wanted
                and root not in _IN_PLACE
                and origins.held(computation, one.name, part)
                for part, (made, root) in enumerate(zip(one.results, roots, strict=True))
            )
    return count


class _Origins:
    """Determines whether an array of a program is a copy of an existing array of one of the wanted shapes."""

    def __init__(self, module: Module, wanted: Iterable[tuple[int, ...]]) -> None:
        self._wanted = set(wanted)
        self._named = {name: {one.name: one for one in body} for name, body in module.computations.items()}
        self.held = functools.cache(self._held)

    def _held(self, computation: str, name: str, part: int = 0, given: tuple[str, ...] = ()) -> bool:
        """Returns whether an array contains all or part of an existing array of a wanted shape.

        Args:
          computation, name: the instruction that produces the array.
          part: number of its result.
          given: for an instruction within fusions, the computation and name of each of these fusions, innermost first.
            A parameter of a fusion is traced to the operand of this fusion.
        """
        one = self._named[computation][name]
        if one.opcode == "parameter" and given:
            (outer, fusion), rest = given[:2], given[2:]
            assert one.index is not None
            return self.held(outer, self._named[outer][fusion].operands[one.index], 0, rest)
        if one.opcode in _MAKES and one.target != "ConcatBitcast":
            return False
        if one.opcode == "fusion":
            (inside,) = one.called["calls"]
            (root,) = [inner for inner in self._named[inside].values() if inner.root]
            made = root.operands[part] if root.opcode == "tuple" else root.name
            return self.held(inside, made, 0, (computation, name, *given))
        if one.opcode == "get-tuple-element" and one.index is not None:
            source = self._named[computation][one.operands[0]]
            if source.opcode == "fusion":
                return self.held(computation, source.name, one.index, given)
            if source.opcode == "tuple":
                return self.held(computation, source.operands[one.index], 0, given)
        if not one.operands or (one.opcode in HANDED_ON and one.opcode not in ("tuple", "bitcast")):
            # The array comes from outside the computation, or from a loop or a condition.
            return any(_squeezed(made.dims) in self._wanted for made in one.results[part : part + 1])
        return any(self.held(computation, operand, 0, given) for operand in one.operands)


def dequantised(module: Module, shapes: Iterable[tuple[int, ...]]) -> int:
    """Counts the float arrays of these shapes that the program writes to main memory.

    Such an array is a dequantised weight.

    Args:
      module: the program.
      shapes: shapes of the quantised weights; on a mesh, of one device's part.
    """
    wanted = {_squeezed(shape) for shape in shapes}
    count = 0
    for computation, one in executed(module, module.entry):
        # Skip copies: they are of an existing array, such as an unquantised weight of the same shape.
        if one.opcode in _IN_PLACE or one.opcode.endswith("-done") or one.target == "ConcatBitcast":
            continue
        if moved(module, computation, one) is not None:
            continue
        roots = _roots(module, one) or [one.opcode] * len(one.results)
        count += sum(
            _squeezed(made.dims) in wanted and made.dtype.startswith(("f", "bf")) and root not in _IN_PLACE
            for made, root in zip(one.results, roots, strict=True)
        )
    return count


def write_backs(module: Module, loop: Instruction, shapes: Iterable[tuple[int, ...]]) -> int:
    """Returns how many arrays of these shapes the body of a loop moves whole from a fast memory to main memory.

    The compiler does so if it has prefetched an array into fast memory and updated it there. The arguments are those of
    `copies`.
    """
    wanted = {_squeezed(shape) for shape in shapes}
    moves = (moved(module, name, one) for name, one in executed(module, *loop.called["body"]))
    return sum(
        _squeezed(move[1].dims) in wanted and move[0].space > move[1].space == 0
        for move in moves
        if move is not None
    )


def vector_products(module: Module, loop: Instruction, shapes: Iterable[tuple[int, ...]]) -> int:
    """Returns how many arrays of these shapes a round multiplies element by element, as a TPU's vector unit does.

    Without the matrix unit, for example for a single row, the compiler computes a product with a weight as an
    elementwise multiplication and a sum. The arguments are those of `copies`.

    Examples:
      >>> from jaxspec.measuring.aot.hlo import parse
      >>> module = parse('''HloModule f
      ... %fused (p: f32[8], q: f32[4,8]) -> f32[4,8] {
      ...   %p = f32[8]{0} parameter(0)
      ...   %q = f32[4,8]{1,0} parameter(1)
      ...   %row = f32[4,8]{1,0} broadcast(%p), dimensions={1}
      ...   ROOT %m = f32[4,8]{1,0} multiply(%row, %q)
      ... }
      ... %body (t: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
      ...   %t = (f32[8], f32[4,8]) parameter(0)
      ...   %x = f32[8]{0} get-tuple-element(%t), index=0
      ...   %w = f32[4,8]{1,0} get-tuple-element(%t), index=1
      ...   %y = f32[4,8]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused
      ...   ROOT %next = (f32[8], f32[4,8]) tuple(%x, %y)
      ... }
      ... %more (t: (f32[8], f32[4,8])) -> pred[] {
      ...   ROOT %c = pred[] constant(false)
      ... }
      ... ENTRY %main (s: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
      ...   %s = (f32[8], f32[4,8]) parameter(0)
      ...   ROOT %w = (f32[8], f32[4,8]) while(%s), condition=%more, body=%body
      ... }''')
      >>> vector_products(module, main_loop(module), [(4, 8)])
      1
    """
    wanted, count = {_squeezed(shape) for shape in shapes}, 0
    for _, one in executed(module, *loop.called["body"]):
        inside = list(_within(module, one))
        # Skip fusions that contain a product of the matrix unit. Its result, such as attention scores, may have one of
        # these shapes too.
        if not any(inner.opcode in ("dot", "convolution") for inner in inside):
            count += sum(
                inner.opcode == "multiply" and _squeezed(inner.results[0].dims) in wanted for inner in inside
            )
    return count


def _within(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields an instruction and, for a fusion, the instructions inside it."""
    yield one
    if one.opcode == "fusion":
        for inner in module.computations[one.called["calls"][0]]:
            yield from _within(module, inner)


def moved(module: Module, computation: str, one: Instruction) -> tuple[Buffer, Buffer] | None:
    """Returns the source and the result of a copy or of the start of a transfer; None for other instructions."""
    if one.opcode == "copy-start":  # its results are (copy, source, …)
        return one.results[1], one.results[0]
    if one.opcode.endswith("-start") and len(one.results) > 1:  # (source, result, …)
        return one.results[0], one.results[1]
    if one.opcode == "copy":
        (source,) = (other for other in module.computations[computation] if other.name == one.operands[0])
        return source.results[0], one.results[0]
    return None


def _roots(module: Module, one: Instruction) -> list[str]:
    """Returns the opcode that computes each result of a fusion; [] for other instructions.

    Bitcasts and updates in place at the end of the fusion are skipped.
    """
    if one.opcode != "fusion":
        return []
    (name,) = one.called["calls"]
    inside = {inner.name: inner for inner in module.computations[name]}
    (root,) = [inner for inner in inside.values() if inner.root]

    def origin(inner: Instruction) -> str:
        while inner.opcode in ("bitcast", *WRITES) and inner.operands[0] in inside:
            inner = inside[inner.operands[0]]
        if inner.opcode == "fusion":
            return _roots(module, inner)[0]
        return inner.opcode

    if root.opcode == "tuple":
        # An instruction with several results is one operand of the tuple.
        return [origin(inside[part]) for part in root.operands for _ in inside[part].results]
    return [origin(root)] * len(one.results)


def _squeezed(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def collectives(module: Module, loop: Instruction) -> dict[str, int]:
    """Returns the number of collectives in one round (a draft and its verification), by opcode.

    A loop with a known number of trips counts once per trip; any other loop counts once. Only the widest verification
    counts. For a conditional, only the branch with the largest sum counts. The scopes `trips_NUMBER` and `verify_WIDTH`
    in the names of loops give these numbers.

    Args:
      module: the program.
      loop: the loop of its rounds.
    """

    def kind(one: Instruction) -> tuple[str, int] | None:
        name = one.opcode.removesuffix("-start")
        return (name, 1) if name in COLLECTIVES else None

    total = counted(module, loop.called["body"][0], kind)
    return {kind: total[kind] for kind in COLLECTIVES if total[kind]}


def kernels(module: Module, loop: Instruction) -> int:
    """Returns how many operations one round starts on a GPU (fusions, products, copies, calls).

    A library call counts once, even if it starts several kernels. Instructions that only refer to memory do not count.
    A loop or a condition does not count by itself; the instructions inside it count as in `collectives`.
    """
    return counted(
        module, loop.called["body"][0], lambda one: ("kernel", 1) if _starts(one) else None
    ).total()


def kernels_per_layer(module: Module, loop: Instruction) -> float | None:
    """Returns the number of operations that a layer starts in the verification of a draft, as the median over layers.

    An instruction belongs to the layer in its scope `layer_NUMBER`. A fusion has the scope of its last operation. An
    instruction without a scope, such as a part of a split product, has the scope of its first user.

    Returns:
      The median; None if no instruction has such a scope.
    """
    scopes = scope_of(module, *loop.called["body"])

    def layer(one: Instruction) -> tuple[str, int] | None:
        found = _LAYER.search(scopes(one)) if _starts(one) else None
        return (found[0], 1) if found else None

    by_layer = counted(module, loop.called["body"][0], layer, drafting=False)
    return statistics.median(by_layer.values()) if by_layer else None


def scope_of(module: Module, *names: str) -> Callable[[Instruction], str]:
    """Returns a function that returns an instruction's scope, or its first user's scope if it has none.

    Args:
      module: the program.
      names: the computations that contain the instructions, or run computations that contain them.
    """
    used: dict[str, Instruction] = {}
    for _, one in executed(module, *names):
        for operand in one.operands:
            used.setdefault(operand, one)

    def scope(one: Instruction) -> str:
        while not one.scope and one.name in used:
            one = used[one.name]
        return one.scope

    return scope


def _starts(one: Instruction) -> bool:
    return one.opcode not in _STARTS_NOTHING and not one.opcode.endswith("-done")


def counted(
    module: Module,
    computation: str,
    weigh: Callable[[Instruction], tuple[_Kind, int] | None],
    drafting: bool = True,
) -> collections.Counter[_Kind]:
    """Sums the weights of a computation's instructions for each key. Loops count as in `collectives`.

    Args:
      module: the program.
      computation: the name of a computation, such as a loop's body.
      weigh: returns an instruction's key and weight; None if it does not count.
      drafting: whether loops with a known number of trips count.
    """
    total: collections.Counter[_Kind] = collections.Counter()
    verified: dict[int, collections.Counter[_Kind]] = {}
    for one in module.computations[computation]:
        if (weighed := weigh(one)) is not None:
            total[weighed[0]] += weighed[1]
        elif one.opcode == "while":
            within = counted(module, one.called["body"][0], weigh, drafting)
            width, number = _VERIFY.fullmatch(_innermost(one)), trips(one)
            if width:
                verified[int(width[1])] = within
            elif drafting or number is None:
                for kind, weight in within.items():
                    total[kind] += weight * (number or 1)
        elif one.opcode == "conditional":
            branches = [counted(module, name, weigh, drafting) for name in entered(one)]
            most: collections.Counter[_Kind] = max(branches, key=collections.Counter.total)
            total.update(most)
        else:
            for name in entered(one):
                total.update(counted(module, name, weigh, drafting))
    if verified:
        total.update(verified[max(verified)])
    return total


def trips(loop: Instruction) -> int | None:
    """Returns a loop's maximum number of trips, from the scope `trips_NUMBER` in its name; None if it is unknown."""
    found = _TRIPS.fullmatch(_innermost(loop))
    return int(found[1]) if found else None


def _innermost(loop: Instruction) -> str:
    """Returns the innermost scope that contains a loop."""
    return "".join(loop.scope.split("/")[-2:-1])
