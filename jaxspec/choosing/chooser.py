"""The choice: which candidate drafts next, and how long, for the most expected tokens per millisecond.

A candidate is a kind of draft with what its rounds cost by length; the first one is plain decoding, which drafts
nothing. Acceptances are drawn from what is known (Thompson sampling, see `choosing.acceptance`), so that what is
uncertain is tried as often as it may be the best, and the choice then maximises

    Σ rows expected tokens of a round ÷ time of a round

or, where a candidate's own state has to be brought up first, ends soonest with the tokens in sight.

A trial costs time if it fails, and each of several candidates has its trial. A trial is therefore open only if, even
with bad luck, the total loss against plain decoding stays below a small part of the text so far. Candidates that pay
earn the time for further trials (conservative bandits: Wu et al. 2016, arXiv:1602.04282).

**Why it is lossless.** A choice depends on the seed, on how often was chosen before, and on counts of drafted and
accepted tokens in rounds that are over: never on a token that is still to be drawn. Given all that happened before a
round, the tokens that it adds follow the target's law, whichever candidate drafts: that is what each method proves, and
each round draws with randomness of its own. So a candidate that is a function of what happened before changes no law,
round after round. A choice that looked at a draft before its verification would: it would favour rounds by their
tokens. A greedy text is plain decoding's in any case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.choosing.acceptance import Estimate, Prior, hoped, nothing_seen, observed, sampled
from jaxspec.choosing.costs import DraftCost, StepCosts

OFF = 0
# Tokens to come for which a trial is worth all that it may be.
_WORTH = 256.0
# The minimum expected gain over plain decoding. The largest of several uncertain estimates is usually too large.
_GAIN = 0.03
# The number of standard deviations that are added to the mean acceptances to test whether a candidate can pay at all,
# and subtracted from it to bound its loss.
_LUCK = 1.0
# The allowed loss against plain decoding: a part of the text so far plus some tokens to come. Without the latter
# nothing could be tried at first. After 256 tokens the sum is 3 %.
_LOSS, _ADVANCE = 0.02, 128.0


@dataclasses.dataclass(frozen=True)
class Prices:
    """What rounds of M candidates cost, in milliseconds; candidate `OFF` is plain decoding.

    Attributes:
      names: of the candidates.
      round_ms: float[M, K + 1], by the length of the draft; ∞ for a length that a candidate does not have. Length 0
        is a round in which it found nothing.
      start_ms: float[M], to take a candidate up whose state is behind, whatever it is behind.
      absorb_ms: float[M], to bring its state up by one token.
      shortest: int[M], the shortest drafts that may be asked for; None for any length.

    Examples:
      >>> table = Prices(("off", "ngram"), np.array([[9.0, np.inf], [9.1, 9.5]]), np.zeros(2), np.zeros(2))
      >>> table.round_ms[OFF, 0].item()
      9.0
    """

    names: tuple[str, ...]
    round_ms: np.ndarray
    start_ms: np.ndarray
    absorb_ms: np.ndarray
    shortest: np.ndarray | None = None


def prices(
    costs: StepCosts,
    drafts: Sequence[tuple[str, DraftCost]],
    lengths: Sequence[int],
    live: int | None = None,
    batch: int = 1,
) -> Prices:
    """The prices of plain decoding and of kinds of drafts.

    Args:
      costs: of the device.
      drafts: names and kinds, plain decoding not among them.
      lengths: of drafts that may be chosen, from 1 on.
      live, batch: as in `StepCosts.step_ms`.

    Raises:
      ValueError: no length, or one below 1.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0)
      >>> prices(costs, [("ngram", DraftCost(lookup=True))], lengths=[2, 4]).round_ms.tolist()
      [[10.0, inf, inf, inf, inf], [10.0, inf, 12.0, inf, 14.0]]
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are {list(lengths)}; give at least one, from 1 on")
    table = np.full((1 + len(drafts), max(lengths) + 1), np.inf)
    table[:, 0] = [
        draft.round_ms(costs, 0, live, batch) for draft in (DraftCost(), *(one for _, one in drafts))
    ]
    for at, (_, draft) in enumerate(drafts, 1):
        for length in lengths:
            table[at, length] = draft.round_ms(costs, length, live, batch)
    absorb = np.array([0.0, *(draft.absorb_ms(costs) for _, draft in drafts)])
    # A state is brought up in one pass at least.
    start = np.array(
        [
            0.0,
            *(
                costs.step_ms(layers=one.absorb_layers, head=False) if one.absorb_layers else 0.0
                for _, one in drafts
            ),
        ]
    )
    return Prices(("off", *(name for name, _ in drafts)), table, start, absorb)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """All that the next choice depends on, beside the prices and the prior.

    Attributes:
      estimate: what the rounds said.
      behind: int[B, M], tokens that a candidate's own state has not absorbed; 0 where it has none.
      tokens: float[B], the number of tokens so far.
      lost: float[B], the time that they took beyond plain decoding's, in its steps; negative if they took less.
      seed: of what is drawn.
      num_choices: made so far.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> begin(flat_prior(2, 4), np.array([30]), seed=7).num_choices
      0
    """

    estimate: Estimate
    behind: np.ndarray
    tokens: np.ndarray
    lost: np.ndarray
    seed: int = 0
    num_choices: int = 0


