"""Every stop rule at every exit with every number on greedy texts: counted by replay, priced by rounds of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxspec.bench import rules
from jaxspec.bench.prices import fixed_length, round_prices
from jaxspec.bench.rules import Case, Rounds
from jaxspec.choosing.costs import DraftCost
from jaxspec.drafting.layerskip import LayerSkip as EarlyExit
from jaxspec.engine.buckets import bucket
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods.base import share_of_step
from jaxspec.papers.tables import Cell
from jaxspec.papers.workbench import Workbench

# Lengths at which rounds are priced, of a rule with a threshold (one program) and of constant K (a program each);
# between them on straight lines.
LENGTHS, CONSTANT_LENGTHS = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
# Prompts and tokens with which rounds are priced.
PRICED, PRICED_TOKENS = 4, 64


@dataclasses.dataclass(frozen=True)
class Counted:
    """Every rule at every exit with every number, on greedy texts.

    Attributes:
      rounds: by case, on tuning and on reporting texts.
      prices: by exit, of rounds under a threshold by tokens drafted.
      constant: by exit, of rounds that always draft K, by K.
      draft_share: by exit, the bytes of weights that a draft step reads, as a part of all.
    """

    rounds: Mapping[Case, tuple[Rounds, Rounds]]
    prices: Mapping[int, Mapping[int, float]]
    constant: Mapping[int, Mapping[int, float]]
    draft_share: Mapping[int, float]

    def speedup(self, case: Case, split: int = 0) -> Cell:
        """Predicted speed-up over plain decoding on tuning (0) or reporting texts (1)."""
        rounds = self.rounds[case][split]
        prices = (self.constant if case.rule == "constant" else self.prices)[case.exit_layer]
        return Cell(None, *rules.ratio(rounds.tokens, rounds.cost(prices)))

    def free(self, case: Case) -> Cell:
        """The same on reporting texts if a pass cost the weights that it reads, whatever its rows."""
        rounds = self.rounds[case][1]
        # The draft's layers are not read again in verification, but for the last draft token: together one pass.
        share = self.draft_share[case.exit_layer]
        prices = {length: 1 + length * share for length in (1, rules.LONGEST)}
        return Cell(None, *rules.ratio(rounds.tokens, rounds.cost(prices)))

    def best(self, rule: str, exit_layer: int | None = None) -> Case | None:
        """The case of a rule that is fastest on tuning texts, of all exits or of one."""
        cases = [case for case in self.rounds if case.rule == rule and exit_layer in (None, case.exit_layer)]
        return max(cases, key=lambda case: self.speedup(case).ours or 0.0, default=None)


def exit_layers(lm: LanguageModel) -> list[int]:
    """The exits that are tried: about a quarter, three eighths, half and three quarters of the layers."""
    depth = lm.config.num_layers
    return sorted({max(1, round(depth * part / 8)) for part in (2, 3, 4, 6)} - {depth})


def count(bench: Workbench, exits: Sequence[int]) -> Counted:
    """Records the greedy texts of all prompts, replays every case on them, and prices the rounds."""
    lm, options = bench.lm, bench.options
    tuning, reporting = (
        rules.record(lm, bench.encoded(split), exits, options.max_new_tokens, bench.on_progress)
        for split in ("tuning", "reporting")
    )
    rounds: dict[Case, tuple[Rounds, Rounds]] = {}
    for layer in exits:
        bench.on_progress(f"replaying exit {layer}")
        rounds |= rules.replayed(lm, layer, tuning[layer], reporting[layer])
    # Written down, as they are the clock's: with other prices another case may be the best, and what was measured of
    # the first would be lost.
    priced = bench.once(
        "prices",
        lambda: _prices(bench, exits),
        exits=list(exits),
        lengths=[LENGTHS, CONSTANT_LENGTHS],
        repeats=options.repeats,
    )
    return Counted(
        rounds,
        {layer: {n: priced[_name("rule", layer, n)] for n in LENGTHS} for layer in exits},
        {layer: {n: priced[_name("constant", layer, n)] for n in CONSTANT_LENGTHS} for layer in exits},
        {layer: share_of_step(DraftCost(layers=layer), lm.loaded) for layer in exits},
    )


def _name(kind: str, layer: int, length: int) -> str:
    return f"{kind}, exit {layer}, {length}"


def _prices(bench: Workbench, exits: Sequence[int]) -> dict[str, float]:
    """What a round costs, by `_name`."""
    lm, options = bench.lm, bench.options
    drafters = {
        _name("rule", layer, length): EarlyExit(lm.config, layer, fixed_length(length), rules.LONGEST)
        for layer in exits
        for length in LENGTHS
    } | {
        _name("constant", layer, length): EarlyExit(lm.config, layer, num_draft_tokens=length)
        for layer in exits
        for length in CONSTANT_LENGTHS
    }
    tokens = min(PRICED_TOKENS, options.max_new_tokens)
    return round_prices(
        lm,
        drafters,
        _of_one_capacity(bench.encoded("tuning"), tokens)[:PRICED],
        max_new_tokens=tokens,
        repeats=options.repeats,
        on_progress=lambda what: bench.on_progress(f"prices: {what}"),
    )


def _of_one_capacity(prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The prompts that need the same cache as most do: for another one every program compiles again."""
    groups: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        groups.setdefault(bucket(len(prompt) + max_new_tokens + rules.LONGEST + 1), []).append(prompt)
    return max(groups.values(), key=len)
