"""Converts the settings of requests to the arrays of `jaxspec.penalties`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.penalties import Penalties

if TYPE_CHECKING:
    from jaxspec.engine.requests import RowRequest

# For each field of `Penalties`: the field of a request, and its neutral value.
_NUMBERS = {
    "repetition": ("repetition_penalty", 1.0),
    "presence": ("presence_penalty", 0.0),
    "frequency": ("frequency_penalty", 0.0),
}
# A position beyond the end of any text.
_ALWAYS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """Makes the penalties for rows of a batch, always with the same tree structure and shapes.

    Attributes:
      numbers: the fields of `Penalties` with a number per row that are used.
      num_banned: the most banned tokens of a request.
      words: the most banned words of a request, and the most tokens of such a word.
      longest_ngram: the longest n-gram that must not repeat.
    """

    numbers: tuple[str, ...]
    num_banned: int
    words: tuple[int, int]
    longest_ngram: int

    @classmethod
    def for_all(cls, requests: Sequence[RowRequest]) -> Settings:
        """Returns the settings with which each of these requests can share a batch."""
        numbers = tuple(
            name
            for name, (field, neutral) in _NUMBERS.items()
            if any(getattr(request, field) != neutral for request in requests)
        )
        words = [word for request in requests for word in request.rules.longer_words]
        return cls(
            numbers,
            max(len(_banned(request)) for request in requests),
            (
                max(len(request.rules.longer_words) for request in requests),
                max(map(len, words), default=0),
            ),
            max(request.rules.no_repeat_ngram_size for request in requests),
        )

    def of(self, requests: Sequence[RowRequest]) -> Penalties | None:
        """Returns the penalties with one row for each of these requests; None if no request of the batch has any."""
        if not (self.numbers or self.num_banned or self.words[0] or self.longest_ngram):
            return None
        arrays: dict[str, Any] = {
            name: np.array([getattr(request, _NUMBERS[name][0]) for request in requests], np.float32)
            for name in self.numbers
        }
        if self.num_banned:
            banned = _filled(requests, _banned, (self.num_banned, 2))
            arrays |= {"banned": banned[..., 0], "until": banned[..., 1]}
        if self.words[0]:
            arrays["words"] = _filled(requests, lambda request: request.rules.longer_words, self.words)
        if self.longest_ngram:
            arrays["ngram"] = np.array([request.rules.no_repeat_ngram_size for request in requests], np.int32)
        arrays["begin"] = np.array([len(request.prompt) for request in requests], np.int32)
        return Penalties(**arrays, longest_ngram=self.longest_ngram)


def _banned(request: RowRequest) -> list[tuple[int, int]]:
    """Returns the banned tokens, each with the position from which it is allowed again."""
    rules, begin = request.rules, len(request.prompt)
    # As in transformers, a bad word is ignored if it is an end-of-text token.
    always = {*rules.suppress_tokens, *(token for token in rules.bad_tokens if token not in request.eos_ids)}
    ends = rules.min_length if rules.min_new_tokens is None else begin + rules.min_new_tokens
    return [
        *((token, _ALWAYS) for token in sorted(always)),
        *((token, begin + 1) for token in rules.begin_suppress_tokens),
        *((token, ends) for token in request.eos_ids if ends > begin),
    ]


def _filled(
    requests: Sequence[RowRequest],
    rows_of: Callable[[RowRequest], Sequence[Sequence[int]]],
    shape: tuple[int, int],
) -> np.ndarray:
    """Returns lists of each request as int32[B, *shape], aligned to the end of the last axis; −1 elsewhere."""
    filled = np.full((len(requests), *shape), -1, np.int32)
    for row, request in enumerate(requests):
        for at, one in enumerate(rows_of(request)):
            filled[row, at, shape[1] - len(one) :] = one
    return filled
