"""`jaxspec generate`: a text after a prompt, as it comes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import TextOptions
from jaxspec.cli.slower import slower, warn_slower_by
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import ACCEPTED, DIM, Progress, painted, printable, shows_colour
from jaxspec.methods import registry
from jaxspec.methods.flat import usable_methods

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.engine.results import Piece, Result, Statistics
    from jaxspec.engine.text import RowText


def _method_field() -> str:
    """The option --method, whose help names every method, those of other packages too."""
    methods, problems = usable_methods()
    for problem in problems:
        print(f"jaxspec: warning: {problem}", file=sys.stderr)
    details = " ".join(f"{name}: {method.summary()}." for name, method in methods.items())
    metadata = {"metavar": "{" + ",".join(methods) + "}", "details": details}
    return dataclasses.field(default="autoregressive", metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Generate(TextOptions):
    """Generate a text after a prompt.

    The text goes to standard output as it comes, its speed to standard error.

    In a terminal, draft tokens that were accepted have another colour.

    Attributes:
      method: how to decode. All give the text of plain decoding (autoregressive), or its distribution where tokens are
        drawn.
      stream: print the text as it comes, or only once it is whole.
    """

    method: str = _method_field()
    stream: bool = True

    def run(self) -> int:
        """Generates; returns the exit status."""
        registry.find(self.method)
        prompt = self.read_prompt()
        with Progress() as progress:
            progress("loading the model")
            lm = self.load()
            pieces = lm.stream(prompt, method=self.method, **self.generation(), **self.method_options())
            method = registry.make(self.method, self.method_options())
            if warning := slower(lm, method):
                print(f"jaxspec: warning: {warning}", file=sys.stderr)
            progress("compiling")
            output = _Output(self, prompt, lm, progress)
            status = output.write(pieces)
            if output.statistics is not None and warning is None:
                warn_slower_by(lm, method, output.statistics)
            return status


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
        self._streams = options.stream and not options.json
        self._painter = _Painter(_row_text(lm, prompt, options)) if shows_colour(sys.stdout) else None
        self._written: list[str] = []
        self._text = ""
        self._tokens: list[int] = []
        self.statistics: Statistics | None = None
        self._error: str | None = None
        self._lossy = False
        self._result: Result | None = None

    def write(self, pieces: Iterator[Piece]) -> int:
        """Takes all the pieces, or those that come before an interruption; returns the exit status."""
        reason = "interrupted"
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
            print("jaxspec: interrupted", file=sys.stderr)
            return INTERRUPTED
        if self._error is not None:
            print(f"jaxspec: error: {self._error}", file=sys.stderr)
            return 1
        if not self._options.json:
            print(_summary(self.statistics, self._lossy), file=sys.stderr)
            if self._result is not None and self._result.choices:
                print(explained(self._result), file=sys.stderr)
        return 0

    def _take(self, piece: Piece) -> str | None:
        self._text += piece.text
        self._tokens += piece.tokens
        self.statistics = piece.statistics
        shown = printable(piece.text, sys.stdout)
        if self._painter is not None:
            shown = self._painter.paint(piece)
            if not self._written:
                shown = painted(printable(self._prompt, sys.stdout), DIM) + shown
        self._written.append(shown)
        if self._streams:
            self._progress.stop()
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
            "tokens": self._tokens,
            "finish_reason": reason,
            "lossy": self._lossy,
            "statistics": _as_json(self.statistics),
        } | self._explanation()

    def _explanation(self) -> dict[str, Any]:
        """What was expected and chosen, where that was asked for."""
        if self._result is None or not self._result.choices:
            return {}
        return {
            name: [one._asdict() for one in getattr(self._result, name)] for name in ("expected", "choices")
        }


class _Painter:
    """Gives the text of accepted draft tokens another colour.

    Args:
      row: turns the same tokens into the same text as the pieces have, here one token at a time.
    """

    def __init__(self, row: RowText) -> None:
        self._row = row

    def paint(self, piece: Piece) -> str:
        """The text of a piece. What a token completes has the colour of that token."""
        ended = piece.result is not None
        spans = []
        for at, token in enumerate(piece.token_records, 1):
            gained, _, _ = self._row.push([token.id], ended and at == len(piece.token_records))
            gained = printable(gained, sys.stdout)
            spans.append(painted(gained, ACCEPTED) if token.drafted else gained)
        if ended and not piece.token_records:
            spans.append(printable(self._row.push([], True)[0], sys.stdout))
        return "".join(spans)


def _row_text(lm: LanguageModel, prompt: str | list[dict[str, str]], options: Generate) -> RowText:
    from jaxspec.engine.text import RowText

    if lm.tokenizer is None:
        return RowText(None, options.stops)
    ids = lm.encode(prompt, chat=options.chat, chat_template_kwargs=options.template_variables)
    return RowText(lm.tokenizer.stream(ids), options.stops, options.stop_token_ids)


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
    """The tables of `--explain`: what was expected of each candidate before the text, and what was chosen when.

    Examples:
      >>> from jaxspec.engine.results import Chosen, Expected, Result, Statistics
      >>> statistics = Statistics(2, 1, 1, 1, 0, (1,), elapsed_ms=30.0, decode_ms=20.0, compile_ms=0.0)
      >>> expected = (Expected("ngram", 4, 0.5, 11.0, 1.2, True), Expected("off", 0, None, 9.0, 1.0, True))
      >>> chosen = (Chosen(0, "off", 0, 8, 8, 72.0, 80.0), Chosen(8, "ngram", 4, 8, 16, 90.0, 80.0))
      >>> print(explained(Result("Hi", [], "length", statistics, expected=expected, choices=chosen)))
      candidate     drafts  acceptance  ms/round  speed-up  programs
      ngram              4        0.50     11.00      1.20  ready
      off                0           –      9.00      1.00  ready
      of those that are ready ngram was expected to be the fastest: 1.20 times plain decoding's speed
      <BLANKLINE>
      round     chosen        drafts  rounds  tokens  ms expected  ms taken
      0         off                0       8       8         72.0      80.0
      8         ngram              4       8      16         90.0      80.0
    """
    lines = []
    if result.expected:  # of choices that a file says, nothing
        lines.append(f"{'candidate':<12}  drafts  acceptance  ms/round  speed-up  programs")
    for one in result.expected:
        ready = "ready" if one.ready else "not compiled"
        lines.append(
            f"{one.name:<12}  {one.length:>6}  {_number(one.acceptance, 2):>10}  {_number(one.round_ms, 2):>8}  "
            f"{one.speedup:>8.2f}  {ready}"
        )
    if any(one.round_ms is None for one in result.expected):
        lines.append("no time was measured yet: costs are guessed; jaxspec profile --costs measures them")
    for best in [one for one in result.expected if one.ready][:1]:
        gain = f"{best.speedup:.2f} times plain decoding's speed"
        if best.name == "off":
            gain = "nothing else pays" if best == result.expected[0] else "what pays more is not compiled"
        lines += [f"of those that are ready {best.name} was expected to be the fastest: {gain}", ""]
    lines += [f"{'round':<8}  {'chosen':<12}  drafts  rounds  tokens  ms expected  ms taken"]
    for turn in result.choices:
        lines.append(
            f"{turn.round:<8}  {turn.name:<12}  {turn.length:>6}  {turn.num_rounds:>6}  {turn.num_tokens:>6}  "
            f"{_number(turn.expected_ms, 1):>11}  {turn.took_ms:>8.1f}"
        )
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _summary(statistics: Statistics | None, lossy: bool) -> str:
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
        f"acceptance rate {rate}"
    )
    if lossy:
        line += " · lossy: not the model's own distribution"
    return painted(line, DIM) if shows_colour(sys.stderr) else line
