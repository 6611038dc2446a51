"""Counts every stop rule at every exit with every number on greedy texts by replay, and prices it by real rounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.papers import baselines, rules
from benchmarks.papers.prices import fixed_length, round_prices
from benchmarks.papers.rules import Case, Rounds
from benchmarks.papers.tables import Cell
from benchmarks.papers.workbench import SPLITS, Workbench
from jaxspec.costs.rounds import DraftCost
from jaxspec.drafting.layerskip_drafter import LayerSkip as EarlyExit
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods.base import share_of_step
from jaxspec.programs.buckets import bucket

# Table I, speed over LayerSkip's: greedy, and top-p, for the models of 1B and 7B.
TABLE = {
    "constant": ((1.0, 1.0), (1.0, 1.0)),
    "confidence": ((1.10, 1.12), (1.35, 1.14)),
    "product": ((1.16, 1.18), (1.42, 1.21)),
    "probe": ((1.10, 1.12), (1.51, 1.24)),
}
NAMES = {
    "constant": "LayerSkip, best constant",
    "confidence": "Draft & Verify's stop",
    "product": "AdaSPEED",
    "probe": "AdaSPEED, probe",
    "oracle": baselines.ORACLE,
}
# Draft lengths at which rounds are priced: with a threshold (one program), and with constant K (one program each).
# Other lengths are interpolated linearly.
LENGTHS, CONSTANT_LENGTHS = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
# Number of prompts and tokens for the prices.
PRICED, PRICED_TOKENS = 4, 64
# Measurements of an exit's prices until they are sound.
ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Counted:
    """Every rule at every exit with every number, on greedy texts.

    Attributes:
      rounds: by case, on tuning and on reporting texts.
      prices: by exit, prices of rounds with a threshold by number of draft tokens.
      constant: by exit, prices of rounds that always draft K tokens, by K.
      draft_share: by exit, the share of the weights' bytes that a draft step reads.
      unsound: the exits whose prices are not `sound`.
    """

    rounds: Mapping[Case, tuple[Rounds, Rounds]]
    prices: Mapping[int, Mapping[int, float]]
    constant: Mapping[int, Mapping[int, float]]
    draft_share: Mapping[int, float]
    unsound: Sequence[int] = ()

    def speedup(self, case: Case, split: int = 0) -> Cell:
        """Returns the predicted speed-up over plain decoding on tuning (0) or reporting texts (1)."""
        rounds = self.rounds[case][split]
        prices = (self.constant if case.rule == "constant" else self.prices)[case.exit_layer]
        return Cell(None, *rules.ratio(rounds.tokens, rounds.cost(prices)))

    def free(self, case: Case) -> Cell:
        """Returns the speed-up on reporting texts if a pass cost only the weights that it reads."""
        rounds = self.rounds[case][1]
        # Verification does not read the draft's layers again, except for the last draft token: together one pass.
        share = self.draft_share[case.exit_layer]
        prices = {length: 1 + length * share for length in (1, rules.LONGEST)}
        return Cell(None, *rules.ratio(rounds.tokens, rounds.cost(prices)))

    def best(self, rule: str, exit_layer: int | None = None) -> Case | None:
        """Returns the case of a rule that is fastest on tuning texts, over all exits or for one."""
        cases = [case for case in self.rounds if case.rule == rule and exit_layer in (None, case.exit_layer)]
        return max(cases, key=lambda case: self.speedup(case).ours or 0.0, default=None)


def exit_layers(lm: LanguageModel) -> list[int]:
    """Returns the exits to try: about a quarter, three eighths, half and three quarters of the layers."""
    depth = lm.config.num_layers
    return sorted({max(1, round(depth * part / 8)) for part in (2, 3, 4, 6)} - {depth})


def replayed(bench: Workbench, exits: Sequence[int]) -> dict[Case, tuple[Rounds, Rounds]]:
    """Replays every case on the greedy texts of all prompts, tuning and reporting; each exit is stored at once."""
    prompts = {split: bench.encoded(split) for split in SPLITS}
    written = {
        split: bench.once(
            f"texts-{split}",
            functools.partial(_written, bench.lm, prompts[split], bench.options.max_new_tokens),
        )["texts"]
        for split in SPLITS
    }
    found: dict[Case, tuple[Rounds, Rounds]] = {}
    for layer in exits:
        stored = bench.once(
            f"counts-exit-{layer}",
            functools.partial(_replayed, bench.lm, prompts, written, layer),
            numbers=_numbers(),
        )
        for case, tuning, reporting in stored["cases"]:
            found[Case(*case)] = Rounds.from_json(tuning), Rounds.from_json(reporting)
    return found


def _written(lm: LanguageModel, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    return {"texts": rules.texts(lm, prompts, max_new_tokens)}


def _replayed(
    lm: LanguageModel,
    prompts: Mapping[Any, list[list[int]]],
    written: Mapping[Any, list[list[int]]],
    layer: int,
) -> dict[str, Any]:
    tuning, reporting = (rules.record(lm, prompts[split], written[split], layer) for split in SPLITS)
    counts = rules.replayed(lm, layer, tuning, reporting)
    return {"cases": [[list(case), *(one.to_json() for one in both)] for case, both in counts.items()]}


def _numbers() -> list[Any]:
    return [rules.CONSTANTS, rules.GAMMAS, rules.LONGEST]


def count(bench: Workbench, exits: Sequence[int]) -> Counted:
    """Replays every case on the greedy texts of all prompts, and prices the rounds."""
    lm, options = bench.lm, bench.options
    rounds = replayed(bench, exits)
    # Stored, because prices vary between runs. Other prices may select another best case, and its measurements would be
    # missing.
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
        priced["unsound"],
    )


def _name(kind: str, layer: int, length: int) -> str:
    return f"{kind}, exit {layer}, {length}"


def _prices(bench: Workbench, exits: Sequence[int]) -> dict[str, Any]:
    """Returns the prices of rounds by `_name`, and as `unsound` the exits whose prices are never `sound`."""
    found: dict[str, Any] = {}
    left = list(exits)
    for _ in range(ATTEMPTS):
        found |= _measured_prices(bench, left)
        left = [layer for layer in left if not sound(found, layer)]
        if not left:
            break
    return found | {"unsound": left}


def sound(prices: Mapping[str, float], layer: int) -> bool:
    """Whether the prices of an exit rise with the draft's length, and differ by at most 20 % between the two programs.

    Examples:
      >>> rising = {_name(kind, 3, n): 1 + n / 4 for kind in ("rule", "constant") for n in LENGTHS}
      >>> sound(rising, 3), sound(rising | {_name("rule", 3, 1): 2.1}, 3)
      (True, False)
    """
    rule, constant = (
        [prices[_name(kind, layer, n)] for n in lengths if _name(kind, layer, n) in prices]
        for kind, lengths in (("rule", LENGTHS), ("constant", CONSTANT_LENGTHS))
    )
    rises = all(less < more for one in (rule, constant) for less, more in itertools.pairwise(one))
    both = [
        tuple(prices[_name(kind, layer, n)] for kind in ("rule", "constant"))
        for n in LENGTHS
        if n in CONSTANT_LENGTHS
    ]
    return rises and all(max(pair) <= 1.2 * min(pair) for pair in both)


def _measured_prices(bench: Workbench, exits: Sequence[int]) -> dict[str, float]:
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
    """Selects the prompts with the most frequent cache size; another size would compile every program again."""
    groups: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        groups.setdefault(bucket(len(prompt) + max_new_tokens + rules.LONGEST + 1), []).append(prompt)
    return max(groups.values(), key=len)
