"""The file with a model's tokens by frequency, for drafts over a part of its vocabulary."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from jaxspec.host.files import no_file
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.methods.method_files import check_model, read_format, write_found
from jaxspec.io.records import record

VOCABULARY_FORMAT = "jaxspec.vocab/1"
# The file's name beside a model.
VOCABULARY_NAME = "jaxspec.vocab.json"
_COMMAND = "jaxspec vocab"


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Tokens of a model in order of frequency.

    Attributes:
      always: the tokens that are in every draft vocabulary: ends of text and other special tokens, however rare.
      ids: the other counted tokens, the most frequent first.
      num_counted: the number of tokens of the counted text.
      source: the name of the ranking's file, for messages.
    """

    always: tuple[int, ...]
    ids: tuple[int, ...]
    num_counted: int
    source: str = "the ranking"

    def __len__(self) -> int:
        return len(self.always) + len(self.ids)

    def first(self, count: int | None = None, name: str = "draft_vocab") -> np.ndarray:
        """Returns the draft vocabulary: the first `count` tokens, int32[N], in ascending order.

        Args:
          count: N; None for all ranked tokens.
          name: the name of the parameter, for messages.

        Raises:
          ValueError: `count` is larger than the ranking, or smaller than the number of tokens in `always`.
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
    of = {"always": list(ranking.always), "ids": list(ranking.ids), "num_counted": ranking.num_counted}
    write_found(path, VOCABULARY_FORMAT, found_by, model=model, vocab_size=vocab_size, **of)


@brief_errors()
def read_vocabulary(path: str | os.PathLike[str], model: str | None, vocab_size: int) -> Ranking:
    """Returns the ranking in a file, checked to be for the model of this fingerprint and number of tokens.

    A `model` of None accepts any model's ranking, for a draft in training, which has no fingerprint yet.

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or of another model; one line with the remedy.
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
    ranking = dataclasses.replace(record(Ranking, content, str(path)), source=os.fspath(path))
    every = [*ranking.always, *ranking.ids]
    wrong = [one for one in every if not 0 <= one < vocab_size]
    if not every or wrong or len(set(every)) < len(every):
        found = f"the token {shown(wrong[0])}" if wrong else "a token twice" if every else "no token"
        raise ValueError(
            f"{path} has {found}; expected ids from 0 to {vocab_size - 1}, each once; make one with `{_COMMAND}`"
        )
    return ranking
