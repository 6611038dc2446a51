"""The choices of `method="auto"` in a file, so that they can be made again."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.io.files import parse_json, write_atomic, written_here
from jaxspec.io.messages import shown

FORMAT = "jaxspec.choices/1"


class Entry(NamedTuple):
    """What is chosen once so many rounds of a batch are over: a candidate, and the most tokens of its drafts.

    Examples:
      >>> Entry(8, "ngram", 4).length
      4
    """

    round: int
    candidate: str
    length: int


def belongs_to(model: str, prompts: Sequence[Sequence[int]], max_batch: int) -> dict[str, Any]:
    """What choices belong to beside their candidates: a model, by its fingerprint, and the prompts of a call, of which
    so many are at once in the rounds that are counted."""
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode())
    return {"model": model, "prompts": digest.hexdigest()[:16], "rows": min(max_batch, len(prompts))}


class ChoiceFile:
    """A file of choices: one that is there is read, and made again; else one is begun.

    Args:
      path: the file, of JSON lines: a header, then one choice a line.
      candidates: the names that may be chosen.
      num_draft_tokens: K, the most tokens of a draft.
      of: what else the choices belong to, see `belongs_to`.

    Attributes:
      entries: of a file that was there; None where there was none.

    Raises:
      ValueError: the file is damaged, or of other candidates, another model or other prompts, or it cannot be written;
        one line.
      OSError: it cannot be read.
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
        # A file without choices, of a text that ended before the first one, has nothing to repeat: it is written again.
        self.entries = (self._read(header) or None) if path.exists() else None
        if self.entries is None and written_here():
            try:
                write_atomic(path, json.dumps(header) + "\n")
            except OSError as error:  # which names a file that nobody gave
                raise ValueError(
                    f"cannot write {path} ({error.strerror}); give another choices=FILE"
                ) from None

    def add(self, entry: Entry) -> None:
        """Writes a choice behind those before it.

        Raises:
          OSError: it cannot be written.
        """
        if written_here():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry._asdict()) + "\n")

    def _read(self, header: dict[str, Any]) -> list[Entry]:
        try:
            lines = [parse_json(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except ValueError:
            raise ValueError(f"{self.path} is no file of choices; {_REMEDY}") from None
        if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
            raise ValueError(
                f"{self.path} is no file of choices: its first line has no format {FORMAT!r}; {_REMEDY}"
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
                    f"line {number} of {self.path} is of round {entry.round}, after one of round {before.round}; "
                    f"rounds rise in a file of choices: {_REMEDY}"
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
