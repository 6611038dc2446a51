"""What a round costs on a device: a few known steps of a model, straight lines between them, and kinds of drafts.

A round of K draft tokens takes

    lookup + K · step(1 row, what a draft token runs) + step(K + 1 rows, what verification runs) + loop

where step(rows, layers, live length, batch) comes from a table of steps, measured (`bench.step_costs`) or derived from
a device's published figures (`deviceless.roofline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Times of steps of one model on one device, all in milliseconds.

    Attributes:
      device, model, dtype: what they are of, in words.
      num_layers: L of the model.
      live: tokens before the steps of `full_ms` and `cut_ms`.
      full_ms: (rows of one text, batch, time) of steps of the whole model; at least (1, 1), and rows rising for each
        batch.
      cut_layers, cut_ms: a step of one row of one text through this many of the layers, 0 … L − 1, and the head.
      live_token_ms: what a step of one text through all layers costs more for each token before it.
      loop_ms: of a round beside its steps.
      lookup_ms: a search for what followed on the same words earlier.
      absorb_ms: of one token of a prompt through all layers, in a prefill.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.01)
      >>> costs.step_ms(), costs.step_ms(3), costs.step_ms(9), costs.step_ms(layers=2), costs.step_ms(live=200)
      (10.0, 12.0, 18.0, 6.0, 11.0)
    """

    device: str
    model: str
    dtype: str
    num_layers: int
    live: int
    full_ms: tuple[tuple[int, int, float], ...]
    cut_layers: int
    cut_ms: float
    live_token_ms: float
    loop_ms: float = 0.0
    lookup_ms: float = 0.0
    absorb_ms: float = 0.0

    def step_ms(
        self,
        rows: int = 1,
        layers: float | None = None,
        live: int | None = None,
        batch: int = 1,
        head: bool = True,
    ) -> float:
        """Time of a step.

        Args:
          rows: tokens that each text feeds.
          layers: how many layers run; None for all.
          live: tokens before the step, of each text; None for those of the table.
          batch: texts.
          head: whether the final norm and the output head run.
        """
        ran = self.num_layers if layers is None else layers
        full = self._full_ms(rows, batch)
        # A layer's share is that of one row: layers and head are products of the same rows.
        layer = full * self._layer_share
        rest = full - self.num_layers * layer
        further = 0.0 if live is None else (live - self.live) * self.live_token_ms
        return ran * layer + (rest if head else 0.0) + batch * further * ran / self.num_layers

    @property
    def _layer_share(self) -> float:
        """One layer's part of a step of one row, between 0 and 1 ÷ L: measured times are noisy."""
        one = self._full_ms(1, 1)
        share = (one - self.cut_ms) / (self.num_layers - self.cut_layers) / one
        return min(max(share, 0.0), 1 / self.num_layers)

    def _full_ms(self, rows: int, batch: int) -> float:
        batches = sorted({known for _, known, _ in self.full_ms})
        at_batches = []
        for known in batches:
            points = [(at, ms) for at, of, ms in self.full_ms if of == known]
            at_batches.append(on_line(rows, *zip(*points, strict=True)))
        return on_line(batch, batches, at_batches)


def guessed_row(platform: str) -> float:
    """Returns the cost of a further row of a step, as a share of a step of one row, for a device without measurements.

    A CPU takes as long to compute as to read; an accelerator waits for memory. The value for TPUs comes from its
    compiler's cycles: 9 rows take 1.04 times, 65 rows 1.44 times those of one row (docs/measurements.md).

    Args:
      platform: cpu, gpu or tpu.

    Examples:
      >>> guessed_row("tpu")
      0.006
    """
    return {"cpu": 0.12, "tpu": 0.006}.get(platform, 0.01)


