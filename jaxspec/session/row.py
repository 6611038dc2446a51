"""Runs a session and builds the pieces and results of its texts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.decoding import Stats
from jaxspec.host import processes
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.programs.executables import VariantCounts
from jaxspec.session.session import Session, Update
from jaxspec.session.strategies import Strategy
from jaxspec.texts.grammars import is_complete
from jaxspec.texts.requests import RowRequest, Stops
from jaxspec.texts.results import FinishReason, Piece, Result, Statistics, played_rounds
from jaxspec.texts.text import RowText, Token, row_text


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


class Texts:
    """The texts of a session.

    Args:
      session: the session; its requests begin here with `begin`.
      tokenizer: None for texts without characters.
      lossy: whether texts that are drawn at random are, see `Result`.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer | None, lossy: bool) -> None:
        self.session, self._tokenizer, self._lossy = session, tokenizer, lossy
        self._rows: dict[int, Row] = {}

    def now(self) -> Moment:
        """Returns the present, the same in all processes of the session's mesh."""
        loop = self.session.loop
        seconds, blocked_ms = processes.agreed(loop.mesh, time.perf_counter(), loop.executables.blocked_ms)
        return Moment(seconds, blocked_ms, loop.executables.variants)

    def begin(self, index: int, request: RowRequest, stops: Stops, began: Moment) -> None:
        """Begins the text of the session's request `index`."""
        # A tokenizer may not know that an end token of the model's configuration is special.
        new_text = functools.partial(
            row_text, self._tokenizer, request.prompt, stops.strings, request.eos_ids
        )
        self._rows[index] = Row(request, new_text, began, lossy=self._lossy and request.temperature > 0)

    def cancel(self, index: int) -> None:
        """Ends a text before the next step, without a piece."""
        del self._rows[index]
        self.session.halt(index)
        self._end()

    def step(self, rounds: int) -> list[Piece]:
        """Runs one host poll of at most `rounds` rounds, and returns the new pieces. Ended texts are forgotten."""
        updates = self.session.step(rounds)
        now, pieces = self.now(), []
        for update in updates:
            gamma = functools.partial(self.session.gamma, update.row)
            piece = self._rows[update.index].take(update, now, gamma, self.session.strategy)
            pieces.append(piece)
            if piece.result is not None:
                del self._rows[update.index]
                if not update.done:
                    self.session.halt(update.index)
        self._end()
        return pieces

    def _end(self) -> None:
        if self.session.done:
            self.session.end()


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

    def take(
        self,
        update: Update,
        now: Moment,
        gamma: Callable[[], float | None],
        strategy: Strategy,
    ) -> Piece:
        """Converts one update to one piece; the last piece contains the result.

        `now`: the time; `gamma`: returns `Result.gamma`; `strategy`: the source of `Result.expected`,
        `Result.prices` and `Result.drafted_by`.
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
        if not (stopped or update.done):
            return Piece(update.index, gained, tokens, statistics, None, self._tokens, self._new_text)
        reason: FinishReason = "stop" if stopped else "error" if update.broken else self._reason()
        text = self._text.text if self._text.has_text else None
        result = Result(
            text,
            self._tokens,
            reason,
            statistics,
            gamma(),
            self._lossy,
            strategy.expected,
            strategy.prices,
            self._drafted_by(strategy, update.row, statistics),
            self._new_text,
        )
        return Piece(update.index, gained, tokens, statistics, result, self._tokens, self._new_text)

    def _drafted_by(self, strategy: Strategy, row: int, counts: Statistics) -> str:
        """Returns `Result.drafted_by`, which tells of a method that did not draft, such as one whose logits are NaN."""
        name = strategy.drafted_by(row)
        plain = counts.num_drafts or counts.num_rounds < 2 or not strategy.drafter.num_draft_tokens
        return name if plain or ": " in name else f"{name}: no draft in {counts.num_rounds} rounds"

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
