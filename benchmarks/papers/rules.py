"""Stop rules of early exits, tuned with the same method: their drafts are counted exactly by replay, and priced.

Greedy texts and the behaviour of every exit along them are recorded once. Then a rule at an exit with a number costs a
fraction of a second, with the same counts as in the engine. So every rule can be tried at every exit with many numbers,
and the only noise in ratios between rules is that of the common prices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.papers import replay
from benchmarks.papers.oracle import Oracle
from benchmarks.papers.prices import price_of
from jaxspec.engine.language_model import LanguageModel
from jaxspec.measuring.bench.speed import ratio_of_counts
from jaxspec.methods import AdaSPEED, AdaSPEEDProbe, LayerSkip
from jaxspec.model import llama
from jaxspec.protocol import StopRule
from jaxspec.stopping import (
    AdaptiveGamma,
    ConfidenceBelow,
    Constant,
    DraftProbability,
    Estimate,
    ProductBelow,
)

# Up to the largest length of rules with a threshold, so that these do not win by longer drafts alone.
CONSTANTS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
GAMMAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# K of rules other than the constant one: a limit that their thresholds rarely reach.
LONGEST = 16
# Rounds after which a γ that is carried from text to text counts as settled: a round changes it by .001.
SETTLED = 2000
# How each rule is made from γ and the record's estimates (0: the draft's probability, 1: the probe's).
THRESHOLDS: dict[str, Callable[[Any], StopRule]] = {
    "confidence": lambda gamma: ConfidenceBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "product": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "probe": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(1)),
}
# AdaSPEED's γ0 for all models, from a search (its appendix).
PAPER_GAMMA = 0.8


class Case(NamedTuple):
    """A rule at an exit with its number.

    Attributes:
      rule: "constant", "confidence", "product", "probe" or "oracle".
      exit_layer: number of layers of the draft.
      number: K of the constant rule; the initial γ of each text for the others; None for the oracle.
      settled: whether γ is the value reached from the paper's γ0, carried from tuning text to tuning text.

    Examples:
      >>> print(Case("product", 3, 0.6))
      product, exit 3, γ 0.6
    """

    rule: str
    exit_layer: int
    number: float | None = None
    settled: bool = False

    def __str__(self) -> str:
        words = f"{self.rule}, exit {self.exit_layer}"
        if self.number is None:
            return words
        number = f"K {self.number:g}" if self.rule == "constant" else f"γ {self.number:.3g}"
        return f"{words}, {number}{' (settled)' if self.settled else ''}"

    def method(self) -> LayerSkip:
        """Returns the case as a method for `generate`.

        Raises:
          ValueError: the case is the oracle, which belongs to one text.

        Examples:
          >>> Case("product", 3, 0.6).method()
          AdaSPEED(num_draft_tokens=16, gamma=0.6, exit_layer=3)
        """
        if self.number is None:
            raise ValueError("the oracle differs for each text; see `benchmarks.papers.oracle`")
        if self.rule == "constant":
            return LayerSkip(exit_layer=self.exit_layer, num_draft_tokens=int(self.number))
        given: dict[str, Any] = {
            "exit_layer": self.exit_layer,
            "num_draft_tokens": LONGEST,
            "gamma": self.number,
        }
        if self.rule == "confidence":
            return LayerSkip(stop_rule=("confidence",), **given)
        return (AdaSPEED if self.rule == "product" else AdaSPEEDProbe)(**given)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of a case on N texts.

    Attributes:
      tokens: int[N], number of tokens after the first of each text.
      by_length: int[N, K + 1], rounds by number of draft tokens.
      drafted, accepted: totals.
    """

    tokens: np.ndarray
    by_length: np.ndarray
    drafted: int
    accepted: int

    def to_json(self) -> list[Any]:
        """Returns the fields as JSON-ready values."""
        return [self.tokens.tolist(), self.by_length.tolist(), self.drafted, self.accepted]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Rounds:
        """Restores the result of `to_json`."""
        tokens, by_length, drafted, accepted = fields
        return cls(np.array(tokens), np.array(by_length), drafted, accepted)

    def cost(self, prices: Mapping[int, float]) -> np.ndarray:
        """Returns the cost of each text in steps of plain decoding, float[N]."""
        return price_of(self.by_length, prices)


