"""From a request of the API to the arguments of the scheduler, for the server and for batch files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.messages import shown
from jaxspec.serving.openai import ApiRequest, BadField, usage_of
from jaxspec.texts.requests import batch_of
from jaxspec.texts.results import Statistics


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a request.

    Attributes:
      ids: the token ids of each.
      texts: the text of each, for `echo`.
    """

    ids: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()


def encoded(lm: LanguageModel, request: ApiRequest) -> Prompts:
    """Returns the prompts of a request.

    Raises:
      ValueError: a text cannot be encoded, a message or token id is wrong, or there is no chat template.
    """
    context = lm.config.context_length
    if request.is_chat:
        (messages,), _ = batch_of(None, list(request.messages))
        variables = request.options.get("chat_template_kwargs")
        return Prompts([lm.encode(messages, chat_template_kwargs=variables, most_tokens=context)], [""])
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
    lm: LanguageModel, request: ApiRequest, prompts: Prompts, **defaults: Any
) -> list[dict[str, Any]]:
    """Returns the arguments of `Scheduler.add` for each text to generate: the `n` texts of a prompt beside each other.

    Args:
      lm: the model.
      request: the request.
      prompts: from `encoded`.
      **defaults: the arguments that the options of the request do not give, such as `method` and `seed`.

    Raises:
      BadField: a prompt is empty or too long.
    """
    options = {**defaults, **request.options}
    options.pop("chat_template_kwargs", None)
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
