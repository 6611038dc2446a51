"""Predicts the time of a round on a device by linear interpolation in a table of step times.

A round of K draft tokens takes

    lookup + K · step(1 row, layers of a draft token) + step(K + 1 rows, layers of verification) + loop

where step(rows, layers, live length, batch) is interpolated in a table, `StepCosts`. The table has four sources:

- measured: `bench.step_costs`, which `jaxspec profile` runs
- guessed: `guessed`, for a device without measurements
- the bytes of a model's weights: `methods.base.read_costs`, where further rows are free
- a device's published figures: `aot.roofline`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

# The largest draft length of predictions: K of Draft & Verify.
LONGEST = 12


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The times of one model's steps on one device, in milliseconds, or in steps of one row if nothing was measured.

    Attributes:
      device, model, dtype: names for reports.
      num_layers: L, the model's number of layers.
      live: the number of cached tokens per text for which `full_ms` and `cut_ms` are given.
      full_ms: (rows per text, batch size, time) of steps of the whole model. The rows rise for each batch size, and
        (1, 1) is included.
      cut_layers, cut_ms: a number of layers, 0 … L − 1, and the time of a step of one row through these layers and the
        output head.
      live_token_ms: additional time per cached token, for a step of one text through all layers.
      loop_ms: time of a round that is not spent in its steps.
      lookup_ms: time of one search of a lookup drafter.
      absorb_ms: time per token of a prefill through all layers.
      row_reads: the share of `live_token_ms` that each further row of a text adds; 0 if a step reads the cache once.
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
    row_reads: float = 0.0

    def step_ms(
        self,
        rows: float = 1,
        layers: float | None = None,
        live: int | None = None,
        batch: int = 1,
        heads: float = 1,
    ) -> float:
        """Returns the time of a step in milliseconds.

        Args:
          rows: tokens fed per text; a mean over rounds may be fractional.
          layers: the number of layers that run; None for all.
          live: cached tokens per text; None for the table's `live`.
          batch: the number of texts.
          heads: how many times the final norm and the output head run.
        """
        ran = self.num_layers if layers is None else layers
        full = self._full_ms(rows, batch)
        # The time of layers and that of the head grow alike with the rows, so a layer's share of a step is constant.
        layer = full * self._layer_share
        rest = full - self.num_layers * layer
        further = 0.0 if live is None else (live - self.live) * self.live_token_ms
        further *= 1 + (rows - 1) * self.row_reads
        return ran * layer + heads * rest + batch * further * ran / self.num_layers

    @property
    def _layer_share(self) -> float:
        """One layer's share of the time of a step, clipped to 0 … 1 ÷ L because measured times are noisy."""
        one = self._full_ms(1, 1)
        share = (one - self.cut_ms) / (self.num_layers - self.cut_layers) / one
        return min(max(share, 0.0), 1 / self.num_layers)

    def _full_ms(self, rows: float, batch: int) -> float:
        batches = sorted({known for _, known, _ in self.full_ms})
        at_batches = []
        for known in batches:
            points = [(at, ms) for at, of, ms in self.full_ms if of == known]
            at_batches.append(on_line(rows, *zip(*points, strict=True)))
        return on_line(batch, batches, at_batches)


# Assumed times of steps by rows, relative to a step of one row, by whether products are of int8 numbers. Those of
# SmolLM2-135M on two cores are rather lower: prices that are too low lose the bound of `auto`, and prices that are too
# high lose little speed. Products of float32 have kernels for 1, 4, 8 and 16 rows.
CPU_STEPS = {
    False: ((2, 1.4), (8, 1.7), (9, 2.2), (33, 4.5), (64, 4.8), (256, 15.0)),
    True: ((2, 1.04), (8, 1.95), (33, 5.2)),
}


def guessed_row(platform: str) -> float:
    """Returns the assumed cost of each additional row, relative to a step of one row, without measurements.

    On a CPU, arithmetic takes about as long as reading the weights; on an accelerator, reading dominates. The value for
    TPUs comes from the compiler's cycle counts: relative to one row, 9 rows take 1.04 times and 65 rows 1.44 times the
    cycles (docs/laboratory.md).

    Args:
      platform: cpu, gpu or tpu.
    """
    return {"cpu": 0.12, "tpu": 0.006}.get(platform, 0.01)


