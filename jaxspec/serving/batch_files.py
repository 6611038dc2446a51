"""The files of a batch job: prompts, one JSON object per line, and an append-only file of results.

A process may be killed at any moment. The next one drops an incomplete last line, and answers the prompts that have no
result. Prompts are streamed; a digest of 16 bytes is held in memory for each one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from jaxspec.host import lock, processes
from jaxspec.host.files import named_errors, no_file, opened, parse_json, written_here
from jaxspec.host.messages import shown

# The longest line, and the seconds between two times that results are forced to the disk.
_MAX_BYTES, _LOOK_S = 64_000_000, 1.0
# A result, see `Results.add`, also without the space that other programs leave out; and the beginnings of results.
_RESULT = re.compile(rb'\{"(?:key": ?"|id": ?"batch_req_)([0-9a-f]{8})-([0-9a-f]{32})".*\}\n', re.DOTALL)
_HEADS = b'{"key": "', b'{"id": "batch_req_'


class Shard(NamedTuple):
    """The part of the prompts that this process answers: those whose hash modulo `total` is `number`.

    Examples:
      >>> Shard(0, 1) == ALL
      True
    """

    number: int = 0
    total: int = 1

    def path(self, output: Path) -> Path:
        """Returns the file of this part's results: `output` with the shard before its suffix, if there are several.

        Examples:
          >>> Shard(2, 8).path(Path("results.jsonl")).name
          'results-2-of-8.jsonl'
        """
        if self.total == 1:
            return output
        return output.with_name(f"{output.stem}-{self.number}-of-{self.total}{output.suffix}")


ALL = Shard()
# For each system: the variables of the index, of the first index, of the distance of two, and of the count.
_VARIABLES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", "", "", "JOB_COMPLETIONS"),
    ("SLURM_PROCID", "", "", "SLURM_NTASKS"),
)


def shard_of(text: str | None, environment: Mapping[str, str]) -> Shard:
    """Returns the shard of a command line.

    Args:
      text: "index/count"; `auto` for the numbers of a SLURM array or step, or of an Indexed Job of Kubernetes, whose
        number of completions is in the variable JOB_COMPLETIONS; None for all prompts.
      environment: the variables of the process.

    Raises:
      ValueError: the text is not a shard, or the variables are missing.

    Examples:
      >>> shard_of("auto", {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
      Shard(number=3, total=8)
    """
    if text is None:
        return Shard()
    given = text
    if text == "auto":
        for index, first, step, count in _VARIABLES:
            if index in environment and count in environment:
                number = int(environment[index]) - int(environment.get(first, 0))
                number //= int(environment.get(step, 1))
                given = f"{number}/{environment[count]}"
                break
        else:
            raise ValueError(
                "shard is auto, but neither SLURM nor an Indexed Job with JOB_COMPLETIONS numbers this process; "
                "give index/count, such as 0/8"
            )
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", given)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(1, 1)
    if shard.number >= shard.total:
        raise ValueError(f"shard is {shown(given)}; give index/count, such as 0/8, with an index from 0")
    return shard


class Line(NamedTuple):
    """A line of the prompts.

    Attributes:
      digest: 16 bytes that identify it: a hash of its content, and of how often the same line came before.
      content: its JSON object; None if there is none.
      error: the reason, if there is none.
      end: the number of bytes of the file up to the end of the line.
      number: its number in the file, from 1.

    Examples:
      >>> Line(bytes(16), {"prompt": "ab"}, None, 17, 1).error is None
      True
    """

    digest: bytes
    content: dict[str, Any] | None
    error: str | None
    end: int
    number: int


def read_lines(path: Path, shard: Shard = ALL) -> Iterator[Line]:
    """Yields the lines of a file of prompts that belong to a shard, without empty ones; the file may be packed by gzip.

    Raises:
      FileNotFoundError: there is no such file; before the first line.
      ValueError: it is a damaged gzip file; at the first line.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     path = Path(directory) / "prompts.jsonl"
      ...     _ = path.write_text('{"prompt": "ab"}')
      ...     [line.content for line in read_lines(path)]
      [{'prompt': 'ab'}]
    """
    if not path.is_file():
        raise FileNotFoundError(f"{no_file(path)}; give a file with one JSON object per line")
    return _lines(path, shard)


def count_prompts(path: Path) -> tuple[int, int]:
    """Returns the number of lines of a file that are not empty, and the number of its bytes, unpacked.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     path = Path(directory) / "prompts.jsonl"
      ...     _ = path.write_text('{"prompt": "ab"}\\n\\n')
      ...     count_prompts(path)
      (1, 18)
    """
    with opened(path) as file:
        count = sum(not line.isspace() for line in iter(lambda: file.readline(_MAX_BYTES), b""))
        return count, file.tell()


def _lines(path: Path, shard: Shard) -> Iterator[Line]:
    seen: dict[bytes, int] = {}
    number = 0
    with opened(path) as file:
        end = file.tell()
        while data := file.readline(_MAX_BYTES):
            end, number = end + len(data), number + 1
            if not data.strip():
                continue
            content, error = _content(data)
            while len(data) == _MAX_BYTES and not data.endswith(b"\n"):
                error = f"the line is longer than {_MAX_BYTES} bytes"
                data = file.readline(_MAX_BYTES)
                end += len(data)
            # Spaces and the order of the keys do not matter.
            same = data.strip() if content is None else json.dumps(content, sort_keys=True).encode()
            digest = hashlib.sha256(same).digest()[:16]
            if int.from_bytes(digest) % shard.total != shard.number:
                continue
            before = seen.get(digest, 0)
            seen[digest] = before + 1
            if before:
                digest = hashlib.sha256(digest + before.to_bytes(8)).digest()[:16]
            yield Line(digest, content if error is None else None, error, end, number)


def _content(data: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        content = parse_json(data.decode())
        json.dumps(content, allow_nan=False)  # results must be valid JSON too
    except json.JSONDecodeError as error:  # its line number counts from the beginning of this line
        return None, f"the line is not valid JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        return None, f"the line is not valid JSON: {error}"
    if not isinstance(content, dict):
        return None, f"the line holds {shown(content)}; give a JSON object"
    return content, None


class Results:
    """The file of results. A context manager, which locks the file; several processes of one mesh share it.

    Each result begins with its key: the job and the digest of the line.

    Args:
      path: the file; it is created if necessary. An incomplete last line is removed.
      job: everything besides a line that its result depends on, such as the model.

    Attributes:
      done: the digests of the lines that have a result.
      errors: those of them whose result in the file, when it was opened, is an error.

    Raises:
      ValueError: another process writes the file, it is not such a file, or it has results of another job.
      OSError: the file cannot be read or written.

    Examples:
      >>> import tempfile
      >>> line = Line(bytes(16), {"prompt": "ab"}, None, 17, 1)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     path = Path(directory) / "results.jsonl"
      ...     with Results(path, {"model": "tiny"}) as results:
      ...         results.add(line, {"key": results.key(line), "text": "abab"})
      ...     with Results(path, {"model": "tiny"}) as results:
      ...         line.digest in results.done
      True
    """

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        self.path = path
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()[:8]
        self.done: set[bytes] = set()
        self.errors: set[bytes] = set()
        self._held = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self._looked = time.monotonic()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held:
            if written_here():
                name = f".{self.path.name}.lock"
                held.enter_context(lock.exclusive(self.path.parent, _say_nothing, "output", name))
                self._file = held.enter_context(self._open())
            if processes.several():
                self.done, self.errors = map(_of_first, (self.done, self.errors))
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.look(now=True)
        self._held.close()

    def key(self, line: Line) -> str:
        """Returns the key of a line's result."""
        return f"{self._job}-{line.digest.hex()}"

    def add(self, line: Line, record: Mapping[str, Any]) -> None:
        """Appends a result, which begins with `key`, or with `id`, `batch_req_` and the key."""
        self.done.add(line.digest)
        if self._file is None:
            return
        data = json.dumps(record).encode() + b"\n"
        assert _RESULT.fullmatch(data)
        view = memoryview(data)
        with named_errors(self.path):
            while view:
                view = view[self._file.write(view) :]

    def look(self, now: bool = False) -> None:
        """Forces the results to the disk if the last time was a second ago, or `now`."""
        if self._file is None or (not now and time.monotonic() - self._looked < _LOOK_S):
            return
        with named_errors(self.path):
            os.fsync(self._file.fileno())
        self._looked = time.monotonic()

    def _open(self) -> IO[bytes]:
        file = self.path.open("a+b", buffering=0)
        file.seek(0)
        whole = 0
        with self.path.open("rb") as reader:
            for number, data in enumerate(reader, 1):
                found = _RESULT.fullmatch(data)
                if not data.endswith(b"\n") and any(data[: len(one)] == one[: len(data)] for one in _HEADS):
                    break  # a process was killed while it wrote this line
                if found is None:
                    file.close()
                    raise ValueError(
                        f"line {number} of {self.path} is not a result of a batch; give another output"
                    )
                if found[1].decode() != self._job:
                    file.close()
                    raise ValueError(
                        f"{self.path} has results of another model or other options; give the same, or another "
                        "output"
                    )
                digest = bytes.fromhex(found[2].decode())
                self.done.add(digest)
                if b'"error"' in data and json.loads(data).get("error") is not None:
                    self.errors.add(digest)
                whole += len(data)
        file.truncate(whole)
        return file


def _of_first(digests: set[bytes]) -> set[bytes]:
    """Returns the digests of the first process."""
    joined = processes.of_first("".join(one.hex() for one in digests))
    return {bytes.fromhex(joined[at : at + 32]) for at in range(0, len(joined), 32)}


def _say_nothing(line: str) -> None:
    return