def guessed(num_layers: int, row: float) -> StepCosts:
    """Costs in proportion to a step of one row, for a device of which nothing has been measured.

    Observed times correct them, so they need only be of the right order.

    Args:
      num_layers: of the model.
      row: what each further row of a step costs, as a share of a step of one.

    Examples:
      >>> guessed(10, row=0.1).step_ms(rows=6), round(guessed(10, row=0.1).step_ms(layers=5), 2)
      (1.5, 0.55)
    """
    share = 0.1  # of embedding, norm and head; a search is small beside a layer
    full = ((1, 1, 1.0), (33, 1, 1.0 + 32 * row), (1, 8, 1.0 + 7 * row), (33, 8, 1.0 + 263 * row))
    return StepCosts(
        *("unknown", "unknown", "unknown"),
        num_layers=num_layers,
        live=0,
        full_ms=full,
        cut_layers=0,
        cut_ms=share,
        live_token_ms=0.0,
        loop_ms=0.0,
        lookup_ms=0.02,
        absorb_ms=(1.0 + 32 * row) / 33,
    )


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """The work of a draft on a device, from which the device's `StepCosts` give its time.

    Attributes:
      layers: of the target, or as much work as that many, that one draft token runs through.
      head: whether a draft token runs through an output head as large as the target's.
      once: whether one such pass gives all the tokens of a draft.
      shared: how many of these layers verification does not run again: the exit layer of an early exit.
      lookup: whether the draft is looked up in a text.
      absorb_layers: as many layers' work as one token takes to be absorbed by a state of the draft's own; 0 for none.
      replayed: whether what it would have drafted follows from a text that others drafted, as for prompt lookup of the
        usual kind.
      adapts: whether a draft ends by itself where it does not pay, so that nobody has to choose its length.
      widths: the numbers of rows for which a verification is compiled, rising, of which the narrowest runs that fits;
        () for all of them.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0)
      >>> DraftCost(lookup=True).round_ms(costs, 4), DraftCost(layers=1).round_ms(costs, 4)
      (14.0, 30.0)
    """

    layers: float = 0.0
    head: bool = True
    once: bool = False
    shared: float = 0.0
    lookup: bool = False
    absorb_layers: float = 0.0
    replayed: bool = False
    adapts: bool = False
    widths: tuple[int, ...] = ()

    def round_ms(self, costs: StepCosts, length: int, live: int | None = None, batch: int = 1) -> float:
        """Time of a round that drafts and verifies `length` tokens of each text; 0 verifies nothing."""
        search = costs.lookup_ms if self.lookup else 0.0
        rows = next((width for width in self.widths if width > length), length + 1)
        if not length:
            return search + costs.step_ms(rows, live=live, batch=batch) + costs.loop_ms
        drafting = 0.0
        if self.layers:
            one = costs.step_ms(layers=self.layers, live=live, batch=batch, head=self.head)
            drafting = one if self.once else length * one
        verified = costs.num_layers - self.shared if self.shared else None
        verifying = costs.step_ms(rows, verified, live, batch)
        if self.shared:  # drafting did not run the last draft token through these layers
            verifying += costs.step_ms(layers=self.shared, live=live, batch=batch, head=False)
        return search + drafting + verifying + costs.loop_ms

    @property
    def copies(self) -> bool:
        """Whether a search is all that drafts: not of a hybrid, which has layers to run too."""
        return self.lookup and not self.layers

    def absorb_ms(self, costs: StepCosts) -> float:
        """Time to bring the draft's own state up by one token."""
        return costs.absorb_ms * self.absorb_layers / costs.num_layers


