"""Which candidate drafts the next rounds of a batch: prices, estimates, observed times, and what is worth compiling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.choosing import acceptance, chooser
from jaxspec.choosing.chooser import OFF, Outlook, Prices
from jaxspec.choosing.costs import DraftCost, StepCosts
from jaxspec.engine.known import Known
from jaxspec.engine.replayed_lookup import ReplayedLookup
from jaxspec.engine.results import Chosen, Expected
from jaxspec.io.choice_file import ChoiceFile, Entry

# Rounds until a choice is made again; as long as it stays the same, so many times as many each time, up to a limit: a
# choice takes the host about as long as a round of a small model takes. And of what has not drafted in a text yet:
# where nothing pays, a trial is what is lost. And of what a text begins with: two rounds of a head tell easy texts,
# which want long drafts and are often short, from others.
ROUNDS, MOST_ROUNDS, TRIAL, FIRST = 8, 64, 4, 2
_LONGER = 4
# A prefill of at least this many tokens is long enough to measure the time per token.
_WHOLE = 64
# How much of its uncertainty a candidate is tried for; of one whose rounds are known without running it, none.
_EXPLORATION = 0.5
# What is expected of drafts of which nothing is known, and how often a lookup then finds one.
_ACCEPTANCE, _STRENGTH, _FOUND, _EMPTY = 0.5, 2.0, 0.5, 0.1
# As how many draft tokens what is known before counts at most: the text at hand is soon believed more. A few other
# texts say little of how much texts differ, and one that suits a head is often over before twenty are outweighed.
_BELIEVED = 5.0
# The part that a new observation has in a candidate's ratio of observed to expected times; and what a candidate that
# does not run takes over of plain decoding's in a choice, so that a slow moment does not rule it out for good.
_LEARNING, _FADING = 0.3, 0.02
# How far an observation can lie from what was known, as a factor: a slow moment is no news of a candidate.
_SURPRISE = 1.5
# Of the time that a program takes to compile, what has to be lost without it first: it is compiled beside the rounds.
_SHARE = 0.5
# Tokens over which a state pays in a text that has just begun.
_SOON = 32
# Live tokens between two tables of prices.
_LIVE = 256


class Choices:
    """Makes the choices of one batch, and learns from what became of them.

    Args:
      names: of the candidates; plain decoding, `off`, stands before them.
      kinds: of their drafts, with the widths of their verifications.
      longest: K of each.
      costs: of steps.
      batch: rows.
      seed: of what is drawn.
      known: from earlier batches; brought up to date.
      file: where choices are read from, or written to.
      measured: whether the costs are milliseconds of this machine, or only guessed in proportion.
      explains: whether somebody asks for `expected`.
      expectations: of what is accepted of each; None where nothing is known.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[DraftCost],
        longest: Sequence[int],
        costs: StepCosts,
        batch: int,
        *,
        seed: int = 0,
        known: Known | None = None,
        file: ChoiceFile | None = None,
        measured: bool = True,
        explains: bool = True,
        expectations: Sequence[acceptance.Expectation | None] | None = None,
    ) -> None:
        self.names = ("off", *names)
        self._kinds, self._longest, self._costs, self._batch = tuple(kinds), tuple(longest), costs, batch
        self._known = Known() if known is None else known
        self._file, self._measured, self._explains = file, measured, explains
        # Choices that are made again.
        self._entries = None if file is None else file.entries
        known_before = [None] * len(kinds) if expectations is None else expectations
        self._prior = _prior(kinds, known_before, max(longest))
        # Those of whose drafts something is known before a text begins.
        self.informed = [at for at, one in enumerate(known_before, 1) if one is not None]
        # What the first texts begin with; and of rows, how many tokens each had when its text began.
        self._first, self._given = (OFF, 0), np.zeros(batch, np.int64)
        self._chooser = chooser.begin(self._prior, np.zeros(batch, np.int64), seed)
        # How long the last choice holds, and how many of those rounds are still to come.
        self._patience, self._left, self._round = ROUNDS, 0, 0
        self._chosen_at = 0
        self._last: tuple[int, int] | None = None
        # Of rows, what lookup would have drafted; None before a row's first tokens.
        self._lookups: list[ReplayedLookup | None] = [None] * batch
        self._looked_up = [at for at, kind in enumerate(kinds, 1) if kind.copies]
        # Of candidates without programs, the share of time that may well be lost for want of them.
        self._missed: dict[str, float] = {}
        self._exploration = np.array(
            [_EXPLORATION, *(0.0 if kind.replayed else _EXPLORATION for kind in kinds)]
        )
        # Candidates that have drafted in this batch.
        self._played: set[int] = set()
        self.expected: tuple[Expected, ...] = ()
        self.chosen: list[Chosen] = []

    def begin_row(self, row: int, tokens: Sequence[int]) -> None:
        """A text has taken a row: its prompt and its first token."""
        self._chooser, self._left = chooser.with_new_row(self._chooser, row), 0
        self._given[row] = len(tokens)
        if self._looked_up:
            most = max(self._longest[at - 1] for at in self._looked_up)
            self._lookups[row] = ReplayedLookup(most, tokens)

    def begin(
        self, lengths: np.ndarray, remaining: np.ndarray, ready: Callable[[int], bool]
    ) -> tuple[int, int]:
        """The candidate that drafts from the first round on, and how long: of those of which something is known.

        Plain decoding begins where nobody knows yet what a step takes on this machine.

        Args:
          lengths, remaining: of the prompts, as of `next`.
          ready: whether a candidate can begin.
        """
        if self._entries is not None:
            self._first = self._again(self._entries)[:2]
            return self._first
        open_to = np.array([at in self.informed and ready(at) for at in range(len(self.names))])
        self._first = (OFF, 0)
        if open_to.any() and self._ratio(OFF) is not None:
            # The prompts are fed with whatever is chosen, so no state is behind; and nothing is tried.
            behind = np.zeros((len(lengths), len(self.names)), np.int64)
            self._first = self._best(lengths, remaining, behind, open_to, np.zeros_like(self._exploration))
        return self._first

    def next(
        self,
        lengths: np.ndarray,
        remaining: np.ndarray,
        most_rounds: int,
        held: int | None,
        ready: Callable[[int], bool],
    ) -> tuple[int, int, int]:
        """The candidate that drafts next, how long its drafts are at most, and for how many rounds.

        Args:
          lengths: int[B], tokens of each row.
          remaining: int[B], tokens that may still come; 0 in rows that have ended.
          most_rounds: the host is wanted after so many.
          held: the candidate whose own state is there; None if none is.
          ready: whether the programs of a candidate are there.
        """
        if self._entries is not None:
            candidate, length, rounds = self._again(self._entries)
            return candidate, length, min(rounds, most_rounds)
        if self._left > 0 and self._last is not None and (self._last[0] == OFF or ready(self._last[0])):
            return (*self._last, min(self._left, most_rounds))
        usable = np.array([at == OFF or ready(at) for at in range(len(self.names))])
        if self._explains and not self.expected:
            self.expected = self._expectations(self._corrected(lengths), remaining, usable)
        candidate, length = OFF, 0
        # At first plain decoding says what would have been found, for little; but for what was prefilled.
        begins = self._last is None
        if begins and held is not None and held == self._first[0]:
            candidate, length = self._first
        elif usable[1:].any() and not begins:
            behind = np.repeat(lengths[:, None], len(self.names), axis=1)
            if held is not None:
                behind[:, held] = 0
            candidate, length = self._best(lengths, remaining, behind, usable, self._exploration)
        if not usable[1:].any():
            self._patience = MOST_ROUNDS
        elif self._last is not None and candidate == self._last[0]:
            self._patience = min(_LONGER * self._patience, MOST_ROUNDS)
        elif candidate == OFF:  # at first, or after a trial that did not pay
            self._patience = ROUNDS if begins else _LONGER * ROUNDS
        elif begins:  # what ends its own drafts where they do not pay needs nobody to look so soon
            self._patience = ROUNDS if self._kinds[candidate - 1].adapts else FIRST
        else:
            self._patience = ROUNDS if candidate in self._played or candidate in self.informed else TRIAL
        self._last, self._left, self._chosen_at = (candidate, length), self._patience, self._round
        if self._file is not None:
            self._file.add(Entry(self._round, self.names[candidate], length))
        return candidate, length, min(self._left, most_rounds)

    def _best(
        self,
        lengths: np.ndarray,
        remaining: np.ndarray,
        behind: np.ndarray,
        usable: np.ndarray,
        exploration: np.ndarray,
    ) -> tuple[int, int]:
        """The candidate and length that give the most tokens per millisecond, by acceptances that are drawn.

        Args:
          lengths, remaining: as of `next`.
          behind: int[B, M + 1], tokens of each row that the state of each candidate has not absorbed.
          usable: bool[M + 1].
          exploration: float[M + 1], how much of its uncertainty each is tried for.
        """
        table = self._corrected(lengths)
        # Nobody knows how soon a text ends. One that has gone on for long may well go on: to bring a state up has to
        # pay over as many tokens as there are.
        soon = np.minimum(remaining, _SOON + lengths - self._given)
        choice, after = chooser.choose(
            dataclasses.replace(self._chooser, estimate=self._with_open_drafts(), behind=behind),
            table,
            self._prior,
            remaining,
            exploration=exploration,
            together=True,
            usable=usable,
            rounds=TRIAL,
            soon=soon,
        )
        self._chooser = dataclasses.replace(self._chooser, num_choices=after.num_choices)
        return int(choice.candidate[0]), int(choice.length[0])

    def _with_open_drafts(self) -> acceptance.Estimate:
        """What is known, with what was accepted so far of drafts that lookup would have had, and are not over."""
        estimate = self._chooser.estimate
        if self._looked_up and any(lookup is not None and lookup.open for lookup in self._lookups):
            rounds = [
                [] if lookup is None or not lookup.open else [(lookup.open, lookup.open)]
                for lookup in self._lookups
            ]
            for at in self._looked_up:
                if at not in self._played or self._kinds[at - 1].replayed:
                    estimate = acceptance.observed_rounds(estimate, at, rounds, forgetting=1.0)
        return estimate

    def wanted(
        self, lengths: np.ndarray, remaining: np.ndarray, compile_ms: float, ready: Callable[[int], bool]
    ) -> list[int]:
        """The candidates whose programs are worth compiling, the most promising first.

        A program is bought once as much may well have been lost without it, in earlier texts and those at hand, as it
        costs: so the price of not knowing the future is at most what it would have been worth.

        Args:
          lengths, remaining, ready: as of `next`.
          compile_ms: how long it takes to compile one.
        """
        if self._left > 0:
            return []
        missing = [at for at in range(1, len(self.names)) if not ready(at)]
        self._missed = {}
        # Costs may be guessed: without an observed time milliseconds mean nothing yet.
        if not missing or self._ratio(OFF) is None:
            return []
        table = self._corrected(lengths)
        speed, plain_ms = self._outlook(table, remaining, deviations=1.0).speedup[0], table.round_ms[OFF, 0]
        expected = self._outlook(table, remaining).speedup[0]
        best = max(expected[at] for at in range(len(speed)) if at not in missing)
        worth = []
        for at in missing:
            lost = remaining.max() * plain_ms * (1 / best - 1 / speed[at]) + self._known.missed_ms.get(
                self.names[at], 0.0
            )
            if speed[at] > best:
                self._missed[self.names[at]] = 1 - best / speed[at]
                worth += [at] if lost > _SHARE * compile_ms else []
        return sorted(worth, key=lambda at: -speed[at])

    def prefilled(self, num_tokens: int, took_ms: float) -> None:
        """Takes in how long a prefill took: about what it takes to bring a state up over as many tokens."""
        if num_tokens < _WHOLE:
            return  # a few tokens take as long as one, so they do not show the time per token
        ms, before = took_ms / num_tokens, self._known.prefill_ms
        self._known.prefill_ms = ms if before is None else before * (ms / before) ** _LEARNING

    def learn(
        self,
        rounds: Sequence[Sequence[tuple[int, int]]],
        tokens: Sequence[Sequence[int]],
        lengths: np.ndarray,
        took_ms: float,
        fair: bool,
        taken_up: bool = False,
    ) -> None:
        """Takes in what became of the last choice.

        Args:
          rounds: by row, (drafted, accepted) of each round that it had.
          tokens: by row, what it gained.
          lengths: as of `next`, before those rounds.
          took_ms: how long they took.
          fair: whether that says what they cost: nothing else was done meanwhile.
          taken_up: whether the candidate's own state was brought up first, in that time.
        """
        assert self._last is not None
        candidate, length = self._last
        count = max((len(of_row) for of_row in rounds), default=0)
        table = self._table(lengths)
        estimate = acceptance.observed_rounds(self._chooser.estimate, candidate, rounds, asked=length)
        self._chooser = dataclasses.replace(self._chooser, estimate=estimate)
        # A round takes as long as its longest draft.
        drafted = np.zeros(count, np.int64)
        for of_row in rounds:
            drafted[: len(of_row)] = np.maximum(drafted[: len(of_row)], [one for one, _ in of_row])
        most = 0 if candidate == OFF else self._longest[candidate - 1]
        expected = float(table.round_ms[candidate, np.minimum(drafted, most)].sum())
        if taken_up:
            expected += float(table.start_ms[candidate] + lengths.sum() * table.absorb_ms[candidate])
        num_tokens = sum(map(len, tokens))
        self._played.add(candidate)
        self._look_up(tokens, candidate)
        ratio = self._ratio(candidate)
        known_ms = expected * (1.0 if ratio is None else ratio) if self._timed else None
        turn = Chosen(self._round, self.names[candidate], length, count, num_tokens, known_ms, took_ms)
        if self.chosen and self.chosen[-1].round >= self._chosen_at:  # the host looked in between
            turn = _joined(self.chosen.pop(), turn)
        self.chosen.append(turn)
        self._round += count
        self._left -= count
        if not count:
            return
        if fair:
            self._observe(candidate, took_ms / expected)
        # The chooser counts predicted times, because a slow moment of the machine must not change them.
        to_plain = [1.0 if (one := self._ratio(at)) is None else one for at in (candidate, OFF)]
        steps = expected * to_plain[0] / (float(table.round_ms[OFF, 0]) * to_plain[1])
        # `steps` is the time in steps of plain decoding, each of which gives one token.
        self._chooser = chooser.with_time(self._chooser, count * num_tokens / sum(map(len, rounds)), steps)
        if not fair:
            return
        for name, share in self._missed.items():
            self._known.missed_ms[name] = self._known.missed_ms.get(name, 0.0) + took_ms * share

    def _look_up(self, tokens: Sequence[Sequence[int]], candidate: int) -> None:
        """Lets candidates that look up learn from rounds of others, until they have drafted themselves."""
        would = [
            [] if lookup is None else lookup.played(of_row)
            for lookup, of_row in zip(self._lookups, tokens, strict=True)
        ]
        for at in self._looked_up:
            if at == candidate or (at in self._played and not self._kinds[at - 1].replayed):
                continue
            estimate = acceptance.observed_rounds(
                self._chooser.estimate, at, would, forgetting=1.0, asked=self._longest[at - 1]
            )
            self._chooser = dataclasses.replace(self._chooser, estimate=estimate)

    def _again(self, entries: Sequence[Entry]) -> tuple[int, int, int]:
        """What the file says for this round, until the round of its next entry."""
        over = [entry for entry in entries if entry.round <= self._round]
        later = [entry.round for entry in entries if entry.round > self._round]
        candidate, length = (self.names.index(over[-1].candidate), over[-1].length) if over else (OFF, 0)
        self._last, self._chosen_at = (candidate, length), over[-1].round if over else 0
        return candidate, length, min(later[0] - self._round, MOST_ROUNDS) if later else ROUNDS

    def _observe(self, candidate: int, ratio: float) -> None:
        ratios, own = self._known.ratios, (self.names[candidate], self._batch)
        plain = self._ratio(OFF)
        # Of a candidate's first rounds, which may be few and cold, what others take is the better guess.
        usual = self._ratio(candidate)
        before = ratio if usual is None else usual
        surprise = min(max(ratio / before, 1 / _SURPRISE), _SURPRISE)
        ratios[own] = before * surprise**_LEARNING
        for name in {*self.names[1:]} - {own[0]}:
            other = ratios.get((name, self._batch))
            if other is not None and plain is not None:
                ratios[name, self._batch] = other * (plain / other) ** _FADING

    def _ratio(self, candidate: int) -> float | None:
        """Of a candidate that has not run, that of those that have: costs that are guessed too low are so for all;
        else plain decoding's. None before the first observation."""
        ratios = self._known.ratios
        if (own := ratios.get((self.names[candidate], self._batch))) is not None:
            return own
        others = [ratios[key] for name in self.names[1:] if (key := (name, self._batch)) in ratios]
        plain = ratios.get((self.names[OFF], self._batch))
        if candidate == OFF or not others:
            return plain
        return float(np.exp(np.log(others).mean()))

    @property
    def _timed(self) -> bool:
        """Whether milliseconds are known, of the table or of rounds."""
        return self._measured or self._ratio(OFF) is not None

    def _table(self, lengths: np.ndarray) -> Prices:
        live = int(lengths.mean()) // _LIVE * _LIVE + _LIVE // 2
        return _prices(self._costs, self.names[1:], self._kinds, self._longest, live, self._batch)

    def _corrected(self, lengths: np.ndarray) -> Prices:
        table = self._table(lengths)
        ratios = np.array([1.0 if (one := self._ratio(at)) is None else one for at in range(len(self.names))])
        absorb_ms = table.absorb_ms * ratios
        if self._known.prefill_ms is not None and self._timed:
            layers = np.array([0.0, *(kind.absorb_layers for kind in self._kinds)])
            absorb_ms = self._known.prefill_ms * layers / self._costs.num_layers
        return dataclasses.replace(
            table,
            round_ms=table.round_ms * ratios[:, None],
            start_ms=table.start_ms * ratios,
            absorb_ms=absorb_ms,
        )

    def _outlook(self, table: Prices, remaining: np.ndarray, deviations: float = 0.0) -> Outlook:
        """Returns the expected performance of each candidate, averaged over the live rows."""
        seen = self._chooser.estimate
        live = remaining > 0 if (remaining > 0).any() else np.ones(self._batch, bool)
        return chooser.outlook(
            table,
            self._prior,
            acceptance.Estimate(seen.accept[live], seen.draft[live]),
            deviations,
            together=True,
        )

    def _expectations(self, table: Prices, remaining: np.ndarray, usable: np.ndarray) -> tuple[Expected, ...]:
        seen = self._outlook(table, remaining)
        columns = (seen.speedup, seen.length, seen.accept, seen.round_ms)
        rows = zip(self.names, *(column[0].tolist() for column in columns), usable.tolist(), strict=True)
        expected = [
            Expected(
                name, length, None if name == "off" else first, took if self._timed else None, speed, ready
            )
            for name, speed, length, first, took, ready in rows
        ]
        return tuple(sorted(expected, key=lambda one: -one.speedup))


