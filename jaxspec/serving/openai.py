"""Reads requests of OpenAI's API for completions and chat completions, and builds its responses.

The names of further fields (`top_k`, `min_tokens`, `ignore_eos`, …) and of `metrics` are those of vLLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxspec.grammar import Grammar
from jaxspec.host.arguments import flag, listed, whole
from jaxspec.host.messages import fitted, nearest, shown
from jaxspec.requests.reading import check_text
from jaxspec.requests.text import TokenText
from jaxspec.serving.tools import Call
from jaxspec.verification import MOST_TOP

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Token budgets of requests without `max_tokens`: OpenAI's for completions, that of `jaxspec chat` for chats.
_BUDGETS = {COMPLETIONS: 16, CHAT: 512}
_MAX_STOPS, _MAX_COPIES = 16, 128
# Numbers and flags that have the same name and meaning as options of `LanguageModel.generate`.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos", "acceptor", "exact"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
# The grammars by the words of `structured_outputs` of vLLM, and the fields with a grammar.
_WORDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda value: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choices,
}
_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "json_schema",
)
_SHARED = (
    *(*_SAME, "model", "method", "stop", "stop_token_ids", "max_tokens", "min_tokens", "logit_bias"),
    *("stream", "stream_options", "logprobs", *_GRAMMARS),
    # These do not change a text here.
    *("user", "metadata", "store", "reasoning_effort", "verbosity", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prediction", "request_id", "priority", "cache_prompt"),
)
_FIELDS = {
    COMPLETIONS: (*_SHARED, "prompt", "echo"),
    CHAT: (
        *(*_SHARED, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
        *("tools", "tool_choice", "parallel_tool_calls"),
    ),
}
# The fields of each object within a request, by its place. A chat template gets all of a function.
_NESTED: dict[str, tuple[str, ...]] = {
    "response_format of the type text": ("type",),
    "response_format of the type json_object": ("type", "schema"),  # as llama.cpp takes it
    "response_format of the type json_schema": ("type", "json_schema"),
    "response_format.json_schema": ("schema", "name", "description", "strict"),
    "structured_outputs": tuple(_WORDS),
    "stream_options": ("include_usage",),
    "tools": ("type", "function"),
    # transformers makes `return` of a function's annotations, and templates print it.
    "tools.function": ("name", "description", "parameters", "strict", "return"),
    "tool_choice": ("type", "function"),
    "tool_choice.function": ("name",),
}
# The values of fields, for messages.
_WANTED = {
    "chat_template_kwargs": "a JSON object",
    "messages": "a list of messages with `role` and `content`",
    "method": "a name, or an object with `name` and the method's options",
    "model": "a name",
    "n": f"a number from 1 to {_MAX_COPIES}",
    "prompt": "a text, token ids, or a list of texts or of lists of token ids",
    "response_format": "an object with the type text, json_object or json_schema, the last with "
    '{"json_schema": {"name": "answer", "schema": {…}}}',
    "seed": f"a number from {-(2**63)} to {2**64 - 1}",
    "stream_options": "an object with include_usage",
    "structured_outputs": f"an object with one of {', '.join(_WORDS)}",
    "tool_choice": "auto, none, required, or one of the tools such as "
    '{"type": "function", "function": {"name": "now"}}',
    "tools": "a list of functions such as "
    '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}',
}
# Fields of the API that are not supported, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "structured_outputs.disable_fallback": (False,),
    "structured_outputs.disable_any_whitespace": (False,),
    "structured_outputs.disable_additional_properties": (False,),
    "stream_options.include_obfuscation": (True, False),
    "stream_options.continuous_usage_stats": (False,),
    "tools.cache_control": ({"type": "ephemeral"},),
}
_PYTHON = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "prompts": "prompt"}
# The API's names of `Result.finish_reason`.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "error": "error"}
# JSON has no infinity; the number is vLLM's.
_MIN_LOG_PROB = -9999.0


class BadField(ValueError):
    """A field of a request is unknown, not supported, or has a wrong value.

    Attributes:
      param: the name of the field; None if the body as a whole is wrong.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(fitted(message))
        # A name of the request may be long, or have characters that UTF-8 has not.
        self.param = None if param is None else fitted(param)


