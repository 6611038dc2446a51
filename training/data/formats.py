"""Records become documents: plain text, JSON lines, prompt and completion, GSM8K, MBPP, ShareGPT, tasks made by rule.

A document is a row of spans, some of which are to be learned and some only read; a record that does not fit
its format is reported with file and line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from jaxspec.io.files import read_json, read_text
from training.data import copy_edit, tasks

SEPARATOR = "<|endoftext|>"
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# Vicuna's form, for a model whose tokenizer brings no chat template of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of a document.

    Attributes:
      text: as it stands.
      learn: whether its tokens are to be predicted; the others are only read.
    """

    text: str
    learn: bool = True


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to learn from, some of whose spans may be read only.

    Attributes:
      spans: laid end to end.
      origin: the text by whose hash it is held out or not: what is made of a held-out story is held out too.
      chat: whether it is a conversation, written by the chat template.
    """

    spans: tuple[Span, ...]
    origin: str
    chat: bool = False

    @property
    def text(self) -> str:
        """The document's whole text."""
        return "".join(span.text for span in self.spans)


class Malformed(ValueError):
    """A record that does not fit its format; the message begins with file and line."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template and its special tokens, by which conversations become text.

    Attributes:
      template: Jinja, as in a tokenizer's `chat_template`.
      bos_token, eos_token: what the template may write.
    """

    template: str = CHAT_TEMPLATE
    bos_token: str = ""
    eos_token: str = "</s>"

    def render(self, messages: list[dict[str, str]], ask: bool) -> str:
        """The text of messages with `role` and `content`; `ask` adds what stands before an answer."""
        return _compiled(self.template).render(
            messages=messages,
            add_generation_prompt=ask,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            raise_exception=_refuse,
        )


def chat_of(directory: Path) -> Chat:
    """Reads the chat template of a model's tokenizer; Vicuna's form where it has none."""
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    template = settings.get("chat_template")
    if (directory / TEMPLATE).is_file():
        template = read_text(directory / TEMPLATE, "a chat template is Jinja")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")

    def token(name: str, usual: str) -> str:
        value = settings.get(name) or usual
        return value["content"] if isinstance(value, dict) else value

    return Chat(template or CHAT_TEMPLATE, token("bos_token", ""), token("eos_token", "</s>"))


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


# A record and the way conversations are written → its documents; raises ValueError where it does not fit.
Convert = Callable[[Mapping[str, Any], Chat], list[Document]]


def plain(text: str) -> list[Document]:
    """Makes one document of a text, all of which is learned; none of an empty text."""
    text = text.strip()
    return [Document((Span(text),), text)] if text else []


