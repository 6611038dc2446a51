"""Sums a TPU compiler's cycle estimates over the parts of a round or of a chunk of a prompt. They are not times."""

from __future__ import annotations

import collections
import re
from typing import Any

from jaxspec.measuring.aot.accelerators import Accelerator
from jaxspec.measuring.aot.compiled_rounds import COLLECTIVES, counted, executed, scope_of, trips
from jaxspec.measuring.aot.hlo import Instruction, Module
from jaxspec.measuring.aot.reads import bytes_read

PRODUCTS, HEAD, ATTENTION, NORMS, CACHE, EXCHANGES, REST, WAITING = PARTS = (
    "products",
    "head and sampling",
    "attention",
    "norms and rotation",
    "cache writes",
    "collectives",
    "the rest",
    "waiting for memory",
)
# The part of each `jax.named_scope` in the model and the loop; the innermost scope counts.
_PARTS = {
    "head": HEAD,
    "sampling": HEAD,
    "attend": ATTENTION,
    "norm": NORMS,
    "rope": NORMS,
    "cache": CACHE,
}
_PART = re.compile(rf"(?:^|[/(])({'|'.join(_PARTS)})(?=[/)])")
STAGES = ("draft", "verify", "absorb")
_STAGE = re.compile(rf"/({'|'.join(STAGES)})/")
BESIDE = "beside"
_EXCHANGES = {name + suffix for name in COLLECTIVES for suffix in ("", "-start")}


def estimate(module: Module, loop: Instruction, accelerator: Accelerator) -> dict[str, Any] | None:
    """Returns the compiler's estimate of one trip of a loop: a round, or a chunk of a prompt.

    The sum counts as `collectives` does: a loop with a known number of trips counts once per trip, another loop
    counts once, and a condition counts as its most expensive branch. The compiler's numbers exclude transfers that run
    in parallel with the computation; a sum below the floor is therefore raised to the floor.

    Args:
      module: the program.
      loop: one of its `while` instructions, see `rounds.main_loop`.
      accelerator: the chip for which the program was compiled.

    Returns:
      None if the program has no estimates, as on GPUs. Otherwise a dictionary: `clock`, in Hz; `stages`, by name
      (`draft`, `verify`, `absorb`, the update of a drafter's own state, and `beside`, the rest of a round); `round`,
      their sum; `draft_step`, one trip of a draft's loop (None without one); `loops`, by name, the `trips` and the
      `cycles` per trip of every inner loop (with the instruction's name if two loops have one name); `exchanged_bytes`,
      the size of the results of collectives in a round, for which the compiler estimates no cycles. The stages, `round`
      and `draft_step` have the keys of `_figures`. The compiler overestimates products on the vector unit several times
      (docs/laboratory.md); programs of this library have them only if a mesh gives each chip a single row, see
      `vector_products`.
    """
    (body, *_) = loop.called["body"]
    if all(one.cycles is None for _, one in executed(module, body)):
        return None
    scopes = scope_of(module, body)
    products = {name: _product_scope(module, name) for name in module.computations}

    def stage(one: Instruction) -> str:
        found = _STAGE.search(scopes(one))
        return found[1] if found else BESIDE

    def part(one: Instruction) -> str:
        if one.opcode in _EXCHANGES:
            return EXCHANGES
        inside = products[one.called["calls"][0]] if one.opcode == "fusion" else ""
        scope = inside or scopes(one)
        named = _PART.findall(scope)
        if named:
            return _PARTS[named[-1]]
        return PRODUCTS if scope.endswith("dot_general") else REST

    def weigh(one: Instruction) -> tuple[tuple[str, str], int] | None:
        return None if one.cycles is None else ((stage(one), part(one)), one.cycles)

    def exchanged(one: Instruction) -> tuple[str, int] | None:
        return (EXCHANGES, _exchanged_bytes(one)) if one.opcode in _EXCHANGES else None

    def stages(within: Instruction) -> dict[str, dict[str, Any]]:
        cycles = counted(module, within.called["body"][0], weigh)
        read = bytes_read(module, within, stage)
        names = {name for name, _ in cycles} | read.keys()
        ordered = [name for name in (*STAGES, BESIDE) if name in names]
        return {name: _figures(cycles, name, read[name], accelerator) for name in ordered}

    inner = [one for _, one in executed(module, body) if one.opcode == "while"]
    drafting = [
        one for one in inner if stage(one) == "draft" and (trips(one) or 0) > 1 and _runs_a_model(module, one)
    ]
    step = max(drafting, key=lambda one: counted(module, one.called["body"][0], weigh).total(), default=None)
    of_round, named = stages(loop), collections.Counter(one.scope for one in inner)
    return {
        "clock": accelerator.clock,
        "round": _sum(of_round),
        "stages": of_round,
        "draft_step": None if step is None else {"trips": trips(step)} | _sum(stages(step)),
        "loops": {
            one.scope if named[one.scope] == 1 else f"{one.scope} ({one.name})": {
                "trips": trips(one),
                "cycles": counted(module, one.called["body"][0], weigh).total(),
            }
            for one in inner
        },
        "exchanged_bytes": counted(module, body, exchanged)[EXCHANGES],
    }


def _figures(
    cycles: collections.Counter[tuple[str, str]], stage: str, read: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Returns the figures of a stage.

    Returns:
      `cycles`, the larger of the compiler's estimate and the floor; `split`, these cycles by part; `bytes`, which the
      stage reads; `floor`, the cycles for reading them at the published bandwidth; `of_floor`, floor ÷ cycles.
    """
    split = {part: cycles[stage, part] for part in PARTS}
    floor = round(read / accelerator.bandwidth * accelerator.clock)
    split[WAITING] = max(0, floor - sum(split.values()))
    return _with_fraction({"cycles": sum(split.values()), "floor": floor, "bytes": read, "split": split})


def _sum(stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of several stages that run one after the other."""
    total: dict[str, Any] = {
        key: sum(stage[key] for stage in stages.values()) for key in ("cycles", "floor", "bytes")
    }
    split = {part: sum(stage["split"][part] for stage in stages.values()) for part in PARTS}
    return _with_fraction(total | {"split": split})


def _with_fraction(figures: dict[str, Any]) -> dict[str, Any]:
    return figures | {"of_floor": figures["floor"] / figures["cycles"] if figures["cycles"] else 1.0}


def _exchanged_bytes(one: Instruction) -> int:
    """Returns the bytes of the arrays that a collective produces."""
    # The results of a "-start" can be its operands, then the produced arrays, then others.
    made, count = one.results, len(one.operands)
    if one.opcode.endswith("-start") and len(made) > count:
        made = made[count : 2 * count]
    return sum(result.size_bytes for result in made)


def _product_scope(module: Module, computation: str) -> str:
    """Returns the scope of the product within a fusion; "" if it has none."""
    found = (one.scope for one in module.computations[computation] if one.scope.endswith("dot_general"))
    return next(found, "")


def _runs_a_model(module: Module, loop: Instruction) -> bool:
    """Returns whether a loop multiplies by weights; a draft's loop does, a filter's does not."""
    return any(one.scope.endswith("dot_general") for _, one in executed(module, *loop.called["body"]))
