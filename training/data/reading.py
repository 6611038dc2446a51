"""Data sources become documents: files, Hugging Face data sets, and tasks made by rule.

A record that does not fit its format is reported with its file and line.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.data import tasks
from training.data.conversations import Chat
from training.data.formats import AUTO, FORMATS, Document, recognise

SEPARATOR = "<|endoftext|>"


class Malformed(ValueError):
    """A record that does not fit its format; the message begins with file and line."""


# Where a record stands, and what parses it.
_Record = tuple[str, Callable[[], Mapping[str, Any]]]


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
