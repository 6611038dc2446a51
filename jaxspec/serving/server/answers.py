"""The method of a request, and from pieces to the parts of a response."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.messages import shown
from jaxspec.io.embedded import embedded_names
from jaxspec.methods import Method, registry
from jaxspec.requests.results import Score
from jaxspec.requests.text import TokenText
from jaxspec.serving.openai import FINISH_REASONS, ApiRequest, BadField, Part, scored
from jaxspec.serving.server.engine_thread import Job, Pieces
from jaxspec.serving.server.refusals import Refused
from jaxspec.serving.translation import Choice, Prompts, used


def method_of(request: ApiRequest, default: Method, allowed: Sequence[Method] | None = None) -> Method:
    """Returns the method of a request.

    An allowed method has the operator's options; a request may repeat them. Where all methods are allowed, the options
    of a request may not open files of the server.

    Args:
      request: the request.
      default: the method of requests that name none.
      allowed: the methods, with their options, that a request may name beside `default`; None for all.

    Raises:
      BadField: the method or an option of it does not exist or is not allowed, or an option names a file.
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


def scored_tokens(lm: LanguageModel, prompt: str, ids: Sequence[int], score: Score) -> list[TokenText]:
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
    tokens = scored(map(TokenText, texts, [None, *score.log_probs]), 0)
    for place, (token, top, number) in enumerate(
        zip(score.tokens, score.top_tokens, score.top_log_probs, strict=True), 1
    ):
        if top != token:
            likeliest = TokenText(lm.tokenizer.alone(top)[0], number)
            tokens[place] = tokens[place]._replace(top=(likeliest,))
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
        self._choices = [
            Choice(row, request.logprobs, prompts.reader(request)) for row in range(self.num_choices)
        ]
        self._begun = False

    def _echoed(self) -> list[Part]:
        """Returns the prompts."""
        scores: Sequence[Sequence[TokenText]] = [()] * len(self._prompts.ids)
        if self._job.scores:
            scores = [
                scored_tokens(self._lm, *prompt)
                for prompt in zip(self._prompts.texts, self._prompts.ids, self._job.scores, strict=True)
            ]
        reason = FINISH_REASONS["length"] if self._request.only_echo else None
        which = [row // self._request.n for row in range(self.num_choices)]
        parts = [Part(row, self._prompts.texts[at], scores[at], reason) for row, at in enumerate(which)]
        self._choices = [Choice(part.index, self._request.logprobs, offset=len(part.text)) for part in parts]
        return parts

    def parts(self, pieces: Pieces) -> list[Part]:
        """Returns the text of new pieces; before the first ones, the prompts if the request asks for them.

        Raises:
          Refused: the model's logits are not finite.
        """
        parts = self._echoed() if self._request.echo and not self._begun else []
        self._begun = True
        for row, piece in pieces:
            result = piece.result
            if result is not None and result.error is not None:
                raise Refused(500, result.error, code="engine_error")
            part = self._choices[row].part(piece)
            if part != Part(row, tokens=[]):
                parts.append(part)
        return parts

    def usage(self) -> dict[str, Any]:
        """Returns the usage; each prompt counts once."""
        pieces = [timing.piece for timing in self._job.timings]
        return used(self._request, self._prompts, [piece.statistics for piece in pieces if piece is not None])
