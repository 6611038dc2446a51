"""Builds the pieces and the result of one text from its row's updates."""

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
from jaxspec.engine.strategies import Strategy
from jaxspec.engine.text import RowText


class Row:
    """Builds one text from the updates of its row.

    Args:
      request: the row's request.
      new_text: returns a converter of the row's tokens to text, at the beginning of the text.
      began: the start of its batch, by `time.perf_counter`.
      lossy: see `Result`.
    """

    def __init__(
        self, request: RowRequest, new_text: Callable[[], RowText], began: float, lossy: bool = False
    ) -> None:
        self._request, self._new_text, self._began, self._lossy = request, new_text, began, lossy
        self._text = new_text()
        self._first: tuple[float, float] | None = None
        self._tokens: list[Token] = []

    def take(
        self,
        update: Update,
        now: float,
        blocked_ms: float,
        variants: VariantCounts,
        gamma: Callable[[], float | None],
        strategy: Strategy,
    ) -> Piece:
        """Converts one update to one piece; the last piece contains the result.

        `now`: the time, by the same clock as `began`; `blocked_ms`: the batch's waiting time for compilation since it
        began; `gamma`: returns `Result.gamma`; `strategy`: the source of `Result.expected` and `Result.choices`.
        """
        if self._first is None:
            self._first = (now, blocked_ms)
        gained, used, stopped = self._text.push([token.id for token in update.tokens], update.done)
        tokens = update.tokens[:used]
        self._tokens += tokens
        # Rounds that ran before the host found the stop string are not part of this text.
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
            num_prompt_tokens=len(self._request.prompt),
            num_reused_tokens=update.num_reused_tokens,
        )
        if not (stopped or update.done):
            return Piece(update.index, gained, tokens, statistics, None, self._tokens, self._new_text)
        reason: FinishReason = "stop" if stopped else "error" if update.broken else self._reason()
        text = self._text.text if self._text.has_text else None
        chosen = strategy.expected, strategy.chosen
        result = Result(
            text,
            self._tokens,
            reason,
            statistics,
            gamma(),
            self._lossy,
            *chosen,
            strategy.drafted_by,
            self._new_text,
        )
        return Piece(update.index, gained, tokens, statistics, result, self._tokens, self._new_text)

    def _reason(self) -> FinishReason:
        """Returns the reason why the text ended, by its last token."""
        last = self._tokens[-1].id if self._tokens else None
        if last in self._request.stop_ids:
            return "stop"
        return "eos" if last in self._request.eos_ids else "length"


def _counts(stats: Stats) -> dict[str, Any]:
    """Returns the loop's counts in the form of `recount`."""
    counts = {name: np.asarray(value).tolist() for name, value in dataclasses.asdict(stats).items()}
    return counts | {"acceptance_histogram": tuple(counts["acceptance_histogram"])}


def recount(tokens: Sequence[Token]) -> dict[str, Any]:
    """Counts the rounds and drafts of a text that was cut, without draft tokens after the cut.

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
