"""Stop rules of early exits, all tuned alike: what each drafts is counted by replay, exactly, and priced.

Greedy texts are written once and what every exit says along them is recorded once; then a rule at an exit with a number
costs a fraction of a second, and its counts are those that the engine would have. So every rule can be tried at every
exit with many numbers, and ratios between rules have no noise but that of prices, which they share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.bench import replay
from jaxspec.bench.oracle import Oracle
from jaxspec.bench.prices import price_of
from jaxspec.bench.speed import ratio_of_counts
from jaxspec.bench.timing import OnProgress
from jaxspec.engine.language_model import LanguageModel
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

# Up to the length that rules with a threshold may reach: else a longer draft would pass for a better rule.
CONSTANTS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
GAMMAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# K of rules other than the constant one: room for what their thresholds let through.
LONGEST = 16
# Rounds after which a γ that is carried from text to text counts as settled: a round moves it by .001.
SETTLED = 2000
# Rule → how it is made of γ and the records' estimates (0: the draft's probability, 1: the probe's).
THRESHOLDS: dict[str, Callable[[Any], StopRule]] = {
    "confidence": lambda gamma: ConfidenceBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "product": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "probe": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(1)),
}
# γ0 of AdaSPEED for all of them, after a search (its appendix).
PAPER_GAMMA = 0.8


class Case(NamedTuple):
    """A rule at an exit with its number.

    Attributes:
      rule: "constant", "confidence", "product", "probe" or "oracle".
      exit_layer: layers that draft.
      number: K of the constant rule, the γ that each text starts from of the others; None for the oracle.
      settled: whether γ is what it came to from the paper's γ0, carried from tuning text to tuning text.

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
        """The case as `generate` takes it.

        Raises:
          ValueError: of the oracle, which belongs to one text.

        Examples:
          >>> Case("product", 3, 0.6).method()
          AdaSPEED(num_draft_tokens=16, gamma=0.6, exit_layer=3)
        """
        if self.number is None:
            raise ValueError("the oracle is another one for each text; see `bench.oracle`")
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
    """What a case's rounds were on N texts.

    Attributes:
      tokens: int[N], after the first of each text.
      by_length: int[N, K + 1], rounds by tokens drafted.
      drafted, accepted: in all.
    """

    tokens: np.ndarray
    by_length: np.ndarray
    drafted: int
    accepted: int

    def cost(self, prices: Mapping[int, float]) -> np.ndarray:
        """float[N], what each text takes, in steps of plain decoding."""
        return price_of(self.by_length, prices)


def probe(lm: LanguageModel, exit_layer: int, law: str = "greedy") -> Estimate | None:
    """The probe of an exit for a law, wherever `adaspeed-probe` finds it; None where there is none."""
    if lm.directory is None:
        return None
    try:
        drafter, _ = lm.drafter(AdaSPEEDProbe(exit_layer=exit_layer), laws=(law,))
    except FileNotFoundError:
        return None
    found: Estimate = drafter.rule.estimate  # type: ignore[attr-defined]
    return found


def record(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    exits: Sequence[int],
    max_new_tokens: int,
    on_progress: OnProgress = lambda what: None,
) -> dict[int, list[replay.Record]]:
    """Writes the greedy texts after some prompts, and records what each exit would say along them."""
    on_progress(f"writing {len(prompts)} texts")
    texts = [
        lm.generate(
            prompt, method="autoregressive", max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True
        ).tokens
        for prompt in prompts
    ]
    longest = max(LONGEST, *CONSTANTS)
    found: dict[int, list[replay.Record]] = {}
    for layer in exits:
        draft = (lm.config.truncated(layer), llama.truncate(lm.params, layer))
        estimates = _estimates(lm, layer)
        found[layer] = []
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            on_progress(f"recording exit {layer}, text {number} of {len(prompts)}")
            found[layer].append(replay.record(lm, prompt, text, draft, estimates, longest))
    return found


def replayed(
    lm: LanguageModel, layer: int, tuning: Sequence[replay.Record], reporting: Sequence[replay.Record]
) -> dict[Case, tuple[Rounds, Rounds]]:
    """Every rule with every number at one exit: its rounds on tuning texts and on reporting texts."""

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
    """The γ that a rule comes to, carried from text to text and round again."""
    gamma, rounds = PAPER_GAMMA, 0
    while rounds < SETTLED:
        for one in texts:
            counts = replay.replay(one, make(jnp.asarray([gamma], jnp.float32)), LONGEST)
            if counts.gamma is not None:
                gamma = float(np.clip(counts.gamma[0], 0.0, 1.0))
            # A text of one token has no round.
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
    """The draft's own probability, and that of the exit's probe where the model has one for greedy texts."""
    found = probe(lm, exit_layer)
    return (DraftProbability(),) if found is None else (DraftProbability(), found)


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of two sums over texts, and its 95 % interval by the bootstrap over texts, as of measured speeds.

    Returns:
      Both; None where there is nothing to divide by, no interval where there is one text.

    Examples:
      >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
      (2.0, (2.0, 2.0))
      >>> ratio(np.array([0.0]), np.array([0.0]))
      (None, None)
    """
    mine, plain = (np.stack([above, taken], axis=-1)[:, None].astype(np.float64) for taken in (below, above))
    found, interval = ratio_of_counts(mine, plain)
    return found, interval if len(above) > 1 else None
