"""Builds the pieces and the result of one text from the tokens of its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.decoding import Stats
from jaxspec.programs.executables import VariantCounts
from jaxspec.requests.grammar_tables import is_complete
from jaxspec.requests.reading import RowRequest
from jaxspec.requests.results import FinishReason, Piece, Result, Statistics, played_rounds
from jaxspec.requests.text import RowText, Token


class Moment(NamedTuple):
    """A time, and the counts of the compiled programs until then.

    Attributes:
      seconds: by `time.perf_counter`.
      blocked_ms: see `Executables.blocked_ms`.
      variants: see `Executables.variants`.
    """

    seconds: float
    blocked_ms: float
    variants: VariantCounts


@dataclasses.dataclass(frozen=True)
class Update:
    """The progress of one row in one host poll.

    Attributes:
      index: the index of the request.
      row: the row of the batch that holds the request until the next step.
      tokens: the new tokens.
      done: whether the row has ended.
      broken: whether it has ended because its next logits are not finite.
      stats: counts since its prefill, of a single row.
      began: the time at which it got its row, by `time.perf_counter`.
      num_reused_tokens: prompt tokens that were not fed.
    """

    index: int
    row: int
    tokens: list[Token]
    done: bool
    broken: bool
    stats: Stats
    began: float
    num_reused_tokens: int = 0


class Row:
    """Builds one text from the updates of its row.

    Args:
      request: the row's request.
      new_text: returns a converter of the row's tokens to text, at the beginning of the text.
      began: the start of its batch, or its arrival.
      lossy: see `Result`.
    """

    def __init__(
        self, request: RowRequest, new_text: Callable[[], RowText], began: Moment, lossy: bool = False
    ) -> None:
        self._request, self._new_text, self._began, self._lossy = request, new_text, began, lossy
        self._text = new_text()
        self._first: Moment | None = None
        self._tokens: list[Token] = []

    def take(self, update: Update, now: Moment, drafting: Callable[[int], dict[str, Any]]) -> Piece:
        """Converts one update to one piece; the last piece contains the result.

        `now`: the time; `drafting`: returns `gamma`, `expected`, `prices` and `drafted_by` of the `Result` of a row.
        """
        began = self._began
        self._first = self._first or now
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
            elapsed_ms=1e3 * (now.seconds - began.seconds),
            decode_ms=1e3 * (now.seconds - self._first.seconds),
            compile_ms=now.blocked_ms - began.blocked_ms,
            decode_compile_ms=now.blocked_ms - self._first.blocked_ms,
            static_plans=now.variants - began.variants,
            num_prompt_tokens=len(self._request.prompt),
            num_reused_tokens=update.num_reused_tokens,
            queue_ms=max(1e3 * (update.began - began.seconds), 0.0),
        )
        result = None
        if stopped or update.done:
            reason: FinishReason = "stop" if stopped else "error" if update.broken else self._reason()
            about = drafting(update.row)
            # A method that did not draft, such as one whose logits are NaN, is reported.
            plain = statistics.num_drafts or statistics.num_rounds < 2 or width == 1
            if not plain and ": " not in about["drafted_by"]:
                about["drafted_by"] += f": no draft in {statistics.num_rounds} rounds"
            result = Result(
                self._text.text if self._text.has_text else None,
                self._tokens,
                reason,
                statistics,
                lossy=self._lossy,
                new_text=self._new_text,
                **about,
            )
        return Piece(update.index, gained, tokens, statistics, result, self._tokens, self._new_text)

    def _reason(self) -> FinishReason:
        """Returns the reason why the text ended, by its tokens."""
        last = self._tokens[-1].id if self._tokens else None
        if last in self._request.stop_ids:
            return "stop"
        if last in self._request.eos_ids or is_complete(self._request, [token.id for token in self._tokens]):
            return "eos"
        return "length"


def _counts(stats: Stats) -> dict[str, Any]:
    """Returns the loop's counts in the form of `recount`."""
    names = "num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_histogram"
    counts = {name: np.asarray(getattr(stats, name)).tolist() for name in names}
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
