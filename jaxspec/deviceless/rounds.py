"""What happens in a round of a compiled loop, from its optimised HLO: copies of arrays, and exchanges of devices."""

from __future__ import annotations

import collections
import functools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jaxspec.deviceless.hlo import Buffer, Instruction, Module

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
# Instructions that hand on a buffer, and those that write a part of it in place.
HANDED_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call")
WRITES = ("dynamic-update-slice", "scatter")
_IN_PLACE = {*HANDED_ON, *WRITES, "optimization-barrier"}
# What makes new numbers: an array of a cache's shape that comes out of one, as scores of attention may, is no copy.
_MAKES = ("dot", "convolution", "reduce", "reduce-window", "custom-call", "iota", "constant", "rng")
# Scopes that name a loop: how often it goes around, at most (`drafting.chain`, `sampling`); and the widths of those
# that verify, of which a round takes one (`verification`).
_TRIPS, _VERIFY = re.compile(r"trips_(\d+)"), re.compile(r"verify_(\d+)")
# And those of the model's layers (`model.llama.run_layers`).
_LAYER = re.compile(r"\blayer_\d+\b")
_Kind = TypeVar("_Kind")
# What a GPU starts nothing for: the host goes on, or other computations run instead.
_STARTS_NOTHING = {
    *HANDED_ON,
    "constant",
    "optimization-barrier",
    "after-all",
    "async-start",
    "async-update",
}


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
            for other in entered(one):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def entered(one: Instruction) -> list[str]:
    """Returns the computations that an instruction runs step by step; [] for a fusion."""
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

    Moves between main memory and a fast one do not count: so an array is read; see `write_backs` for the way back. Nor
    does what only has such a shape: an array counts if it is made, by other than products and sums, of one that was
    there before. In which order the axes lie, and axes of length 1, do not matter.

    Args:
      module: the program.
      loop: one of its `while` instructions.
      shapes: of the arrays; on a mesh, of one device's part.

    Examples:
      >>> from jaxspec.deviceless.hlo import parse
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
        # A TPU reads a large array ahead in slices; this only says that they are one.
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
    """What the arrays of a program are made of."""

    def __init__(self, module: Module, wanted: Iterable[tuple[int, ...]]) -> None:
        self._wanted = set(wanted)
        self._named = {name: {one.name: one for one in body} for name, body in module.computations.items()}
        self.held = functools.cache(self._held)

    def _held(self, computation: str, name: str, part: int = 0, given: tuple[str, ...] = ()) -> bool:
        """Whether an array has in it one of the wanted shapes that was there before the computation, whole or in part.

        Args:
          computation, name: of the instruction that makes it.
          part: which of its results.
          given: in a fusion, the instruction and the computations around it, from the innermost: where its parameters
            come from.
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
            # From outside the computation, or out of a loop or a condition.
            return any(_squeezed(made.dims) in self._wanted for made in one.results[part : part + 1])
        return any(self.held(computation, operand, 0, given) for operand in one.operands)


def dequantised(module: Module, shapes: Iterable[tuple[int, ...]]) -> int:
    """How many arrays of floats of these shapes the whole program writes, where it should read whole numbers only.

    Args:
      module: the program.
      shapes: of the quantised weights; on a mesh, of one device's part.
    """
    wanted = {_squeezed(shape) for shape in shapes}
    count = 0
    for computation, one in executed(module, module.entry):
        # What is moved was there before: a weight that is not quantised may have such a shape too.
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
    """How many arrays of these shapes the body of a loop moves whole from a fast memory to the main one.

    The arguments are those of `copies`. A compiler does so where it has read an array ahead, and updated it there.
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

    The compiler turns a product with a weight into an elementwise multiplication and a sum if it does not use the
    matrix unit, for example for a single row. The arguments are those of `copies`.

    Examples:
      >>> from jaxspec.deviceless.hlo import parse
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
        # Results of the matrix unit, such as attention scores, may have such a shape too: skip them.
        if not any(inner.opcode in ("dot", "convolution") for inner in inside):
            count += sum(
                inner.opcode == "multiply" and _squeezed(inner.results[0].dims) in wanted for inner in inside
            )
    return count


def _within(module: Module, one: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, and the instructions that are fused into it."""
    yield one
    if one.opcode == "fusion":
        for inner in module.computations[one.called["calls"][0]]:
            yield from _within(module, inner)


def moved(module: Module, computation: str, one: Instruction) -> tuple[Buffer, Buffer] | None:
    """Returns the source and the result of a copy or of the start of a transfer; None for other instructions."""
    if one.opcode == "copy-start":  # its results are (what is made, what it is made of, …)
        return one.results[1], one.results[0]
    if one.opcode.endswith("-start") and len(one.results) > 1:  # (what it is made of, what is made, …)
        return one.results[0], one.results[1]
    if one.opcode == "copy":
        (source,) = (other for other in module.computations[computation] if other.name == one.operands[0])
        return source.results[0], one.results[0]
    return None


def _roots(module: Module, one: Instruction) -> list[str]:
    """What makes each result of a fusion: its root, seen through bitcasts and writes of a part; of others none."""
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
        # What makes several arrays is one part of the tuple.
        return [origin(inside[part]) for part in root.operands for _ in inside[part].results]
    return [origin(root)] * len(one.results)


def _squeezed(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def collectives(module: Module, loop: Instruction) -> dict[str, int]:
    """The exchanges between devices in one round, by kind: of a whole draft, and its verification.

    Counted as a round runs: a loop of a known number of trips goes around as often (one that drafts, once a draft
    token), of the verifications of several widths the widest runs, of the branches of a condition the one with most,
    and any other loop once. Which loop is which follows from the scopes `trips_NUMBER` and `verify_WIDTH` of its name.

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
    """How many operations of a GPU one round starts, counted as `collectives` does: fusions, products, copies, calls.

    A library's call counts once, however many kernels it starts; what only names memory counts nothing, and so does a
    loop or a condition beside what runs in it.
    """
    return counted(
        module, loop.called["body"][0], lambda one: ("kernel", 1) if _starts(one) else None
    ).total()


def kernels_per_layer(module: Module, loop: Instruction) -> float | None:
    """The same of one layer in one pass of the model, which is the verification of a draft: the median over layers.

    By the scopes `layer_NUMBER` of their names; None where there are none. A fusion of several operations bears the
    name of its last one, and what has no name, as a part of a product that was split, counts where it is first used.
    """
    scopes = scope_of(module, *loop.called["body"])

    def layer(one: Instruction) -> tuple[str, int] | None:
        found = _LAYER.search(scopes(one)) if _starts(one) else None
        return (found[0], 1) if found else None

    by_layer = counted(module, loop.called["body"][0], layer, drafting=False)
    return statistics.median(by_layer.values()) if by_layer else None


def scope_of(module: Module, *names: str) -> Callable[[Instruction], str]:
    """Returns a function that gives an instruction's scope, or its first user's scope if it has none.

    Args:
      module: the program.
      names: the computations whose instructions are looked up, with those that they run.
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
    """Returns the sum, by kind, of the weights of a computation's instructions, with loops as in `collectives`.

    Args:
      module: the program.
      computation: the name of a computation, such as a loop's body.
      weigh: returns an instruction's kind and its weight in the sum; None if it does not count.
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
