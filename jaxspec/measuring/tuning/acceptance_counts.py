"""Measures each method's acceptance on given prompts: the estimates with which `auto` begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.choosing import beliefs
from jaxspec.choosing.beliefs import Expectation
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import played_rounds
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.methods.base import Candidate

# Decimals in the file; an estimate from a few texts is not more precise.
_DIGITS = 3


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
    expected = {}
    for name, texts in played.items():
        # A method without drafts is treated as if it had drafted one token per round that was always rejected.
        longest = max([1, *(drafted for rounds in texts for drafted, _ in rounds)])
        nothing = beliefs.no_counts(len(texts), 1, longest)
        # The end of the text may cut the last draft short; that does not count against the drafter.
        before, last = (
            [rounds[:-1] for rounds in texts],
            [[one for one in rounds[-1:] if one[0]] for rounds in texts],
        )
        if not any(rounds for texts in (before, last) for rounds in texts):
            continue  # no rounds were measured
        seen = beliefs.with_rounds(nothing, 0, before, asked=longest)
        seen = beliefs.with_rounds(seen, 0, last)
        (one,) = beliefs.fitted(seen)
        expected[name] = Expectation(_rounded(one.accept), one.strength, _rounded(one.draft))
    return expected


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
