"""The definitions of speed and acceptance that all reports of the project use.

Runs generate after the same prompts in turns (`timing.measure_runs`). The speed of a run in one turn is the number of
its new tokens ÷ their time, over all prompts: the tokens after the first of each text, in the time from the first
token of a text to its last, without compilation. The speed-up of a run is the ratio of its speed to that of plain
decoding in the same turn, the median over the turns.

The texts of a batch count as one text with all their tokens, from the first token of any row to the last of any row.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.requests.results import Result

# A text, or the texts of a batch.
Texts = Result | Sequence[Result]
# The texts of a run, by prompt (or batch of prompts) and turn; all prompts have the same number of turns.
Taken = Sequence[Sequence[Texts]]


def rows(texts: Texts) -> Sequence[Result]:
    """The texts as a sequence."""
    return [texts] if isinstance(texts, Result) else texts


def first_token_ms(result: Result) -> float:
    """The time from the call to a text's first token without compilation, in milliseconds."""
    counts = result.statistics
    return counts.elapsed_ms - counts.decode_ms - (counts.compile_ms - counts.decode_compile_ms)


def running_ms(texts: Texts) -> float:
    """The time from the first token to the last without compilation, in milliseconds."""
    ended = max(result.statistics.elapsed_ms - result.statistics.compile_ms for result in rows(texts))
    return ended - min(map(first_token_ms, rows(texts)))


def tokens_per_second(taken: Taken) -> float | None:
    """The speed of a run, the median over its turns; None if no text has a token after its first.

    Args:
      taken: the texts by prompt and turn.
    """
    tokens, ms = _counts(taken).sum(axis=0).T
    speeds = [1e3 * n / t for n, t in zip(tokens, ms, strict=True) if n and t]
    return float(statistics.median(speeds)) if speeds else None


