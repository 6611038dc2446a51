"""Turns the arguments of `generate` into one request per text; a wrong argument raises ValueError with one line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxspec.grammar import Grammar, compile_grammar
from jaxspec.grammar.table import TokenTable
from jaxspec.host.arguments import flag, listed, real, whole
from jaxspec.host.files import parse_json
from jaxspec.host.messages import shown, warn_caller
from jaxspec.io.hf.generation_json import NO_RULES, PENALTIES, SAMPLING, Rules
from jaxspec.io.tokenizers.chat import NO_EFFECT, text_of, unknown_fields
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.model.config import LlamaConfig
from jaxspec.requests.generation_options import GRAMMARS, GenerationOptions
from jaxspec.requests.grammar_tables import packed
from jaxspec.sampling import is_greedy
from jaxspec.verification import MOST_TOP

# A message has a `role` and a `content`: a text, or a list of parts such as {"type": "text", "text": "Hi"}. One with
# `tool_calls` needs no content.
Message = Mapping[str, Any]
Prompt = str | Sequence[int]
Messages = Sequence[Message]
Prompts = Prompt | Messages | Sequence[Prompt | Messages] | np.ndarray | jax.Array
# For all prompts, or per prompt; None for the default.
Integers = int | Sequence[int | None] | None
Numbers = float | Sequence[float | None] | None
# The most tokens to generate if `max_new_tokens` is not given.
DEFAULT_BUDGET = 128
# The largest penalty, and the inverse of the smallest repetition penalty: float32 logits do not overflow with it.
MAX_PENALTY = 1e5
# OpenAI's largest bias, and its largest number of tokens with a bias, rounded up to a power of two.
MAX_BIAS, MAX_BIASES = 100, 512
_PROMPTS = "give a text, token ids, messages (with `role` and `content`), or a list of such"
NO_TEMPLATE = "chat_template_kwargs is for a chat template; give messages, or a text with chat"
_MASK = "give 0 or 1 for each token id of the prompts"
_MESSAGES = "give a list of messages (with `role` and `content`), or several such lists"


@dataclasses.dataclass(frozen=True)
class RowRequest:
    """One text to generate, in tokens.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: at least 1.
      eos_ids: the tokens that end it.
      stop_ids: the tokens of `eos_ids` that the call has added to the model's own.
      temperature, top_k, top_p, min_p: see `sampling.Sampling`; temperature 0 is greedy. A temperature that means
        greedy (`sampling.is_greedy`) becomes 0.
      repetition_penalty, presence_penalty, frequency_penalty: see `penalties.Penalties`.
      logit_bias: pairs of a token and the number that is added to its logit.
      rules: the bans of the model's generation_config.json.
      grammar: the automaton that the text follows; None for none.
      log_probs: the number of likeliest tokens that are reported beside the log-probability of each token; −1 for no
        report.
      seed: the seed of its random numbers.
      stream: distinguishes requests with the same seed, which otherwise draw the same random numbers.
      start: the first tokens of the prompt that are not fed, because caches hold them already.

    Raises:
      ValueError: a number outside its range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    rules: Rules = NO_RULES
    grammar: TokenTable | None = None
    log_probs: int = -1
    seed: int = 0
    stream: int = 0
    start: int = 0

    @property
    def num_fed(self) -> int:
        """The number of prompt tokens to feed."""
        return len(self.prompt) - self.start

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if is_greedy(self.temperature):
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}; give 0 (all tokens) or a positive number")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; give a number from 0 to {2**32 - 1}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; give a number from 0 to 1")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; give a number from {1 / MAX_PENALTY:g} to "
                f"{MAX_PENALTY:g}, 1 for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; give a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, "
                    "0 for none"
                )


def needs_sampling(requests: Sequence[RowRequest]) -> bool:
    """Whether any text is sampled, that is, not greedy."""
    return any(request.temperature > 0 for request in requests)


def _warn_of_no_effect(requests: Sequence[RowRequest], given: Mapping[str, Any]) -> None:
    """Warns if a filter was given that has no effect, because each request with this filter is greedy.

    `given`: the sampling parameters of the call, by name; None if not given.
    """
    used: dict[str, Callable[[RowRequest], bool]] = {
        "top_k": lambda request: request.top_k > 0,
        "top_p": lambda request: request.top_p < 1,
        "min_p": lambda request: request.min_p > 0,
    }
    drawn = [request for request in requests if request.temperature > 0]
    if idle := [
        name
        for name, uses in used.items()
        if given.get(name) is not None and any(map(uses, requests)) and not any(map(uses, drawn))
    ]:
        names, verb = " and ".join(f"`{name}`" for name in idle), "has" if len(idle) == 1 else "have"
        warn_caller(f"{names} {verb} no effect at temperature 0; give a temperature above 0")


