"""The policy of method `auto`: it chooses the drafter and draft length with the most expected tokens per millisecond.

A candidate is a drafter with the price of its rounds by draft length; candidate `OFF` is plain decoding. The engine
(`engine.auto`) and the simulation (`benchmarks.choosing`) use the same `Policy`. It has no randomness and no I/O.

All rows of a batch use the same candidate and length, because one call of the loop decodes all of them. The choice
maximises

    Σ rows expected tokens of a round ÷ time of a round

where the time includes the time to bring the candidate's own state up to date. A trial of a candidate costs time if it
fails. It is therefore allowed only if, even with pessimistic acceptances, the total loss against plain decoding stays
below a small share of the text so far. Time saved by successful candidates increases that allowance (conservative
bandits: Wu et al. 2016, arXiv:1602.04282).

**Why it is lossless.** A choice depends only on times and on counts of drafted and accepted tokens in completed rounds,
never on a token that is still to be drawn. Given everything before a round, its tokens follow the target's distribution
with every candidate, because each method is lossless by itself. A choice that depended on a draft before its
verification would break this, because the tokens of a round would influence which rounds are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.choosing import beliefs
from jaxspec.choosing.beliefs import UNKNOWN, Counts, Expectation, Prior
from jaxspec.choosing.costs import DraftCost, StepCosts
from jaxspec.choosing.lookup import ReplayedLookup
from jaxspec.choosing.prices import OFF, Outlook, Prices, outlook, price_table

# The number of rounds between two choices: enough to estimate an acceptance, few enough to lose little.
ROUNDS = 8
# The maximum of this number. A choice takes the host about as long as one round of a small model.
MOST_ROUNDS = 64
# The number of rounds of a candidate's first trial in a text. It is short because a failed trial is a loss.
TRIAL = ROUNDS // 2
# The allowed loss against plain decoding is LOSS · (ADVANCE + tokens of the text so far), in tokens. ADVANCE allows
# trials at the beginning of a text. After 256 tokens the allowed loss is 3 % of the text.
LOSS, ADVANCE = 0.02, 128.0
# The end of a text is unknown. A new text is assumed to continue for this many tokens. A candidate must save at least
# the time of its state update within them.
SOON = 32
# The weight of a new observation in the ratio of observed to predicted times.
LEARNING = 0.3
# The largest factor by which one observation may differ from the ratio so far; a larger one is clipped. Otherwise one
# slow moment of the machine could exclude a candidate.
SURPRISE = 1.5


def choose(
    table: Prices,
    prior: Prior,
    counts: Counts,
    *,
    usable: np.ndarray,
    state_ms: np.ndarray,
    horizon: float,
    allowed: float,
    rounds: int,
) -> tuple[int, int]:
    """Returns the candidate and the draft length with the most expected tokens per millisecond.

    Args:
      table, prior, counts: as for `outlook`.
      usable: bool[M], the candidates to choose among; plain decoding is always one of them.
      state_ms: float[M], time to bring each candidate's own state up to date in all rows before its first round.
      horizon: the number of tokens per row that the text is assumed to continue; the candidate must save `state_ms`
        within them.
      allowed: the maximum loss of a failed trial per row. The unit is the time of one plain decoding step.
      rounds: the number of rounds of a trial.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 10.0)), 1, 4.0, 0.0)
      >>> table = price_table(costs, (DraftCost(lookup=True),), (2,), None, 1)
      >>> prior = beliefs.prior_of([UNKNOWN, Expectation((0.8,), 2.0)], 2)
      >>> rest = {"state_ms": np.zeros(2), "horizon": 64.0, "allowed": 3.0, "rounds": 4}
      >>> choose(table, prior, beliefs.no_counts(1, 2, 2), usable=np.array([True, True]), **rest)
      (1, 2)
    """
    step = table.round_ms[OFF, 0]
    # Step 1: exclude candidates whose trial could cost more than `allowed` with pessimistic acceptances (-1). A
    # candidate that is slower than plain decoding is dropped after the trial. Its loss is the extra time of the trial
    # rounds and the time of its state update. A faster candidate stays active until the horizon. Its gain until then is
    # subtracted from the time of its state update.
    bad = outlook(table, prior, counts, -1.0)
    kept = horizon * (1 / np.maximum(bad.speedup, 1) - 1)
    loss = np.where(bad.speedup < 1, rounds * bad.round_ms / step * (1 - bad.speedup), kept)
    open_to = usable & (state_ms / step + loss <= max(allowed, 0.0))
    open_to[OFF] = True
    # Step 2: choose the candidate with the least expected time for the tokens of the horizon. `argmin` takes the first
    # of equal times, which is plain decoding.
    good = outlook(table, prior, counts)
    needed = np.where(open_to, state_ms + horizon * step / good.speedup, np.inf)
    best = int(needed.argmin())
    return best, int(good.length[best])


@dataclasses.dataclass
class Times:
    """Times observed on this machine, shared by all texts of a model.

    Attributes:
      ratios: observed ÷ predicted time of rounds, by candidate and batch size.
      disturbed: the keys of ratios from disturbed times, see `Policy.learn`.
      prefill_ms: time per token of a prefill; None before the first long prompt.
      compile_ms: the longest compile time of a program; None before the first compilation.
      missed_ms: time lost so far because a candidate's programs were not compiled, by candidate.
      programs: the time to load a candidate's stored programs, by candidate and shapes of the batch.
    """

    ratios: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    prefill_ms: float | None = None
    compile_ms: float | None = None
    missed_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    programs: dict[str, float] = dataclasses.field(default_factory=dict)
    disturbed: set[tuple[str, int]] = dataclasses.field(default_factory=set)


class Choice(NamedTuple):
    """A candidate, its maximum draft length, and the number of rounds to run."""

    candidate: int
    length: int
    rounds: int


class Policy:
    """Makes the choices of one batch and learns from the results.

    Args:
      names: the names of the candidates, without plain decoding. It becomes candidate 0, `off`.
      drafts: the cost of each candidate's drafts.
      longest: K of each candidate.
      costs: the device's costs of steps.
      batch: the number of rows.
      times: times of earlier batches, which are updated in place.
      measured: whether `costs` are milliseconds on this machine; otherwise only their proportions are known.
      expectations: the expected acceptance of each candidate; None if unknown.
      lookup: makes the replay of prompt lookup in one row, from K and the row's tokens.
    """

    def __init__(
        self,
        names: Sequence[str],
        drafts: Sequence[DraftCost],
        longest: Sequence[int],
        costs: StepCosts,
        batch: int,
        *,
        times: Times | None = None,
        measured: bool = True,
        expectations: Sequence[Expectation | None] | None = None,
        lookup: Callable[[int, Sequence[int]], ReplayedLookup] = ReplayedLookup,
    ) -> None:
        self.names = ("off", *names)
        self._drafts, self._longest, self._costs, self._batch = tuple(drafts), tuple(longest), costs, batch
        self.times, self._measured = Times() if times is None else times, measured
        known = [None] * len(drafts) if expectations is None else expectations
        # Candidates with an expectation may draft from the first round of a text.
        self.informed = [at for at, one in enumerate(known, 1) if one is not None]
        prior = beliefs.prior_of([UNKNOWN, *(one or UNKNOWN for one in known)], max(longest))
        kin = np.array([False, *(not one.copies for one in drafts)])
        strength = np.minimum(prior.strength, beliefs.BELIEVED)
        self._prior = dataclasses.replace(prior, strength=strength, kin=kin)
        self.counts = beliefs.no_counts(batch, len(self.names), max(longest))
        # Per row: the number of tokens at the start of the text, the number of new tokens since then, and the time lost
        # since then, in steps of plain decoding.
        self._given, self._tokens, self._lost = np.zeros(batch), np.zeros(batch), np.zeros(batch)
        self._first: tuple[int, int] = (OFF, 0)
        self._last: tuple[int, int] | None = None
        # The number of rounds that the last choice covers, and how many of these have not run yet.
        self._patience, self._left = ROUNDS, 0
        self._played: set[int] = set()
        # Whether programs are being loaded: a new choice is then made soon.
        self.awaits = False
        # Candidates that copy from the text. Their drafts can be computed from the tokens without running them.
        self._copies = [at for at, one in enumerate(drafts, 1) if one.copies]
        self._lookup = lookup
        self._lookups: list[ReplayedLookup | None] = [None] * batch
        # For each candidate whose programs are not compiled: the share of the time that its programs would save, by
        # name.
        self._missed: dict[str, float] = {}
        self._unready: list[str] = []

    def resize(self, batch: int) -> None:
        """Keeps the first `batch` rows, or adds rows without a text."""
        new = max(batch - self._batch, 0)
        counts = beliefs.no_counts(new, len(self.names), self.counts.accept.shape[2])
        self.counts = Counts(
            np.concatenate([self.counts.accept[:batch], counts.accept]),
            np.concatenate([self.counts.draft[:batch], counts.draft]),
        )
        self._given, self._tokens, self._lost = (
            np.pad(numbers[:batch], (0, new)) for numbers in (self._given, self._tokens, self._lost)
        )
        self._lookups = [*self._lookups[:batch], *[None] * new]
        self._batch, self._left = batch, 0

    def begin_row(self, row: int, tokens: Sequence[int]) -> None:
        """Starts a new text in a row. `tokens` are its prompt and its first token."""
        self._left = 0
        self.counts.accept[row], self.counts.draft[row] = 0, 0
        self._given[row], self._tokens[row], self._lost[row] = len(tokens), 0, 0
        if self._copies:
            self._lookups[row] = self._lookup(max(self._longest[at - 1] for at in self._copies), tokens)

    def begin(
        self, lengths: np.ndarray, remaining: np.ndarray, ready: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Returns the candidate and draft length of the first rounds.

        The candidate has an expectation, or it is plain decoding.

        It is chosen before the prefill, which also makes the candidate's state. Plain decoding is chosen until an
        undisturbed time of a step is known. The arguments are those of `next`, before the prefill.
        """
        usable = np.array([at in self.informed and ready(at) for at in range(len(self.names))])
        self._first = (OFF, 0)
        if usable.any() and self._undisturbed(OFF) is not None:
            self._first = self._best(lengths, remaining, np.zeros(len(usable)), usable)
        return self._first

    def next(
        self,
        lengths: np.ndarray,
        remaining: np.ndarray,
        most_rounds: int,
        held: int | None,
        ready: Callable[[int], bool],
    ) -> tuple[Choice, bool]:
        """Returns the next choice, and whether it is new; otherwise it is the rest of the previous one.

        Args:
          lengths: int[B], tokens of each row.
          remaining: int[B], the maximum number of further tokens; 0 for rows that have ended.
          most_rounds: the maximum number of rounds before control must return to the host.
          held: the candidate whose state is up to date; None for none.
          ready: returns whether a candidate's programs are ready.
        """
        last, begins = self._last, self._last is None
        if self._left > 0 and last is not None and (last[0] == OFF or ready(last[0])):
            return Choice(*last, min(self._left, most_rounds)), False
        usable = np.array([at == OFF or ready(at) for at in range(len(self.names))])
        candidate, length = OFF, 0
        if begins and held is not None and held == self._first[0]:
            candidate, length = self._first
        elif usable[1:].any() and not begins:
            # Otherwise a text begins with plain decoding, whose tokens already show the acceptance of lookup drafts.
            state_ms = self._table(lengths).state_ms(float(lengths.sum()))
            if held is not None:
                state_ms[held] = 0.0
            candidate, length = self._best(lengths, remaining, state_ms, usable)
        if not usable[1:].any():
            self._patience = ROUNDS if self.awaits else MOST_ROUNDS
        elif last is not None and candidate == last[0]:
            self._patience = min(self._patience * TRIAL, MOST_ROUNDS)
        elif candidate == OFF:  # at the beginning of a text, or after a failed trial
            self._patience = ROUNDS if begins else MOST_ROUNDS // 2
        else:
            self._patience = ROUNDS if candidate in self._played else TRIAL
        self._last, self._left = (candidate, length), self._patience
        return Choice(candidate, length, min(self._left, most_rounds)), True

    def _best(
        self, lengths: np.ndarray, remaining: np.ndarray, state_ms: np.ndarray, usable: np.ndarray
    ) -> tuple[int, int]:
        live = _live(remaining)
        # The end of a text is unknown; the longer it already is, the longer it is expected to continue.
        soon = np.minimum(remaining, SOON + lengths - self._given)[live]
        return choose(
            self._table(lengths),
            self._prior,
            self.counts.of(live),
            usable=usable,
            state_ms=state_ms,
            horizon=max(float(soon.mean()), 1.0),
            allowed=float((LOSS * (ADVANCE + self._tokens) - self._lost)[live].mean()),
            rounds=TRIAL,
        )

    def promising(
        self, lengths: np.ndarray, remaining: np.ndarray, loading_ms: Callable[[int], float]
    ) -> list[int]:
        """Returns the candidates whose programs should be loaded at the start of a text, in order of saved time.

        A candidate must be expected to save more time in this text than the loading of its programs takes: loading
        keeps a core busy. The list is empty until the time of a step is known.

        Args:
          lengths, remaining: as for `next`.
          loading_ms: time to load the programs of a candidate.
        """
        if not self.timed:
            return []
        table = self._table(lengths)
        speedup = outlook(table, self._prior, self.counts.of(_live(remaining))).speedup
        saved_ms = remaining.max() * table.round_ms[OFF, 0] * (1 - 1 / speedup)
        saving = [at for at in np.argsort(-saved_ms, kind="stable").tolist() if saved_ms[at] > 0]
        self._unready = [self.names[at] for at in saving]
        return [at for at in saving if saved_ms[at] > loading_ms(at)]

    def wanted(
        self,
        lengths: np.ndarray,
        remaining: np.ndarray,
        making_ms: Callable[[int], float],
        ready: Callable[[int], bool],
    ) -> list[int]:
        """Returns the candidates whose programs are worth making, the most promising first.

        The lost time is the time lost in earlier texts plus the predicted loss in this text. A program is loaded or
        compiled when this time exceeds half of the time to make it. One short text therefore compiles nothing, but many
        short texts do.

        Args:
          lengths, remaining, ready: as for `next`.
          making_ms: time to load or compile the programs of a candidate.
        """
        if self._left > 0:
            return []
        compiled = np.array([at == OFF or ready(at) for at in range(len(self.names))])
        self._missed = {}
        # Until the time of a step is known, costs may be proportions only.
        if compiled.all() or self._ratio(OFF) is None:
            return []
        table, counts = self._table(lengths), self.counts.of(_live(remaining))
        best = outlook(table, self._prior, counts).speedup[compiled].max()
        hoped = outlook(table, self._prior, counts, 1.0).speedup
        promising = [at for at in np.argsort(-hoped).tolist() if hoped[at] > best and not compiled[at]]
        self._missed = {self.names[at]: float(1 - best / hoped[at]) for at in promising}
        known = dict.fromkeys((*self._unready, *self._missed))
        self._unready = [name for name in known if not compiled[self.names.index(name)]]
        text_ms = float(remaining.max() * table.round_ms[OFF, 0] / best)
        lost = {
            at: self._missed[self.names[at]] * text_ms + self.times.missed_ms.get(self.names[at], 0.0)
            for at in promising
        }
        return [at for at in promising if lost[at] > making_ms(at) / 2]

    def prefilled(self, num_tokens: int, took_ms: float) -> None:
        """Learns the time per token of a prefill, from which the time to update a state is predicted."""
        if num_tokens < MOST_ROUNDS:
            return  # a prefill of few tokens takes as long as one of one token
        ms, before = took_ms / num_tokens, self.times.prefill_ms
        self.times.prefill_ms = ms if before is None else before * (ms / before) ** LEARNING

    def learn(
        self,
        choice: tuple[int, int],
        rounds: Sequence[Sequence[tuple[int, int]]],
        tokens: Sequence[Sequence[int]],
        lengths: np.ndarray,
        took_ms: float,
        fair: bool,
        taken_up: bool = False,
        disturbed: bool = False,
    ) -> float | None:
        """Learns from a call of the loop.

        Args:
          choice: the candidate and length of the call.
          rounds: for each row, (drafted, accepted) of each round.
          tokens: for each row, its new tokens.
          lengths: as for `next`, before the call.
          took_ms: the time of the call.
          fair: whether this time can be compared with the prediction: it includes no compilation or other work.
          taken_up: whether this time includes bringing the candidate's own state up to date.
          disturbed: whether work in the background made a fair time longer. Such a time is used only until another one
            is known.

        Returns:
          The predicted time in milliseconds; None if only proportions are known so far.
        """
        candidate, length = choice
        self.counts = beliefs.with_rounds(self.counts, candidate, rounds, asked=length)
        self._played.add(candidate)
        self._look_up(tokens, candidate)
        count = max((len(of_row) for of_row in rounds), default=0)
        predicted = self._predicted(candidate, rounds, lengths)
        if taken_up:
            predicted += float(self._uncorrected(lengths).state_ms(float(lengths.sum()))[candidate])
        known_ms = (
            predicted * (self._ratio(candidate) or 1.0) if self._ratio(candidate) or self._measured else None
        )
        self._left -= count
        if not count:
            return known_ms
        if fair and not (disturbed and self._ratio(candidate)):
            self._observe(candidate, took_ms / predicted, disturbed)
            for name, share in self._missed.items():
                self.times.missed_ms[name] = self.times.missed_ms.get(name, 0.0) + took_ms * share
        # Count the loss in predicted times, because a slow moment of the machine must not change it.
        step = self._table(lengths).round_ms[OFF, 0]
        gained = count * sum(map(len, tokens)) / sum(map(len, rounds))
        self._tokens = self._tokens + gained
        self._lost = self._lost + predicted * (self._ratio(candidate) or 1.0) / step - gained
        return known_ms

    def _predicted(
        self, candidate: int, rounds: Sequence[Sequence[tuple[int, int]]], lengths: np.ndarray
    ) -> float:
        """Returns the price of rounds; each takes as long as its longest draft."""
        table = self._uncorrected(lengths).round_ms[candidate]
        most = 0 if candidate == OFF else self._longest[candidate - 1]
        longest = np.zeros(max((len(of_row) for of_row in rounds), default=0), np.int64)
        for of_row in rounds:
            longest[: len(of_row)] = np.maximum(longest[: len(of_row)], [drafted for drafted, _ in of_row])
        return float(table[np.minimum(longest, most)].sum())

    def _look_up(self, tokens: Sequence[Sequence[int]], candidate: int) -> None:
        """Counts the acceptance of the copying candidates in rounds that another candidate drafted, by replay.

        A candidate is no longer replayed once it has drafted itself, unless its replay is exact (`DraftCost.replayed`).
        """
        rounds = [
            [] if one is None else one.played(of_row)
            for one, of_row in zip(self._lookups, tokens, strict=True)
        ]
        for at in self._copies:
            if at != candidate and (at not in self._played or self._drafts[at - 1].replayed):
                self.counts = beliefs.with_rounds(self.counts, at, rounds, asked=self._longest[at - 1])

    def _observe(self, candidate: int, ratio: float, disturbed: bool = False) -> None:
        key = self.names[candidate], self._batch
        # The first measured times of a candidate are unreliable, so its ratio starts from that of plain decoding. The
        # first undisturbed time replaces a disturbed one.
        before = self._undisturbed(candidate) or self._undisturbed(OFF) or ratio
        factor = min(max(ratio / before, 1 / SURPRISE), SURPRISE)
        self.times.ratios[key] = before * factor**LEARNING
        (self.times.disturbed.add if disturbed else self.times.disturbed.discard)(key)

    def _undisturbed(self, candidate: int) -> float | None:
        """Returns observed ÷ predicted time of a candidate; None if only disturbed times are known."""
        key = self.names[candidate], self._batch
        return None if key in self.times.disturbed else self.times.ratios.get(key)

    def _ratio(self, candidate: int) -> float | None:
        """Returns observed ÷ predicted time of a candidate, or else of plain decoding; None if neither was measured."""
        ratios = self.times.ratios
        return ratios.get((self.names[candidate], self._batch), ratios.get((self.names[OFF], self._batch)))

    def _uncorrected(self, lengths: np.ndarray) -> Prices:
        # Round the length to a power of two, so that few tables are made.
        live = 1 << int(lengths.mean()).bit_length()
        return price_table(self._costs, self._drafts, self._longest, live, self._batch)

    def _table(self, lengths: np.ndarray) -> Prices:
        """Returns the prices, multiplied by the ratios of observed to predicted times."""
        table = self._uncorrected(lengths)
        ratios = np.array([self._ratio(at) or 1.0 for at in range(len(self.names))])
        absorb_ms = table.absorb_ms * ratios
        if self.times.prefill_ms is not None and self.timed:
            layers = np.array([0.0, *(one.absorb_layers for one in self._drafts)])
            absorb_ms = self.times.prefill_ms * layers / self._costs.num_layers
        return Prices(table.round_ms * ratios[:, None], table.start_ms * ratios, absorb_ms, table.shortest)

    @property
    def unready(self) -> list[str]:
        """The candidates whose programs are not ready and that were expected to save time at some point of the text.

        The best comes first.
        """
        return list(self._unready)

    def outlook(self, lengths: np.ndarray, remaining: np.ndarray) -> Outlook:
        """Returns the expected performance of the candidates in the rows that have not ended."""
        return outlook(self._table(lengths), self._prior, self.counts.of(_live(remaining)))

    @property
    def timed(self) -> bool:
        """Whether times are in milliseconds, from measured costs or from observed rounds."""
        return self._measured or self._ratio(OFF) is not None


def _live(remaining: np.ndarray) -> np.ndarray:
    """Returns the rows that have not ended, bool[B]; all rows if every row has ended."""
    live: np.ndarray = remaining > 0
    return live if live.any() else np.ones_like(live)