def _from_text(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(_string(record, "text"))


def _from_completion(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Only the completion is learned; records of the same `origin`, if it is there, are held out together."""
    del chat
    prompt, completion = _string(record, "prompt"), _string(record, "completion")
    if not completion:
        raise ValueError("`completion` is empty; give the text to be learned")
    origin = _string(record, "origin") if "origin" in record else prompt
    return [Document((Span(prompt, learn=False), Span(completion)), origin)]


def _from_gsm8k(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(gsm8k_prompt(_string(record, "question")) + " " + _string(record, "answer"))


def _from_mbpp(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    code = _string(record, "code").replace("\r\n", "\n").expandtabs(4)
    lines = "\n".join(line.rstrip() for line in code.split("\n"))
    return plain(mbpp_prompt(_string(record, "text")) + lines)


def _from_copy_edit(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    story = _string(record, "text").strip()
    tasks = copy_edit.tasks(story)
    return [Document((Span(task.prompt + " " + task.answer),), story) for task in tasks]


def _from_sharegpt(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Only the answers are learned, with the end that the template gives each."""
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError("no list `conversations`")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or turn.get("from") not in _ROLES:
            raise ValueError(f"a turn is not from {' or '.join(_ROLES)}")
        messages.append({"role": _ROLES[turn["from"]], "content": _string(turn, "value")})
    spans: list[Span] = []
    done = ""
    for count, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        try:
            asked = chat.render(messages[: count - 1], ask=True)
            answered = chat.render(messages[:count], ask=False)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None
        if not answered.startswith(asked) or not asked.startswith(done):
            raise ValueError("the chat template rewrites earlier turns; the answers cannot be separated")
        spans += [Span(asked[len(done) :], learn=False), Span(answered[len(asked) :])]
        done = answered
    return [Document(tuple(spans), done, chat=True)] if spans else []


def gsm8k_prompt(question: str) -> str:
    """Builds the prompt of a GSM8K problem: what stands before its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def mbpp_prompt(task: str) -> str:
    """Builds the prompt of an MBPP task: the task as a comment, before the code."""
    return f"# {' '.join(task.split())}\n"


FORMATS: dict[str, Convert] = {
    "text": _from_text,
    "completion": _from_completion,
    "gsm8k": _from_gsm8k,
    "mbpp": _from_mbpp,
    "sharegpt": _from_sharegpt,
    "copy-edit": _from_copy_edit,
}
# By which keys `auto` knows the format of a record, the most special first.
_KEYS = {
    "completion": ("prompt", "completion"),
    "gsm8k": ("question", "answer"),
    "mbpp": ("text", "code"),
    "sharegpt": ("conversations",),
    "text": ("text",),
}
AUTO = "auto"


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is {'missing' if key not in record else 'not a text'}")
    return value


def recognise(record: Mapping[str, Any]) -> str:
    """The format whose keys a record has.

    Raises:
      ValueError: none's.
    """
    for name, keys in _KEYS.items():
        if all(key in record for key in keys):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _KEYS.items())
    raise ValueError(f"no known keys in ({', '.join(map(str, record))}); expected one of {known}")


def read(
    path: str, form: str, chat: Chat, skip: bool, report: Callable[[str], None] = print
) -> list[Document]:
    """All documents of a file or a Hugging Face data set; empty ones are dropped.

    Args:
      path: text with `<|endoftext|>` between documents, `.jsonl`, a `.json` list, `hf:NAME[:SPLIT]`, or
        `tasks:FAMILY[:COUNT]`, tasks made by rule; see `training.data.tasks`.
      form: one of `FORMATS`, or `auto`: by the keys of each record.
      chat: how conversations become text.
      skip: whether a malformed record is reported and left out instead of ending it all.
      report: where it is reported.

    Raises:
      ValueError: there is nothing to read, or (`Malformed`) a record does not fit.
    """
    if form != AUTO and form not in FORMATS:
        raise ValueError(f"no data format {form!r}; choose one of {', '.join([AUTO, *FORMATS])}")
    documents: list[Document] = []
    skipped = 0
    for place, load in _records(path):
        try:
            record = load()
            documents += FORMATS[recognise(record) if form == AUTO else form](record, chat)
        except ValueError as error:
            said = f"{place}: {error}"
            if not skip:
                raise Malformed(
                    f"{said}; fix the record, or skip such records with --skip-malformed"
                ) from None
            skipped += 1
            report(f"skipped {said}")
    if not documents:
        left = f" ({skipped} malformed records skipped)" if skipped else ""
        raise ValueError(f"no document in {path}{left}; expected text with {SEPARATOR} between documents, "
                         "or records in JSON")  # fmt: skip
    return documents


# Where a record stands, and what parses it.
_Record = tuple[str, Callable[[], Mapping[str, Any]]]


def _records(path: str) -> Iterator[_Record]:
    if path.startswith("hf:"):
        yield from _hugging_face(path)
        return
    if path.startswith(tasks.PREFIX):
        for place, record in tasks.records(path):
            yield place, functools.partial(dict, record)
        return
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); give an existing file") from None
    if file.suffix == ".jsonl":
        # Line by line as bytes: one line that is not UTF-8 is one malformed record.
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield f"{path}:{number}", functools.partial(_parse, line)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    if file.suffix == ".json":
        yield from _json_list(path, text)
        return
    begin = 1
    for part in text.split(SEPARATOR):
        yield f"{path}:{begin}", functools.partial(dict, text=part)
        begin += part.count("\n")


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    return _object(record)


def _object(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object")
    return record


def _json_list(path: str, text: str) -> Iterator[_Record]:
    """The records of a JSON list, each with the line on which it begins."""
    decoder = json.JSONDecoder()
    at = len(text) - len(text.lstrip())
    if text[at : at + 1] != "[":
        raise ValueError(f"{path} is not a JSON list; give one record a line as .jsonl, or a list")
    at, line, counted = at + 1, 1, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if text[at : at + 1] == "]":
            return
        line, counted = line + text.count("\n", counted, at), at
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise Malformed(f"{path}:{error.lineno}: not JSON ({error.msg}); fix the file") from None
        yield f"{path}:{line}", functools.partial(_object, record)


def _hugging_face(path: str) -> Iterator[_Record]:
    """`hf:NAME`, `hf:NAME:SPLIT` (split `train` if not given), or `hf:` and a directory saved to disk."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path} needs the package `datasets`; pip install datasets") from None
    name, _, split = path.removeprefix("hf:").partition(":")
    try:
        saved = Path(name).is_dir() and (Path(name) / "dataset_info.json").is_file()
        found = (
            datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split or "train")
        )
    except Exception as error:  # one line for whatever the hub, the network or the files say
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load {path}: {reason}") from None
    for number, record in enumerate(found):
        yield f"{path} record {number}", functools.partial(_object, record)
