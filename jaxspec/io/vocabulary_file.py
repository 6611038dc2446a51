"""The file that says which tokens of a model are frequent, for drafts over a part of its vocabulary."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from jaxspec.io.files import no_file, write_json
from jaxspec.io.messages import brief_errors, shown
from jaxspec.io.method_files import check_model, read_format

VOCABULARY_FORMAT = "jaxspec.vocab/1"
# Its name beside a model.
VOCABULARY_NAME = "jaxspec.vocab.json"
_COMMAND = "jaxspec vocab"


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Tokens of a model in order of frequency.

    Attributes:
      always: those that every draft vocabulary has: ends of text and other special tokens, however rare.
      ids: the others that were counted, the most frequent first.
      num_counted: how many tokens of text were counted.
      source: what the ranking was read from, for messages.
    """

    always: tuple[int, ...]
    ids: tuple[int, ...]
    num_counted: int
    source: str = "the ranking"

    def __len__(self) -> int:
        return len(self.always) + len(self.ids)

    def first(self, count: int | None = None, name: str = "draft_vocab") -> np.ndarray:
        """The `count` tokens to draft with, int32[N], rising; None for all that are ranked.

        Args:
          count: how many.
          name: of the parameter that says so, for messages.

        Raises:
          ValueError: there are not so many, or not even those that must be there.
        """
        least = max(1, len(self.always))
        if count is not None and not least <= count <= len(self):
            raise ValueError(
                f"{name} is {count}; {self.source} ranks {len(self)} tokens, {len(self.always)} of which must "
                f"always be there: give {least} to {len(self)}, or count more text with `{_COMMAND}`"
            )
        chosen = (*self.always, *self.ids)[:count]
        return np.sort(np.array(chosen, np.int32))


def write_vocabulary(
    path: str | os.PathLike[str], model: str, vocab_size: int, ranking: Ranking, found_by: dict[str, Any]
) -> None:
    """Writes a ranking, whole or not at all; `model` is the fingerprint of its model, which has `vocab_size` tokens."""
    content = {
        "format": VOCABULARY_FORMAT,
        "model": model,
        "vocab_size": vocab_size,
        "num_counted": ranking.num_counted,
        "always": list(ranking.always),
        "ids": list(ranking.ids),
        "found_by": found_by,
    }
    write_json(path, content)


@brief_errors()
def read_vocabulary(path: str | os.PathLike[str], model: str | None, vocab_size: int) -> Ranking:
    """The ranking in a file, checked to be for the model of this fingerprint and number of tokens.

    A draft that is being made has no fingerprint yet, and tokens like its target's: None takes any model's ranking.

    Raises:
      FileNotFoundError, ValueError: one line that says what is wrong and what to do.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{no_file(path)}; make one with `{_COMMAND}`")
    content = read_format(path, VOCABULARY_FORMAT, "a ranking of tokens")
    if model is not None:
        check_model(path, content.get("model"), model, _COMMAND)
    if content.get("vocab_size") != vocab_size:
        raise ValueError(
            f"{path} ranks a vocabulary of {shown(content.get('vocab_size'))} tokens, the model has {vocab_size}; "
            f"make one with `{_COMMAND}`"
        )
    always, ids, counted = (content.get(name) for name in ("always", "ids", "num_counted"))
    if not (isinstance(always, list) and isinstance(ids, list) and type(counted) is int):
        raise ValueError(
            f"{path} lacks the lists always and ids, or the number num_counted; make one with `{_COMMAND}`"
        )
    every = [*always, *ids]
    wrong = next((one for one in every if type(one) is not int or not 0 <= one < vocab_size), None)
    if not every or wrong is not None or len(set(every)) < len(every):
        found = "no token" if not every else "a token twice" if wrong is None else f"the token {shown(wrong)}"
        raise ValueError(
            f"{path} has {found}; expected ids from 0 to {vocab_size - 1}, each once; make one with `{_COMMAND}`"
        )
    return Ranking(tuple(always), tuple(ids), counted, os.fspath(path))
