"""Writes files whole or not at all, and reads JSON and text with one-line errors."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import re
import stat
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # without these locks, abandoned files cannot be recognised, and stay
    fcntl = None  # type: ignore[assignment]

_written_by_another = False
_TEMPORARY = re.compile(r"\.(.+)\.\d+(?:-\d+)?\.tmp", re.DOTALL)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GZIP = b"\x1f\x8b"
# Texts whose size is known only at their end may have as many bytes: pipes, devices, and what gzip packed.
_MAX_UNSIZED = 256_000_000
# Far larger than any file of settings or token ids.
_MAX_JSON_BYTES = 30_000_000
_MAX_DEPTH = 100
_POINTER = b"version https://git-lfs.github.com/spec/"


def leave_to_another() -> None:
    """Makes the functions below write nothing from now on, because another process of this command writes the files."""
    global _written_by_another
    _written_by_another = True


def written_here() -> bool:
    """Whether this process writes files."""
    return not _written_by_another


def make_directory(path: str | os.PathLike[str]) -> None:
    """Creates a directory and its missing parents, if this process writes files."""
    if not _written_by_another:
        Path(path).mkdir(parents=True, exist_ok=True)


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a binary file for writing, which gets the name `path` only when the block ends without an error.

    The temporary file is in the same directory, because a rename is atomic only within one file system. Temporary files
    that killed processes left for the same `path` are removed first.

    Raises:
      OSError: the file cannot be written; the error names it.
    """
    if _written_by_another:
        yield io.BytesIO()
        return
    path = Path(path)
    remove_abandoned(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with named_errors(path), _held(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned(directory: str | os.PathLike[str], name: str | None = None) -> None:
    """Removes the temporary files that killed processes left in a directory.

    A process locks a file while it writes it, for any length of time; a file without a lock is abandoned.

    Args:
      directory: the directory, without its subdirectories; it need not exist.
      name: the name of the file whose temporary files are removed; None for all files.
    """
    if fcntl is None or _written_by_another:
        return
    with suppress(OSError):  # no directory, no locks, or another process was faster
        for entry in list(os.scandir(directory)):
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or (name is not None and found[1] != name) or entry.is_symlink():
                continue
            with suppress(OSError), open(entry.path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)


@contextmanager
def _held(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file for writing and locks it until it is closed."""
    while True:
        with open(path, "wb") as file:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                # Between the opening and the lock, another process may have removed the file as abandoned.
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue
            yield file
            return


@contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the file's name to a write error without one, such as that of a full disk.

    Raises:
      OSError: the error with the name of the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def full_reason(error: BaseException | None) -> str | None:
    """Returns the system's message if an error, or one of its causes, is about missing space; else None.

    The disk is full, or a limit on the user's files or on the size of a file is reached. Libraries written in C++
    report it only in the text of their message.
    """
    while error is not None:
        for number in _FULL:
            reason = os.strerror(number)
            if reason in str(error) or (isinstance(error, OSError) and error.errno == number):
                return reason
        error = error.__cause__ or error.__context__
    return None


def is_full(error: BaseException | None) -> bool:
    """Whether `full_reason` returns a message."""
    return full_reason(error) is not None


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replaces a file whole or not at all; text is written as UTF-8."""
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Writes `content` as indented JSON with sorted keys, whole or not at all."""
    write_atomic(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not JSON, not an object, or larger than 30 MB.
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
        content = parse_json(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def parse_json(text: str | bytes) -> Any:
    """Returns the value in a JSON text, which may begin with a byte-order mark.

    Raises:
      ValueError: it is not JSON, is nested deeper than 100 levels, or has a number with more digits than Python reads.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        content = json.loads(decoded.removeprefix("\N{BYTE ORDER MARK}"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of too many digits") from None
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Refuses a JSON value that is nested deeper than 100 levels, whatever the limits of this Python are.

    Raises:
      ValueError: it is.
    """
    level = [content]
    for _ in range(_MAX_DEPTH):  # the callers may recurse into the value
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))
        )
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return
    raise ValueError("it is nested too deeply")


def identity(path: str | os.PathLike[str], depth: int = 2) -> tuple[Any, ...]:
    """Returns a value that changes when a file changes, or one of a directory and its subdirectories; () without any.

    It has names, sizes, and times of the last change: of the content, which a copy may keep, and of the status.
    """
    try:
        now = os.stat(path)
        if depth and stat.S_ISDIR(now.st_mode):
            names = sorted(os.listdir(path))
            return tuple((name, identity(os.path.join(path, name), depth - 1)) for name in names)
    except (OSError, ValueError):
        return ()
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns


def no_file(path: str | os.PathLike[str]) -> str:
    """Returns the message for a path that should be a file and is not."""
    path = Path(path)
    if path.is_dir():
        return f"{path} is a directory, not a file"
    # Such links appear in the hub's cache if a download was interrupted or only a part of the cache was copied.
    return f"{path} is a link to a file that is missing" if path.is_symlink() else f"{path} does not exist"


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Refuses a Git LFS pointer in place of the file itself.

    Raises:
      ValueError: the file is a pointer; the message tells the user how to fetch the file.
      OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(_pointer(path))


def _pointer(path: str | os.PathLike[str]) -> str:
    return (
        f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its directory, or download the "
        "file"
    )


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a text that a user gives, and yields it as a seekable binary file after its byte-order mark.

    Every text that a user names is opened here. A path `-` is standard input. A text that gzip packed is unpacked. A
    pipe, a device and a packed text are read whole, up to 256 MB.

    Raises:
      OSError: it cannot be opened or read.
      ValueError: it is too large, a damaged gzip file, or a pointer of Git LFS; one line with the path.
    """
    with contextlib.ExitStack() as held:
        file: IO[bytes]
        if os.fspath(path) == "-":
            if sys.stdin is None:
                raise ValueError("- is standard input, which is closed; give a file")
            file, path = sys.stdin.buffer, "standard input"
        else:
            file = held.enter_context(open(path, "rb"))
        if not _is_regular(file):
            file = _whole(file, path)
        if file.read(len(_GZIP)) == _GZIP:
            file.seek(0)
            try:
                file = _whole(gzip.GzipFile(fileobj=file), path)
            except (EOFError, zlib.error, gzip.BadGzipFile):
                raise ValueError(f"{path} is a damaged gzip file; write it again") from None
        file.seek(0)
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(_pointer(path))
        file.seek(0)
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        yield file


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # it has no number: a stand-in for standard input
        return False


def _whole(file: IO[bytes] | gzip.GzipFile, path: str | os.PathLike[str]) -> IO[bytes]:
    content = file.read(_MAX_UNSIZED + 1)
    if len(content) > _MAX_UNSIZED:
        raise ValueError(
            f"{path} has more than {_MAX_UNSIZED // 10**6} MB, unpacked or from a pipe; give a file of plain text"
        )
    return io.BytesIO(content)


@contextmanager
def as_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a file with a text that a user gives, for readers that open it several times.

    It is the file itself, or a temporary copy of what can be read only once: standard input, a pipe or a device.

    Raises:
      OSError, ValueError: see `opened`.
    """
    once = os.fspath(path) == "-" or (
        os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path)
    )
    if not once:
        yield Path(path)
        return
    with opened(path) as file, tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "text"
        copy.write_bytes(file.read())
        yield copy


def ending(path: str | os.PathLike[str]) -> str:
    """Returns the ending of a file's name in lower case, without that of gzip, such as ".jsonl" for "a.jsonl.gz"."""
    return Path(os.fspath(path).lower().removesuffix(".gz")).suffix


def read_text(path: str | os.PathLike[str], expected: str) -> str:
    """Returns a text that a user gives, see `opened`; its lines end with line feeds.

    Args:
      path: the file, or `-` for standard input.
      expected: the end of the message, such as "`reference` must be a text file".

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it cannot be read.
      ValueError: the file is not text in UTF-8, or see `opened`.
    """
    try:
        with opened(path) as file:
            content = file.read()
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"{no_file(path)}; {expected}") from None
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        name = "standard input" if os.fspath(path) == "-" else path
        raise ValueError(f"{name} is not text in UTF-8; {expected}") from None
