"""The options of `LanguageModel.generate` and `stream`, and their names, signature and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.host.messages import shown

if TYPE_CHECKING:
    from jaxspec.grammar import Grammar, TokenTable
    from jaxspec.methods.acceptors import AcceptorName
    from jaxspec.requests.reading import Integers, Numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of `generate` and `stream`, given as keyword arguments or as one object.

    Attributes:
      acceptor: the rule that accepts draft tokens. With greedy, rejection, block and coupled the text follows the
        model's sampling distribution. With coupled (Daliri et al. 2024) it also equals the text of plain decoding with
        the same seed. typical is lossy: sampled text follows another distribution (see `lossy.TypicalAcceptor`), and
        `Result.lossy` is true. Default: greedy at temperature 0, else block (coupled with method `auto`).
      exact: whether greedy text is the same, bit for bit in its logits, with every method and in every batch. Text is
        generated more slowly. It needs one CPU device, whose products are tested first.
      max_new_tokens: the token budget. Like the sampling parameters, penalties and seed it is one number for all
        prompts or a list of one per prompt. Default: 128, or fewer if the context ends before.
      min_new_tokens: the number of tokens before which no end token of the model or of `stop_token_ids` is possible.
        One number, or one per prompt. Default: the value in generation_config.json, or else 0.
      n: texts per prompt. The results of a prompt follow each other, and each has its own random stream; with more than
        one, `generate` returns a list.
      temperature: the sampling temperature; 0 or a number below 1e-5 for greedy decoding. Default: the value in the
        model's generation_config.json, or else greedy.
      top_k, top_p, min_p: filters of the sampling distribution, see `sampling.Sampling`. At temperature 0 they have no
        effect, and a `RuntimeWarning` reports it. Default: the values in generation_config.json, or else no filter.
      repetition_penalty, presence_penalty, frequency_penalty: penalties on repeated tokens, see `penalties.Penalties`.
        They are part of the model's sampling distribution with every method: a draft token counts as text for the
        tokens after it. At most 1e5; a repetition penalty is at least 1e-5. Default: the values in
        generation_config.json, or else no penalty.
      logit_bias: numbers from -100 to 100 by token id, for all prompts: each is added to the token's logit after the
        penalties. At most 512.
      grammar: a `grammar.Grammar`, or its table, that the text follows, for all prompts or one per prompt, None for
        none. The model's distribution is restricted to the tokens that it allows, with every method. The text ends
        where it allows nothing but the end; end tokens are possible only in its final states. If the budget ends
        before, the finish reason is `length`. Where a penalty, a ban or `min_new_tokens` leaves no token of the
        grammar, it has no effect.
      json_schema, choices, regex: instead of `grammar`, for all prompts: the text is a value of a JSON schema (a
        mapping, JSON text or a pydantic class), one of some texts, or matches a regular expression as a whole. In a
        conversation with a model that reasons, as its chat template shows, the reasoning comes first and is free.
      seed: the seed of the random numbers; each prompt of a list has its own random stream. With one seed per prompt,
        a prompt's text does not depend on its position in the list. Method `auto` is an exception unless the acceptor
        is coupled: it chooses for the whole batch, and prompts with the same seed use different random streams.
      stop: one or more strings that end a text and are not part of it. They may span several tokens. The string that is
        complete first ends the text. If a string is the text of a special token, the text ends at that token.
      stop_token_ids: one or more ids of tokens that end a text and are not part of it, for all prompts.
      ignore_eos: whether to continue after the model's end tokens, up to the budget. The end tokens are the
        `eos_token_id`s of config.json and generation_config.json together; transformers uses only the latter.
      logprobs: whether to report each token's log-probability under the model's own distribution, without temperature,
        filters, penalties and grammar.
      top_logprobs: the number of likeliest tokens, up to 20, that are reported beside each token under the same
        distribution, see `Token.top`. With more than 0, `logprobs` need not be given.
      chat: whether each prompt is a user's message, to which the chat template is applied.
      chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}` for Qwen3.
      max_batch: the maximum number of prompts decoded at once. Each other prompt starts when a row becomes free.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> language_model().generate("ab", GenerationOptions(max_new_tokens=6)).text
      'ab adeab a'
    """

    acceptor: AcceptorName | None = None
    exact: bool = False
    max_new_tokens: Integers = None
    min_new_tokens: Integers = None
    n: int = 1
    temperature: Numbers = None
    top_k: Integers = None
    top_p: Numbers = None
    min_p: Numbers = None
    repetition_penalty: Numbers = None
    presence_penalty: Numbers = None
    frequency_penalty: Numbers = None
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | TokenTable | Sequence[Grammar | TokenTable | None] | None = None
    json_schema: Any = None
    choices: Sequence[str] | None = None
    regex: str | None = None
    seed: Integers = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Integers = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_batch: int = 8


# The options of which at most one is given.
GRAMMARS = ("grammar", "json_schema", "choices", "regex")
NAMES = tuple(field.name for field in dataclasses.fields(GenerationOptions))


def split(
    options: GenerationOptions | None, given: Mapping[str, Any]
) -> tuple[GenerationOptions, dict[str, Any]]:
    """Separates the options of a call from the options of its method.

    Args:
      options: the `options` argument of the call, or None.
      given: the keyword arguments of the call. They take precedence over `options`.

    Raises:
      ValueError: `options` is not a `GenerationOptions`.

    Examples:
      >>> options, rest = split(GenerationOptions(seed=3), {"top_k": 5, "exit_layer": 2})
      >>> options.seed, options.top_k, rest
      (3, 5, {'exit_layer': 2})
    """
    if options is not None and not isinstance(options, GenerationOptions):
        raise ValueError(f"options is {shown(options)}; give jaxspec.GenerationOptions or keyword arguments")
    own = {name: value for name, value in given.items() if name in NAMES}
    rest = {name: value for name, value in given.items() if name not in NAMES}
    return dataclasses.replace(options or GenerationOptions(), **own), rest


def document(function: Callable[..., Any]) -> None:
    """Adds the options to the signature and the docstring of a function that takes them as keyword arguments."""
    before = inspect.signature(function)
    *ours, rest = before.parameters.values()
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(GenerationOptions)
    ]
    function.__signature__ = before.replace(parameters=[*ours, *options, rest])  # type: ignore[attr-defined]
    # Cleaned, because the compiler removes the indentation of docstrings since Python 3.13.
    described = re.search(
        r"\nAttributes:\n(.*?)\n *Examples:", inspect.getdoc(GenerationOptions) or "", re.DOTALL
    )
    begin, place, end = (inspect.getdoc(function) or "").partition(f"  **{rest.name}:")
    assert described is not None
    assert place
    function.__doc__ = f"{begin}{described[1].rstrip()}\n{place}{end}"
