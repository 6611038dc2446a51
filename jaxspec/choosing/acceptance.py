"""What is known of each candidate's drafts: Beta counts by position, which forget.

A round that drafts d tokens and has k of them accepted says: positions 0 … k − 1 were right, and position k was wrong
where k < d; of what lies behind it says nothing. A draft that ends before it had to, or does not even begin, counts as
having the wrong next token: so a lookup that finds nothing, and a drafter that does better to stop, are known by what
they bring. What that saves is counted beside it, by position too: whether a draft goes on to a token there.

Each position has counts of its own. But a text on which first tokens are wrong more often than expected is one on which
later tokens will be, too: so the counts of all positions together give a candidate a level on this text, with a Beta
law, and the level shifts the expected acceptance of every position (in log-odds) before its own counts are added.
Without that, positions that were never reached would keep the prior's hopes, and a long draft would look good on a text
on which none is.

Candidates that draft with a model stand or fall together: on a text that one head does not suit, another seldom does.
So what a text says of one shifts what is expected of its kin, until they have counts of their own; else each of them
would be tried in turn where none pays.

All counts of rounds fade by the same factor in each round, played or not, so that a candidate that was bad a while ago
is worth a trial again (discounted Thompson sampling: Raj and Kalyani 2017, arXiv:1707.09727).

All functions are pure: NumPy arrays in, new ones out. A row is one text. M: candidates; K: the longest draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# A prior counts at least and at most as many rounds.
_STRENGTH = (1.0, 20.0)
# Draft tokens that the level of a text counts as at each position, beside the position's own.
_POSITION = 8.0
# How much of a shift (in log-odds) goes for kin.
_KINSHIP = 0.7
# Draft tokens of a text below which it says little of the law.
_HARDLY = 4.0
# Probabilities stay this far from 0 and 1.
_EDGE = 1e-3


@dataclasses.dataclass(frozen=True)
class Prior:
    """What is expected of candidates before a text's first round.

    Attributes:
      accept: float[M, K], expected acceptance by position, given the positions before; what is not drafted is wrong.
      strength: float[M], how many draft tokens that counts as: the fewer, the more texts differ.
      draft: float[M, K], the expected share of drafts that go on to a token at a position, of those that came so far.
      kin: bool[M], the candidates of which what a text says of one goes for the others; None for none.

    Examples:
      >>> prior = Prior(np.array([[0.7, 0.8]]), strength=np.array([4.0]), draft=np.array([[0.9, 0.5]]))
      >>> accept, drafted = mean(prior, nothing_seen(prior, num_rows=1))
      >>> accept.round(2).tolist(), drafted.round(2).tolist()
      ([[[0.7, 0.8]]], [[[0.9, 0.45]]])
    """

    accept: np.ndarray
    strength: np.ndarray
    draft: np.ndarray
    kin: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What is expected of one candidate: a row of a `Prior`.

    Attributes:
      accept: expected acceptance by position, given the positions before, where what is not drafted is wrong; of later
        positions the last.
      strength: how many draft tokens that counts as.
      draft: share of drafts that go on to a token at a position; of later positions the last.

    Examples:
      >>> joined([Expectation((0.5,), 2.0), Expectation((0.8, 0.7), 9.0)], 3).accept.tolist()
      [[0.5, 0.5, 0.5], [0.8, 0.7, 0.7]]
    """

    accept: tuple[float, ...]
    strength: float
    draft: tuple[float, ...] = (1.0,)


