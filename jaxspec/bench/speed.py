"""The one definition of speed and of acceptance, for every report of the project.

Runs generate after the same prompts in turns (`timing.measure_runs`). In one turn a run's speed is the number of its
new tokens ÷ its time, over all prompts: tokens after the first of each text, in the time from a text's first token to
its last, compilation left out. The speed-up of a run is the ratio of its speed to that of plain decoding in the same
turn, the median over the turns.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Sequence

import numpy as np

from jaxspec.engine.results import Result

# What a run generated: by prompt, its texts turn by turn; all prompts have as many turns.
Taken = Sequence[Sequence[Result]]


def running_ms(result: Result) -> float:
    """The time from a text's first token to its last, compilation left out, in milliseconds."""
    return result.statistics.decode_ms - result.statistics.decode_compile_ms


def tokens_per_second(taken: Taken) -> float | None:
    """The speed of a run, the median over its turns; None where no text has a token after its first.

    Args:
      taken: by prompt, turn by turn.
    """
    tokens, ms = _counts(taken).sum(axis=0).T
    speeds = [1e3 * n / t for n, t in zip(tokens, ms, strict=True) if n and t]
    return float(statistics.median(speeds)) if speeds else None


def speed_ratio(
    taken: Taken, others: Taken, resamples: int = 2000
) -> tuple[float | None, tuple[float, float] | None]:
    """How many times faster one run is than another: of plain decoding, its speed-up.

    Args:
      taken: by prompt, turn by turn.
      others: what it is compared with, on the same prompts in the same turns.
      resamples: draws of the bootstrap.

    Returns:
      The ratio, and its 95 % interval by the bootstrap over prompts; None where a speed is not defined. The interval
      says what other prompts of these kinds might have given; it does not hold the noise of the clock.

    Raises:
      ValueError: the runs differ in their prompts or turns.
    """
    mine, other = _counts(taken), _counts(others)
    if mine.shape != other.shape:
        raise ValueError(f"runs have {mine.shape[:2]} and {other.shape[:2]} prompts and turns; give the same")
    drawn = np.random.default_rng(0).integers(len(mine), size=(resamples, len(mine)))
    rows = np.vstack([np.arange(len(mine)), drawn])
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.filterwarnings("ignore", "All-NaN slice")
        (tokens, ms), (other_tokens, other_ms) = (
            np.moveaxis(counts[rows].sum(axis=1), -1, 0) for counts in (mine, other)
        )
        ratios = np.where(tokens * other_tokens > 0, (tokens / ms) / (other_tokens / other_ms), np.nan)
        typical = np.nanmedian(ratios, axis=1)
        if not np.isfinite(typical[0]):
            return None, None
        low, high = np.nanquantile(typical[1:], (0.025, 0.975))
    return float(typical[0]), (float(low), float(high))


def acceptance(taken: Taken) -> dict[str, float | None]:
    """What became of a run's drafts, over all its prompts and turns.

    Returns:
      `mean_acceptance_length`, tokens ÷ rounds (as Spec-Bench counts); `mean_acceptance_length_drafting`, 1 + accepted
      ÷ drafting rounds (as vLLM counts); `draft_acceptance_rate`, accepted ÷ drafted; `mean_draft_length`, draft
      tokens verified per round. Null where there was no round, or no draft.
    """
    counts = [result.statistics for result in itertools.chain(*taken)]
    rounds, drafts = sum(c.num_rounds for c in counts), sum(c.num_drafts for c in counts)
    drafted = sum(c.num_draft_tokens for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    return {
        "mean_acceptance_length": sum(map(_tokens, itertools.chain(*taken))) / rounds if rounds else None,
        "mean_acceptance_length_drafting": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds else None,
    }


def _counts(taken: Taken) -> np.ndarray:
    """float64[prompts, turns, 2]: new tokens, and the milliseconds that they took."""
    return np.array([[(_tokens(one), running_ms(one)) for one in turns] for turns in taken], np.float64)


def _tokens(result: Result) -> int:
    """Tokens after the first."""
    return max(result.statistics.num_tokens - 1, 0)
