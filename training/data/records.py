"""Reads the records of a file. The content decides the file type: JSON lines, one JSON list, Parquet, or plain text.

The ending of the file name is only a hint: a file of records is never learned as plain text because of its ending.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxspec.console.errors import one_line
from jaxspec.host.files import ending, opened, parse_json
from jaxspec.host.messages import shown

SEPARATOR = "<|endoftext|>"
_SEPARATOR_LINE = re.compile(rb"^\s*" + re.escape(SEPARATOR.encode()) + rb"\s*$", re.MULTILINE)
# The place of a record, and a function that parses it.
Record = tuple[str, Callable[[], Mapping[str, Any]]]
# The bytes of a file.
Content = bytes | mmap.mmap
# Files with these endings are records, whatever their first lines contain.
_RECORDS = (".json", ".jsonl", ".ndjson", ".jsonlines")
_TABLES = (".csv", ".tsv", ".xlsx", ".xls")
# The first bytes of other file types, with a name and advice.
_UNPACK, _CONVERT = "unpack it first", "write its records as JSON lines"
_BEGINNINGS = {
    b"PK\x03\x04": ("a zip file", _UNPACK),
    b"BZh": ("a bzip2 file", _UNPACK),
    b"\xfd7zXZ": ("an xz file", _UNPACK),
    b"7z\xbc\xaf": ("a 7z file", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("a Zstandard file", _UNPACK),
    b"ARROW1": ("an Arrow file", "give its data set as hf:DIRECTORY, or " + _CONVERT),
    b"SQLite format 3": ("an SQLite file", _CONVERT),
    b"%PDF-": ("a PDF file", "give its text"),
    b"GGUF": ("a GGUF file, which is a model", "give a model with --start or --target"),
    b"\xff\xfe": ("text in UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it to UTF-8"),
}
_BYTE_ORDER_MARK = "\ufeff"
_MARK_BYTES = _BYTE_ORDER_MARK.encode()
_LIST = re.compile(rb"(?:" + _MARK_BYTES + rb")?\s*\[")
_PARQUET = b"PAR1"
# The number of lines that decide the type of a file without a known ending.
_JUDGED = 20


class Malformed(ValueError):
    """A record does not fit its format; the message begins with the file and line."""


def of_file(path: str) -> Iterator[Record]:
    """Yields the records of a file; the records of plain text have one key, `text`.

    Args:
      path: the file. Its content decides its type. If the content is ambiguous, an ending for JSON, in upper or lower
        case, means records.

    Raises:
      ValueError: the file does not exist, or is neither text nor JSON.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path} is a directory; give a file, or hf:{path} for the files of a data set")
    try:
        with opened(file) as stream:
            content = _content(stream)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); give an existing file") from None
    if content[:4] == _PARQUET:
        return _of_parquet(path)
    _refuse_others(path, ending(file), content)
    ended = ending(file) in _RECORDS
    if not ended and not _looks_like_records(content):
        return _of_text(path, content)
    return _of_list(path, bytes(content)) if _is_list(content) else _of_lines(path, content)


def _content(stream: IO[bytes]) -> Content:
    """Maps a file, so that memory holds only the record that is being read; reads what is in memory, or empty."""
    try:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return stream.read()


def checked(record: Any) -> Mapping[str, Any]:
    """Returns a record if it is an object.

    Raises:
      ValueError: it is not an object.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object")
    return record


def _refuse_others(path: str, ending: str, content: Content) -> None:
    for beginning, (name, advice) in _BEGINNINGS.items():
        if content[: len(beginning)] == beginning:
            raise ValueError(f"{path} is {name}; {advice}")
    if ending in _TABLES:
        raise ValueError(f"{path} is a table; {_CONVERT}, or its text into a .txt file")


def _looks_like_records(content: Content) -> bool:
    """Whether most of the first lines, or the whole content, are JSON; a separator line means plain text."""
    if _SEPARATOR_LINE.search(content):
        return False
    lines = (part.strip() for line in _lines(content) for part in line.splitlines())
    first = [line.removeprefix(_MARK_BYTES) for line in itertools.islice(filter(None, lines), _JUDGED)]
    objects = sum(line.startswith(b"{") and _is_json(line) for line in first)
    return 2 * objects > len(first) or (
        bool(first) and first[0][:1] in (b"{", b"[") and _is_json(bytes(content))
    )


def _lines(content: Content) -> Iterator[bytes]:
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin)
        end = len(content) if end < 0 else end
        yield content[begin:end]
        begin = end + 1


def _is_list(content: Content) -> bool:
    """Whether the content is one JSON list, rather than several lines of which the first is a list."""
    if not (begun := _LIST.match(content)):
        return False
    first, _, rest = content[begun.end() - 1 :].partition(b"\n")
    return not (rest.strip() and _is_json(first))


def _is_json(content: bytes) -> bool:
    try:
        _parsed(content)
    except ValueError:
        return False
    return True


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content.strip().decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({getattr(error, 'msg', error)})") from None


def _parse(content: bytes) -> Mapping[str, Any]:
    return checked(_parsed(content))


def _of_lines(path: str, content: Content) -> Iterator[Record]:
    """Yields one record per line. Each line is parsed separately, so invalid UTF-8 affects only that line.

    If the whole file is a sequence of JSON values, a record may extend over several lines.
    """
    lines = ((number, line) for number, line in enumerate(_lines(content), start=1) if line.strip())
    first = list(itertools.islice(lines, 1))
    if first and not _is_json(first[0][1]) and (spread := _spread(path, bytes(content))) is not None:
        yield from spread
        return
    for number, line in itertools.chain(first, lines):
        # A carriage return ends a line too, unless it is whitespace within a record.
        parts = [line] if b"\r" not in line.strip() or _is_json(line) else line.split(b"\r")
        for part in parts:
            if part.strip():
                yield f"{path}:{number}", functools.partial(_parse, part)


def _spread(path: str, content: bytes) -> list[Record] | None:
    """Returns the records of a file that is a sequence of JSON values with any line breaks; None for other files."""
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
      between: the characters allowed between values.
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


def _of_text(path: str, content: Content) -> Iterator[Record]:
    begin, at, mark = 1, 0, SEPARATOR.encode()
    while at <= len(content):
        end = content.find(mark, at)
        end = len(content) if end < 0 else end
        part = _as_text(path, content[at:end], at)
        yield f"{path}:{begin}", functools.partial(dict, text=part)
        begin, at = begin + part.count("\n"), end + len(mark)


def _of_parquet(path: str) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path} is a Parquet file, which needs the package `pyarrow`; pip install pyarrow"
        ) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                yield f"{path} record {number}", functools.partial(checked, record)
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are such
        raise ValueError(f"cannot read {path}: {one_line(error)}") from None


def _as_text(path: str, content: bytes, at: int = 0) -> str:
    """Decodes a text file, or its part from byte `at` on: line feeds as line ends, no byte-order mark at their start.

    Raises:
      ValueError: the file is not text in UTF-8.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {at + error.start}; convert it first") from None
    if "\0" in text:
        raise ValueError(f"{path} is a binary file; give text in UTF-8 or records in JSON")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removeprefix(_BYTE_ORDER_MARK).replace("\n" + _BYTE_ORDER_MARK, "\n")
