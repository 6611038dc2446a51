"""AdaSPEED's Table I, greedy (Liu et al.): when should an early exit stop drafting?

Every rule is tuned over the same exits and numbers. The paper's rules do not limit the length of a draft; here the
limit is 16 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import struct

from benchmarks.papers.counts import FREE, Bench, Case, Claim, Counts, Paper, Table, choose
from jaxspec.costs.rounds import DraftCost
from jaxspec.methods import AdaSPEED, AdaSPEEDProbe, LayerSkip
from jaxspec.methods.base import share_of_step
from jaxspec.protocol import Outcome, Signal, State, StopRule
from jaxspec.requests.results import Result

CONSTANT, STOP, PRODUCT, PROBE = (
    "LayerSkip, best constant",
    "Draft & Verify's stop",
    "AdaSPEED",
    "AdaSPEED, probe",
)
# Up to the largest length of rules with a threshold, so that these do not win by longer drafts alone.
LENGTHS, GAMMAS, LONGEST = (
    (1, 2, 3, 4, 5, 6, 8, 12, 16),
    (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    16,
)
# The share of a step's bytes that the output head has in the paper's models: Llama-3.2-1B (16 layers, a head of
# 128,256 × 2,048) and Llama-2-7B (32 layers, a head of 32,000 × 4,096).
HEADS = {"Llama 1B": 0.2126, "Llama 7B": 0.0198}
PAPER = Paper(
    "AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding (Liu et al.)",
    (
        Table("Table I, greedy, from counts: × LayerSkip with the best constant", CONSTANT),
        Table("Table I, greedy, from counts: × plain"),
        Table(
            f"Table I, greedy, by task type, from counts: {PRODUCT} ÷ {CONSTANT}", CONSTANT, (PRODUCT,), True
        ),
    ),
    (
        Claim("An early exit with the best constant length is faster than plain decoding.", CONSTANT),
        Claim("Greedy, AdaSPEED is faster than LayerSkip.", PRODUCT, CONSTANT),
        Claim("Greedy, AdaSPEED is faster than Draft & Verify's stop.", PRODUCT, STOP),
        Claim("Greedy, AdaSPEED is faster without a probe than with one.", PRODUCT, PROBE),
    ),
    {
        row: dict(zip(HEADS, figures, strict=True))
        for row, figures in {
            CONSTANT: (1.0, 1.0),
            STOP: (1.10, 1.12),
            PRODUCT: (1.16, 1.18),
            PROBE: (1.10, 1.12),
        }.items()
    },
    CONSTANT,
)
# The number of draft tokens of the text that is being generated.
_drafted = [0]


@struct.dataclass
class Tally:
    """Counts the draft tokens under a stop rule, also those after the end of a text.

    Attributes:
      rule: the rule.
    """

    rule: StopRule

    def init(self, batch_size: int) -> State:
        """Returns the rule's state."""
        return self.rule.init(batch_size)

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns what the rule does."""
        jax.debug.callback(_tally)
        return self.rule.stop(state, signal)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Returns the rule's state."""
        return self.rule.observe(state, outcome)


def _tally() -> None:
    _drafted[0] += 1


def measure(bench: Bench) -> Counts:
    """Counts every rule at every exit with every number, and the fastest of each rule on the reporting prompts."""
    target, depth = bench.lm.loaded, bench.lm.config.num_layers
    layer = share_of_step(DraftCost(layers=1, heads=0), target)
    columns = {FREE: (layer, 1 - depth * layer)}
    columns |= {name: ((1 - head) / depth, head) for name, head in HEADS.items()}
    cases = {
        case: functools.partial(_count, bench, method)
        for exit_layer in exits(depth)
        for case, method in methods(bench, exit_layer).items()
    }
    works = bench.count("tuning", cases, "layers, heads")
    return bench.counts("adaspeed", columns, choose(works, [*cases], columns), cases, "layers, heads")


def exits(depth: int) -> list[int]:
    """Returns the exits to try: about a quarter, three eighths, half and three quarters of the layers.

    Examples:
      >>> exits(12)
      [3, 4, 6, 9]
    """
    return sorted({max(1, round(depth * part / 8)) for part in (2, 3, 4, 6)} - {depth})


def methods(bench: Bench, exit_layer: int) -> dict[Case, LayerSkip]:
    """Returns every rule at an exit with every number; with a probe if the model has one for this exit."""
    found: dict[Case, LayerSkip] = {}
    for length in LENGTHS:
        found[Case(CONSTANT, f"exit {exit_layer}, K {length}")] = LayerSkip(
            exit_layer=exit_layer, num_draft_tokens=length
        )
    for gamma in GAMMAS:
        given: dict[str, Any] = {"exit_layer": exit_layer, "num_draft_tokens": LONGEST, "gamma": gamma}
        words = f"exit {exit_layer}, γ {gamma:g}"
        found[Case(STOP, words)] = LayerSkip(stop_rule=("confidence",), **given)
        found[Case(PRODUCT, words)] = AdaSPEED(**given)
        found[Case(PROBE, words)] = AdaSPEEDProbe(**given)
    try:
        bench.lm.drafter(AdaSPEEDProbe(exit_layer=exit_layer))
    except (FileNotFoundError, ValueError):
        return {case: method for case, method in found.items() if case.row != PROBE}
    return found


def _count(bench: Bench, method: LayerSkip, prompt: Sequence[int]) -> tuple[Result, Sequence[float]]:
    """Counts layers and heads of the drafts. Verification reads the draft's layers only once."""
    drafter, params = bench.lm.drafter(method)
    drafter = dataclasses.replace(drafter, rule=Tally(drafter.rule))  # type: ignore[attr-defined, type-var]
    _drafted[0] = 0
    result = bench.generate(prompt, (drafter, params))
    jax.effects_barrier()
    return result, [_drafted[0] * method.exit_layer, _drafted[0]]  # type: ignore[operator]
