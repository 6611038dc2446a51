"""Measures each method's acceptance on given prompts: the estimates with which `auto` begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.costs.expectations import Expectation
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.methods.base import Candidate
from jaxspec.texts.results import played_rounds

# Decimals in the file; an estimate from a few texts is not more precise.
_DIGITS = 3
# Draft tokens as which a measured expectation counts: texts differ, so the rounds of a text soon outweigh it.
_BELIEVED = 5.0
# Shares of positions that no draft reached are 1.
_EDGE = 1e-3


@shows_progress
def measure_acceptance(
    lm: LanguageModel,
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: OnProgress = lambda step: None,
) -> tuple[dict[str, Expectation], list[dict[str, Any]]]:
    """Generates a greedy text per prompt with each candidate and fits its acceptance rates.

    Args:
      lm: the model.
      candidates: the candidates of `auto`, each with its longest drafts.
      prompts: token ids.
      max_new_tokens: the maximum number of new tokens per text.
      on_progress: called with a description of the current step.

    Returns:
      The expectation of each candidate, by name; and one report row per candidate: `candidate`, `rounds`,
      `num_draft_tokens`, `draft_acceptance_rate` (None without draft tokens) and `tokens_per_round`.

    Raises:
      ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("auto has nothing to choose among for this model; there is nothing to measure")
    played: dict[str, list[list[tuple[int, int]]]] = {}
    rows = []
    for one in candidates:
        rounds = played[one.name] = []
        for number, prompt in enumerate(prompts, 1):
            on_progress(f"measuring {one.name}, prompt {number} of {len(prompts)}")
            result = lm.generate(
                prompt,
                method=(one.drafter, one.params),
                max_new_tokens=max_new_tokens,
                temperature=0.0,
            )
            rounds.append(played_rounds(result.token_records))
        rows.append({"candidate": one.name, **_counted([pair for of_text in rounds for pair in of_text])})
    return fitted(played), rows


def fitted(played: Mapping[str, Sequence[Sequence[tuple[int, int]]]]) -> dict[str, Expectation]:
    """Fits the expectation of each candidate from its observed rounds.

    Args:
      played: (draft tokens, accepted tokens) of each round, by candidate and text.

    Examples:
      >>> fitted({"eagle": [[(2, 1), (2, 2), (2, 0)]] * 9})["eagle"].accept
      (0.65, 0.5)
    """
    return {name: _expectation(texts) for name, texts in played.items() if any(map(_complete, texts))}


def _complete(rounds: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Leaves out a last round without a draft, which the end of the text may have prevented."""
    return rounds if rounds and rounds[-1][0] else rounds[:-1]


def _expectation(texts: Sequence[Sequence[tuple[int, int]]]) -> Expectation:
    """Fits an expectation to (draft tokens, accepted tokens) of the rounds of some texts.

    A round with d draft tokens of which k are accepted shows that positions 0 … k − 1 were right and, where k < d, that
    position k was wrong. It shows nothing about later positions.
    """
    # A method without drafts is treated as if it had drafted one token per round that was always rejected.
    longest = max([1, *(drafted for rounds in texts for drafted, _ in rounds)])
    # By text and position: (accepted, rejected) draft tokens, and drafts that (continued, ended) there.
    accept, draft = np.zeros((2, len(texts), longest, 2))
    at = np.arange(longest)
    for number, rounds in enumerate(map(_complete, texts)):
        last = len(rounds) == len(texts[number])
        for left, (drafted, accepted) in zip(range(len(rounds) - 1, -1, -1), rounds, strict=True):
            # The end of the text may cut the last draft short; that does not count against the drafter. Any other
            # draft that ends early counts as rejected at its end.
            most = drafted if last and not left else longest
            accept[number] += np.stack([at < accepted, (at == accepted) & (accepted < most)], axis=-1)
            draft[number] += np.stack([at < drafted, (at == drafted) & (drafted < most)], axis=-1)
    shares = [(of[..., 0].sum(axis=0) + _EDGE) / (of.sum(axis=(0, -1)) + _EDGE) for of in (accept, draft)]
    shown = (accept.sum(axis=-1) > 0).sum(axis=0)
    # Half an acceptance and half a rejection more, so that nothing is certain.
    return Expectation(_rounded((shares[0] * shown + 0.5) / (shown + 1)), _BELIEVED, _rounded(shares[1]))


def _counted(rounds: Sequence[tuple[int, int]]) -> dict[str, Any]:
    drafted, accepted = (math.fsum(column) for column in zip(*rounds, strict=True)) if rounds else (0.0, 0.0)
    return {
        "rounds": len(rounds),
        "num_draft_tokens": int(drafted),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": 1 + accepted / len(rounds) if rounds else None,
    }


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(number), _DIGITS) for number in numbers)
