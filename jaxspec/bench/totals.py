"""What texts that were generated one after another come to: their speed, and how their drafts fared."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.engine.results import Result


def running_ms(result: Result) -> float:
    """From its first token to its last, compilation left out."""
    return result.statistics.decode_ms - result.statistics.compile_ms


def tokens_per_second(results: Sequence[Result]) -> float | None:
    """Of all tokens after the first of their text; None where there are none."""
    tokens = sum(result.statistics.num_tokens - 1 for result in results)
    return 1e3 * tokens / sum(map(running_ms, results)) if tokens else None


def acceptance(results: Sequence[Result]) -> dict[str, float | None]:
    """`mean_acceptance_length` (tokens a round), `draft_acceptance_rate` (accepted ÷ drafted) and
    `mean_draft_length` (draft tokens verified a round), null where there was no round, or no draft."""
    counts = [result.statistics for result in results]
    rounds, drafted = sum(c.num_rounds for c in counts), sum(c.num_draft_tokens for c in counts)
    return {
        "mean_acceptance_length": sum(c.num_tokens - 1 for c in counts) / rounds if rounds else None,
        "draft_acceptance_rate": sum(c.num_accepted_tokens for c in counts) / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds else None,
    }