def _joined(one: Chosen, other: Chosen) -> Chosen:
    """Two calls of the loop by one choice, as one."""
    known = one.expected_ms is not None and other.expected_ms is not None
    return one._replace(
        num_rounds=one.num_rounds + other.num_rounds,
        num_tokens=one.num_tokens + other.num_tokens,
        expected_ms=one.expected_ms + other.expected_ms if known else None,  # type: ignore[operator]
        took_ms=one.took_ms + other.took_ms,
    )


def _prior(
    kinds: Sequence[DraftCost], known: Sequence[acceptance.Expectation | None], longest: int
) -> acceptance.Prior:
    def unknown(found: float) -> acceptance.Expectation:
        return acceptance.Expectation((_ACCEPTANCE * found, _ACCEPTANCE), _STRENGTH, (found, 1.0))

    each = [
        unknown(_FOUND if kind.copies else 1.0 - _EMPTY)
        if one is None
        else dataclasses.replace(one, strength=min(one.strength, _BELIEVED))
        for kind, one in zip(kinds, known, strict=True)
    ]
    return acceptance.joined([unknown(0.0), *each], longest, [False, *(not kind.copies for kind in kinds)])


@functools.lru_cache(maxsize=64)
def _prices(
    costs: StepCosts,
    names: tuple[str, ...],
    kinds: tuple[DraftCost, ...],
    longest: tuple[int, ...],
    live: int,
    batch: int,
) -> Prices:
    """The prices of all lengths that each candidate has."""
    lengths = range(1, max(longest) + 1)
    table = chooser.prices(costs, list(zip(names, kinds, strict=True)), lengths, live, batch)
    for at, most in enumerate(longest, 1):
        table.round_ms[at, most + 1 :] = np.inf
    # Of one that ends its drafts where they do not pay there is no length to choose.
    shortest = [most if kind.adapts else 1 for kind, most in zip(kinds, longest, strict=True)]
    return dataclasses.replace(table, shortest=np.array([0, *shortest]))
