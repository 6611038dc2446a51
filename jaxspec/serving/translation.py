"""From a request of the API to the arguments of the scheduler, for the server and for batch files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.grammar import Grammar, GrammarError, compile_grammar
from jaxspec.grammar.calls import Calls, Form
from jaxspec.host.messages import shown
from jaxspec.requests.generation_options import GRAMMARS
from jaxspec.requests.reading import batch_of
from jaxspec.requests.results import Piece, Result, Statistics
from jaxspec.requests.text import TokenText, TokenTexts
from jaxspec.serving.openai import FINISH_REASONS, ApiRequest, BadField, Part, scored, usage_of
from jaxspec.serving.tools import Reader, told


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a request.

    Attributes:
      ids: the token ids of each.
      texts: the text of each, for `echo`.
      form: the form of calls of tools; None without tools.
      grammar: the grammar of the texts; None for none.
      after: how the answer to a chat reasons, see `ChatTemplate.reasoning`; without a grammar it may always begin to.
    """

    ids: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    form: Form | None = None
    grammar: Grammar | None = None
    after: str | tuple[str, str] | None = None

    def reader(self, request: ApiRequest) -> Reader | None:
        """Returns a reader of one answer; None for a completion, which is its text."""
        if not request.is_chat:
            return None
        names = [tool["function"]["name"] for tool in request.tools]
        document = request.grammar is not None and not request.must_call
        return Reader(self.form, names, self.after, request.most_calls, document)


def encoded(lm: LanguageModel, request: ApiRequest) -> Prompts:
    """Returns the prompts of a request.

    Raises:
      ValueError: a text cannot be encoded, a message or token id is wrong, or there is no chat template.
    """
    context = lm.config.context_length
    if request.is_chat:
        (messages,), _ = batch_of(None, list(request.messages))
        variables, form = request.options.get("chat_template_kwargs"), None
        chat = None if lm.tokenizer is None else lm.tokenizer.chat
        if chat and (request.tools or any("tool_calls" in one for one in messages)):
            form, messages, more = told(messages, request.tools, chat, variables)
            variables = {**(variables or {}), **more}
        ids = lm.encode(messages, chat_template_kwargs=variables, most_tokens=context)
        grammar = request.grammar[0] if request.grammar else None
        if form and request.functions:
            calls = Calls(form, request.functions, request.most_calls is None)
            rest = Grammar("calls") if request.must_call else grammar or Grammar("text")
            grammar = dataclasses.replace(rest, calls=calls)
        assert chat is not None  # or `encode` has raised an error
        after = chat.reasoning(messages, variables)
        if grammar is not None:
            return Prompts([ids], [""], form, dataclasses.replace(grammar, after=after), after)
        return Prompts([ids], [""], form, None, after or chat.thought)
    found, texts = [], []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            found.append(lm.encode(prompt, most_tokens=context))
            texts.append(prompt)
        else:
            found.append(checked_ids(lm, "prompt", prompt))
            if request.echo:
                _check_length(lm, request, prompt)
            texts.append(lm.tokenizer.decode(prompt) if request.echo and lm.tokenizer else "")
    return Prompts(found, texts, grammar=request.grammar[0] if request.grammar else None)


