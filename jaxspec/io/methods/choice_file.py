"""The file of the choices of `method="auto"`, so that they can be repeated."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.host.files import parse_json, write_atomic, written_here
from jaxspec.host.messages import shown

FORMAT = "jaxspec.choices/1"


class Entry(NamedTuple):
    """A choice after `round` rounds of a batch: a candidate, and its maximum draft length.

    Examples:
      >>> Entry(8, "ngram", 4).length
      4
    """

    round: int
    candidate: str
    length: int


def belongs_to(model: str, prompts: Sequence[Sequence[int]], max_batch: int) -> dict[str, Any]:
    """Returns the identity of a call for the file's header: the model's fingerprint, a hash of the prompts, and the
    number of rows that are generated together."""
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode())
    return {"model": model, "prompts": digest.hexdigest()[:16], "rows": min(max_batch, len(prompts))}


class ChoiceFile:
    """A file of choices: an existing one is read, otherwise a new one is started.

    Args:
      path: the file, of JSON lines: a header, then one choice per line.
      candidates: the names of the candidates.
      num_draft_tokens: K, the maximum draft length.
      of: the other parts of the header, see `belongs_to`.

    Attributes:
      entries: the choices of an existing file; None for a new one.

    Raises:
      ValueError: the file is damaged, has other candidates, another model or other prompts, or cannot be written; one
        line.
      OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        candidates: Sequence[str],
        num_draft_tokens: int,
        of: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        header = {"format": FORMAT, "candidates": list(candidates), "num_draft_tokens": num_draft_tokens}
        header |= of or {}
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give choices=FILE")
        # A file without choices, of a text that ended before the first one, is treated as a new file.
        self.entries = (self._read(header) or None) if path.exists() else None
        if self.entries is None and written_here():
            try:
                write_atomic(path, json.dumps(header) + "\n")
            except OSError as error:  # its message may name a temporary file
                raise ValueError(
                    f"cannot write {path} ({error.strerror}); give another choices=FILE"
                ) from None

    def add(self, entry: Entry) -> None:
        """Appends a choice.

        Raises:
          OSError: the file cannot be written.
        """
        if written_here():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry._asdict()) + "\n")

    def _read(self, header: dict[str, Any]) -> list[Entry]:
        try:
            lines = [parse_json(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except ValueError:
            raise ValueError(f"{self.path} is not a file of choices; {_REMEDY}") from None
        if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
            raise ValueError(
                f"{self.path} is not a file of choices: its first line has no format {FORMAT!r}; {_REMEDY}"
            )
        for name, expected in header.items():
            if lines[0].get(name) != expected:
                raise ValueError(
                    f"{self.path} has the {name.replace('_', ' ')} {shown(lines[0].get(name))}, this text "
                    f"{shown(expected)}; give the model, the prompts and the options that it was written with"
                )
        entries = [self._entry(number, line, header) for number, line in enumerate(lines[1:], 2)]
        for number, (before, entry) in enumerate(itertools.pairwise(entries), 3):
            if entry.round < before.round:
                raise ValueError(
                    f"line {number} of {self.path} has round {entry.round} after round {before.round}, expected "
                    f"ascending rounds; {_REMEDY}"
                )
        return entries

    def _entry(self, number: int, line: Any, header: dict[str, Any]) -> Entry:
        given: dict[str, Any] = line if isinstance(line, dict) else {}
        entry = Entry(*(given.get(name, "") for name in Entry._fields))
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (entry.round, entry.length))
        longest = header["num_draft_tokens"]
        if (
            not whole
            or entry.candidate not in header["candidates"]
            or entry.round < 0
            or not 0 <= entry.length <= longest
        ):
            raise ValueError(
                f"line {number} of {self.path} is {shown(line)}, expected a round, a candidate and a length from 0 to "
                f"{longest}; {_REMEDY}"
            )
        return entry


_REMEDY = "move it away, or give another"