@dataclasses.dataclass(frozen=True)
class ApiRequest:
    """A request of the API.

    Attributes:
      url: `COMPLETIONS` or `CHAT`.
      model: the name of the model; None if not given.
      prompts: texts or token ids, of a completion; () for a chat.
      messages: the conversation of a chat.
      options: those keyword arguments of `LanguageModel.generate` that are given, without `n`.
      method, method_options: the method's name and options; None if not given.
      n: the number of texts per prompt.
      stream: whether the response is a stream of chunks.
      include_usage: whether the stream ends with a chunk that has the usage.
      tools: the tools of a chat, in OpenAI's form.
      functions: the name of each function whose calls follow the schema of its arguments, and the schema as JSON text.
      must_call: whether the answer must call one of them.
      most_calls: the most calls of an answer; None for no limit.
      grammar: the grammar of the text, and the field that gives it; None for none.
      echo: whether each text begins with its prompt.
      logprobs: whether the response has log-probabilities.
    """

    url: str
    model: str | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None
    method_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    functions: tuple[tuple[str, str], ...] = ()
    must_call: bool = False
    most_calls: int | None = None
    grammar: tuple[Grammar, str] | None = None

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat completion."""
        return self.url == CHAT

    @property
    def only_echo(self) -> bool:
        """Whether the choices are the prompts: with `echo`, `max_tokens` may be 0."""
        return self.echo and self.options.get("max_new_tokens") == 0

    @property
    def default_budget(self) -> int:
        """The token budget if `options` has no `max_new_tokens`; the context may leave less."""
        return _BUDGETS[self.url]


def request_of(url: str, body: Any) -> ApiRequest:
    """Returns the request in a body.

    Beside OpenAI's fields there are those of vLLM, and `method`: a name, or an object with `name` and the options of
    the method. A field that is null counts as absent.

    Args:
      url: `/v1/completions` or `/v1/chat/completions`.
      body: the value of the JSON body.

    Raises:
      BadField: a field is unknown, not supported, missing, or has a value of a wrong type. Numbers are checked by
        `LanguageModel.generate`.

    Examples:
      >>> method = {"name": "ngram", "ngram_max": 3}
      >>> request = request_of("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "method": method})
      >>> request.prompts, request.options, request.method, request.method_options
      (['Hi'], {'max_new_tokens': 4}, 'ngram', {'ngram_max': 3})
    """
    if not isinstance(url, str) or url not in _FIELDS:
        raise BadField(f"the url is {shown(url)}; give {COMPLETIONS} or {CHAT}", "url")
    if not isinstance(body, Mapping):
        raise BadField(f"the body is {shown(body)}; give a JSON object")
    _check_names(body, _FIELDS[url])
    given = {name: value for name, value in body.items() if value is not None}
    for name in _SAME:
        if listed(given.get(name)) is not None or isinstance(given.get(name), Mapping):
            raise BadField(f"{name} is {shown(given[name])}; give one value", name)
    chat = url == CHAT
    options = {name: given[name] for name in (*_SAME, "logit_bias") if name in given and name != "n"}
    if options.get("top_k") == -1:  # vLLM's value for all tokens
        options["top_k"] = 0
    if "seed" in given:
        options["seed"] = _seed(given["seed"])
    echo = _checked("echo", flag, given.get("echo", False))
    options |= _budget(given) | _stops(given) | _log_probs(given, chat, echo)
    if options.get("max_new_tokens") == 0 and not chat and not echo:
        raise BadField("max_tokens is 0; give at least 1, or echo: true for the prompt alone", "max_tokens")
    method, method_options = _method(given.get("method"))
    if "chat_template_kwargs" in given:
        options["chat_template_kwargs"] = _typed(given, "chat_template_kwargs", Mapping)
    copies = _checked("n", whole, given.get("n", 1))
    if not 1 <= copies <= _MAX_COPIES:
        raise _wrong("n", copies)
    stream = _checked("stream", flag, given.get("stream", False))
    return ApiRequest(
        url,
        _typed(given, "model", str),
        () if chat else _prompts(given.get("prompt")),
        _messages(given.get("messages")) if chat else (),
        options,
        method,
        method_options,
        copies,
        stream,
        _include_usage(given.get("stream_options"), stream),
        echo,
        "logprobs" in options,
        **_constraints(given),
    )


def _check_names(given: Mapping[str, Any], known: Collection[str], place: str = "") -> None:
    """Refuses fields without an effect, by name: of a request, or of the object at a place within it."""
    for name, value in given.items():
        path = f"{place}.{name}" if place else name
        if name in known or (place and value is None):
            continue
        if path not in _UNSUPPORTED:
            near = nearest(name, [*known, *(own for own, api in _PYTHON.items() if api in known)])
            meant = f"; perhaps you meant {_PYTHON.get(near, near)}" if near else ""
            if place:
                meant = f" of {place}; give {', '.join(known)}"
            raise BadField(f"unknown field {shown(name)}{meant}", _field_of(place) if place else name)
        if value is not None and value not in _UNSUPPORTED[path]:
            raise BadField(f"{path} is not supported; leave it out", _field_of(path))


def _object(place: str, given: Any) -> dict[str, Any]:
    """Returns the fields of the object at a place within a request that are not null."""
    if not isinstance(given, Mapping):
        raise _wrong(place, given)
    _check_names(given, _NESTED[place], place)
    return {name: value for name, value in given.items() if value is not None and name in _NESTED[place]}


def _wrong(place: str, value: Any) -> BadField:
    """Returns the error of a value at a place within a request."""
    field, said = _field_of(place), "null or missing" if value is None else shown(value)
    return BadField(f"{place} is {said}; give {_WANTED[field]}", field)


def _field_of(place: str) -> str:
    return re.split(r"[. ]", place, maxsplit=1)[0]


def _checked(name: str, check: Callable[[str, Any], Any], value: Any, field: str | None = None) -> Any:
    try:
        return check(name, value)
    except ValueError as error:
        raise BadField(str(error), field or name) from None


def _typed(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value)
    return value


def _prompts(given: Any) -> list[str | list[int]]:
    def is_prompt(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and all(type(one) is int for one in value))

    prompts = [given] if given != [] and is_prompt(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise _wrong("prompt", given)
    for one in prompts:
        if not is_prompt(one):
            raise BadField(f"prompt has {shown(one)}; give {_WANTED['prompt']}", "prompt")
    return prompts


def _messages(given: Any) -> list[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given) or not given:
        raise _wrong("messages", given)
    return given


def _constraints(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ApiRequest` for tools and grammars."""
    grammar = _grammar(given)
    tools, functions, must_call = _tools(given)
    follows = grammar or must_call or any(function.get("strict") is True for function in functions)
    schemas = [(one["name"], json.dumps(one.get("parameters") or {"type": "object"})) for one in functions]
    parallel = _checked("parallel_tool_calls", flag, given.get("parallel_tool_calls", True))
    return {
        "tools": tools,
        "functions": tuple(schemas) if follows else (),
        "must_call": must_call,
        "most_calls": None if parallel and not isinstance(given.get("tool_choice"), Mapping) else 1,
        "grammar": grammar,
    }


def _grammar(given: Mapping[str, Any]) -> tuple[Grammar, str] | None:
    """Returns the grammar of a text, and the field that gives it; None for none."""
    found = []
    for name in _GRAMMARS:
        word, value = name.removeprefix("guided_").removesuffix("_schema"), given.get(name)
        if name == "response_format" and value is not None:
            word, value = _response_format(value)
        elif name == "structured_outputs" and value is not None:
            own = _object(name, value)
            if len(own) != 1:
                raise _wrong(name, value)
            ((word, value),) = own.items()
        if value is not None and (word, value) != ("json_object", False):
            try:
                found.append((_WORDS[word](value), name))
            except ValueError as error:
                raise BadField(str(error), name) from None
    if len(found) > 1:
        raise BadField(f"got both {found[0][1]} and {found[1][1]}; give one of them", found[1][1])
    return found[0] if found else None


def _response_format(given: Any) -> tuple[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    place = f"response_format of the type {kind}"
    if place not in _NESTED:
        raise _wrong("response_format", given)
    fields = _object(place, given)
    if kind == "json_schema":
        fields = _object("response_format.json_schema", fields.get("json_schema"))
        _checked("strict", flag, fields.get("strict", False), "response_format")
    schema = fields.get("schema", {"text": False, "json_object": True}.get(str(kind)))
    if not isinstance(schema, (Mapping, bool)):
        raise _wrong("response_format", given)
    return ("json" if "schema" in fields else "json_object"), schema


def _tools(given: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]], bool]:
    """Returns the tools that the model gets, the functions that it may call, and whether it must call one."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise _wrong("tools", tools)
    functions: list[Any] = []
    for tool in tools:
        own = _object("tools", tool)
        function = _object("tools.function", own.get("function"))
        name, parameters = function.get("name"), function.get("parameters") or {}
        is_named = isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII)
        if not is_named or own.get("type", "function") != "function":
            raise _wrong("tools", tools)
        if not isinstance(parameters, Mapping):
            raise BadField(f"parameters of {name} is {shown(parameters)}; give a JSON schema", "tools")
        _checked("strict of a function", flag, function.get("strict") or False, "tools")
        functions.append(function)
    _checked("tools", check_text, json.dumps(tools, ensure_ascii=False))
    if choice == "none":
        return (), (), False
    if choice == "auto":
        return tools, functions, False
    if choice != "required":
        own = _object("tool_choice", choice)
        name = _object("tool_choice.function", own.get("function")).get("name")
        is_one = own.get("type", "function") == "function"
        functions = [one for one in functions if is_one and one["name"] == name]
    if not functions:
        raise _wrong("tool_choice", choice)
    return tools, functions, True


def _budget(given: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    found: dict[str, int] = {}
    for ours, name in (*(("max_new_tokens", name) for name in names), ("min_new_tokens", "min_tokens")):
        if name in given:
            number = _checked(name, whole, given[name])
            if found.setdefault(ours, number) != number:
                raise BadField(
                    f"max_tokens is {number} and max_completion_tokens is {found[ours]}; give one of them",
                    name,
                )
    return found


def _seed(given: Any) -> int:
    """Returns the seed of `LanguageModel.generate`, of 32 bits, for a seed of the API, of 64 bits with or without sign.

    Seeds of 32 bits stay, others are hashed.
    """
    seed: int = _checked("seed", whole, given)
    if not -(2**63) <= seed < 2**64:
        raise _wrong("seed", seed)
    if 0 <= seed < 2**32:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4])


def _stops(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: given[name] for name in ("stop", "stop_token_ids") if name in given}
    for name, value in found.items():
        if len(listed(value) or ()) > _MAX_STOPS:
            raise BadField(f"{name} has {len(value)} values; give at most {_MAX_STOPS}", name)
    return found


def _method(method: Any) -> tuple[str | None, dict[str, Any]]:
    if method is None or isinstance(method, str):
        return method, {}
    if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
        raise _wrong("method", method)
    return method["name"], {name: value for name, value in method.items() if name != "name"}


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    own = _object("stream_options", options)
    if not stream:
        raise BadField("stream_options needs stream: true", "stream_options")
    return bool(_checked("stream_options", flag, own.get("include_usage", False)))


def _log_probs(given: Mapping[str, Any], chat: bool, echo: bool) -> dict[str, Any]:
    """Returns the options of log-probabilities, if they are requested."""
    name = "top_logprobs" if chat else "logprobs"
    requested = _checked("logprobs", flag, given.get("logprobs", False)) if chat else name in given
    if name in given and not requested:
        raise BadField("top_logprobs needs logprobs: true", name)
    count = _checked(name, whole, given.get(name, 0))
    most = 1 if echo else MOST_TOP
    if not 0 <= count <= most:
        why = "; with echo, only the likeliest token is reported" if echo else ""
        raise BadField(f"{name} is {count}{why}; give a number from 0 to {most}", name)
    return {"logprobs": True, "top_logprobs": count} if requested else {}


def bad_field(error: ValueError, request: ApiRequest) -> BadField:
    """Returns an error of `LanguageModel.generate` with the names of the API, and the field that it names.

    Examples:
      >>> found = bad_field(ValueError("max_new_tokens is 0; give at least 1"), ApiRequest(COMPLETIONS))
      >>> str(found), found.param
      ('max_tokens is 0; give at least 1', 'max_tokens')
    """
    message = str(error)
    for ours, theirs in _PYTHON.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    first = re.match(r"(?:unknown |the )?(\w+)", message)
    named: str | None = first[1] if first else None
    if named in ("prompt", "conversation", "token") or "of the prompt" in message:
        named = "messages" if request.is_chat else "prompt"
    elif named not in _FIELDS[request.url]:
        named = "method" if request.method is not None and named in request.method_options else None
    return BadField(message, named)


def error_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the body of an error.

    Examples:
      >>> error_of("n is 0; give at least 1", "invalid_request_error", "n")["error"]["param"]
      'n'
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Part:
    """New text of one choice.

    Attributes:
      index: the index of the choice.
      text: the text.
      tokens: the log-probability of each token; () if they were not requested.
      finish_reason: None before the end.
      reasoning: text before the answer of a chat.
      calls: calls of tools.
    """

    index: int
    text: str = ""
    tokens: Sequence[TokenText] = ()
    finish_reason: str | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()


def joined(parts: Iterable[Part]) -> Part:
    """Returns the whole text of one choice from its parts, in order; at least one.

    Examples:
      >>> joined([Part(0, "a"), Part(0, "b", finish_reason="stop")])
      Part(index=0, text='ab', tokens=[], finish_reason='stop', reasoning='', calls=[])
    """
    given = list(parts)
    return Part(
        given[0].index,
        "".join(part.text for part in given),
        [token for part in given for token in part.tokens],
        given[-1].finish_reason,
        "".join(part.reasoning for part in given),
        [call for part in given for call in part.calls],
    )


def scored(tokens: Iterable[TokenText], offset: int) -> list[TokenText]:
    """Returns tokens with their offsets; `offset`: the number of characters of the choice before the first.

    Examples:
      >>> [token.offset for token in scored([TokenText("ab", -1.0), TokenText("c", -2.0)], 3)]
      [3, 5]
    """
    found = []
    for token in tokens:
        found.append(token._replace(offset=offset))
        offset += len(token.text)
    return found


def usage_of(num_prompt_tokens: int, num_tokens: int, num_reused_tokens: int = 0) -> dict[str, Any]:
    """Returns the usage of a request: tokens of its prompts, of its texts, and prompt tokens that were not fed again.

    Examples:
      >>> usage_of(3, 4)["total_tokens"]
      7
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_reused_tokens},
    }


