"""From a request of the API to the arguments of the scheduler, and from pieces to the parts of a response."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.requests import batch_of
from jaxspec.engine.results import Score
from jaxspec.engine.text import TokenTexts
from jaxspec.host.messages import shown
from jaxspec.io.embedded import embedded_names
from jaxspec.methods import Method, registry
from jaxspec.serving.openai import (
    COMPLETIONS,
    ApiRequest,
    BadField,
    Part,
    TokenScore,
    finish_reason,
    scored,
    usage_of,
)
from jaxspec.serving.server.engine_thread import Job, News, Unavailable


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a request.

    Attributes:
      ids: the token ids of each.
      texts: the text of each, for `echo`.
    """

    ids: Sequence[Sequence[int]]
    texts: Sequence[str]


def encoded(lm: LanguageModel, request: ApiRequest) -> Prompts:
    """Returns the prompts of a request.

    Raises:
      ValueError: a text cannot be encoded, a message or token id is wrong, or there is no chat template.
    """
    assert lm.tokenizer is not None
    if request.is_chat:
        if not lm.tokenizer.has_chat_template:
            raise BadField(
                f"{lm.name} has no chat template; send a prompt to {COMPLETIONS}, or start jaxspec serve with "
                "--chat-template",
                "messages",
            )
        (messages,), _ = batch_of(None, list(request.messages))
        variables = request.options.get("chat_template_kwargs")
        ids = lm.encode(messages, chat_template_kwargs=variables, most_tokens=lm.config.context_length)
        return Prompts([ids], [""])
    found, texts = [], []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            found.append(lm.encode(prompt, most_tokens=lm.config.context_length))
            texts.append(prompt)
        else:
            found.append(checked_ids(lm, "prompt", prompt))
            if request.echo:
                _check_length(lm, request, prompt)
            texts.append(lm.tokenizer.decode(prompt) if request.echo else "")
    return Prompts(found, texts)


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
    lm: LanguageModel,
    request: ApiRequest,
    prompts: Prompts,
    method: Method,
    seed: int,
    allowed: Sequence[Method] | None = None,
) -> list[dict[str, Any]]:
    """Returns the arguments of `Scheduler.add` for each text to generate: the `n` texts of a prompt beside each other.

    Args:
      lm: the model.
      request: the request.
      prompts: from `encoded`.
      method: the method of requests that name none.
      seed: the seed of requests that give none.
      allowed: the methods, with their options, that a request may name beside `method`; None for all.

    Raises:
      BadField: a prompt is empty or too long, the method or an option of it does not exist or is not allowed, or an
        option names a file.
    """
    options = {name: value for name, value in request.options.items() if name != "chat_template_kwargs"}
    options |= {"method": _method(request, method, allowed), "seed": options.get("seed", seed)}
    rows = []
    for index, ids in enumerate(prompts.ids):
        _check_length(lm, request, ids)
        if request.only_echo:
            continue
        budget = min(request.default_budget, lm.config.context_length - len(ids))
        rows += [
            {"max_new_tokens": budget, **options, "prompt": list(ids), "stream": index * request.n + copy}
            for copy in range(request.n)
        ]
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


def _method(request: ApiRequest, default: Method, allowed: Sequence[Method] | None) -> Method:
    """Returns the method of a request.

    An allowed method has the operator's options; a request may repeat them. Where all methods are allowed, the options
    of a request may not open files of the server.
    """
    if request.method is None:
        return default
    if allowed is not None:
        for one in (default, *allowed):
            if one.name == request.method and {**one.given, **request.method_options} == one.given:
                return one
        names = ", ".join(dict.fromkeys(one.name for one in (default, *allowed)))
        raise BadField(
            f"method is {shown({'name': request.method, **request.method_options})}; this server allows {names}, "
            "without options of a request",
            "method",
        )
    files = _file_options()
    for name, value in request.method_options.items():
        # A draft model that comes with jaxspec is no secret, and `draft_vocab` may be a number.
        if (
            name in files
            and not isinstance(value, int)
            and not (name == "draft" and value in embedded_names())
        ):
            raise BadField(
                f"{name} names a file of the server, {shown(value)}; start jaxspec serve with --method and this option",
                "method",
            )
    try:
        return registry.make(request.method, request.method_options)
    except ValueError as error:
        raise BadField(str(error), "method") from None


