"""First differences of greedy texts, and their logit margins: most are near ties that rounding decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from jaxspec.engine.language_model import LanguageModel
from jaxspec.requests.results import Score


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first position at which two texts differ, in tokens from 0; None for equal texts.

    Examples:
      >>> first_difference([3, 4, 5], [3, 5, 5]), first_difference([3], [3, 4]), first_difference([3], [3])
      (1, 1, None)
    """
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
    return None if len(one) == len(other) == at else at


def margin(lm: LanguageModel, context: Sequence[int], token: int, other: int) -> float:
    """The difference between the logits of two tokens after a context.

    The logits come from a pass over the context, not from the rounds that chose the tokens.

    Args:
      lm: the model.
      context: token ids, at least one.
      token, other: token ids.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> lm = language_model()
      >>> token = lm.generate([3, 4], max_new_tokens=1, temperature=0).tokens[0]
      >>> margin(lm, [3, 4], token, (token + 1) % 13) > 0, margin(lm, [3, 4], token, token)
      (True, 0.0)
    """
    of_token, of_other = cast("list[Score]", lm.score([context, context], [[token], [other]]))
    return of_token.log_prob - of_other.log_prob