def guessed(
    num_layers: int,
    row: float,
    rest: float = 0.1,
    lookup: float = 0.02,
    steps: Sequence[tuple[int, float]] = (),
    live_token: float = 0.0,
    row_reads: float = 0.0,
) -> StepCosts:
    """Returns assumed costs for a device without measurements, in units of a step of one row.

    Args:
      num_layers: the model's number of layers.
      row: the cost of each additional row, relative to a step of one row, see `guessed_row`; 0 if rows are free.
      steps: the times of steps by the rows of all texts, above 1 and rising, such as `CPU_STEPS`; () if `row` gives
        them.
      live_token: the cost of each cached token of a text.
      row_reads: as in `StepCosts`.
      rest: the share of a step that is not spent in its layers: embedding, final norm and head.
      lookup: the cost of one search of a lookup drafter.
    """
    rows, times = zip((1, 1.0), *(steps or [(33, 1.0 + 32 * row)]), strict=True)
    return StepCosts(
        *("unknown", "unknown", "unknown"),
        num_layers=num_layers,
        live=0,
        full_ms=tuple((one, batch, on_line(one * batch, rows, times)) for batch in (1, 8) for one in rows),
        cut_layers=0,
        cut_ms=rest,
        live_token_ms=live_token,
        lookup_ms=lookup,
        absorb_ms=(1.0 + 32 * row) / 33,
        row_reads=row_reads,
    )


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """The work of a draft. A device's `StepCosts` convert it to time.

    Attributes:
      layers: the work of one draft token, in layers of the target.
      heads: the number of output heads of the target's size that a draft token runs, a mean over the draft tokens.
      once: whether one pass produces all tokens of a draft.
      rows: the number of rows of a draft pass; above 1 for a tree, each of whose levels takes one pass.
      shared: the number of these layers that verification reuses instead of running them again: the exit layer of an
        early exit, else 0.
      lookup: whether the draft is copied from earlier tokens, which takes only a search.
      absorb_layers: the work to absorb one token into the drafter's own state, in layers of the target; 0 if it has no
        state.
      widths: the numbers of rows for which a verification is compiled, rising. A round runs the smallest that fits.
        () if every number is compiled.
      window: the cached tokens of a text that a draft token reads, if they are fewer than all; 0 for all. A shorter
        text has the same price.
      choice: of a draft whose layers are chosen again as the text grows, the tokens of the pass that chooses them, and
        the rounds between two choices. (0, 1) for other drafts.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0)
      >>> DraftCost(lookup=True).round_ms(costs, 4), DraftCost(layers=1).round_ms(costs, 4)
      (14.0, 30.0)
    """

    layers: float = 0.0
    heads: float = 1
    once: bool = False
    rows: int = 1
    shared: float = 0.0
    lookup: bool = False
    absorb_layers: float = 0.0
    widths: tuple[int, ...] = ()
    window: int = 0
    choice: tuple[int, int] = (0, 1)

    def draft_ms(self, costs: StepCosts, length: float, live: int | None = None, batch: int = 1) -> float:
        """Returns the time in milliseconds of the passes that draft `length` tokens per text, without a search."""
        if not self.layers or not length:
            return 0.0
        one = costs.step_ms(self.rows, self.layers, self.window or live, batch, self.heads)
        rows, rounds = self.choice
        choice = costs.step_ms(rows, live=live, batch=batch) / rounds if rows else 0.0
        return choice + (one if self.once else length * one)

    def round_ms(self, costs: StepCosts, length: float, live: int | None = None, batch: int = 1) -> float:
        """Returns the time in milliseconds of a round with `length` draft tokens per text; length 0 is a plain step."""
        search = costs.lookup_ms if self.lookup else 0.0
        rows = next((width for width in self.widths if width > length), length + 1)
        if not length:
            return search + costs.step_ms(rows, live=live, batch=batch) + costs.loop_ms
        drafting = self.draft_ms(costs, length, live, batch)
        verified = costs.num_layers - self.shared if self.shared else None
        verifying = costs.step_ms(rows, verified, live, batch)
        if self.shared:  # these layers have not run on the last draft token, which only verification reads
            verifying += costs.step_ms(layers=self.shared, live=live, batch=batch, heads=0)
        return search + drafting + verifying + costs.loop_ms

    def absorb_ms(self, costs: StepCosts) -> float:
        """Returns the time in milliseconds to absorb one token into the drafter's own state."""
        return costs.absorb_ms * self.absorb_layers / costs.num_layers