class Choice:
    """Turns the text of one choice, which may come in pieces, into parts of the response.

    Args:
      index: the index of the choice.
      logprobs: whether its tokens have log-probabilities.
      reader: the reader of its text, from `Prompts.reader`.
      offset: the number of characters before the text, of the prompt.
    """

    def __init__(
        self, index: int, logprobs: bool = False, reader: Reader | None = None, offset: int = 0
    ) -> None:
        self._index, self._logprobs, self._reader, self._offset = index, logprobs, reader, offset
        self._texts: TokenTexts | None = None

    def part(self, piece: Piece | Result) -> Part:
        """Returns a new piece, or a whole text. A token comes with the text that it completes."""
        text, result = (piece.text, piece.result) if isinstance(piece, Piece) else (str(piece), piece)
        tokens: list[TokenText] = []
        if self._logprobs and piece.new_text is not None:
            self._texts = self._texts or piece.new_text().by_token()
            assert self._texts is not None
            pushed = self._texts.push(piece.token_records, text, result is not None)
            tokens = scored(pushed, self._offset)
            self._offset += sum(len(token.text) for token in tokens)
        reason = None if result is None else FINISH_REASONS[result.finish_reason]
        return self.read(text, tokens, reason)

    def read(self, text: str, tokens: Sequence[TokenText], reason: str | None) -> Part:
        """Returns new text after the reader has separated it."""
        if self._reader is None:
            return Part(self._index, text, tokens, reason)
        read = self._reader.push(text, reason is not None)
        if self._reader.num_calls and reason == "stop":
            reason = "tool_calls"
        return Part(self._index, read.content, tokens, reason, read.reasoning, read.calls)


def checked_ids(lm: LanguageModel, name: str, ids: Any) -> list[int]:
    """Returns the token ids of the field `name` of a request.

    Raises:
      BadField: they are no list of token ids, or one is outside the vocabulary.
    """
    largest = lm.config.vocab_size - 1
    if not isinstance(ids, list):
        raise BadField(f"{name} is {shown(ids)}; give a list of token ids", name)
    for one in ids:
        if type(one) is not int or not 0 <= one <= largest:
            raise BadField(
                f"{name} has the token id {shown(one)}; ids are whole numbers from 0 to {largest}", name
            )
    return ids


def rows_of(
    lm: LanguageModel, request: ApiRequest, prompts: Prompts, **defaults: Any
) -> list[dict[str, Any]]:
    """Returns the arguments of `Scheduler.add` for each text to generate: the `n` texts of a prompt beside each other.

    A new grammar takes up to some seconds.

    Args:
      lm: the model.
      request: the request.
      prompts: from `encoded`.
      **defaults: the arguments that the options of the request do not give, such as `method` and `seed`.

    Raises:
      BadField: a prompt is empty or too long, or the grammar cannot be used.
    """
    options = {**defaults, **request.options}
    options.pop("chat_template_kwargs", None)
    if prompts.grammar is not None:
        options = {name: value for name, value in options.items() if name not in GRAMMARS}
        assert lm.tokenizer is not None
        try:
            options["grammar"] = compile_grammar(prompts.grammar, lm.tokenizer, lm.config.vocab_size)
        except GrammarError as error:
            field = request.grammar[1] if request.grammar else "tools"
            raise BadField(str(error), "tools" if str(error).startswith("function ") else field) from None
    rows = []
    for index, ids in enumerate(prompts.ids):
        _check_length(lm, request, ids)
        if request.only_echo:
            continue
        own = options | {"prompt": list(ids)}
        if own.get("max_new_tokens") is None:
            own["max_new_tokens"] = min(request.default_budget, lm.config.context_length - len(ids))
        rows += [own | {"stream": index * request.n + copy} for copy in range(request.n)]
    return rows


def _check_length(lm: LanguageModel, request: ApiRequest, ids: Sequence[int]) -> None:
    context = lm.config.context_length
    if not ids:
        raise BadField("the prompt is empty; give at least one token", "prompt")
    if len(ids) + (not request.only_echo) > context:
        raise BadField(
            f"the prompt has {len(ids)} tokens, the model's context is {context}; shorten it",
            "messages" if request.is_chat else "prompt",
        )


def used(request: ApiRequest, prompts: Prompts, texts: Iterable[Statistics]) -> dict[str, Any]:
    """Returns the usage from the statistics of the texts, in order; each prompt counts once."""
    counts = list(texts)
    return usage_of(
        sum(map(len, prompts.ids)),
        sum(one.num_tokens for one in counts),
        sum(one.num_reused_tokens for one in counts[:: request.n]),
    )
