"""The file with a model's tokens by frequency, for drafts over a part of its vocabulary."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.records import ModelRecord

# The file's name beside a model.
VOCABULARY_NAME = "jaxspec.vocab.json"


@dataclasses.dataclass(frozen=True)
class Ranking(ModelRecord):
    """Tokens of a model in order of frequency.

    Attributes:
      always: the tokens that are in every draft vocabulary: ends of text and other special tokens, however rare.
      ids: the other counted tokens, the most frequent first.
      num_counted: the number of tokens of the counted text.
      vocab_size: the number of tokens of the model.

    Raises:
      ValueError: there is no token, a token is there twice, or the model has no such token.
    """

    FORMAT, MADE_BY = "jaxspec.vocab/1", "jaxspec vocab"
    always: tuple[int, ...]
    ids: tuple[int, ...]
    num_counted: int
    vocab_size: int

    def __post_init__(self) -> None:
        every = [*self.always, *self.ids]
        wrong = [one for one in every if not 0 <= one < self.vocab_size]
        if not every or wrong or len(set(every)) < len(every):
            found = f"the token {shown(wrong[0])}" if wrong else "a token twice" if every else "no token"
            raise ValueError(
                f"it has {found}; expected ids from 0 to {self.vocab_size - 1}, each once; make one with "
                f"`{self.MADE_BY}`"
            )

    def __len__(self) -> int:
        return len(self.always) + len(self.ids)

    def first(
        self,
        count: int | None = None,
        name: str = "draft_vocab",
        source: os.PathLike[str] | str = "the ranking",
    ) -> np.ndarray:
        """Returns the draft vocabulary: the first `count` tokens, int32[N], in ascending order.

        Args:
          count: N; None for all ranked tokens.
          name: the name of the parameter, for messages.
          source: the ranking's file, for messages.

        Raises:
          ValueError: `count` is larger than the ranking, or smaller than the number of tokens in `always`.
        """
        least = max(1, len(self.always))
        if count is not None and not least <= count <= len(self):
            raise ValueError(
                f"{name} is {count}; {source} ranks {len(self)} tokens, {len(self.always)} of which must "
                f"always be there: give {least} to {len(self)}, or count more text with `{self.MADE_BY}`"
            )
        chosen = (*self.always, *self.ids)[:count]
        return np.sort(np.array(chosen, np.int32))


@brief_errors()
def read_vocabulary(path: str | os.PathLike[str], model: str | None, vocab_size: int) -> Ranking:
    """Returns the ranking in a file, checked to be for the model of this fingerprint and number of tokens.

    A `model` of None accepts any model's ranking, for a draft in training, which has no fingerprint yet.

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or of another model; one line with the remedy.
    """
    ranking = Ranking.read(path, model)
    if ranking.vocab_size != vocab_size:
        raise ValueError(
            f"{path} ranks a vocabulary of {ranking.vocab_size} tokens, the model has {vocab_size}; make one with "
            f"`{Ranking.MADE_BY}`"
        )
    return ranking
