"""Files that appear whole or not at all, and JSON read with one clear line where it is wrong."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_written_by_another = False
# Far more than any file of settings or of token ids has.
_MAX_JSON_BYTES = 30_000_000
_MAX_DEPTH = 100
_POINTER = b"version https://git-lfs.github.com/spec/"


def leave_to_another() -> None:
    """Has the functions below write nothing from now on: another process of this command writes the same."""
    global _written_by_another
    _written_by_another = True


def written_here() -> bool:
    """Whether it is this process that writes files."""
    return not _written_by_another


def make_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory for files that this process writes, and those above it, where they are missing."""
    if not _written_by_another:
        Path(path).mkdir(parents=True, exist_ok=True)


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file to write, which takes the name `path` only when the block ends without an error.

    It is written beside its destination, because a rename is atomic only within one file system.
    """
    if _written_by_another:
        yield io.BytesIO()
        return
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a whole file, or leaves what was there; text as UTF-8."""
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Writes `content` as indented JSON with sorted keys, whole or not at all."""
    write_atomic(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, not an object, or far too large.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(no_file(path))
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, expected JSON of at most {_MAX_JSON_BYTES}"
        )
    refuse_pointer(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises:
      ValueError: it is no JSON, is nested deeper than 100 levels, or has a longer number than Python reads.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of too many digits") from None
    level = [content]
    for _ in range(_MAX_DEPTH):  # what follows may recurse
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))
        )
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return content
    raise ValueError("it is nested too deeply")


def no_file(path: str | os.PathLike[str]) -> str:
    """What to say of a path that should be a file and is not."""
    path = Path(path)
    if path.is_dir():
        return f"{path} is a directory, not a file"
    # As in the cache of the hub, where a download was interrupted or only a part of it was copied.
    return f"{path} is a link to a file that is missing" if path.is_symlink() else f"{path} does not exist"


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Refuses a file that Git LFS left in place of the file itself.

    Raises:
      ValueError: it is one; the line says how to fetch the file.
      OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its directory, or "
                "download the file"
            )


def read_text(path: str | os.PathLike[str], expected: str) -> str:
    """The text of a file that a user named.

    Args:
      path: the file.
      expected: what it should be, for the message, such as "`reference` must be a text file".

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not text in UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{no_file(path)}; {expected}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; {expected}") from None