def kinds(num_layers: int) -> dict[str, DraftCost]:
    """The kinds of drafts that need no second model, at usual sizes, for a target of so many layers.

    Returns:
      by name: `lookup` (n-gram, suffix), `early exit` after a quarter of the layers, `half the layers` (Draft & Verify:
      what is skipped is verified), and `one layer` (EAGLE: a head of one layer, with the target's output head).

    Examples:
      >>> list(kinds(32))
      ['lookup', 'early exit', 'half the layers', 'one layer']
    """
    return {
        "lookup": DraftCost(lookup=True),
        "early exit": DraftCost(layers=max(1, num_layers // 4), shared=max(1, num_layers // 4)),
        "half the layers": DraftCost(layers=num_layers / 2),
        "one layer": DraftCost(layers=1, absorb_layers=1),
    }


def tokens_per_round(agreement: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round that drafts K, each right with probability a: (1 − a^(K+1)) ÷ (1 − a).

    Leviathan et al. 2023, equation 1.

    Examples:
      >>> tokens_per_round(0.5, 2)
      1.75
    """
    return sum(agreement**accepted for accepted in range(num_draft_tokens + 1))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A speed-up over plain decoding, and the draft length K that gives it.

    Examples:
      >>> Prediction(1.5, 4).num_draft_tokens
      4
    """

    speedup: float
    num_draft_tokens: int


def predicted_speedup(
    acceptance: float,
    draft: DraftCost,
    costs: StepCosts,
    longest: int = 12,
    live: int | None = None,
    batch: int = 1,
) -> Prediction:
    """The best speed-up over plain decoding of drafts of constant length K = 1 … `longest`; below 1 a loss.

    It takes acceptances as independent, and every round as having a draft.

    Args:
      acceptance: the probability that a draft token is right, given those before it.
      draft: the kind.
      costs: of the device.
      longest: the largest K.
      live, batch: as in `StepCosts.step_ms`.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 10.0)), 1, 4.0, 0.0)
      >>> predicted_speedup(1.0, DraftCost(lookup=True), costs, longest=4)
      Prediction(speedup=5.0, num_draft_tokens=4)
    """
    plain = DraftCost().round_ms(costs, 0, live, batch)

    def speedup(length: int) -> float:
        return tokens_per_round(acceptance, length) * plain / draft.round_ms(costs, length, live, batch)

    best = max(range(1, longest + 1), key=speedup)
    return Prediction(speedup(best), best)


def reached_speedup(
    draft: DraftCost,
    costs: StepCosts,
    num_tokens: int,
    num_rounds: int,
    num_drafts: int,
    num_draft_tokens: int,
) -> float:
    """Returns a text's speed-up over plain decoding, computed from its rounds' drafted and accepted tokens.

    Args:
      draft: the cost of its drafts.
      costs: the device's costs of steps.
      num_tokens: number of tokens that the rounds committed.
      num_rounds, num_drafts: number of rounds, and of rounds that drafted.
      num_draft_tokens: drafted tokens that were verified.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 10.0)), 1, 4.0, 0.0)
      >>> reached_speedup(DraftCost(lookup=True), costs, num_tokens=6, num_rounds=3, num_drafts=2, num_draft_tokens=8)
      2.0
    """
    drafted = num_drafts * draft.round_ms(costs, round(num_draft_tokens / max(num_drafts, 1)))
    taken = drafted + (num_rounds - num_drafts) * draft.round_ms(costs, 0)
    return num_tokens * DraftCost().round_ms(costs, 0) / taken


ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def speedup_table(
    costs: StepCosts, drafts: Mapping[str, DraftCost], live: int | None = None, batch: int = 1
) -> dict[str, dict[str, Prediction]]:
    """What kinds of drafts would gain at `ACCEPTANCES`, by kind and acceptance such as "0.8".

    Args:
      costs: of the device.
      drafts: by name.
      live, batch: as in `StepCosts.step_ms`.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 10.0)), 1, 4.0, 0.0)
      >>> round(speedup_table(costs, {"ngram": DraftCost(lookup=True)})["ngram"]["0.5"].speedup, 2)
      2.0
    """
    return {
        name: {
            f"{rate:g}": predicted_speedup(rate, draft, costs, live=live, batch=batch) for rate in ACCEPTANCES
        }
        for name, draft in drafts.items()
    }


def on_line(at: float, known: Sequence[float], values: Sequence[float]) -> float:
    """The value at a place: straight lines between the known ones, the last line carried on behind them.

    In front of the first place it is the first value; behind a last line that falls, which is noise, the last.

    Args:
      at: the place.
      known: rising.
      values: as many.

    Examples:
      >>> [on_line(at, (1, 3), (10.0, 20.0)) for at in (0, 2, 5)]
      [10.0, 15.0, 30.0]
    """
    if len(known) > 1 and at > known[-1]:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        return float(values[-1] + max(slope, 0.0) * (at - known[-1]))
    return float(np.interp(at, known, values))