def speed_ratio(
    taken: Taken,
    others: Taken,
    *,
    groups: Sequence[Any] | None = None,
    kinds: Sequence[Any] | None = None,
) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of the speeds of two runs; the speed-up if the other run is plain decoding.

    Args:
      taken: the texts by prompt and turn.
      others: the texts of the other run, on the same prompts in the same turns.
      groups: group of each prompt; prompts of one group, such as the turns of a conversation, are one unit of the
        bootstrap. None if each prompt is its own unit.
      kinds: kind of work of each prompt, see `weights`. None for one kind.

    Returns:
      The ratio, and its 95 % interval by the bootstrap over the prompts of each kind and over the turns; None if a
      speed is not defined. With one turn, the interval does not cover the noise of the timing.

    Raises:
      ValueError: the runs differ in their prompts or turns.
    """
    mine, other = _counts(taken), _counts(others)
    if mine.shape != other.shape:
        raise ValueError(f"runs have {mine.shape[:2]} and {other.shape[:2]} prompts and turns; give the same")
    kinds = [None] * len(mine) if kinds is None else kinds
    if groups is not None:
        mine, other = (_together(counts, groups) for counts in (mine, other))
        kinds = [
            frozenset(kind for kind, group_of in zip(kinds, groups, strict=True) if group_of == group)
            for group in dict.fromkeys(groups)
        ]
    return spread(_drawn(mine, other, kinds))


def spread(drawn: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    """A figure and its 95 % interval.

    Args:
      drawn: float64[1 + N], the figure, then its value on each draw of the bootstrap.

    Returns:
      The figure and (low, high); both None if the figure is not defined.

    Examples:
      >>> spread(np.array([1.5, 1.4, 1.4, 1.6, 1.6]))
      (1.5, (1.4, 1.6))
    """
    if not np.isfinite(drawn[0]):
        return None, None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice")
        low, high = np.nanquantile(drawn[1:], (0.025, 0.975))
    return float(drawn[0]), (float(low), float(high))


def weights(kinds: Sequence[Any], resamples: int = 2000) -> np.ndarray:
    """The weight of each prompt in each draw of the bootstrap; deterministic for given kinds.

    The number of prompts of each kind is a choice, not random, so every draw has the same weight of each kind. Prompts
    that are the only ones of their kind are drawn together, as one kind. Of n prompts of a kind n − 1 are drawn, each
    with weight n ÷ (n − 1), so that the variance of a mean is unbiased (Rao and Wu 1988). Draws of n would give
    intervals that are too narrow by a factor of √((n − 1) ÷ n).

    Args:
      kinds: kind of work of each prompt, hashable.
      resamples: number of draws.

    Returns:
      float64[1 + resamples, prompts]: first 1 for every prompt, then the draws with replacement. Rows have equal sums.

    Examples:
      >>> drawn = weights(["sums", "sums", "stories", "stories"], 50)
      >>> drawn[0].tolist(), {tuple(row) for row in drawn[1:, :2].tolist()} == {(2.0, 0.0), (0.0, 2.0)}
      ([1.0, 1.0, 1.0, 1.0], True)
    """
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    alone = [place for members in places.values() if len(members) == 1 for place in members]
    every = np.ones((1 + resamples, len(kinds)))
    random = np.random.default_rng(0)
    for stratum in (alone, *(members for members in places.values() if len(members) > 1)):
        if (count := len(stratum)) > 1:
            drawn = random.multinomial(count - 1, np.full(count, 1 / count), size=resamples)
            every[1:, stratum] = drawn * (count / (count - 1))
    return every


def _drawn(mine: np.ndarray, other: np.ndarray, kinds: Sequence[Any]) -> np.ndarray:
    """Returns the ratio of two speeds on all prompts, then on each draw of the bootstrap; NaN if it is not defined."""
    weighted = weights(kinds)
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.filterwarnings("ignore", "All-NaN slice")
        (tokens, ms), (other_tokens, other_ms) = (
            np.moveaxis(np.tensordot(weighted, counts, 1), -1, 0) for counts in (mine, other)
        )
        ratios = np.where(tokens * other_tokens > 0, (tokens / ms) / (other_tokens / other_ms), np.nan)
        # Turns are drawn too, so that the noise of the clock is part of the interval.
        turns = np.tile(np.arange(ratios.shape[1]), (len(ratios), 1))
        turns[1:] = np.random.default_rng(1).integers(turns.shape[1], size=turns[1:].shape)
        typical: np.ndarray = np.nanmedian(np.take_along_axis(ratios, turns, axis=1), axis=1)
    return typical


def acceptance(taken: Taken) -> dict[str, float | None]:
    """Acceptance statistics of a run, over all its prompts and turns.

    Returns:
      `mean_acceptance_length`, tokens ÷ rounds (as in Spec-Bench); `mean_acceptance_length_drafting`, 1 + accepted
      tokens ÷ drafting rounds (as in vLLM); `draft_acceptance_rate`, accepted ÷ draft tokens; `mean_draft_length`,
      verified draft tokens ÷ rounds. None if the divisor is 0.
    """
    texts = list(every_text(taken))
    counts = [result.statistics for result in texts]
    rounds, drafts = sum(c.num_rounds for c in counts), sum(c.num_drafts for c in counts)
    drafted = sum(c.num_draft_tokens for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    return {
        "mean_acceptance_length": sum(map(_tokens, texts)) / rounds if rounds else None,
        "mean_acceptance_length_drafting": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds else None,
    }


def acceptance_by_position(taken: Taken) -> list[float]:
    """The share of the drafting rounds that accepted the first draft token, the second, and so on (as in vLLM).

    Returns:
      One number per position of the longest draft; [] without drafts.
    """
    histograms = [result.statistics.acceptance_histogram for result in every_text(taken)]
    by_count = [sum(sizes) for sizes in itertools.zip_longest(*histograms, fillvalue=0)]
    return [sum(by_count[position:]) / sum(by_count) for position in range(1, len(by_count)) if any(by_count)]


def every_text(taken: Taken) -> Iterator[Result]:
    """Yields each text of a run."""
    for texts in itertools.chain(*taken):
        yield from rows(texts)


def _counts(taken: Taken) -> np.ndarray:
    """float64[prompts, turns, 2]: new tokens after the first, and their time in milliseconds."""
    return np.array(
        [[(sum(map(_tokens, rows(one))), running_ms(one)) for one in turns] for turns in taken], np.float64
    )


def _together(counts: np.ndarray, groups: Sequence[Any]) -> np.ndarray:
    """The sums over the prompts of each group."""
    names = list(dict.fromkeys(groups))
    summed = np.zeros((len(names), *counts.shape[1:]))
    np.add.at(summed, [names.index(group) for group in groups], counts)
    return summed


def _tokens(result: Result) -> int:
    """The number of tokens after the first."""
    return max(result.statistics.num_tokens - 1, 0)
