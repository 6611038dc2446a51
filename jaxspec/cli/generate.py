"""`jaxspec generate`: a text after a prompt, as it comes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.cli.methods import method_field
from jaxspec.cli.options import TextOptions
from jaxspec.console import interrupts
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import ACCEPTED, DIM, painted, printable, shows_colour
from jaxspec.host.progress import Progress, hidden

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.requests.results import Piece, Result, Statistics
    from jaxspec.requests.text import RowText, Token


@dataclasses.dataclass(frozen=True)
class Generate(TextOptions):
    """Generate a text after a prompt.

    The text goes to standard output as it comes, its speed to standard error. In a terminal, accepted draft tokens
    have another colour.

    Attributes:
      method: how to decode. The text, or its distribution, is that of plain decoding.
      stream: print the text as it comes, or only once it is whole.
      n: number of texts, printed once all are whole.
      logprobs: also print the log-probability of each token.
      top_logprobs: also print the N likeliest tokens, N ≤ 20.
    """

    method: str = method_field()
    stream: bool = True
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    drafting: Any = None

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are printed."""
        return self.logprobs or self.top_logprobs > 0

    def generation(self) -> dict[str, Any]:
        """Returns the options of `TextOptions`, and those of log-probabilities."""
        return super().generation() | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}

    def run(self) -> int:
        """Generates; returns the exit status."""
        prompt = self.read_prompt()
        with Progress() as progress:
            progress("loading the model")
            lm = self.load()
            pieces = lm.stream(prompt, method=self.drafting, n=self.n, **self.generation())
            progress("starting")
            texts = [pieces] if self.n == 1 else _collected(pieces, self.n, progress)
            outputs = [_Output(self, prompt, lm, progress) for _ in texts]
            return max([output.write(text) for output, text in zip(outputs, texts, strict=True)])


class _Output:
    """Writes a text that comes in pieces, and what is to be said about it.

    Args:
      options: the command.
      prompt: a text or messages, of which the last is shown above the text in a terminal.
      lm: the model.
      progress: ended before the first output.

    Attributes:
      statistics: counts and times so far; None before the first piece.
    """

    def __init__(
        self, options: Generate, prompt: str | list[dict[str, str]], lm: LanguageModel, progress: Progress
    ) -> None:
        self._options, self._lm, self._progress = options, lm, progress
        self._prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        self._streams = options.stream and options.n == 1 and not options.json
        self._break = "\n" if options.chat or not isinstance(prompt, str) else ""
        self._coloured = shows_colour(sys.stdout)
        self._row_text: RowText | None = None
        self._written: list[str] = []
        self._quiet = contextlib.ExitStack()  # hides the progress while a text is written to the terminal
        self._text = ""
        self._tokens: list[Token] = []
        self.statistics: Statistics | None = None
        self._error: str | None = None
        self._lossy = False
        self._result: Result | None = None

    def write(self, pieces: Iterator[Piece]) -> int:
        """Takes all the pieces, or those that come before an interruption; returns the exit status."""
        reason = "interrupted"
        with self._quiet:
            try:
                for piece in pieces:
                    reason = self._take(piece) or reason
            except KeyboardInterrupt:
                reason = "interrupted"
        self._progress.stop()
        if self._options.json:
            print(json.dumps(self._report(reason)))
        elif self._streams and self._written:
            print(flush=True)
        else:
            print("".join(self._written), flush=True)
        if reason == "interrupted":
            interrupts.is_first_line()  # no line about a busy program may follow
            print("jaxspec: interrupted", file=sys.stderr)
            return INTERRUPTED
        if self._error is not None:
            print(f"jaxspec: error: {self._error}", file=sys.stderr)
            return 1
        if not self._options.json:
            assert self._result is not None  # a text that has ended
            print(summary(self.statistics, self._result), file=sys.stderr)
            for line in self._log_probs():
                print(line, file=sys.stderr)
            if self._result.expected:
                print(explained(self._result), file=sys.stderr)
                if self._lm.step_costs is None:
                    print(
                        "costs are estimated from sizes; `jaxspec profile` measures them",
                        file=sys.stderr,
                    )
        return 0

    def _take(self, piece: Piece) -> str | None:
        self._text += piece.text
        self._tokens += piece.token_records
        self.statistics = piece.statistics
        shown = printable(piece.text, sys.stdout)
        if self._coloured and piece.new_text is not None:
            self._row_text = self._row_text or piece.new_text()
            shown = coloured(self._row_text, piece)
            if not self._written:
                shown = painted(printable(self._prompt, sys.stdout), DIM) + self._break + shown
        self._written.append(shown)
        if self._streams:
            self._progress.stop()
            if not self._written[1:] and sys.stdout.isatty():
                self._quiet.enter_context(hidden())
            print(shown, end="", flush=True)
        else:
            self._progress(f"generating: {len(self._tokens)} tokens")
        if piece.result is None:
            return None
        self._result = piece.result
        self._error, self._lossy = piece.result.error, piece.result.lossy
        return piece.result.finish_reason

    def _report(self, reason: str) -> dict[str, Any]:
        return {
            "model": self._lm.name,
            "method": self._options.method,
            "text": self._text,
            "tokens": [token.id for token in self._tokens],
            "finish_reason": reason,
            "drafted_by": None if self._result is None else self._result.drafted_by,
            "lossy": self._lossy,
            "statistics": _as_json(self.statistics),
            **({"logprobs": [token.log_prob for token in self._tokens]} if self._options.reports else {}),
            **(
                {"top_logprobs": list(map(self._likeliest, self._tokens))}
                if self._options.top_logprobs
                else {}
            ),
        } | self._explanation()

    def _likeliest(self, token: Token) -> list[dict[str, Any]]:
        from jaxspec.requests.text import likeliest  # imports tokenizers, which takes a while

        return likeliest(token, self._lm.tokenizer)

    def _log_probs(self) -> Iterator[str]:
        """Yields a line with log-probability and text for each token, and the likeliest, if they were requested."""
        for token in self._tokens if self._options.reports else ():
            text = token.id if self._lm.tokenizer is None else self._lm.tokenizer.decode([token.id])
            top = (f"{one['text'] or one['id']!r} {one['logprob']:.4f}" for one in self._likeliest(token))
            yield "  ".join((f"{token.log_prob:9.4f}  {text!r}", *top))

    def _explanation(self) -> dict[str, Any]:
        """What was expected and chosen, where that was asked for."""
        if self._result is None or not self._result.expected:
            return {}
        return {"expected": [one._asdict() for one in self._result.expected], "prices": self._result.prices}


