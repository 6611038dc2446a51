"""Converts records to documents: text, prompt and completion, GSM8K, MBPP, messages, instructions.

A document is a sequence of spans. Some spans are learned; the others are context only.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Container, Mapping
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.tokenizers.chat import text_of
from training.data.conversations import Chat

# Chat templates expect these roles. Published data uses these speaker names, in lower case.
_NAMES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bard", "bing", "claude", "model", "bot", "ai", "chatbot"),
    "system": ("system", "developer"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
# Speakers of tool calls, which are refused because chat templates write them in different ways.
_TOOLS = ("tool", "function", "ipython", "observation", "function_call", "function_response", "tool_call")
# The keys that hold the turns of a record: OpenAI and TRL, ShareGPT, LMSYS-Chat-1M.
_TURNS = ("messages", "conversations", "conversation")


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of a document.

    Attributes:
      text: the text, unchanged.
      learn: whether its tokens are predicted; otherwise they are context only.
    """

    text: str
    learn: bool = True


@dataclasses.dataclass(frozen=True)
class Document:
    """A training text.

    Attributes:
      spans: its spans, in order and without separators.
      origin: the text whose hash decides whether the document is held out. Documents made from one source share it.
      chat: whether it is a conversation, written by the chat template.
    """

    spans: tuple[Span, ...]
    origin: str
    chat: bool = False

    @property
    def text(self) -> str:
        """The whole text of the document."""
        return "".join(span.text for span in self.spans)


# Converts a record to documents, with a chat template for conversations; ValueError if the record does not fit.
Convert = Callable[[Mapping[str, Any], Chat], list[Document]]


def plain(text: str) -> list[Document]:
    """Makes one document of a text, all of it learned; none of an empty text."""
    text = text.strip()
    return [Document((Span(text),), text)] if text else []


