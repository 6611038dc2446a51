"""A conversation of several turns, in which the caches of one turn serve the next."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.engine import prepare
from jaxspec.engine.prepare import STREAM_ROUNDS, AnyMethod
from jaxspec.host.arguments import whole
from jaxspec.programs.jax_settings import needed
from jaxspec.requests.generation_options import GenerationOptions, split
from jaxspec.requests.reading import Message, batch_of, template_variables
from jaxspec.requests.results import Piece, Result, Statistics
from jaxspec.session.prefix import Prefix
from jaxspec.session.session import Session

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

# The token budget of an answer if `max_new_tokens` is not given.
DEFAULT_ANSWER = 512


class Conversation:
    """A conversation with a model; `LanguageModel.chat` begins one.

    Each turn renders all messages with the chat template. The caches of the target and of the drafter are kept between
    turns. Only the tokens after the longest common beginning with the text that they hold are fed, so that the result
    equals that of `generate` for the same messages. If the template changes earlier messages, such as one that drops
    their reasoning, or if the caller changes them, more tokens are fed.

    Args:
      lm: the model.
      method: the method, as `generate` takes it, made with its options.
      options: the options of all turns. `max_new_tokens` is by default 512, and at most what the context leaves.
      system: a system prompt; None for none.

    Attributes:
      messages: the conversation so far, which may be changed between two turns. While an answer is generated, and after
        it was stopped, its last message is the part of the answer that was returned.
      prompt: the token ids of the last turn's prompt.
      statistics: the statistics of each turn.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> lm = language_model(chat_template="{% for one in messages %}{{ one.content }}e {% endfor %}")
      >>> conversation = lm.chat(max_new_tokens=4)
      >>> first, second = conversation.send("ab").statistics, conversation.send("cd").statistics
      >>> first.num_reused_tokens, second.num_reused_tokens > 0
      (0, True)
    """

    def __init__(
        self,
        lm: LanguageModel,
        method: AnyMethod,
        options: GenerationOptions,
        system: str | None = None,
    ) -> None:
        template_variables(options.chat_template_kwargs)  # raises
        self._lm, self._options = lm, options
        self.use(method)
        self._session: Session | None = None
        self._pieces = self._answer([], iter(()))
        # The method of the session, which has the drafter's caches, and the identity of its files.
        self._ran: AnyMethod | None = None
        self._files: tuple[Any, ...] = ()
        self.messages: list[Message] = []
        self.prompt: list[int] = []
        self.statistics: list[Statistics] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system prompt; it may be changed between two turns."""
        first = self.messages[0] if self.messages else {}
        content: str | None = first["content"] if first.get("role") == "system" else None
        return content

    @system.setter
    def system(self, text: str | None) -> None:
        others = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([] if text is None else [{"role": "system", "content": text}]), *others]

    def use(self, method: AnyMethod, **options: Any) -> None:
        """Changes the method of the next turns.

        The target's cache is kept. A head that reads hidden states of the target gets the whole conversation fed once.

        Args:
          method: as in `generate`.
          **options: the options of a method that is given by name.

        Raises:
          ValueError, FileNotFoundError: as `generate`; the method is not changed then.
        """
        with needed():
            made = prepare.choose_method(method, options)
            self._start([0], made)  # raises
        self._method = made

    def set(self, **options: Any) -> None:
        """Changes options of the next turns, such as temperature=0.7; they are those of `GenerationOptions`.

        Raises:
          ValueError: as `generate`; nothing is changed then.
        """
        before = self._options
        try:
            self._options, others = split(before, options)
            if others:
                raise ValueError(f"unknown option {next(iter(others))} of a turn")
            with needed():
                self._start([0], self._method)
        except ValueError:
            self._options = before
            raise

    def warm_up(self) -> None:
        """Compiles what turns need while the conversation fits into the first capacity of the caches.

        Programs for longer ones are compiled in the background, once the caches are half full.
        """
        with needed():
            session, _ = self._start([0], self._method)
            session.warm_up(2, continued=True)

    def clear(self) -> None:
        """Removes all messages except the system prompt, and stops an answer that is being generated."""
        self._pieces.close()
        system, self.messages, self.statistics = self.system, [], []
        self.system = system

    def send(self, text: str) -> Result:
        """Returns the answer to a message of the user; a `RuntimeWarning` reports an error as in `generate`.

        Raises:
          ValueError: as `stream`.
        """
        *_, last = self.stream(text)
        assert last.result is not None
        if last.result.error is not None:
            warnings.warn(last.result.error, RuntimeWarning, stacklevel=2)
        return last.result

    def stream(self, text: str) -> Iterator[Piece]:
        """Yields the answer to a message of the user in pieces; the last one has the result.

        The message is checked before this returns. It belongs to the conversation from the first piece on, and the
        answer so far with it: a caller may stop after any piece.

        Raises:
          ValueError: the template refuses the message, or the conversation has reached the end of the model's context.
        """
        (messages,), _ = batch_of(None, [*self.messages, {"role": "user", "content": text}])
        with needed():
            prompt = self._lm.encode(
                messages,
                chat_template_kwargs=self._options.chat_template_kwargs,
                most_tokens=self._lm.config.context_length,
            )
            self._pieces.close()
            prefix = None if self._session is None else self._session.prefix()
            files = prepare.files_read(self._lm, self._method)
            if prefix is not None and (self._ran is not self._method or self._files != files):
                prefix = prefix.without_drafter()
            self._session, pieces = self._start(prompt, self._method, prefix)
        self._ran, self._files, self.prompt = self._method, files, prompt
        self._pieces = self._answer(messages, pieces)
        return self._pieces

    def _start(
        self, prompt: list[int], method: AnyMethod, prefix: Prefix | None = None
    ) -> tuple[Session, Iterator[Piece]]:
        """Returns the session of a turn and its pieces; see `prepare.start_texts`."""
        context = self._lm.config.context_length
        if self._options.n != 1:
            raise ValueError(f"n is {self._options.n}; a turn of a conversation has 1 answer")
        if len(prompt) >= context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, the model's context is {context}; begin another one"
            )
        asked = self._options.max_new_tokens
        asked = DEFAULT_ANSWER if asked is None else whole("max_new_tokens", asked)
        budget, least = min(asked, context - len(prompt)), self._options.min_new_tokens
        if least is not None:
            number = whole("min_new_tokens", least)
            least = min(number, budget) if number <= asked else number  # the latter is refused
        options = dataclasses.replace(
            self._options,
            max_new_tokens=budget,
            min_new_tokens=least,
            chat=False,
            chat_template_kwargs=None,
        )
        return prepare.start_texts(self._lm, STREAM_ROUNDS, prompt, None, None, method, options, prefix)[:2]

    def _answer(self, messages: list[Message], pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
        text, turn = "", len(self.statistics)
        for piece in pieces:
            text += piece.text
            self.messages = [*messages, {"role": "assistant", "content": text}]
            self.statistics[turn:] = [piece.statistics]
            yield piece