def drawn_apart(requests: Sequence[RowRequest]) -> list[RowRequest]:
    """Returns the requests with streams such that no two of them draw the same random numbers.

    It is for batches in which the tokens accepted in one row influence the drafts of other rows. With the same random
    numbers, a row that is ahead would reveal the next draws of the others, and drafts would depend on them.
    """
    before: Counter[tuple[int, int]] = Counter()
    apart = []
    for request in requests:
        stream = request.stream + before[request.seed, request.stream]
        before[request.seed, request.stream] += 1
        apart.append(dataclasses.replace(request, stream=stream))
    return apart


class Stops(NamedTuple):
    """Strings and tokens that end a text in addition to the model's own end tokens; they are not part of the text."""

    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


def _stops(model: Reads, options: GenerationOptions) -> Stops:
    """Returns the stops of a call.

    A stop string that is the text of a special token, which never appears in the decoded text, is replaced by that
    token's id.

    Raises:
      ValueError: an argument has another type, a string is empty or there is no tokenizer, or an id is outside the
        vocabulary.
    """
    stop, token_ids, vocab_size = options.stop, options.stop_token_ids, model.config.vocab_size
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(one, str) for one in strings):
        raise ValueError(f"stop is {shown(stop)}; give a string or a list of strings")
    if "" in strings:
        raise ValueError("a stop string is empty; give at least one character")
    given = () if token_ids is None else listed(token_ids)
    if given is None:
        given = [token_ids]
    ids = [whole("stop_token_ids", index, "token id") for index in given]
    for index in ids:
        if not 0 <= index < vocab_size:
            raise ValueError(
                f"stop_token_ids has {index}, which is outside the vocabulary; ids are from 0 to {vocab_size - 1}"
            )
    if strings and model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer; stop strings need one")
    named = [model.tokenizer.special_id(text) for text in strings] if model.tokenizer is not None else []
    return Stops(
        tuple(strings), tuple(dict.fromkeys([*ids, *(index for index in named if index is not None)]))
    )


def batch_of(prompts: Any, messages: Any = None) -> tuple[list[Any], bool]:
    """Returns a list of prompts, each a text, token ids or messages, and whether a single prompt was given.

    Args:
      prompts, messages: as in `LanguageModel.generate`; one of them is None.

    Raises:
      ValueError: they are not such prompts, both are given, or there is no prompt.
    """
    if messages is not None and prompts is not None:
        raise ValueError("got both prompts and messages; give one of them")
    name, given, wanted = "prompts", prompts, _PROMPTS
    if messages is not None:
        name, given, wanted = "messages", messages, _MESSAGES
    batch = [given] if isinstance(given, str) else listed(given)
    if batch is None:
        raise ValueError(f"{name} is {shown(given)}; {wanted}")
    if isinstance(given, Mapping) and name == "messages":
        raise ValueError(f"messages is one message, {shown(given)}; give a list of messages")
    if not batch:
        raise ValueError(f"{name} is empty; give at least one")
    if isinstance(given, str) or (not isinstance(batch[0], str) and listed(batch[0]) is None):
        return [_prompt(name, given, wanted)], True
    return [_prompt(f"{name}[{index}]", prompt, wanted) for index, prompt in enumerate(batch)], False