@dataclasses.dataclass(frozen=True)
class Choice:
    """What drafts next.

    Attributes:
      candidate: int[B].
      length: int[B], of its drafts; 0 for `OFF`.

    Examples:
      >>> Choice(np.array([1]), np.array([4])).length.tolist()
      [4]
    """

    candidate: np.ndarray
    length: np.ndarray


def begin(prior: Prior, prompt_lengths: np.ndarray, seed: int = 0) -> Chooser:
    """A chooser before the first round.

    Args:
      prior: of the candidates.
      prompt_lengths: int[B], tokens that no candidate's own state has absorbed yet.
      seed: with the same one, the same choices follow on the same counts.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> begin(flat_prior(2, 4), np.array([30])).behind.tolist()
      [[30, 30]]
    """
    behind = np.repeat(np.asarray(prompt_lengths)[:, None], len(prior.draft), axis=1)
    nothing = np.zeros(len(prompt_lengths))
    return Chooser(nothing_seen(prior, len(prompt_lengths)), behind, nothing, nothing, seed)


def tokens_of_rounds(accept: np.ndarray) -> np.ndarray:
    """Expected tokens of a round by length, float[B, M, K + 1], from what `acceptance.mean` gives, float[B, M, K].

    Examples:
      >>> tokens_of_rounds(np.array([[[0.5, 0.5]]])).tolist()
      [[[1.0, 1.5, 1.75]]]
    """
    right = np.cumsum(np.cumprod(accept, axis=-1), axis=-1)
    return np.concatenate([np.ones_like(right[..., :1]), 1 + right], axis=-1)


def times_of_rounds(table: Prices, drafted: np.ndarray) -> np.ndarray:
    """Expected milliseconds of a round by length, float[B, M, K + 1]; ∞ for what cannot be asked for.

    Args:
      table: prices.
      drafted: float[B, M, K], the share of rounds that draft a token at each position, where as many are asked for.

    Examples:
      >>> table = Prices(("off", "ngram"), np.array([[1.0, np.inf], [1.0, 2.0]]), np.zeros(2), np.zeros(2))
      >>> times_of_rounds(table, np.array([[[1.0], [0.5]]])).tolist()
      [[[1.0, inf], [1.0, 1.5]]]
    """
    known = _filled(table)
    known = np.where(np.isinf(known), 0.0, known)  # behind the longest, or of what is closed
    further = np.cumsum(drafted * np.diff(known), axis=-1)
    times = known[:, :1] + np.concatenate([np.zeros_like(further[..., :1]), further], axis=-1)
    closed = np.isinf(table.round_ms)
    if table.shortest is not None:
        lengths = np.arange(known.shape[1])
        closed |= (lengths > 0) & (lengths < table.shortest[:, None])
    return np.where(closed, np.inf, times)


def _filled(table: Prices) -> np.ndarray:
    """Returns milliseconds by candidate and drafted tokens; a length that cannot be requested costs as the next one."""
    filled: np.ndarray = np.minimum.accumulate(table.round_ms[:, ::-1], axis=1)[:, ::-1]
    return filled


