"""Converts the settings of requests to the arrays with which the compiled loop decodes their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.penalties import Penalties
from jaxspec.sampling import Sampling

if TYPE_CHECKING:
    from jaxspec.requests.reading import RowRequest

# The number of end tokens, and of tokens with a bias or a ban, for which the programs of ordinary requests have space.
WIDTH = 8
# The fields of `Penalties` with a number per row.
_PENALTIES = ("repetition", "presence", "frequency")
# A position beyond the end of any text.
_ALWAYS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The properties of requests on which the programs of their batch depend, in addition to the method.

    They are equal for all ordinary requests: temperature, filters, penalties, a minimal length, log-probabilities, and
    up to `WIDTH` end tokens and biases are numbers of the rows. Requests with more of them, with banned words, or with
    a ban of repeated n-grams have programs of their own.

    Attributes:
      num_eos: the number of end tokens per row, a power of two.
      num_biased: the number of tokens with a bias or a ban per row, a power of two.
      words: the most banned words of a request, and the most tokens of such a word.
      longest_ngram: the longest n-gram that must not repeat.
    """

    num_eos: int = WIDTH
    num_biased: int = WIDTH
    words: tuple[int, int] = (0, 0)
    longest_ngram: int = 0

    @classmethod
    def from_requests(cls, requests: Sequence[RowRequest]) -> Shapes:
        """Returns the shapes with which each of these requests can share a batch."""
        words = [word for request in requests for word in request.rules.longer_words]
        return cls(
            _width(len(request.eos_ids) for request in requests),
            _width(len(_biased(request)) for request in requests),
            (max(len(request.rules.longer_words) for request in requests), max(map(len, words), default=0)),
            max(request.rules.no_repeat_ngram_size for request in requests),
        )

    def eos_ids(self, requests: Sequence[RowRequest]) -> np.ndarray:
        """Returns the end tokens of each request, int32[B, num_eos]; −1 for none."""
        ids = np.full((len(requests), self.num_eos), -1, np.int32)
        for row, request in enumerate(requests):
            ids[row, : len(request.eos_ids)] = request.eos_ids
        return ids

    def penalties(self, requests: Sequence[RowRequest]) -> Penalties:
        """Returns the penalties and bans with one row for each of these requests."""
        shape = len(requests), self.num_biased
        biased, bias, until = (
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int32),
        )
        for row, request in enumerate(requests):
            for at, settings in enumerate(_biased(request)):
                biased[row, at], bias[row, at], until[row, at] = settings
        # NumPy arrays, which the caller puts on the devices.
        arrays: dict[str, Any] = {
            "begin": np.array([len(request.prompt) for request in requests], np.int32),
            "biased": biased,
            "bias": bias,
            "until": until,
        }
        arrays |= {name: _numbers(requests, f"{name}_penalty") for name in _PENALTIES}
        if self.words[0]:
            arrays["words"] = _filled(requests, lambda request: request.rules.longer_words, self.words)
        if self.longest_ngram:
            arrays["ngram"] = np.array([request.rules.no_repeat_ngram_size for request in requests], np.int32)
        return Penalties(**arrays, longest_ngram=self.longest_ngram)


def distribution_of(requests: Sequence[RowRequest]) -> Sampling:
    """Returns the sampling distribution of a batch with one row for each of these requests."""
    filters: dict[str, Any] = {name: _numbers(requests, name) for name in ("temperature", "top_p", "min_p")}
    return Sampling(**filters, top_k=_numbers(requests, "top_k", np.int32))


def _numbers(requests: Sequence[RowRequest], field: str, dtype: Any = np.float32) -> Any:
    return np.array([getattr(request, field) for request in requests], dtype)


def _width(counts: Iterable[int]) -> int:
    """Returns the width of an array of ids: `WIDTH`, or the smallest power of two that is large enough."""
    return max(WIDTH, 1 << (max(counts) - 1).bit_length())


def _biased(request: RowRequest) -> list[tuple[int, float, int]]:
    """Returns the tokens with a bias or a ban, each with the bias and the position from which on it is not added."""
    rules, begin = request.rules, len(request.prompt)
    # As in transformers, a bad word is ignored if it is an end-of-text token.
    always = {*rules.suppress_tokens, *(token for token in rules.bad_tokens if token not in request.eos_ids)}
    ends = rules.min_length if rules.min_new_tokens is None else begin + rules.min_new_tokens
    return [
        *((token, -np.inf, _ALWAYS) for token in sorted(always)),
        *((token, -np.inf, begin + 1) for token in rules.begin_suppress_tokens),
        *((token, -np.inf, ends) for token in request.eos_ids if ends > begin),
        *((token, bias, _ALWAYS) for token, bias in request.logit_bias),
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
