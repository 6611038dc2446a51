"""`jaxspec chat`: a conversation in the terminal, or with the lines of a pipe as messages."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxspec.cli.generate import coloured, summary
from jaxspec.cli.methods import method_field, names, parse_method
from jaxspec.cli.options import AnswerOptions, PenaltyOptions, SamplingOptions, read_messages
from jaxspec.console.errors import in_options, one_line
from jaxspec.console.interrupts import Interruptible
from jaxspec.console.parsing import parse_as
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import printable, shows_colour, tell
from jaxspec.host.messages import nearest
from jaxspec.host.progress import Progress, hidden

if TYPE_CHECKING:
    from jaxspec.engine.conversation import Conversation
    from jaxspec.engine.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Chat(AnswerOptions):
    """Chat with a model.

    Each line is a message; one of several lines is between triple quotation marks. In a terminal, /help lists commands,
    and Ctrl-C stops an answer. From a pipe, each line is a message or a command too, and only the answers are printed.
    A turn feeds only the tokens that are new.

    Attributes:
      method: how to decode. The text, or its distribution, is that of plain decoding.
      max_new_tokens: the token budget of an answer. Default 512, or what the context leaves.
    """

    method: str = method_field()
    max_new_tokens: int | None = None
    drafting: Any = None

    def run(self) -> int:
        """Chats; returns the exit status."""
        method = self.drafting
        self.check_texts()
        with Progress() as progress:
            progress("loading the model")
            lm = self.load()
            conversation = lm.chat(self.system, method=method, **self.generation())
            progress("starting")
            conversation.warm_up()
        return _Chat(self, lm, conversation).run()


@dataclasses.dataclass(frozen=True)
class _Settings(SamplingOptions, PenaltyOptions):
    """The options that /set changes; None for one that it leaves.

    Attributes:
      max_new_tokens, min_new_tokens: as in `AnswerOptions`.
    """

    seed: int | None = None  # type: ignore[assignment]
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None


class _Chat:
    """Reads lines, and answers them.

    Args:
      options: the command.
      lm: the model.
      conversation: the conversation, without messages of the user.
    """

    def __init__(self, options: Chat, lm: LanguageModel, conversation: Conversation) -> None:
        self._options, self._lm, self._conversation = options, lm, conversation
        self._in_terminal = _is_terminal(sys.stdin)
        self._settings = options.generation()
        self._file: Path | None = None  # that was saved or loaded

    def run(self) -> int:
        """Answers lines until the input ends; returns the exit status."""
        if not self._in_terminal:
            lines = _piped_lines()
            for line in lines:
                if line == "/exit":
                    break
                self._take(*_whole(line, lambda: next(lines, None)))
            return 0
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits lines and has a history
        tell(f"{self._lm.name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
        hinted = False
        while True:
            try:
                with Interruptible("jaxspec"):
                    line, is_command = _whole(_input("> "), lambda: _input("… "))
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                if hinted:
                    return INTERRUPTED
                tell("/exit or Ctrl-D ends the chat, and so does a second Ctrl-C")
                hinted = True
                continue
            if is_command and line == "/exit":
                return 0
            hinted = False
            try:
                with Interruptible("jaxspec"):
                    self._take(line, is_command)
            except KeyboardInterrupt:
                print(flush=True)
            except (ValueError, OSError) as error:
                tell(f"error: {in_options(one_line(error), names())}")

    def _take(self, line: str, is_command: bool) -> None:
        """Runs a command, or answers a message.

        Raises:
          ValueError, OSError: the command or the message is wrong; one line.
        """
        if not is_command:
            if line:
                self._answer(line)
            return
        name, _, rest = line.partition(" ")
        if said := self._command(name, rest.strip()):
            print(said, file=sys.stderr)

    def _command(self, name: str, rest: str) -> str | None:
        match name:
            case "/stats":
                return self._statistics()
            case "/method":
                return self._use(rest)
            case "/set":
                return self._set(rest)
            case "/retry":
                self._retry()
                return None
            case "/save":
                return self._save(rest)
            case "/load":
                messages = read_messages(rest)
                self._conversation.clear()
                self._conversation.messages, self._file = list(messages), Path(rest)
                return f"{len(messages)} messages"
            case "/system":
                self._conversation.system = rest or None
                return "the system prompt is changed" if rest else "there is no system prompt now"
            case "/clear":
                self._conversation.clear()
                return "the conversation begins anew"
            case "/help":
                return _HELP
        near = nearest(name, [line.split()[0] for line in _HELP.splitlines()])
        meant = f"perhaps you meant {near}; " if near else ""
        raise ValueError(f"unknown command {name!r}; {meant}/help lists the commands")

    def _answer(self, text: str) -> None:
        from jaxspec.requests.text import row_text

        pieces = self._conversation.stream(text)
        stops = self._options.stops, self._options.stop_token_ids
        own_text = row_text(self._lm.tokenizer, self._conversation.prompt, *stops)
        colours, result = shows_colour(sys.stdout), None
        with contextlib.ExitStack() as quiet:
            for number, piece in enumerate(pieces):
                if number == 0:
                    quiet.enter_context(hidden())  # progress must not be written into the answer
                print(
                    coloured(own_text, piece) if colours else printable(piece.text, sys.stdout),
                    end="",
                    flush=True,
                )
                result = piece.result
        print(flush=True)
        if result is not None and result.error is not None:
            tell(f"warning: {result.error}")
        if result is not None and self._in_terminal:
            print(summary(result.statistics, result), file=sys.stderr)
            if result.finish_reason == "length":
                tell("the answer has reached the token budget; /set max-new-tokens N gives more")

    def _statistics(self) -> str:
        turns = self._conversation.statistics
        if not turns:
            return "no turn yet"
        lines = []
        for title, of in (("last turn", turns[-1:]), (f"all {len(turns)} turns", turns)):
            tokens, drafts, accepted, prompt, reused = (
                sum(getattr(one, f"num_{name}tokens") for one in of)
                for name in ("", "draft_", "accepted_", "prompt_", "reused_")
            )
            seconds = sum(one.decode_ms - one.decode_compile_ms for one in of) / 1e3
            speed = f"{(tokens - len(of)) / seconds:.1f}" if seconds > 0 else "–"
            rate = f"{accepted / drafts:.2f}" if drafts else "–"
            lines.append(
                f"{title}: {tokens} tokens · {speed} tokens/s · acceptance rate {rate} · "
                f"{reused} of {prompt} prompt tokens reused"
            )
        return "\n".join(lines)

    def _set(self, words: str) -> str:
        if not words:
            shown = (f"{field.name} {self._settings[field.name]}" for field in dataclasses.fields(_Settings))
            return ", ".join(shown) + "; None is the model's own"
        name, *value = words.split()
        try:
            given = dataclasses.asdict(parse_as(_Settings, [f"--{name.lstrip('-')}", *value], "/set"))
        except ValueError as error:
            raise ValueError(str(error).removesuffix("; see /set --help")) from None
        changed = {name: number for name, number in given.items() if number is not None}
        self._conversation.set(**changed)
        self._settings |= changed
        return ", ".join(f"{name} is {number}" for name, number in changed.items())

    def _retry(self) -> None:
        """Answers the last message again, with another seed."""
        messages = self._conversation.messages
        at = next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "user"), None)
        if at is None:
            raise ValueError("no message to answer again")
        before = messages[at + 1 :]
        self._conversation.messages = messages[:at]
        try:
            self._set(f"seed {self._settings['seed'] + 1}")
            self._answer(messages[at]["content"])
        finally:
            if len(self._conversation.messages) == at:  # no answer has begun
                self._conversation.messages = messages
        if self._in_terminal and before == self._conversation.messages[at + 1 :]:
            tell("the same answer again; /set temperature 0.8 draws others")

    def _save(self, name: str) -> str:
        path = Path(name) if name else self._file
        if path is None or (path.exists() and path != self._file):
            raise ValueError(f"{path} exists; give another file" if path else "no file; give /save FILE")
        path.write_text(json.dumps(self._conversation.messages, indent=1, ensure_ascii=False), "utf-8")
        self._file = path
        return f"saved in {path}; jaxspec generate --messages {path} continues it too"

    def _use(self, words: str) -> str | None:
        if not words:
            raise ValueError(
                "no method; give a name and its options, such as /method layerskip --exit-layer 3"
            )
        try:
            method = parse_method(words)
        except SystemExit:  # --help was printed
            return None
        self._conversation.use(method)
        return f"method: {method}"


_HELP = """/set NAME VALUE              an option of the next answers: temperature, top-p, max-new-tokens, seed, …
/retry                       the last message answered again, with another seed
/save [FILE]                 the messages as JSON
/load FILE                   messages from such a file
/stats                       tokens, speed, acceptance rate, and prompt tokens that were not fed again
/method NAME [--OPTION ...]  another method from the next turn on
/system TEXT                 another system prompt; without TEXT none
/clear                       a new conversation with the same system prompt
/help                        this list
/exit                        ends the chat"""


_QUOTES = '"""'


def _whole(line: str, more: Callable[[], str | None]) -> tuple[str, bool]:
    """Returns a message or a command, and whether it is a command.

    Args:
      line: its first line. If it begins with triple quotation marks, the message ends with others.
      more: returns the next line; None at the end of the input.

    Raises:
      ValueError: the message has no end.
    """
    text = line.strip()
    if not text.startswith(_QUOTES):
        return text, text.startswith("/")
    text = text[len(_QUOTES) :]
    while not text.endswith(_QUOTES):
        if (following := more()) is None:
            raise ValueError(f"a message begins with {_QUOTES} and does not end with it")
        text += f"\n{following.rstrip()}"
    return text.removesuffix(_QUOTES).strip("\n"), False


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _input(prompt: str) -> str:
    """Returns a line of the terminal; the prompt is not written to a standard output that is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def _piped_lines() -> Iterator[str]:
    """Yields the lines of standard input as they come, without the spaces after them.

    Raises:
      ValueError: one is not valid UTF-8.
    """
    lines: Iterable[str] = (
        io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8") if sys.stdin is not None else ()
    )
    try:
        for line in lines:
            yield line.rstrip()
    except UnicodeDecodeError:
        raise ValueError("standard input is not text in UTF-8") from None
