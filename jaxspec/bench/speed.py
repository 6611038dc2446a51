"""What texts that were generated one after another come to: their speed, and how their drafts fared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.engine.results import Result


def running_ms(result: Result) -> float:
    """From its first token to its last, compilation left out."""
    return result.statistics.decode_ms - result.statistics.decode_compile_ms


def tokens_per_second(results: Sequence[Result]) -> float | None:
    """Of all tokens after the first of their text; None where there are none."""
    tokens = _tokens(results)
    return 1e3 * tokens / _ms(results) if tokens else None


def acceptance(results: Sequence[Result]) -> dict[str, float | None]:
    """`mean_acceptance_length` (tokens a round), `draft_acceptance_rate` (accepted ÷ drafted) and
    `mean_draft_length` (draft tokens verified a round), null where there was no round, or no draft."""
    counts = [result.statistics for result in results]
    rounds, drafted = sum(c.num_rounds for c in counts), sum(c.num_draft_tokens for c in counts)
    return {
        "mean_acceptance_length": _tokens(results) / rounds if rounds else None,
        "draft_acceptance_rate": sum(c.num_accepted_tokens for c in counts) / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds else None,
    }


def speed_ratio(
    texts: Sequence[Sequence[Result]], others: Sequence[Sequence[Result]], resamples: int = 2000
) -> tuple[float | None, tuple[float, float] | None]:
    """How many times faster texts came about than others: all tokens ÷ all time, each after the first token.

    Args:
      texts: by prompt, its texts, turn by turn.
      others: the same of what they are compared with, by the same prompts.
      resamples: draws of the bootstrap.

    Returns:
      The ratio, and its 95 % interval by the bootstrap over prompts; None where a speed is not defined. The interval
      says what other prompts of these kinds might have given; it does not hold the noise of the clock.
    """
    pairs = zip(texts, others, strict=True)
    counts = np.array([[_tokens(one), _ms(one), _tokens(other), _ms(other)] for one, other in pairs])
    drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
    tokens, ms, other_tokens, other_ms = counts[np.vstack([np.arange(len(counts)), drawn])].sum(axis=1).T
    if not (tokens[0] and other_tokens[0]):
        return None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (tokens / ms) / (other_tokens / other_ms)
    low, high = np.nanquantile(ratios[1:], (0.025, 0.975))
    return float(ratios[0]), (float(low), float(high))


def _tokens(results: Sequence[Result]) -> int:
    """Those after the first of their text."""
    return sum(max(result.statistics.num_tokens - 1, 0) for result in results)


def _ms(results: Sequence[Result]) -> float:
    return sum(map(running_ms, results))
