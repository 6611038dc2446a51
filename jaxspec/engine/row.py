"""One text, gathered from what its row gains at each host poll."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.decoding import Stats
from jaxspec.engine.executables import VariantCounts
from jaxspec.engine.requests import RowRequest
from jaxspec.engine.results import FinishReason, Piece, Result, Statistics, Token, played_rounds
from jaxspec.engine.session import Update
from jaxspec.engine.switching import Switching
from jaxspec.engine.text import RowText


class Row:
    """Gathers one text from its updates.

    Args:
      request: what was asked for.
      text: turns tokens into text.
      began: when its batch began, by `time.perf_counter`.
      lossy: see `Result`.
    """

    def __init__(self, request: RowRequest, text: RowText, began: float, lossy: bool = False) -> None:
        self._request, self._text, self._began, self._lossy = request, text, began, lossy
        self._first: tuple[float, float] | None = None
        self._tokens: list[Token] = []

    def take(
        self,
        update: Update,
        now: float,
        blocked_ms: float,
        variants: VariantCounts,
        gamma: Callable[[], float | None],
        switching: Switching | None = None,
    ) -> Piece:
        """One update becomes one piece; the last one carries the result.

        `now`: as `began`; `blocked_ms`: how long the batch has waited for programs since it began; `gamma`: reads
        `Result.gamma`; `switching`: knows `Result.choices`.
        """
        if self._first is None:
            self._first = (now, blocked_ms)
        gained, used, stopped = self._text.push([token.id for token in update.tokens], update.done)
        tokens = update.tokens[:used]
        self._tokens += tokens
        # The rounds after a stop string ran before the host saw it: they are no part of this text.
        counts = recount(self._tokens) if stopped else _counts(update.stats)
        width = len(update.stats.acceptance_histogram)
        histogram = counts.pop("acceptance_histogram")
        statistics = Statistics(
            num_tokens=len(self._tokens),
            acceptance_histogram=(*histogram, *(0,) * (width - len(histogram))),
            **counts,
            elapsed_ms=1e3 * (now - self._began),
            decode_ms=1e3 * (now - self._first[0]),
            compile_ms=blocked_ms,
            decode_compile_ms=blocked_ms - self._first[1],
            static_plans=variants,
        )
        if not (stopped or update.done):
            return Piece(update.index, gained, tokens, statistics)
        reason: FinishReason = "stop" if stopped else "error" if update.broken else self._reason()
        text = self._text.text if self._text.has_text else None
        result = Result(text, self._tokens, reason, statistics, gamma(), self._lossy)
        if switching is not None:
            result = dataclasses.replace(result, expected=switching.expected, choices=switching.chosen)
        return Piece(update.index, gained, tokens, statistics, result)

    def _reason(self) -> FinishReason:
        """Returns the reason why the text ended, judged by its last token."""
        last = self._tokens[-1].id if self._tokens else None
        if last in self._request.stop_ids:
            return "stop"
        return "eos" if last in self._request.eos_ids else "length"


def _counts(stats: Stats) -> dict[str, Any]:
    """The loop's own counts, as `recount` gives them."""
    counts = {name: np.asarray(value).tolist() for name, value in dataclasses.asdict(stats).items()}
    return counts | {"acceptance_histogram": tuple(counts["acceptance_histogram"])}


def recount(tokens: Sequence[Token]) -> dict[str, Any]:
    """The counts of a text that was cut, from its tokens; drafts after the cut are left out.

    Returns:
      The counts of `Statistics` by name; the histogram may be shorter than K + 1.
    """
    rounds = played_rounds(tokens)
    drafting = [(verified, accepted) for verified, accepted in rounds if verified]
    longest = max((accepted for _, accepted in drafting), default=-1)
    return {
        "num_rounds": len(rounds),
        "num_drafts": len(drafting),
        "num_draft_tokens": sum(verified for verified, _ in drafting),
        "num_accepted_tokens": sum(accepted for _, accepted in drafting),
        "acceptance_histogram": tuple(
            sum(accepted == size for _, accepted in drafting) for size in range(longest + 1)
        ),
    }
