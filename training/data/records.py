"""Reads the records of a file. Its content decides its kind: JSON, as one object per line or one list, or plain text.

A file name is only a hint: a file of records is never learned as one plain text because of its ending.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.io.files import parse_json
from jaxspec.io.messages import shown

SEPARATOR = "<|endoftext|>"
_SEPARATOR_LINE = re.compile(rb"^\s*" + re.escape(SEPARATOR.encode()) + rb"\s*$", re.MULTILINE)
# The place of a record, and the function that parses it.
Record = tuple[str, Callable[[], Mapping[str, Any]]]
# Files with these endings are records, whatever their first lines are.
_RECORDS = (".json", ".jsonl", ".ndjson", ".jsonlines")
_TABLES = (".csv", ".tsv", ".xlsx", ".xls")
# The first bytes of other kinds of files, with the kind and advice.
_UNPACK, _CONVERT = "unpack it first", "write its records as JSON lines"
_BEGINNINGS = {
    b"\x1f\x8b": ("a gzip file", _UNPACK),
    b"PK\x03\x04": ("a zip file", _UNPACK),
    b"BZh": ("a bzip2 file", _UNPACK),
    b"\xfd7zXZ": ("an xz file", _UNPACK),
    b"7z\xbc\xaf": ("a 7z file", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("a Zstandard file", _UNPACK),
    b"PAR1": ("a Parquet file", _CONVERT),
    b"ARROW1": ("an Arrow file", "give its data set as hf:DIRECTORY, or " + _CONVERT),
    b"SQLite format 3": ("an SQLite file", _CONVERT),
    b"%PDF-": ("a PDF file", "give its text"),
    b"GGUF": ("a GGUF file, which is a model", "give a model with --start or --target"),
    b"\xff\xfe": ("text in UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it to UTF-8"),
}
_BYTE_ORDER_MARK = "\ufeff"
_MARK_BYTES = _BYTE_ORDER_MARK.encode()
# The number of lines that decide the kind of a file without a known ending.
_JUDGED = 20


class Malformed(ValueError):
    """A record does not fit its format; the message begins with file and line."""


def of_file(path: str) -> Iterator[Record]:
    """Yields the records of a file; those of plain text have one key, `text`.

    Args:
      path: the file. Its content decides its kind; if the content does not, an ending for JSON, in upper or lower case,
        means records.

    Raises:
      ValueError: there is no such file, or it is neither text nor JSON.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path} is a directory; give a file, or hf:{path} for a data set saved to disk")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); give an existing file") from None
    _refuse_others(path, file.suffix.lower(), content)
    ended = file.suffix.lower() in _RECORDS
    if not ended and not _looks_like_records(content):
        return _of_text(path, content)
    return _of_list(path, content) if _is_list(content) else _of_lines(path, content)


def checked(record: Any) -> Mapping[str, Any]:
    """Returns a record if it is an object.

    Raises:
      ValueError: it is not an object.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object")
    return record


def _refuse_others(path: str, ending: str, content: bytes) -> None:
    for beginning, (name, advice) in _BEGINNINGS.items():
        if content.startswith(beginning):
            raise ValueError(f"{path} is {name}; {advice}")
    if ending in _TABLES:
        raise ValueError(f"{path} is a table; {_CONVERT}, or its text into a .txt file")


def _looks_like_records(content: bytes) -> bool:
    """Whether most of the first lines, or the whole content, are JSON; a separator line means plain text."""
    if _SEPARATOR_LINE.search(content):
        return False
    lines = (part.strip() for line in io.BytesIO(content) for part in line.splitlines())
    first = [line.removeprefix(_MARK_BYTES) for line in itertools.islice(filter(None, lines), _JUDGED)]
    objects = sum(line.startswith(b"{") and _is_json(line) for line in first)
    return 2 * objects > len(first) or (bool(first) and first[0][:1] in (b"{", b"[") and _is_json(content))


def _is_list(content: bytes) -> bool:
    """Whether the content is one JSON list, rather than several lines of which the first is a list."""
    begun = content.removeprefix(_MARK_BYTES).lstrip()
    first, _, rest = begun.partition(b"\n")
    return begun.startswith(b"[") and not (rest.strip() and _is_json(first))


def _is_json(content: bytes) -> bool:
    try:
        _parsed(content)
    except ValueError:
        return False
    return True


def _parsed(content: bytes) -> Any:
    try:
        # JSON allows no byte-order mark, but concatenated files can have one in the middle.
        return parse_json(content.strip().removeprefix(_MARK_BYTES).decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({getattr(error, 'msg', error)})") from None


def _parse(content: bytes) -> Mapping[str, Any]:
    return checked(_parsed(content))


def _of_lines(path: str, content: bytes) -> Iterator[Record]:
    """Yields one record per line. Each is parsed alone as bytes, so invalid UTF-8 affects only its own line.

    If the whole file is a sequence of JSON values, a record may also extend over several lines.
    """
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    if lines and not _is_json(lines[0][1]) and (spread := _spread(path, content)) is not None:
        yield from spread
        return
    for number, line in lines:
        # A carriage return ends a line too, unless it is whitespace within a record.
        parts = [line] if b"\r" not in line.strip() or _is_json(line) else line.split(b"\r")
        for part in parts:
            if part.strip():
                yield f"{path}:{number}", functools.partial(_parse, part)


def _spread(path: str, content: bytes) -> list[Record] | None:
    """Returns the records of a file that is a sequence of JSON values with any line breaks, or None for other files."""
    try:
        text = _as_text(path, content)
        found = [(line, record) for line, record in _values(path, text, 0, " \t\n")]
    except ValueError:
        return None
    return [(f"{path}:{line}", functools.partial(checked, record)) for line, record in found]


def _of_list(path: str, content: bytes) -> Iterator[Record]:
    text = _as_text(path, content)
    for line, record in _values(path, text, text.index("[") + 1, " \t\n,", "]"):
        yield f"{path}:{line}", functools.partial(checked, record)


def _values(path: str, text: str, at: int, between: str, end: str = "") -> Iterator[tuple[int, Any]]:
    """Yields the JSON values in a text from a position on, each with the line on which it begins.

    Args:
      path: the name of the file, for messages.
      text: the content of the file.
      at: the first position at which a value may begin.
      between: the characters that may be between values.
      end: the character after the last value; "" for the end of the text.
    """
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    while True:
        while at < len(text) and text[at] in between:
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        if end and text[at : at + 1] == end and not text[at + 1 :].strip():
            return
        if not end and at == len(text):
            return
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise Malformed(f"{path}:{error.lineno}: not JSON ({error.msg}); fix the file") from None
        except (RecursionError, ValueError):
            raise Malformed(f"{path}:{line}: not JSON ({shown(text[at : at + 20])}); fix the file") from None
        yield line, record


def _of_text(path: str, content: bytes) -> Iterator[Record]:
    begin = 1
    for part in _as_text(path, content).split(SEPARATOR):
        yield f"{path}:{begin}", functools.partial(dict, text=part)
        begin += part.count("\n")


def _as_text(path: str, content: bytes) -> str:
    """Returns the text of a file with line feeds as line ends and without a byte-order mark at the start of a line.

    Raises:
      ValueError: the file is not text in UTF-8.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    if "\0" in text:
        raise ValueError(f"{path} is a binary file; give text in UTF-8 or records in JSON")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removeprefix(_BYTE_ORDER_MARK).replace("\n" + _BYTE_ORDER_MARK, "\n")