def template_variables(given: Any) -> Mapping[str, Any] | None:
    """Returns `chat_template_kwargs` of `LanguageModel.generate`.

    Raises:
      ValueError: they are not variables by name.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs is {shown(given)}; give variables of the template by name")
    return given


def unpadded(prompts: Any, mask: Any, pad_ids: Collection[int]) -> Any:
    """Returns the prompts without the padding that `attention_mask` marks; without a mask they are unchanged.

    Args:
      prompts: as in `LanguageModel.generate`.
      mask: 0 for each padding id and 1 for the others, in the shape of the ids; None if not given.
      pad_ids: the tokens with which a tokenizer may pad.

    Raises:
      ValueError: the mask has another shape or other values, or an array of two dimensions is padded and has no mask.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:  # the result of a transformers tokenizer
        mask = prompts.get("attention_mask") if mask is None else mask
        prompts = prompts["input_ids"]
    if mask is None:
        if getattr(prompts, "ndim", 0) == 2 and _looks_padded(prompts.tolist(), pad_ids):
            raise ValueError(
                "`prompts` is an array whose rows begin or end with the tokenizer's padding; give `attention_mask`, or "
                "lists without padding"
            )
        return prompts
    rows, masks = listed(prompts), listed(mask)
    if rows is None or masks is None or len(rows) != len(masks) or not rows:
        raise ValueError(f"attention_mask is {shown(mask)}; {_MASK}")
    if listed(rows[0]) is None:
        return _kept(rows, masks)
    return [_kept(listed(row), listed(own)) for row, own in zip(rows, masks, strict=True)]


def _kept(ids: list[Any] | None, mask: list[Any] | None) -> list[Any]:
    """Returns the ids whose mask is 1."""
    if ids is None or mask is None or len(ids) != len(mask) or any(one not in (0, 1) for one in mask):
        raise ValueError(f"attention_mask has {shown(mask)} for the ids {shown(ids)}; {_MASK}")
    return [token for token, one in zip(ids, mask, strict=True) if one]


def _looks_padded(rows: list[list[int]], pad_ids: Collection[int]) -> bool:
    """Whether some but not all rows begin or end with a padding token, or a row does so with two equal ones."""
    for at, next_at in ((0, 1), (-1, -2)):
        padded = [row[at] in pad_ids for row in rows if row]
        if any(padded) and not all(padded):
            return True
        if any(len(row) > 1 and row[at] == row[next_at] and row[at] in pad_ids for row in rows):
            return True
    return False


def is_text_or_ids(prompt: Any) -> bool:
    """Whether a prompt is a text or token ids, and not a list of messages."""
    return isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping)


def _prompt(name: str, prompt: Any, wanted: str) -> Any:
    if isinstance(prompt, str) and wanted != _MESSAGES:
        return prompt
    items = listed(prompt)
    if items is None:
        raise ValueError(f"{name} is {shown(prompt)}; {wanted}")
    if items and (wanted == _MESSAGES or isinstance(items[0], Mapping)):
        return [_message(f"{name}[{index}]", item) for index, item in enumerate(items)]
    return [whole(f"{name}[{index}]", item, "token id") for index, item in enumerate(items)]


