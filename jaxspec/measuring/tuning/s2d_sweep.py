"""Finds the fastest thresholds of S2D on given prompts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.tuning.objectives import Speed
from jaxspec.measuring.tuning.race import OnMeasured, Race, medians
from jaxspec.measuring.tuning.tuning_options import S2DGrid, Sweep
from jaxspec.methods.resources import ModelLike

THRESHOLDS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
# Maximum number of settings; a larger sweep would take hours.
MAX_SETTINGS = 200


class SortedDraft(NamedTuple):
    """A draft with sorted exits, with any thresholds.

    Attributes:
      drafter: the method.
      params: its parameters; None if the target drafts for itself.
      fingerprint: fingerprint of the draft's layers up to its last exit; saved thresholds are found by it.
    """

    drafter: S2DDrafter
    params: Any
    fingerprint: str


def sorted_draft(lm: LanguageModel, draft: ModelLike | None = None) -> SortedDraft:
    """Loads a draft model, or uses the target as its own draft.

    Raises:
      ValueError, FileNotFoundError: the draft has no sorted exits, or an error of `load`.
    """
    drafter, params = lm.drafter("s2d", beside=False, draft=draft)
    assert isinstance(drafter, S2DDrafter)
    # With quantised weights it is the fingerprint of the original, as the method reads it.
    loaded = lm.loaded if draft is None else lm.load_draft(draft)
    return SortedDraft(drafter, params, loaded.until(drafter.exits[-1]).fingerprint)


def s2d_grid(values: Sequence[float], exits: int) -> list[tuple[float, ...]]:
    """All non-increasing choices of thresholds for the exits but the last of `exits` exits.

    As in the paper, a confidence that suffices at an early exit also suffices at a later one. No setting occurs
    twice: after an exit that is always taken (0), the thresholds of the unreachable exits are 0 too.

    Raises:
      ValueError: there are more than `MAX_SETTINGS` settings.
    """
    falling = sorted(set(values), reverse=True)
    count = math.comb(len(falling) + exits - 2, exits - 1)
    if count > MAX_SETTINGS:
        raise ValueError(
            f"{len(falling)} thresholds at {exits - 1} exits are {count} settings, more than {MAX_SETTINGS}; "
            "give fewer `thresholds`"
        )
    return list(itertools.combinations_with_replacement(falling, exits - 1))


@shows_progress
def tune_s2d(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    drafter: S2DDrafter,
    draft: Any = None,
    tried: S2DGrid | None = None,
    sweep: Sweep | None = None,
    *,
    on_progress: OnProgress = lambda step: None,
    on_measured: OnMeasured = lambda done, total, best: None,
) -> dict[str, Any]:
    """Measures the speed-up of S2D over plain decoding for each setting of its thresholds, as `tune_asd` does.

    Args:
      lm: the target.
      prompts: token ids.
      drafter: the method, with any thresholds.
      draft: its parameters; None if the target drafts for itself.
      tried: the thresholds to try; by default those of `S2DGrid`.
      sweep: tokens per prompt and repeats.
      on_progress: called with a description of the current step.
      on_measured: called with the number of finished measurements, their total, and the best row so far.

    Returns:
      `results`, the best first: `thresholds`, `turns`, `score`, `tokens_per_second`,
      `plain_tokens_per_second`, `draft_acceptance_rate`; `settings`, `interrupted`.

    Raises:
      ValueError: the draft has one exit.
      KeyboardInterrupt: interrupted before the first measurement.
    """
    tried, sweep = tried or S2DGrid(), sweep or Sweep()
    if len(drafter.exits) < 2:
        raise ValueError(f"the draft has one exit ({drafter.exits[0]} layers); there is nothing to tune")

    def method(thresholds: tuple[float, ...]) -> tuple[S2DDrafter, Any]:
        return dataclasses.replace(drafter, thresholds=jnp.asarray(thresholds, jnp.float32)), draft

    candidates = s2d_grid(tried.thresholds or THRESHOLDS, len(drafter.exits))
    on_progress("compiling")
    speed = Speed(lm, prompts, sweep.max_new_tokens, method(candidates[0]))
    race = Race[tuple[float, ...]](
        lambda thresholds: speed(method(thresholds)),
        sweep.repeats,
        lambda thresholds, turns: {"thresholds": list(thresholds), **medians(turns)},
        on_measured,
    )
    race.run(candidates)
    return {"results": race.results(), "settings": len(candidates), "interrupted": race.interrupted}