@dataclasses.dataclass(frozen=True)
class Responses:
    """Builds the bodies of the responses to one request.

    Attributes:
      request: the request.
      id: the id of the response, without its prefix.
      created: seconds since 1970.
      model: the name of the model.

    Examples:
      >>> made = Responses(ApiRequest(COMPLETIONS), "1", 0, "tiny")
      >>> made.whole([Part(0, "Hi", finish_reason="stop")], usage_of(1, 1))["choices"]
      [{'index': 0, 'text': 'Hi', 'logprobs': None, 'finish_reason': 'stop'}]
    """

    request: ApiRequest
    id: str
    created: int
    model: str

    def whole(
        self, parts: Sequence[Part], usage: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the response: the choices in order, the usage and vLLM's `metrics`."""
        choices = []
        for part in parts:
            content: dict[str, Any] = {"text": part.text}
            if self.request.is_chat:
                content = {"message": {"role": "assistant", "content": part.text, "refusal": None}}
                content["message"] |= self._further(part)
                if part.calls and not part.text:
                    content["message"]["content"] = None
            choices.append(self._choice(part, content))
        return self._head(False) | {"choices": choices, "usage": usage, "metrics": metrics}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks before any text: those with the role of each answer of a chat."""
        if not self.request.is_chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(Part(index), delta)) for index in range(self.request.n)]

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """Returns the chunks of new text; the one with the finish reason is the last of its choice."""
        if not self.request.is_chat:
            return [self._chunk(self._choice(part, {"text": part.text}))]
        found = []
        if part.text or part.tokens or part.reasoning or part.calls:
            text = dataclasses.replace(part, finish_reason=None)
            delta = {"content": part.text} if part.text or not (part.reasoning or part.calls) else {}
            found.append(self._chunk(self._choice(text, {"delta": delta | self._further(part, True)})))
        if part.finish_reason is not None:
            end = Part(part.index, finish_reason=part.finish_reason)
            found.append(self._chunk(self._choice(end, {"delta": {}})))
        return found

    def _further(self, part: Part, is_chunk: bool = False) -> dict[str, Any]:
        """Returns the reasoning and the calls of a message, those that there are."""
        calls = []
        for call in part.calls:
            # Mistral's templates take ids of nine letters and digits only.
            id = hashlib.sha256(f"{self.id} {part.index} {call.index}".encode()).hexdigest()[:9]
            function = {"name": call.name, "arguments": call.arguments}
            made = {"id": id, "type": "function", "function": function}
            calls.append({"index": call.index} | made if is_chunk else made)
        return {
            **({"reasoning_content": part.reasoning} if part.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def last_chunks(
        self, usage: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Returns the chunk after all text, with the usage, if it was requested."""
        if not self.request.include_usage:
            return []
        return [self._head(True) | {"choices": [], "usage": usage, "metrics": metrics}]

    def _head(self, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.request.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        prefix = "chatcmpl" if self.request.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.request.include_usage else {}
        return self._head(True) | {"choices": [choice]} | usage

    def _choice(self, part: Part, content: dict[str, Any]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self.request.logprobs and part.tokens:
            logprobs = self._chat_log_probs(part) if self.request.is_chat else self._log_probs(part)
        return {"index": part.index, **content, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def _log_probs(self, part: Part) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in part.tokens],
            "token_logprobs": [_finite(token.log_prob) for token in part.tokens],
            "top_logprobs": list(map(_top, part.tokens)),
            "text_offset": [token.offset for token in part.tokens],
        }

    def _chat_log_probs(self, part: Part) -> dict[str, Any]:
        def shown(token: TokenText) -> dict[str, Any]:
            return {"token": token.text, "logprob": _finite(token.log_prob), "bytes": list(token.raw)}

        content = [shown(token) | {"top_logprobs": list(map(shown, token.top))} for token in part.tokens]
        return {"content": content, "refusal": None}


def _top(token: TokenText) -> dict[str, float | None] | None:
    """Returns the token itself and the likeliest ones; None for the first token of a prompt."""
    if token.log_prob is None:
        return None
    found = {token.text: _finite(token.log_prob)}
    for text, number, *_ in token.top:
        # A token that completes a character may have the text of another one.
        other = text in found and _finite(number) != found[text]
        found[f"{text} (another token)" if other else text] = _finite(number)
    return found


def _finite(number: float | None) -> float | None:
    return None if number is None else max(number, _MIN_LOG_PROB)