def _message(name: str, message: Any) -> dict[str, Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not {"role", *(() if calls else ("content",))} <= message.keys():
        raise ValueError(f"{name} is {shown(message)}; give a message with `role` and `content`")
    # Templates ask whether a key is there.
    found = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    try:
        found["content"] = text_of(message.get("content", "") if not calls else found.get("content", ""))
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if calls:
        found["tool_calls"] = [
            _call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(listed(calls) or [None])
        ]
    for key in ("role", "content"):
        if not isinstance(found.get(key), str):
            raise ValueError(f"{name} has the {key} {shown(message[key])}; give a text")
        check_text(f"{name}, {key}", found[key])
    return found


def _call(name: str, call: Any) -> dict[str, Any]:
    """Returns a call of a tool in a message with its arguments as an object, which templates expect."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{name} is {shown(call)}; give an object with `function`, with a `name` and the JSON object `arguments`"
        )
    for field in (*unknown_fields(call), *unknown_fields(function)):
        raise ValueError(f"{name} {NO_EFFECT.format(shown(field))}")
    function = {**function, "arguments": arguments}
    check_text(f"{name}, function", json.dumps(function, ensure_ascii=False, default=str))
    return {**call, "function": function} if "function" in call else function


def check_text(name: str, text: str) -> None:
    """Checks that a text is valid Unicode.

    Python puts surrogates into a text where it has decoded invalid bytes; tokenizers do not accept them.

    Raises:
      ValueError: the text has a surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(
            f"{name} is not text in UTF-8: it has the surrogate {text[at]!a} at position {at}"
        ) from None


class Reads(Protocol):
    """The part of a `LanguageModel` with which prompts are read."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def defaults(self) -> Mapping[str, Any]: ...

    def encode(
        self,
        text: str | Messages,
        *,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]: ...


def read_requests(
    model: Reads, prompts: Any, messages: Any, attention_mask: Any, options: GenerationOptions
) -> tuple[list[RowRequest], Stops, bool]:
    """Reads the arguments of `LanguageModel.generate`, except the method.

    Args:
      model: encodes the texts, and has the defaults of settings.
      prompts, messages, attention_mask, options: as in `LanguageModel.generate`.

    Returns:
      `options.n` requests per prompt, those of a prompt beside each other, their stops, and whether there is a single
      text.

    Raises:
      ValueError: an argument is wrong.
    """
    config = model.config
    for name in ("exact", "ignore_eos", "chat", "logprobs"):
        flag(name, getattr(options, name))
    num_top, copies = whole("top_logprobs", options.top_logprobs), whole("n", options.n)
    if not 0 <= num_top <= MOST_TOP:
        raise ValueError(f"top_logprobs is {num_top}; give a number from 0 to {MOST_TOP}")
    template_variables(options.chat_template_kwargs)  # raises
    batch, single = batch_of(unpadded(prompts, attention_mask, _pad_ids(model)), messages)
    count, stops = len(batch), _stops(model, options)
    if options.chat_template_kwargs and all(map(_is_ids, batch)):
        raise ValueError(NO_TEMPLATE)
    for name, number in {"max_batch": whole("max_batch", options.max_batch), "n": copies}.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")
    given = {name: getattr(options, name) for name in (*SAMPLING, *PENALTIES)}
    values = {name: model.defaults.get(name) if one is None else one for name, one in given.items()}
    tables = per_row("grammar", _tables(model, options, batch), count, _table)
    numbers = {
        name: per_row(name, one, count, whole if name == "top_k" else real) for name, one in values.items()
    }
    names = "max_new_tokens", "min_new_tokens", "seed"
    budgets, least, seeds = (per_row(name, getattr(options, name), count, whole) for name in names)
    ends = () if options.ignore_eos else config.eos_token_ids
    stop_ids = tuple(index for index in stops.ids if index not in ends)
    biases, rules = _biases(options.logit_bias, config.vocab_size), Rules.from_values(model.defaults)
    requests: list[RowRequest] = []
    for index, prompt in enumerate(batch):
        which = "prompts" if messages is None else "messages"
        which = "the prompt" if count == 1 else f"{which}[{index}]"
        ids = _ids(model, which, prompt, options)
        budget = _budget(which, len(ids), budgets[index], config.context_length)
        request = RowRequest(
            prompt=tuple(ids),
            max_new_tokens=budget,
            eos_ids=(*ends, *stop_ids),
            stop_ids=stop_ids,
            logit_bias=biases,
            rules=_with_minimum(rules, least[index], budget),
            grammar=tables[index],
            log_probs=num_top if options.logprobs or num_top else -1,
            seed=0 if seeds[index] is None else seeds[index],
            **{name: column[index] for name, column in numbers.items() if column[index] is not None},
        )
        if request.grammar is not None:  # a grammar that does not fit must not stop other rows
            packed(request.grammar, request.eos_ids, config.vocab_size)
        # A request with its own seed gives the same text at each place in the list.
        first = 0 if listed(options.seed) is not None else index * copies
        requests += [dataclasses.replace(request, stream=first + copy) for copy in range(copies)]
    _warn_of_no_effect(requests, given)
    return requests, stops, single and copies == 1


def _pad_ids(model: Reads) -> set[int]:
    """The tokens that callers may pad with: the padding token, and the end-of-text tokens, a common substitute."""
    pad = None if model.tokenizer is None else model.tokenizer.pad_id
    return {*model.config.eos_token_ids, *(() if pad is None else (pad,))}


def _is_ids(prompt: Any) -> bool:
    return is_text_or_ids(prompt) and not isinstance(prompt, str)


def _ids(model: Reads, which: str, prompt: Any, options: GenerationOptions) -> list[int]:
    """Returns the token ids of a prompt, of which there is at least one."""
    size = model.config.vocab_size
    ids: list[int] = (
        prompt
        if _is_ids(prompt)
        else model.encode(
            prompt,
            chat=options.chat,
            chat_template_kwargs=options.chat_template_kwargs,
            most_tokens=model.config.context_length,
        )
    )
    if not ids or not prompt:
        raise ValueError(f"{which} is empty; give at least one token")
    outside = next((i for i in ids if not 0 <= i < size), None)
    if outside is not None:
        raise ValueError(
            f"token id {outside} of {which} is outside the vocabulary; ids are from 0 to {size - 1}"
        )
    return ids


def _tables(model: Reads, options: GenerationOptions, batch: Sequence[Any]) -> Any:
    """Returns the table of the grammar of all prompts or of each; None for none."""

    def table(grammar: Any) -> Any:
        if not isinstance(grammar, Grammar):
            return grammar
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer; a grammar needs one")
        return compile_grammar(grammar, model.tokenizer, model.config.vocab_size)

    def after(prompt: Any) -> str | tuple[str, str] | None:
        chat = None if model.tokenizer is None else model.tokenizer.chat
        if isinstance(prompt, str) and options.chat:
            prompt = [{"role": "user", "content": prompt}]
        if chat is None or is_text_or_ids(prompt):
            return None
        return chat.reasoning(prompt, options.chat_template_kwargs)

    given = {name: value for name in GRAMMARS if (value := getattr(options, name)) is not None}
    if len(given) > 1:
        raise ValueError(f"got both {' and '.join(list(given)[:2])}; give one of them")
    if "grammar" in given:
        grammars = listed(options.grammar)
        return table(options.grammar) if grammars is None else list(map(table, grammars))
    for name, value in given.items():
        spec = getattr(Grammar, name)(value)
        return [table(dataclasses.replace(spec, after=after(one))) for one in batch]
    return None


def _biases(given: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Returns `logit_bias` of `LanguageModel.generate` as pairs; JSON has the token ids as texts."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"logit_bias is {shown(given)}; give numbers by token id")
    biases = []
    for token, bias in (given or {}).items():
        index = int(token) if isinstance(token, str) and token.isdecimal() else token
        index, number = whole("logit_bias", index, "token id"), real("logit_bias", bias)
        if not 0 <= index < vocab_size:
            raise ValueError(
                f"logit_bias has {index}, which is outside the vocabulary; ids are from 0 to {vocab_size - 1}"
            )
        if not abs(number) <= MAX_BIAS:
            raise ValueError(
                f"logit_bias of {index} is {number}; give a number from -{MAX_BIAS} to {MAX_BIAS}"
            )
        biases.append((index, number))
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias has {len(biases)} tokens; give at most {MAX_BIASES}")
    return tuple(biases)


def _table(name: str, table: Any) -> TokenTable:
    if not isinstance(table, TokenTable):
        raise ValueError(f"{name} is {shown(table)}; give a jaxspec.grammar.Grammar or its table")
    return table


def _with_minimum(rules: Rules, min_new_tokens: int | None, budget: int) -> Rules:
    """Returns the rules with the given minimum in place of the model's own, if one is given."""
    if min_new_tokens is None:
        return rules
    if not 0 <= min_new_tokens <= budget:
        raise ValueError(
            f"min_new_tokens is {min_new_tokens}; give a number from 0 to max_new_tokens ({budget})"
        )
    return dataclasses.replace(rules, min_new_tokens=min_new_tokens)


def _budget(name: str, length: int, asked: int | None, context: int) -> int:
    """Returns the most tokens to generate after a prompt of `length` tokens."""
    if asked is not None and asked < 1:
        raise ValueError(f"max_new_tokens is {asked}; give at least 1")
    if length >= context:
        raise ValueError(f"{name} has {length} tokens, the model's context is {context}; shorten the prompt")
    if asked is None:
        return min(DEFAULT_BUDGET, context - length)
    if length + asked > context:
        raise ValueError(
            f"{name} ({length} tokens) and max_new_tokens ({asked}) exceed the model's context of {context}; "
            "shorten one of them"
        )
    return asked


def per_row(name: str, value: Any, count: int, number: Callable[[str, Any], Any]) -> list[Any]:
    """Returns a number for each text, from one number for all texts or one for each; None means the default.

    Args:
      name: the name of the argument, for errors.
      value: a number or a list of numbers, of Python, NumPy or JAX.
      count: the number of texts.
      number: `whole` or `real`, which check and convert one number.

    Raises:
      ValueError: a value is not such a number, or the list has not `count` values.
    """
    values = listed(value)
    if values is None:
        return [None if value is None else number(name, value)] * count
    if len(values) != count:
        prompts = "1 prompt" if count == 1 else f"{count} prompts"
        raise ValueError(f"{name} has {len(values)} values for {prompts}; give one, or one per prompt")
    return [None if one is None else number(f"{name}[{index}]", one) for index, one in enumerate(values)]