def joined(expectations: Sequence[Expectation], longest: int, kin: Sequence[bool] | None = None) -> Prior:
    """The prior of several candidates.

    Args:
      expectations: M of them.
      longest: K.
      kin: M of them, see `Prior`.

    Examples:
      >>> joined([Expectation((0.5,), 2.0, (0.8, 0.9))], 3).draft.tolist()
      [[0.8, 0.9, 0.9]]
    """

    def positions(known: tuple[float, ...]) -> tuple[float, ...]:
        return (*known, *known[-1:] * longest)[:longest]

    return Prior(
        np.array([positions(one.accept) for one in expectations]),
        np.array([one.strength for one in expectations]),
        np.array([positions(one.draft) for one in expectations]),
        None if kin is None else np.array(kin),
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the rounds of B rows said, beside the prior.

    Attributes:
      accept: float[B, M, K, 2], faded counts (right, wrong).
      draft: float[B, M, K, 2], faded counts of drafts that came so far (went on, ended).

    Examples:
      >>> nothing_seen(flat_prior(3, 5), num_rows=2).accept.shape
      (2, 3, 5, 2)
    """

    accept: np.ndarray
    draft: np.ndarray


def flat_prior(num_candidates: int, longest: int, acceptance: float = 0.5, strength: float = 2.0) -> Prior:
    """The same for every candidate and position, and nine rounds in ten with a draft.

    Args:
      num_candidates: M.
      longest: K.
      acceptance: the expected acceptance, between 0 and 1.
      strength: how many draft tokens it counts as.

    Raises:
      ValueError: a number out of range.

    Examples:
      >>> flat_prior(1, 2, 0.75, 4.0).accept.tolist()
      [[0.75, 0.75]]
    """
    if not 0 < acceptance < 1:
        raise ValueError(f"acceptance is {acceptance}; give a number between 0 and 1")
    if not 0 < strength < float("inf"):
        raise ValueError(f"strength is {strength}; give a number above 0")
    return Prior(
        np.full((num_candidates, longest), acceptance),
        np.full(num_candidates, strength),
        np.broadcast_to(np.where(np.arange(longest) == 0, 0.9, 1.0), (num_candidates, longest)),
    )


def fitted_prior(counts: Estimate) -> Prior:
    """The prior that other texts suggest: their counts, of which each text has a row.

    What is expected is what a round of a text brings on the average of the texts, so that long texts, and those that
    take many rounds, have no more say than others. The less the texts differ, the more draft tokens the prior counts as
    (the method of moments): the counts of a text vary by p(1 − p) ÷ n when its p is the common one; what they vary more
    is the law's.

    Examples:
      >>> alike = np.array([[[[80.0, 20.0]]]] * 9)
      >>> apart = np.array([[[[90.0, 10.0]]], [[[10.0, 90.0]]]] * 9)
      >>> drafted = np.array([[[[100.0, 0.0]]]] * 18)
      >>> one, other = fitted_prior(Estimate(alike, drafted[:9])), fitted_prior(Estimate(apart, drafted))
      >>> one.accept.round(2).tolist(), one.strength.tolist()
      ([[0.77]], [20.0])
      >>> other.accept.round(2).tolist(), other.strength.tolist(), other.draft.tolist()
      ([[0.5]], [1.0], [[1.0]])
    """
    # Half of one each way, so that nothing is certain.
    texts = (counts.accept.sum(axis=-1) > 0).sum(axis=0)
    accept = (_chained(counts.accept) * texts + 0.5) / (texts + 1)
    # Of all positions together, as a text's level is one for all of them.
    return Prior(accept, _strength(counts.accept.sum(axis=2)), _chained(counts.draft))


def _weights(seen: np.ndarray) -> np.ndarray:
    """Of float[T, …], how much each text counts: alike, but for those that were hardly seen."""
    weight = seen / (seen + _HARDLY)
    weighed: np.ndarray = weight / np.maximum(weight.sum(axis=0), 1e-9)
    return weighed


def _chained(counts: np.ndarray) -> np.ndarray:
    """The shares by position, given the positions before, float[M, K], of the texts' mean round: float[T, M, K, 2]."""
    seen = counts.sum(axis=-1)
    common = (counts[..., 0].sum(axis=0) + _EDGE) / (seen.sum(axis=0) + _EDGE)
    rate = np.where(seen > 0, counts[..., 0] / np.maximum(seen, 1e-9), common)
    # Positions far back are seen in texts that suit the candidate: of the others they are known not to be reached.
    reached = (_weights(seen[..., :1]) * np.cumprod(rate, axis=-1)).sum(axis=0)
    before = np.concatenate([np.ones_like(reached[:, :1]), reached[:, :-1]], axis=-1)
    shares: np.ndarray = np.where(before > _EDGE, reached / np.maximum(before, _EDGE), common)
    return shares


def _strength(counts: np.ndarray) -> np.ndarray:
    """How many tokens the Beta law of texts' rates counts as, float[M], from counts float[T, M, 2]."""
    seen = counts.sum(axis=-1)
    weight, rate = _weights(seen), counts[..., 0] / np.maximum(seen, 1)
    texts = (seen > 0).sum(axis=0)
    mean = ((weight * rate).sum(axis=0) * texts + 0.5) / (texts + 1)
    chance = mean * (1 - mean)
    drawn = chance * (weight / np.maximum(seen, 1)).sum(axis=0)
    spread = (weight * (rate - mean) ** 2).sum(axis=0)
    strength: np.ndarray = np.clip(chance / np.maximum(spread - drawn, 1e-9) - 1, *_STRENGTH)
    return strength


def nothing_seen(prior: Prior, num_rows: int) -> Estimate:
    """The estimate of rows before their first rounds.

    Args:
      prior: says M and K.
      num_rows: B.

    Examples:
      >>> nothing_seen(flat_prior(3, 5), num_rows=2).draft.any().item()
      False
    """
    nothing = np.zeros((num_rows, *prior.accept.shape, 2))
    return Estimate(nothing, nothing.copy())


def observed(
    estimate: Estimate,
    candidate: np.ndarray,
    drafted: np.ndarray,
    accepted: np.ndarray,
    forgetting: float = 0.995,
    live: np.ndarray | None = None,
    asked: np.ndarray | int = 0,
) -> Estimate:
    """The estimate after one more round of each row.

    It depends on counts of committed tokens alone: so does every later choice, see `choosing.chooser`.

    Args:
      estimate: before.
      candidate: int[B], which one drafted; its rounds without a draft count too.
      drafted: int[B], verified draft tokens.
      accepted: int[B], of them accepted.
      forgetting: what is left of all counts after a round, above 0 and at most 1.
      live: bool[B], which rows had a round; None for all.
      asked: int[B], how long drafts might have been, see `observed_rounds`.

    Examples:
      >>> new = nothing_seen(flat_prior(1, 3), 1)
      >>> seen = observed(new, np.array([0]), drafted=np.array([3]), accepted=np.array([1]))
      >>> seen.accept[0, 0].tolist(), seen.draft[0, 0].tolist()
      ([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    """
    rows = np.arange(len(candidate))
    ran = np.ones(len(candidate), bool) if live is None else live
    faded = _faded(estimate, np.where(ran, forgetting, 1.0))
    new = _counts(drafted, accepted, np.broadcast_to(asked, drafted.shape), faded.accept.shape[2])
    for counts, now in zip((faded.accept, faded.draft), new, strict=True):
        counts[rows, candidate] += np.where(ran[:, None, None], now, 0.0)
    return faded


def observed_rounds(
    estimate: Estimate,
    candidate: int,
    rounds: Sequence[Sequence[tuple[int, int]]],
    forgetting: float = 0.995,
    asked: int = 0,
) -> Estimate:
    """As `observed` for several rounds of one candidate, of which all count alike: for the host between two calls.

    Args:
      estimate: before.
      candidate: which one drafted in all of them.
      rounds: by row, (drafted, accepted) of each.
      forgetting: what is left of all counts after a round.
      asked: how long drafts might have been: where one ended before, the next token counts as wrong, for it was not
        there to be accepted. 0: a draft's end says nothing of what would have come.

    Examples:
      >>> seen = observed_rounds(nothing_seen(flat_prior(1, 2), 1), 0, [[(2, 1), (2, 2), (0, 0)]])
      >>> seen.accept[0, 0].tolist(), seen.draft[0, 0].tolist()
      ([[2.0, 0.0], [1.0, 1.0]], [[2.0, 1.0], [2.0, 0.0]])
      >>> short = observed_rounds(nothing_seen(flat_prior(1, 2), 1), 0, [[(1, 1)]], asked=2)
      >>> short.accept[0, 0].tolist(), short.draft[0, 0].tolist()
      ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    """
    faded = _faded(estimate, forgetting ** np.array([len(of_row) for of_row in rounds]))
    for row, of_row in enumerate(rounds):
        if of_row:
            drafted, accepted = np.array(of_row).T
            new = _counts(drafted, accepted, np.full(len(of_row), asked), faded.accept.shape[2])
            for counts, now in zip((faded.accept, faded.draft), new, strict=True):
                counts[row, candidate] += now.sum(axis=0)
    return faded


def _faded(estimate: Estimate, kept: np.ndarray) -> Estimate:
    """A copy with counts of which float[B] is left."""
    left = kept[:, None, None, None]
    return Estimate(estimate.accept * left, estimate.draft * left)


def _counts(
    drafted: np.ndarray, accepted: np.ndarray, asked: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """What N rounds say, int[N] each: counts float[N, K, 2] of acceptances and of drafts."""
    at, most = np.arange(longest), np.maximum(drafted, asked)[:, None]
    drafted, accepted = drafted[:, None], accepted[:, None]
    return (
        np.stack([at < accepted, (at == accepted) & (accepted < most)], axis=-1).astype(float),
        # A round without a draft says so, whatever was asked for.
        np.stack([at < drafted, (at == drafted) & (drafted < np.maximum(most, 1))], axis=-1).astype(float),
    )


def mean(prior: Prior, estimate: Estimate) -> tuple[np.ndarray, np.ndarray]:
    """The expected acceptance by position, and the shares of rounds that draft a token there, float[B, M, K] each.

    Examples:
      >>> prior = flat_prior(1, 2, strength=2.0)
      >>> seen = nothing_seen(prior, 1)
      >>> for _ in range(8):
      ...     seen = observed(seen, np.array([0]), np.array([2]), accepted=np.array([0]), forgetting=1.0)
      >>> mean(prior, seen)[0].round(2).tolist()  # of second tokens none was seen
      [[[0.05, 0.1]]]
    """
    return hoped(prior, estimate, deviations=0.0)


def hoped(prior: Prior, estimate: Estimate, deviations: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """As `mean`, with levels so many standard deviations of their Beta laws above it: what may well be.

    Examples:
      >>> prior = flat_prior(1, 1, acceptance=0.5)
      >>> hoped(prior, nothing_seen(prior, 1))[0].round(2).tolist()
      [[[0.79]]]
    """
    level = np.full(estimate.draft.shape[:2], deviations)
    return _at(prior, estimate, level, level)


def sampled(
    rng: np.random.Generator, prior: Prior, estimate: Estimate, exploration: np.ndarray | float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """As `mean`, with levels drawn from their Beta laws (by mean and variance): Thompson sampling.

    Args:
      rng: what draws.
      prior, estimate: of B rows.
      exploration: by which deviations are multiplied, a number or float[B, 1] or float[B, M]; 0 for the mean.

    Examples:
      >>> prior = flat_prior(1, 1, acceptance=0.5)
      >>> accept, _ = sampled(np.random.default_rng(0), prior, nothing_seen(prior, 1000))
      >>> accept.mean().round(1).item(), accept.std().round(1).item()
      (0.5, 0.3)
    """
    shape = estimate.draft.shape[:2]
    return _at(
        prior, estimate, exploration * rng.standard_normal(shape), exploration * rng.standard_normal(shape)
    )


def _at(
    prior: Prior, estimate: Estimate, level: np.ndarray, finding: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Acceptances, and shares of rounds that draft a token, by position at float[B, M] deviations from the mean."""
    counts = estimate.accept
    base = np.broadcast_to(_log_odds(prior.accept), counts.shape[:-1])
    if prior.kin is not None:
        # Of several that were seen, each by how much was.
        shift = _shift(prior.strength, counts, base, np.zeros_like(level))
        weight = np.where(prior.kin, counts.sum(axis=(-2, -1)), 0.0)
        others = weight[:, None] * ~np.eye(len(prior.kin), dtype=bool)
        shared = (others @ shift[..., None])[..., 0] / np.maximum(others.sum(axis=-1), _EDGE)
        base = base + _KINSHIP * np.where(prior.kin, shared, 0.0)[..., None]
    ends = np.broadcast_to(_log_odds(prior.draft), counts.shape[:-1])
    goes_on = _with_counts(prior.strength, estimate.draft, ends, finding)
    return _with_counts(prior.strength, counts, base, level), np.cumprod(goes_on, axis=-1)


def _with_counts(strength: np.ndarray, counts: np.ndarray, base: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Shares by position, float[B, M, K]: expected in log-odds, shifted to the text's level, with its own counts."""
    shifted = _probability(base + _shift(strength, counts, base, level)[..., None])
    shares: np.ndarray = (_POSITION * shifted + counts[..., 0]) / (_POSITION + counts.sum(axis=-1))
    return shares


def _shift(strength: np.ndarray, counts: np.ndarray, base: np.ndarray, level: np.ndarray) -> np.ndarray:
    """How far, in log-odds, shares lie from those of `base` float[B, M, K], at levels float[B, M]."""
    seen = counts.sum(axis=-1)
    # What is expected of the positions that were seen; before the first round, of the first one.
    weight = seen.copy()
    weight[..., 0] += _EDGE
    expected = (weight * _probability(base)).sum(axis=-1) / weight.sum(axis=-1)
    right = strength * expected + counts[..., 0].sum(axis=-1)
    deviated = _deviated(right, strength + seen.sum(axis=-1), level)
    shift: np.ndarray = _log_odds(deviated) - _log_odds(expected)
    return shift


def _deviated(right: np.ndarray, total: np.ndarray, level: np.ndarray) -> np.ndarray:
    """A probability of the law Beta(right, total − right), `level` deviations from its mean."""
    middle = right / total
    drawn: np.ndarray = np.clip(
        middle + level * np.sqrt(middle * (1 - middle) / (total + 1)), _EDGE, 1 - _EDGE
    )
    return drawn


def _probability(log_odds: np.ndarray) -> np.ndarray:
    probability: np.ndarray = 1 / (1 + np.exp(-log_odds))
    return probability


def _log_odds(probability: np.ndarray) -> np.ndarray:
    inside = np.clip(probability, _EDGE, 1 - _EDGE)
    odds: np.ndarray = np.log(inside) - np.log1p(-inside)
    return odds