def best(
    table: Prices,
    accept: np.ndarray,
    drafted: np.ndarray,
    behind: np.ndarray,
    horizon: np.ndarray,
    together: bool = False,
    open_to: np.ndarray | None = None,
) -> Choice:
    """The choice for acceptances that are taken as known.

    Args:
      table: prices; of rounds of the whole batch where rows choose together.
      accept: float[B, M, K], acceptance by position.
      drafted: float[B, M, K], the share of rounds that draft a token there.
      behind: int[B, M], see `Chooser`.
      horizon: float[B], tokens over which bringing a state up has to pay.
      together: whether all rows take one candidate and length: the one that gives the most tokens of all rows together
        per millisecond. Else each has its own.
      open_to: bool[B, M] ([1, M] if `together`), the candidates to choose among; None for all.

    Examples:
      >>> table = Prices(("off", "ngram"), np.array([[1.0, np.inf], [1.0, 1.1]]), np.zeros(2), np.zeros(2))
      >>> accept = np.array([[[0.0], [0.05]], [[0.0], [0.9]]])
      >>> best(table, accept, np.ones((2, 2, 1)), np.zeros((2, 2)), np.full(2, 64.0)).candidate.tolist()
      [0, 1]
    """
    tokens, times = tokens_of_rounds(accept), times_of_rounds(table, drafted)
    starting = _starting(table, behind, together)
    if together:
        # One round serves every row; it takes as long as one with a draft where any row has one.
        tokens = tokens.sum(axis=0, keepdims=True)
        times = times.max(axis=0, keepdims=True)
        horizon = horizon.sum(keepdims=True)
    needed = starting[..., None] + horizon[:, None, None] * _asked_for(times) / tokens
    if open_to is not None:
        needed = np.where(open_to[..., None], needed, np.inf)
    flat = needed.reshape(len(needed), -1).argmin(axis=1)
    candidate, length = np.divmod(flat, needed.shape[-1])
    rows = len(behind)
    return Choice(np.broadcast_to(candidate, rows), np.broadcast_to(length, rows))


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The expected performance of M candidates, in the order of `Prices`.

    Attributes:
      speedup: float[B, M], the speed-up over plain decoding with the best length, without the cost of updating a
        candidate's own state.
      length: int[B, M], that length.
      accept: float[B, M], the acceptance of the first draft token.
      round_ms: float[B, M], the time of a round with that length, in milliseconds.

    Examples:
      >>> Outlook(np.array([[1.0, 1.4]]), np.array([[0, 3]]), np.array([[0.0, 0.7]]), np.array([[9.0, 12.0]])).length
      array([[0, 3]])
    """

    speedup: np.ndarray
    length: np.ndarray
    accept: np.ndarray
    round_ms: np.ndarray


def outlook(
    table: Prices, prior: Prior, estimate: Estimate, deviations: float = 0.0, together: bool = False
) -> Outlook:
    """Returns the expected performance of each candidate, without drawing anything.

    Args:
      table, together: as for `best`; with `together` the result has a single row.
      prior, estimate: the acceptances known so far.
      deviations: how many standard deviations to add to the mean acceptances, see `acceptance.hoped`.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> table = Prices(("off", "ngram"), np.array([[1.0, np.inf], [1.0, 1.1]]), np.zeros(2), np.zeros(2))
      >>> prior = flat_prior(2, 1, acceptance=0.8)
      >>> outlook(table, prior, nothing_seen(prior, 1)).speedup.round(2).tolist()
      [[1.0, 1.65]]
    """
    accept, drafted = hoped(prior, estimate, deviations)
    tokens, times, first = tokens_of_rounds(accept), times_of_rounds(table, drafted), accept[:, :, 0]
    if together:
        tokens = tokens.mean(axis=0, keepdims=True)
        times = times.max(axis=0, keepdims=True)
        first = first.mean(axis=0, keepdims=True)
    times = _asked_for(times)
    speed = tokens / times * table.round_ms[OFF, 0]
    length = speed.argmax(axis=-1)

    def there(of_lengths: np.ndarray) -> np.ndarray:
        return np.take_along_axis(of_lengths, length[..., None], axis=-1)[..., 0]

    return Outlook(there(speed), length, first, there(times))


def _starting(table: Prices, behind: np.ndarray, together: bool) -> np.ndarray:
    """Returns the milliseconds to update each candidate's state, float[B, M]; [1, M] where one pass serves all rows."""
    if together:
        behind = behind.sum(axis=0, keepdims=True)
    return np.where(behind > 0, table.start_ms + behind * table.absorb_ms, 0.0)


