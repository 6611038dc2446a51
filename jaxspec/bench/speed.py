"""The one definition of speed and of acceptance, for every report of the project.

Runs generate after the same prompts in turns (`timing.measure_runs`). In one turn a run's speed is the number of its
new tokens ÷ its time, over all prompts: tokens after the first of each text, in the time from a text's first token to
its last, compilation left out. The speed-up of a run is the ratio of its speed to that of plain decoding in the same
turn, the median over the turns.

Texts that were generated together, the rows of a batch, count as one with all their tokens, in the time from the first
token of any to the last of any.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.results import Result

# A text, or those that were generated together.
Texts = Result | Sequence[Result]
# What a run generated: by prompt (or batch of prompts), turn by turn; all prompts have as many turns.
Taken = Sequence[Sequence[Texts]]


def rows(texts: Texts) -> Sequence[Result]:
    """Texts that were generated together, as a sequence."""
    return [texts] if isinstance(texts, Result) else texts


def first_token_ms(result: Result) -> float:
    """The time from the call to a text's first token, compilation left out, in milliseconds."""
    counts = result.statistics
    return counts.elapsed_ms - counts.decode_ms - (counts.compile_ms - counts.decode_compile_ms)


def running_ms(texts: Texts) -> float:
    """The time from the first token to the last, compilation left out, in milliseconds."""
    ended = max(result.statistics.elapsed_ms - result.statistics.compile_ms for result in rows(texts))
    return ended - min(map(first_token_ms, rows(texts)))


def tokens_per_second(taken: Taken) -> float | None:
    """The speed of a run, the median over its turns; None where no text has a token after its first.

    Args:
      taken: by prompt, turn by turn.
    """
    tokens, ms = _counts(taken).sum(axis=0).T
    speeds = [1e3 * n / t for n, t in zip(tokens, ms, strict=True) if n and t]
    return float(statistics.median(speeds)) if speeds else None


def speed_ratio(
    taken: Taken,
    others: Taken,
    resamples: int = 2000,
    *,
    groups: Sequence[Any] | None = None,
    kinds: Sequence[Any] | None = None,
) -> tuple[float | None, tuple[float, float] | None]:
    """How many times faster one run is than another: of plain decoding, its speed-up.

    Args:
      taken: by prompt, turn by turn.
      others: what it is compared with, on the same prompts in the same turns.
      resamples: draws of the bootstrap.
      groups: of each prompt, what it is drawn together with: prompts of one group, such as the turns of one
        conversation, are one in the bootstrap. None where each stands for itself.
      kinds: of each prompt, its kind of work, see `indices`. None where all are of one.

    Returns:
      The ratio, and its 95 % interval by the bootstrap over the prompts of each kind; None where a speed is not
      defined. The interval says what other prompts of these kinds, as many of each, might have given; it does not hold
      the noise of the clock.

    Raises:
      ValueError: the runs differ in their prompts or turns.
    """
    return spread(drawn_ratios(taken, others, resamples, groups=groups, kinds=kinds))


def drawn_ratios(
    taken: Taken,
    others: Taken,
    resamples: int = 2000,
    *,
    groups: Sequence[Any] | None = None,
    kinds: Sequence[Any] | None = None,
) -> np.ndarray:
    """Computes the ratio of two speeds, and again for each draw of the bootstrap; `speed_ratio` is its summary.

    Runs whose prompts are of the same kinds, in the same order, have the same prompts drawn. So ratios of several
    models on the same prompts may be added or divided draw by draw, before `spread` makes an interval of them.

    Args:
      taken, others, resamples, groups, kinds: see `speed_ratio`.

    Returns:
      float64[1 + resamples]: the ratio, then that of each draw of prompts with replacement; NaN where a speed is not
      defined.

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
            frozenset(kind for kind, its in zip(kinds, groups, strict=True) if its == group)
            for group in dict.fromkeys(groups)
        ]
    return _drawn(mine, other, kinds, resamples)


def ratio_of_counts(
    mine: np.ndarray, other: np.ndarray, resamples: int = 2000
) -> tuple[float | None, tuple[float, float] | None]:
    """The ratio of two speeds, the median over the turns, and its interval; see `speed_ratio`.

    Args:
      mine, other: float64[prompts, turns, 2], tokens and the time that they took, in one unit for both.
      resamples: draws of the bootstrap over prompts.

    Examples:
      >>> half, whole = np.array([[[10, 5.0]], [[20, 10.0]]]), np.array([[[10, 10.0]], [[20, 20.0]]])
      >>> ratio_of_counts(half, whole)
      (2.0, (2.0, 2.0))
    """
    return spread(_drawn(mine, other, [None] * len(mine), resamples))


def spread(drawn: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    """A figure and its 95 % interval.

    Args:
      drawn: float64[1 + N], the figure, then the same of each draw of the bootstrap.

    Returns:
      Both None where the figure is not defined.

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