def probe(lm: LanguageModel, exit_layer: int, distribution: str = "greedy") -> Estimate | None:
    """Returns the probe of an exit for a sampling distribution, as `adaspeed-probe` finds it; None without one."""
    if lm.directory is None:
        return None
    try:
        drafter, _ = lm.drafter(AdaSPEEDProbe(exit_layer=exit_layer), distributions=(distribution,))
    except FileNotFoundError:
        return None
    found: Estimate = drafter.rule.estimate  # type: ignore[attr-defined]
    return found


def texts(lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns a greedy text after each prompt, of `max_new_tokens` tokens: it continues after its end."""
    return [
        [
            int(token)
            for token in lm.generate(
                prompt,
                method="autoregressive",
                max_new_tokens=max_new_tokens,
                temperature=0.0,
                ignore_eos=True,
            ).tokens
        ]
        for prompt in prompts
    ]


def record(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]], exit_layer: int
) -> list[replay.Record]:
    """Records the drafts of an exit along greedy texts, see `texts`."""
    draft = (lm.config.truncated(exit_layer), llama.truncate(lm.params, exit_layer))
    estimates = _estimates(lm, exit_layer)
    longest = max(LONGEST, *CONSTANTS)
    return [
        replay.record(lm, prompt, text, draft, estimates, longest)
        for prompt, text in zip(prompts, written, strict=True)
    ]


def replayed(
    lm: LanguageModel, layer: int, tuning: Sequence[replay.Record], reporting: Sequence[replay.Record]
) -> dict[Case, tuple[Rounds, Rounds]]:
    """Returns the rounds of every rule with every number at one exit, on tuning texts and on reporting texts."""

    def both(rule: Callable[[replay.Record], StopRule], longest: int, batch: int = 1) -> Any:
        return tuple(
            [replay.replay(one, rule(one), longest, batch) for one in some] for some in (tuning, reporting)
        )

    found: dict[Case, tuple[Rounds, Rounds]] = {}
    for number in CONSTANTS:
        found[Case("constant", layer, number)] = _rounds(both(lambda _: Constant(), number))
    found[Case("oracle", layer)] = _rounds(both(lambda one: Oracle(one.right), LONGEST))
    for name, make in THRESHOLDS.items():
        if name == "probe" and probe(lm, layer) is None:
            continue
        settled = _settled(make, tuning)
        gammas = jnp.asarray((*GAMMAS, settled), jnp.float32)
        counts = both(lambda _, make=make, gammas=gammas: make(gammas), LONGEST, len(gammas))  # type: ignore[misc]
        for row, gamma in enumerate(GAMMAS):
            found[Case(name, layer, gamma)] = _rounds(counts, row)
        found[Case(name, layer, settled, settled=True)] = _rounds(counts, len(GAMMAS))
    return found


def _settled(make: Callable[[Any], StopRule], texts: Sequence[replay.Record]) -> float:
    """Returns the γ that a rule reaches, carried from text to text in a cycle."""
    gamma, rounds = PAPER_GAMMA, 0
    while rounds < SETTLED:
        for one in texts:
            counts = replay.replay(one, make(jnp.asarray([gamma], jnp.float32)), LONGEST)
            if counts.gamma is not None:
                gamma = float(np.clip(counts.gamma[0], 0.0, 1.0))
            # A text of one token has no round; count one, so that the loop ends.
            rounds += max(1, int(counts.rounds.sum()))
    return gamma


def _rounds(counts: Any, row: int = 0) -> tuple[Rounds, Rounds]:
    def gathered(some: Sequence[replay.Counts]) -> Rounds:
        return Rounds(
            np.array([one.tokens for one in some]),
            np.array([one.rounds[row] for one in some]),
            sum(int(one.drafted[row]) for one in some),
            sum(int(one.accepted[row]) for one in some),
        )

    return gathered(counts[0]), gathered(counts[1])


def _estimates(lm: LanguageModel, exit_layer: int) -> tuple[Estimate, ...]:
    """Returns the draft's own probability, and the estimate of the exit's probe for greedy texts if there is one."""
    found = probe(lm, exit_layer)
    return (DraftProbability(),) if found is None else (DraftProbability(), found)


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    """Computes the ratio of two sums over texts, and its 95 % bootstrap interval over texts, as for measured speeds.

    Returns:
      ratio and interval; None if the divisor is 0; no interval for a single text.

    Examples:
      >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
      (2.0, (2.0, 2.0))
      >>> ratio(np.array([0.0]), np.array([0.0]))
      (None, None)
    """
    mine, plain = (np.stack([above, taken], axis=-1)[:, None].astype(np.float64) for taken in (below, above))
    found, interval = ratio_of_counts(mine, plain)
    return found, interval if len(above) > 1 else None