def _asked_for(times: np.ndarray) -> np.ndarray:
    """Returns the times with ∞ for length 0, which only plain decoding may choose."""
    times = times.copy()
    times[:, 1:, 0] = np.inf
    return times


def choose(
    chooser: Chooser,
    table: Prices,
    prior: Prior,
    remaining: np.ndarray,
    memory: float = 200.0,
    exploration: float | np.ndarray = 0.5,
    together: bool = False,
    usable: np.ndarray | None = None,
    rounds: int = 4,
    soon: np.ndarray | None = None,
) -> tuple[Choice, Chooser]:
    """The next choice, and the chooser after it.

    A candidate must promise to be 3 % faster than plain decoding. It is closed if it would not gain as much even with
    good luck, or if with bad luck the text would be more than 2 % behind plain decoding.

    Args:
      chooser: before.
      table, together: as for `best`.
      prior: of the candidates.
      remaining: int[B], tokens that may still come; 0 for a row that has ended.
      memory: tokens for which what is known now will hold, at most.
      exploration: see `acceptance.sampled`, a number or float[M]. It falls with the last tokens, for which a trial is
        worth less and less.
      usable: bool[M], the candidates to choose among; plain decoding is always one of them. None for all.
      rounds: about how many rounds the choice holds for.
      soon: float[B], tokens over which updating a state has to pay, at most `memory`; None for the remaining tokens.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> table = Prices(("off", "ngram"), np.array([[1.0, np.inf], [1.0, 1.1]]), np.zeros(2), np.zeros(2))
      >>> prior = flat_prior(2, 1, acceptance=0.5, strength=100.0)
      >>> choice, _ = choose(begin(prior, np.array([8])), table, prior, remaining=np.array([64]))
      >>> choice.candidate.tolist(), choice.length.tolist()  # 1.5 tokens in 1.1 ms
      ([1], [1])
    """
    # Rows that have ended do not influence the choice of the others.
    says = remaining > 0 if together and (remaining > 0).any() else np.ones(len(remaining), bool)
    known = Estimate(chooser.estimate.accept[says], chooser.estimate.draft[says])
    open_to = outlook(table, prior, known, _LUCK, together).speedup > 1 + _GAIN
    horizon = np.minimum(np.maximum(remaining if soon is None else soon, 1), memory)
    open_to &= _affordable(
        chooser, outlook(table, prior, known, -_LUCK, together), table, says, rounds, horizon
    )
    if usable is not None:
        open_to &= usable
    after = dataclasses.replace(chooser, num_choices=chooser.num_choices + 1)
    nothing = np.zeros(len(remaining), np.int64)
    if not open_to.any():
        return Choice(nothing + OFF, nothing), after
    open_to[:, OFF] = True
    round_ms = table.round_ms.copy()
    round_ms[OFF] /= 1 + _GAIN
    rng = np.random.default_rng([chooser.seed, chooser.num_choices])
    worth = exploration * np.minimum(1.0, np.maximum(remaining, 1) / _WORTH)[:, None]
    accept, drafted = sampled(rng, prior, chooser.estimate, worth)
    choice = best(
        dataclasses.replace(table, round_ms=round_ms),
        accept[says],
        drafted[says],
        chooser.behind[says],
        horizon[says],
        together,
        open_to,
    )
    if together:
        choice = Choice(*(np.repeat(chosen[:1], len(says)) for chosen in (choice.candidate, choice.length)))
    return choice, after


