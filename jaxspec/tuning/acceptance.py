"""How much a model accepts of each method's drafts, on given prompts: what `auto` expects before the first round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.timing import OnProgress
from jaxspec.choosing import acceptance
from jaxspec.choosing.acceptance import Expectation
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import played_rounds
from jaxspec.methods.base import Candidate

# Digits of a number in a file: it is an estimate of a few texts.
_DIGITS = 3


def measure_acceptance(
    lm: LanguageModel,
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_progress: OnProgress = lambda what: None,
) -> tuple[dict[str, Expectation], list[dict[str, Any]]]:
    """Lets each candidate draft for a greedy text after each prompt, and fits what other texts may be like.

    Args:
      lm: the model.
      candidates: what `auto` chooses among; each drafts as long as it may.
      prompts: in tokens.
      max_new_tokens: of each text, at most.
      on_progress: called with what is being done.

    Returns:
      What is expected of each candidate, by name; and, for a report, `candidate`, `rounds`, `num_draft_tokens`,
      `draft_acceptance_rate` (None where nothing was drafted) and `tokens_per_round` of each.

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
    """What other texts may be like, by what drafted.

    Args:
      played: by candidate and text, (drafted, accepted) of each round.

    Examples:
      >>> fitted({"eagle": [[(2, 1), (2, 2), (2, 0)]] * 9})["eagle"].accept
      (0.65, 0.5)
    """
    expected = {}
    for name, texts in played.items():
        # A method that never drafts counts as if its one draft token had always been rejected.
        longest = max([1, *(drafted for rounds in texts for drafted, _ in rounds)])
        flat = acceptance.flat_prior(1, longest)
        nothing = acceptance.nothing_seen(flat, len(texts))
        # A text's last draft had no room, or a text ended within it: no fault of the drafter.
        before, last = (
            [rounds[:-1] for rounds in texts],
            [[one for one in rounds[-1:] if one[0]] for rounds in texts],
        )
        if not any(rounds for texts in (before, last) for rounds in texts):
            continue  # nothing was measured for it
        seen = acceptance.observed_rounds(nothing, 0, before, forgetting=1.0, asked=longest)
        seen = acceptance.observed_rounds(seen, 0, last, forgetting=1.0)
        prior = acceptance.fitted_prior(seen)
        accept, strength, draft = map(_rounded, (prior.accept[0], prior.strength, prior.draft[0]))
        expected[name] = Expectation(tuple(accept), strength[0], tuple(draft))
    return expected


def _counted(rounds: Sequence[tuple[int, int]]) -> dict[str, Any]:
    drafted, accepted = (math.fsum(column) for column in zip(*rounds, strict=True)) if rounds else (0.0, 0.0)
    return {
        "rounds": len(rounds),
        "num_draft_tokens": int(drafted),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": 1 + accepted / len(rounds) if rounds else None,
    }


def _rounded(numbers: np.ndarray) -> list[float]:
    return [float(number) for number in numbers.round(_DIGITS)]