@functools.cache
def _file_options() -> set[str]:
    """Returns the names of options that name files."""
    return {
        field.name
        for method in registry.available()[0].values()
        for field in dataclasses.fields(method)
        if field.metadata.get("metavar") in ("FILE", "DIR")
        or "PathLike" in str(typing.get_type_hints(method)[field.name])
    }


def scores_of(lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[Score]:
    """Returns the scores of the tokens of prompts after their first."""
    long = [ids for ids in prompts if len(ids) > 1]
    scores = lm.score([ids[:1] for ids in long], [ids[1:] for ids in long]) if long else []
    assert isinstance(scores, list)
    found = iter(scores)
    return [next(found) if len(ids) > 1 else Score([], [], [], []) for ids in prompts]


def scored_tokens(lm: LanguageModel, prompt: str, ids: Sequence[int], score: Score) -> list[TokenScore]:
    """Returns the tokens of a prompt with their log-probabilities and the most likely tokens in their places.

    The text of a special token is empty, unless the prompt has it in its place.
    """
    assert lm.tokenizer is not None
    stream = lm.tokenizer.stream()
    texts, at = [], 0
    for index in ids:
        text = stream.push([index])
        if index in lm.tokenizer.special_ids:
            special = lm.tokenizer.decode([index], special=True)
            text = special if prompt.startswith(special, at) else text
        texts.append(text)
        at += len(text)
    texts[-1] += stream.flush()
    tokens = scored(
        ((text, number, b"") for text, number in zip(texts, [None, *score.log_probs], strict=True)), 0
    )
    for place, (token, top, number) in enumerate(
        zip(score.tokens, score.top_tokens, score.top_log_probs, strict=True), 1
    ):
        if top != token:
            tokens[place] = tokens[place]._replace(top=(lm.tokenizer.decode([top]), number))
    return tokens


class Answer:
    """Turns the pieces of a job into the parts of a response.

    Args:
      lm: the model.
      request: the request.
      prompts: its prompts.
      job: its job.

    Attributes:
      num_choices: the number of choices of the response.
    """

    def __init__(self, lm: LanguageModel, request: ApiRequest, prompts: Prompts, job: Job) -> None:
        self._lm, self._request, self._prompts, self._job = lm, request, prompts, job
        self.num_choices = len(prompts.ids) * request.n
        self._texts: list[TokenTexts | None] = [None] * self.num_choices
        self._offsets = [0] * self.num_choices
        self._begun = False

    def _echoed(self) -> list[Part]:
        """Returns the prompts."""
        scores: Sequence[Sequence[TokenScore]] = [()] * len(self._prompts.ids)
        if self._job.scores:
            scores = [
                scored_tokens(self._lm, *prompt)
                for prompt in zip(self._prompts.texts, self._prompts.ids, self._job.scores, strict=True)
            ]
        reason = finish_reason("length") if self._request.only_echo else None
        which = [row // self._request.n for row in range(self.num_choices)]
        parts = [Part(row, self._prompts.texts[at], scores[at], reason) for row, at in enumerate(which)]
        self._offsets = [len(part.text) for part in parts]
        return parts

    def parts(self, news: News) -> list[Part]:
        """Returns the text of new pieces; before the first ones, the prompts if the request asks for them.

        A token comes with the text that it completes.

        Raises:
          Unavailable: the model's logits are not finite.
        """
        parts = self._echoed() if self._request.echo and not self._begun else []
        self._begun = True
        for row, piece in news:
            result = piece.result
            if result is not None and result.error is not None:
                raise Unavailable(result.error, 500, "engine_error")
            tokens: list[TokenScore] = []
            if self._request.logprobs and piece.new_text is not None:
                texts = self._texts[row] = self._texts[row] or piece.new_text().by_token()
                assert texts is not None
                pushed = texts.push(piece.token_records, piece.text, result is not None)
                tokens = scored(pushed, self._offsets[row])
                self._offsets[row] += sum(len(token.text) for token in tokens)
            reason = None if result is None else finish_reason(result.finish_reason)
            if piece.text or tokens or reason is not None:
                parts.append(Part(row, piece.text, tokens, reason))
        return parts

    def usage(self) -> dict[str, Any]:
        """Returns the usage; each prompt counts once."""
        pieces = [timing.piece for timing in self._job.timings]
        counts = [piece.statistics for piece in pieces if piece is not None]
        return usage_of(
            sum(map(len, self._prompts.ids)),
            sum(one.num_tokens for one in counts),
            sum(one.num_reused_tokens for one in counts[:: self._request.n]),
        )