def _affordable(
    chooser: Chooser,
    unlucky: Outlook,
    table: Prices,
    says: np.ndarray,
    rounds: int,
    horizon: np.ndarray,
) -> np.ndarray:
    """Whether each candidate would lose at most the allowed time with bad luck, bool[B, M] ([1, M] if `together`).

    A candidate that gains even with bad luck is kept over the horizon, and can so earn the time to update its state.
    Another one is dropped after `rounds` rounds.
    """
    step = table.round_ms[OFF, 0]
    behind, horizon = chooser.behind[says], horizon[says]
    tokens, lost = chooser.tokens[says], chooser.lost[says]
    together = len(unlucky.speedup) < len(behind)
    loss = _starting(table, behind, together) / step
    if together:
        tokens, lost, horizon = (of_rows.mean(keepdims=True) for of_rows in (tokens, lost, horizon))
    loss = loss + np.where(
        unlucky.speedup < 1,
        rounds * unlucky.round_ms / step * (1 - unlucky.speedup),
        horizon[:, None] * (1 / np.maximum(unlucky.speedup, 1) - 1),
    )
    # A candidate that gains in any case remains open even if no further loss is allowed.
    left = np.maximum(_LOSS * (_ADVANCE + tokens) - lost, 0.0)
    affordable: np.ndarray = loss <= left[:, None]
    return affordable


def after_round(
    chooser: Chooser,
    table: Prices,
    choice: Choice,
    drafted: np.ndarray,
    accepted: np.ndarray,
    committed: np.ndarray,
    forgetting: float = 0.995,
) -> Chooser:
    """The chooser after one round of every row.

    Args:
      chooser: before.
      table: says which candidates have states of their own.
      choice: what drafted.
      drafted, accepted: int[B], draft tokens.
      committed: int[B], tokens that the round added; 0 for a row that has ended, which teaches nothing.
      forgetting: as for `acceptance.observed`.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> table = Prices(("off", "ngram"), np.array([[1.0, np.inf], [1.0, 1.1]]), np.zeros(2), np.zeros(2))
      >>> choice, one = Choice(np.array([1]), np.array([1])), np.array([1])
      >>> after = after_round(begin(flat_prior(2, 1), np.array([8])), table, choice, one, one, committed=one + 1)
      >>> after.estimate.accept[0, 1].tolist(), after.behind.tolist()
      ([[1.0, 0.0]], [[10, 0]])
    """
    estimate = observed(
        chooser.estimate, choice.candidate, drafted, accepted, forgetting, committed > 0, choice.length
    )
    rows, ran = np.arange(len(committed)), committed > 0
    took = _filled(table)[choice.candidate, drafted]
    before = chooser.behind[rows, choice.candidate]
    took = took + np.where(
        before > 0, table.start_ms[choice.candidate] + before * table.absorb_ms[choice.candidate], 0.0
    )
    behind = chooser.behind + committed[:, None]
    behind[rows[ran], choice.candidate[ran]] = 0
    return with_time(
        dataclasses.replace(chooser, estimate=estimate, behind=behind),
        committed,
        np.where(ran, took / table.round_ms[OFF, 0], 0.0),
    )


def with_time(chooser: Chooser, tokens: np.ndarray | float, steps: np.ndarray | float) -> Chooser:
    """Returns the chooser after `tokens` tokens that took as long as `steps` steps of plain decoding.

    Args:
      chooser: before.
      tokens, steps: float[B], or one number for all rows.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> with_time(begin(flat_prior(2, 4), np.array([30])), tokens=8, steps=6.5).lost.tolist()
      [-1.5]
    """
    return dataclasses.replace(
        chooser, tokens=chooser.tokens + tokens, lost=chooser.lost + (np.asarray(steps) - tokens)
    )


def with_new_row(chooser: Chooser, row: int) -> Chooser:
    """Returns the chooser after another text has taken a row: it forgets all about the row except `behind`.

    Examples:
      >>> from jaxspec.choosing.acceptance import flat_prior
      >>> seen = begin(flat_prior(2, 4), np.array([30, 40]))
      >>> seen.estimate.draft[:] = 1
      >>> with_new_row(seen, 1).estimate.draft.sum(axis=(1, 2, 3)).tolist()
      [16.0, 0.0]
    """
    seen = chooser.estimate
    accept, draft, tokens, lost = (
        of_rows.copy() for of_rows in (seen.accept, seen.draft, chooser.tokens, chooser.lost)
    )
    for of_rows in (accept, draft, tokens, lost):
        of_rows[row] = 0
    return dataclasses.replace(chooser, estimate=Estimate(accept, draft), tokens=tokens, lost=lost)