def _collected(pieces: Iterator[Piece], number: int, progress: Progress) -> list[Iterator[Piece]]:
    """Returns the pieces of each of several texts, up to an interruption."""
    rows: list[list[Piece]] = [[] for _ in range(number)]
    with contextlib.suppress(KeyboardInterrupt):
        for piece in pieces:
            rows[piece.index].append(piece)
            progress(
                f"generating: {sum(row[-1].result is not None for row in rows if row)} of {number} texts"
            )
    return [iter(row) for row in rows]


def coloured(row_text: RowText, piece: Piece) -> str:
    """Returns the text of a piece, with another colour for the text that accepted draft tokens complete.

    `row_text` repeats the conversion of the piece's text, one token at a time.
    """
    spans = row_text.spans(piece.token_records, piece.result is not None)
    shown = ((printable(text, sys.stdout), drafted) for text, drafted in spans)
    return "".join(painted(text, ACCEPTED) if drafted else text for text, drafted in shown)


def _as_json(statistics: Statistics | None) -> dict[str, Any] | None:
    """The counts and what follows from them; None if there was no time for a single token."""
    if statistics is None:
        return None
    return dataclasses.asdict(statistics) | {
        "mean_acceptance_length": statistics.mean_acceptance_length,
        "draft_acceptance_rate": statistics.draft_acceptance_rate,
        "tokens_per_second": statistics.tokens_per_second,
    }


def explained(result: Result) -> str:
    """The table of `--explain`: what was expected of each candidate before the text."""
    width = max([12, *(len(one.name) for one in result.expected)])
    lines = ["expected before the text:", f"{'candidate':<{width}}  drafts  acceptance  speed-up"]
    for one in result.expected:
        lines.append(f"{one.name:<{width}}  {one.length:>6}  {one.acceptance:>10.2f}  {one.speedup:>8.2f}")
    return "\n".join(lines)


def summary(statistics: Statistics | None, result: Result) -> str:
    """Returns the tokens, the speed and the acceptance of a text in a line."""
    assert statistics is not None  # a text that has ended has at least one token
    speed, length, rate = (
        "–" if number is None else f"{number:.{digits}f}"
        for number, digits in (
            (statistics.tokens_per_second, 1),
            (statistics.mean_acceptance_length, 2),
            (statistics.draft_acceptance_rate, 2),
        )
    )
    line = (
        f"{statistics.num_tokens} tokens · {speed} tokens/s · mean acceptance length {length} · "
        f"acceptance rate {rate} · {result.drafted_by}"
    )
    if result.lossy:
        line += " · lossy: not the model's own distribution"
    return painted(line, DIM) if shows_colour(sys.stderr) else line