def indices(kinds: Sequence[Any], resamples: int = 2000) -> np.ndarray:
    """The prompts of each draw of the bootstrap, always the same for the same kinds.

    How many prompts there are of each kind of work is chosen, and not a matter of chance; so every draw has as many of
    each. Prompts that are the only ones of their kind are drawn as if they were of one.

    Args:
      kinds: of each prompt, its kind of work; anything that can be a key.
      resamples: how many draws.

    Returns:
      int[1 + resamples, prompts]: first every prompt once, then the draws with replacement.

    Examples:
      >>> drawn = indices(["sums", "sums", "stories", "stories"], 50)
      >>> drawn[0].tolist(), set(drawn[:, :2].flat) == {0, 1}, set(drawn[:, 2:].flat) == {2, 3}
      ([0, 1, 2, 3], True, True)
    """
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    alone = [place for its in places.values() if len(its) == 1 for place in its]
    strata = [alone, *(its for its in places.values() if len(its) > 1)]
    every = np.tile(np.arange(len(kinds)), (1 + resamples, 1))
    random = np.random.default_rng(0)
    for stratum in filter(None, strata):
        every[1:, stratum] = np.array(stratum)[random.integers(len(stratum), size=(resamples, len(stratum)))]
    return every


def _drawn(mine: np.ndarray, other: np.ndarray, kinds: Sequence[Any], resamples: int) -> np.ndarray:
    """float64[1 + resamples], see `drawn_ratios`."""
    chosen = indices(kinds, resamples)
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.filterwarnings("ignore", "All-NaN slice")
        (tokens, ms), (other_tokens, other_ms) = (
            np.moveaxis(counts[chosen].sum(axis=1), -1, 0) for counts in (mine, other)
        )
        ratios = np.where(tokens * other_tokens > 0, (tokens / ms) / (other_tokens / other_ms), np.nan)
        typical: np.ndarray = np.nanmedian(ratios, axis=1)
    return typical


def acceptance(taken: Taken) -> dict[str, float | None]:
    """What became of a run's drafts, over all its prompts and turns.

    Returns:
      `mean_acceptance_length`, tokens ÷ rounds (as Spec-Bench counts); `mean_acceptance_length_drafting`, 1 + accepted
      ÷ drafting rounds (as vLLM counts); `draft_acceptance_rate`, accepted ÷ drafted; `mean_draft_length`, draft
      tokens verified per round. Null where there was no round, or no draft.
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
    """The share of the rounds with a draft that accepted its first token, its second, and so on (as vLLM counts).

    Returns:
      One number per position of the longest draft; none where nothing was drafted.
    """
    histograms = [result.statistics.acceptance_histogram for result in every_text(taken)]
    by_count = [sum(sizes) for sizes in itertools.zip_longest(*histograms, fillvalue=0)]
    return [sum(by_count[position:]) / sum(by_count) for position in range(1, len(by_count)) if any(by_count)]


def every_text(taken: Taken) -> Iterator[Result]:
    """All texts of a run, each for itself."""
    for texts in itertools.chain(*taken):
        yield from rows(texts)


def _counts(taken: Taken) -> np.ndarray:
    """float64[prompts, turns, 2]: new tokens, and the milliseconds that they took."""
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
    """Tokens after the first."""
    return max(result.statistics.num_tokens - 1, 0)