def _from_text(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(_string(record, "text"))


def _from_completion(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Converts a prompt and its completion, which may be texts or lists of messages. Only the completion is learned.

    Records with the same `origin` are held out together. If `ended` is false, the completion was cut off, so the end
    of text after it is not learned.
    """
    if any(isinstance(record.get(name), list) for name in ("prompt", "completion")):
        return _from_completed_messages(record, chat)
    prompt, completion = _string(record, "prompt"), _string(record, "completion")
    if not completion:
        raise ValueError("`completion` is empty; give the text to be learned")
    ended = _given(record, "ended", True)
    if not isinstance(ended, bool):
        raise ValueError(f"`ended` is {shown(ended)}, not true or false")
    cut = () if ended else (Span("", learn=False),)
    return [Document((Span(prompt, learn=False), Span(completion), *cut), _origin(record, prompt))]


def _from_completed_messages(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    prompt, completion = record.get("prompt"), record.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        there = ["a list" if isinstance(one, list) else "a text" for one in (prompt, completion)]
        raise ValueError(
            f"`prompt` is {there[0]} and `completion` {there[1]}; give two texts or two lists of messages"
        )
    turns = [*_messages(prompt), *_messages(completion)]
    if not any(turn["role"] == "assistant" for turn in turns[len(prompt) :]):
        raise ValueError("`completion` has no turn of the assistant")
    documents = _conversation(turns, chat, learned=range(len(prompt), len(turns)))
    return _held_out_by(documents, _origin(record, documents[0].spans[0].text))


def _from_gsm8k(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(gsm8k_prompt(_string(record, "question")) + " " + _string(record, "answer"))


def _from_mbpp(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(mbpp_prompt(_string(record, "text")) + _code(record))


def _code(record: Mapping[str, Any]) -> str:
    code = _string(record, "code").replace("\r\n", "\n").expandtabs(4)
    return "\n".join(line.rstrip() for line in code.split("\n"))


def _from_messages(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Converts turns with `role` and `content` (OpenAI, TRL), `from` and `value` (ShareGPT), or a mixture of both."""
    name = next((name for name in _TURNS if record.get(name) is not None), _TURNS[0])
    given = record.get(name)
    if not isinstance(given, list) or not given:
        raise ValueError(f"no list `{name}`" if not given else f"`{name}` is not a list of turns")
    messages = _messages(given)
    # An answer of weight 0 is not learned, as in OpenAI's fine-tuning format.
    learned = [number for number, turn in enumerate(given) if turn.get("weight") != 0]
    if messages[0]["role"] != "system" and _given(record, "system", ""):
        messages = [{"role": "system", "content": _string(record, "system")}, *messages]
        learned = [number + 1 for number in learned]
    documents = _conversation(messages, chat, learned)
    return _held_out_by(documents, _origin(record, documents[0].origin)) if documents else []


def _messages(turns: list[Any]) -> list[dict[str, str]]:
    """Converts turns to a chat template's messages: `role` (user, assistant or system) and `content`."""
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ValueError(f"a turn is {shown(turn)}, expected an object")
        name = turn.get("role", turn.get("from"))
        known = name.lower() if isinstance(name, str) else name
        if known in _TOOLS or turn.get("tool_calls") or turn.get("function_call"):
            raise ValueError(f"a turn of {shown(name)} belongs to tool calls, which are not learned")
        if not isinstance(known, str) or known not in _ROLES:
            raise ValueError(f"a turn is not from user, assistant or system, but from {shown(name)}")
        key = "content" if "content" in turn or "value" not in turn else "value"
        try:
            content = text_of(turn.get(key))
        except ValueError as error:
            raise ValueError(f"`{key}` {error}") from None
        messages.append(
            {"role": _ROLES[known], "content": _string({**turn, key: content} if key in turn else turn, key)}
        )
    return messages


def _from_chat(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Converts a question and its answer, under any of the known keys, or each case of an instruction.

    All cases are held out together, with the records of the same `origin` if there is one.
    """
    if any(record.get(name) is not None for name in _TURNS):
        return _from_messages(record, chat)
    if any(isinstance(record.get(name), list) for name in ("prompt", "completion")):
        return _from_completed_messages(record, chat)
    pairs: list[tuple[str, str]] = []
    if "instruction" in record:
        cases = _given(record, "instances", [record])
        if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
            raise ValueError("`instances` is not a list of objects")
        pairs = [_case(_string(record, "instruction"), case) for case in cases]
    elif "code" in record:
        pairs.append((_string(record, "text"), _code(record)))
    else:
        names = ("prompt", "completion") if "completion" in record else ("question", "answer")
        asked, answered = (_string(record, name) for name in names)
        pairs.append((asked, answered))
    roles = ("user", "assistant")
    system = _string(record, "system") if _given(record, "system", "") else ""
    begin = [{"role": "system", "content": system}] if system else []
    documents = [
        document
        for pair in pairs
        for document in _conversation(
            begin + [{"role": role, "content": text.strip()} for role, text in zip(roles, pair, strict=True)],
            chat,
        )
    ]
    return _held_out_by(documents, _origin(record, documents[0].origin)) if documents else []


def _case(instruction: str, case: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the question and answer of an instruction, from Alpaca's `input` and `output` or Dolly's keys."""
    more = next((name for name in ("input", "context") if _given(case, name, "")), None)
    answer = "response" if "output" not in case and "response" in case else "output"
    given = instruction if more is None else f"{instruction}\n\n{_string(case, more)}"
    return (given if instruction else given.lstrip("\n")), _string(case, answer)


def _held_out_by(documents: list[Document], origin: str) -> list[Document]:
    return [dataclasses.replace(document, origin=origin) for document in documents]


def _origin(record: Mapping[str, Any], usual: str) -> str:
    return _string(record, "origin") if _given(record, "origin", "") else usual


def _given(record: Mapping[str, Any], key: str, usual: Any) -> Any:
    """Returns the value of an optional key; null counts as absent, because tables store absent values as null."""
    value = record.get(key)
    return usual if value is None else value


def _conversation(
    messages: list[dict[str, str]], chat: Chat, learned: Container[int] | None = None
) -> list[Document]:
    """Makes documents of a conversation. They learn the answers in `learned`, each with its end-of-turn text."""
    pieces = itertools.groupby(chat.pieces(messages, learned), key=operator.itemgetter(1))
    spans = tuple(Span("".join(text for text, _ in group), learn) for learn, group in pieces)
    if not any(span.learn for span in spans):
        return []
    return [Document(spans, "".join(span.text for span in spans), chat=True)]


def gsm8k_prompt(question: str) -> str:
    """Builds the prompt of a GSM8K problem: the text before its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def mbpp_prompt(task: str) -> str:
    """Builds the prompt of an MBPP task: the task as a comment, before the code."""
    return f"# {' '.join(task.split())}\n"


FORMATS: dict[str, Convert] = {
    "text": _from_text,
    "completion": _from_completion,
    "gsm8k": _from_gsm8k,
    "mbpp": _from_mbpp,
    "messages": _from_messages,
    "sharegpt": _from_messages,
    "chat": _from_chat,
}
# `auto` recognises the format of a record by these keys; the most specific come first.
_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("completion", ("prompt", "completion")),
    *(("messages", (name,)) for name in _TURNS),
    ("gsm8k", ("question", "answer")),
    ("mbpp", ("text", "code")),
    ("chat", ("instruction",)),
    ("text", ("text",)),
)
AUTO = "auto"


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        found = "not a text" if value is not None else "null" if key in record else "missing"
        raise ValueError(f"`{key}` is {found}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{key}` holds half of a surrogate pair, which is no character") from None
    return value


def recognise(record: Mapping[str, Any]) -> str:
    """Returns the format whose keys a record has; keys with null values are tried last.

    Raises:
      ValueError: the record has the keys of no format.
    """
    given = {key for key, value in record.items() if value is not None}
    for present in (given, record):
        for name, keys in _KEYS:
            if all(key in present for key in keys):
                return name
    known = "; ".join(", ".join(keys) for _, keys in _KEYS)
    found = ", ".join(str(key)[:20] for key in list(record)[:6])
    raise ValueError(f"no known keys in ({found}); expected one of {known}")