def kinds(num_layers: int) -> dict[str, DraftCost]:
    """Returns the costs of typical drafts by name, for a target of `num_layers` layers.

    - `lookup`: n-gram and suffix drafts.
    - `early exit`: an exit after a quarter of the layers.
    - `half the layers`: Draft & Verify, whose verification runs all layers.
    - `one layer`: EAGLE, a head of one layer with the target's output head.
    """
    return {
        "lookup": DraftCost(lookup=True),
        "early exit": DraftCost(layers=max(1, num_layers // 4), shared=max(1, num_layers // 4)),
        "half the layers": DraftCost(layers=num_layers / 2),
        "one layer": DraftCost(layers=1, absorb_layers=1),
    }


def tokens_per_round(agreement: float, num_draft_tokens: int) -> float:
    """Returns the expected tokens of a round with K draft tokens: (1 − a^(K+1)) ÷ (1 − a) for acceptance rate a.

    Leviathan et al. 2023, equation 1.
    """
    return sum(agreement**accepted for accepted in range(num_draft_tokens + 1))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A speed-up over plain decoding, and the draft length K that gives it."""

    speedup: float
    num_draft_tokens: int


def predicted_speedup(
    acceptance: float, plain: float, round_time: Callable[[int], float], longest: int = LONGEST
) -> Prediction:
    """Returns the largest speed-up over plain decoding among constant draft lengths K = 1 … `longest`.

        tokens_per_round(acceptance, K) · plain ÷ round_time(K)

    A speed-up below 1 is a slow-down. The prediction assumes that every round has a draft, and that each token is
    accepted with the same probability if all tokens before it are: it ranks drafts but does not predict their speeds.

    Args:
      acceptance: this probability.
      plain: the time of a step of plain decoding, in any unit.
      round_time: returns the time of a round with K draft tokens, in the same unit, such as `DraftCost.round_ms`.
      longest: the largest K.
    """

    def speedup(length: int) -> float:
        return tokens_per_round(acceptance, length) * plain / round_time(length)

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
    """Returns the speed-up of a generated text over plain decoding, computed from the counts of its rounds.

    Args:
      draft: the cost of its drafts.
      costs: the device's costs of steps.
      num_tokens: the number of tokens that the rounds committed.
      num_rounds: the number of rounds.
      num_drafts: the number of rounds with a draft.
      num_draft_tokens: the number of draft tokens that were verified.

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
    costs: StepCosts, drafts: Mapping[str, DraftCost], batch: int = 1
) -> dict[str, dict[str, Prediction]]:
    """Returns predicted speed-ups, by the draft's name and by each of `ACCEPTANCES` as a string such as "0.8".

    Args:
      costs: the device's costs of steps.
      drafts: the costs of drafts, by name.
      batch: as in `StepCosts.step_ms`.
    """
    plain = DraftCost().round_ms(costs, 0, batch=batch)

    def predicted(rate: float, draft: DraftCost) -> Prediction:
        return predicted_speedup(rate, plain, lambda length: draft.round_ms(costs, length, batch=batch))

    return {
        name: {f"{rate:g}": predicted(rate, draft) for rate in ACCEPTANCES} for name, draft in drafts.items()
    }


def on_line(at: float, known: Sequence[float], values: Sequence[float]) -> float:
    """Returns the linear interpolation of `values` at `at`, extrapolated with the last slope beyond the last point.

    Below the first point the result is the first value. A negative last slope is noise and is replaced by 0.

    Args:
      at: the point.
      known: the points at which values are given, rising.
      values: the value at each of these points.
    """
    if len(known) > 1 and at > known[-1]:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        return float(values[-1] + max(slope, 0.0) * (at - known[-1]))
    return float(np.interp(at, known, values))
