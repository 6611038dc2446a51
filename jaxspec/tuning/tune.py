"""Measures the numbers of a method on given prompts, and finds the fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.asd import ASD
from jaxspec.drafting.s2d import S2D
from jaxspec.engine.language_model import LanguageModel
from jaxspec.tuning import asd_grid
from jaxspec.tuning.asd_grid import Group, Setting
from jaxspec.tuning.calibration import Report, calibrate
from jaxspec.tuning.objectives import Speed
from jaxspec.tuning.race import Race, Turn, medians

# Settings with all rules on, from the fastest down, among which the ablation looks for one where each matters.
_BASES = 12


@dataclasses.dataclass(frozen=True)
class ASDOptions:
    """The sweep of ASD.

    Attributes:
      alphas: α's to try, 1 for off; empty for quantiles of the similarities, the paper's .985 and off.
      everys: m's to try, 0 for off.
      keep_lasts: n's to try, 0 for off.
      max_new_tokens: of each text, which may end before.
      repeats: turns in which the finalists are measured.
    """

    alphas: tuple[float, ...] = ()
    everys: tuple[int, ...] = asd_grid.EVERYS
    keep_lasts: tuple[int, ...] = asd_grid.KEEP_LASTS
    max_new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        _check_repeats(self.repeats)


def tune_asd(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: ASDOptions,
    *,
    on_progress: Report = lambda what: None,
    on_measured: Callable[[int, int, dict[str, Any]], None] = lambda done, total, best: None,
) -> dict[str, Any]:
    """Sweeps (α, m, n) and measures tokens/s beside plain decoding, in turns.

    Settings that give the same masks on every prompt are measured once; all once, then the fastest of them
    and the rows of the paper's ablation again, in turns, which is what counts. Interrupted (Ctrl-C), it ends
    with what was measured.

    Args:
      lm: the model.
      prompts: token ids.
      options: of the sweep.
      on_progress: told what is being done.
      on_measured: told how many measurements are done, of how many, and the best row so far.

    Returns:
      `results`, the best first: `alpha`, `every`, `keep_last`, `same_masks` (how many settings of the grid
      these masks stand for), `skipped_attention`, `skipped_mlp` (means over the prompts), `turns`, `score`
      (the speed-up, its median over the turns), `tokens_per_second`, `plain_tokens_per_second`,
      `draft_acceptance_rate`; `ablation`, rows of the same with `rules`, of a fast setting in which each
      of them counts; `similarities` (`min`, `mean`, `max`), `settings`, `distinct`, `interrupted`.

    Raises:
      ValueError: a number outside its range, or no setting of the grid skips anything.
      KeyboardInterrupt: interrupted before the first measurement.
    """
    on_progress("reading the prompts")
    # What the prompts are followed by does not matter here.
    _, gathered = calibrate(lm, prompts, [[0, 0]] * len(prompts))
    similarities = np.asarray(gathered)[:, :, 0]
    alphas = options.alphas or asd_grid.default_alphas(similarities)
    settings = asd_grid.grid(alphas, options.everys, options.keep_lasts)
    found = asd_grid.grouped(similarities, settings)
    if not found:
        raise ValueError(
            "no setting skips anything on these prompts; give lower `alphas`, or `everys` above 0"
        )
    on_progress("compiling")
    speed = Speed(lm, prompts, options.max_new_tokens, _drafter(lm, found[0].settings[0]))
    rows: dict[str, tuple[Setting, Group]] = {}

    def ablation(fastest: list[Group]) -> list[Group]:
        rows.update(_ablation_rows(fastest, similarities))
        return [group for _, group in rows.values()]

    race = Race[Group](
        lambda group: speed(_drafter(lm, group.settings[0])), options.repeats, _row, on_measured
    )
    race.run(found, ablation)
    return {
        "results": race.results(),
        "ablation": [
            {"rules": name, **_row(group, turns), **dataclasses.asdict(setting)}
            for name, (setting, group) in rows.items()
            if (turns := race.turns(group))
        ],
        "similarities": {
            "min": float(similarities.min()),
            "mean": float(similarities.mean()),
            "max": float(similarities.max()),
        },
        "settings": len(settings),
        "distinct": len(found),
        "interrupted": race.interrupted,
    }


def _drafter(lm: LanguageModel, setting: Setting) -> ASD:
    return ASD(lm.config, jnp.float32(setting.alpha), jnp.int32(setting.every), jnp.int32(setting.keep_last))


def _ablation_rows(fastest: Sequence[Group], similarities: np.ndarray) -> dict[str, tuple[Setting, Group]]:
    """The ablation of a fast setting with all rules on, by name; rows that skip nothing are left out."""
    complete = [s for group in fastest for s in group.settings if s.rules == 3]
    if not complete:
        return {}
    by_masks = {group.plans.tobytes(): group for group in fastest}

    def named(base: Setting) -> dict[str, tuple[Setting, Group]]:
        return {
            name: (setting, by_masks.get(group.plans.tobytes(), group))
            for name, setting in asd_grid.ablation(base).items()
            for group in asd_grid.grouped(similarities, [setting])
        }

    def telling(rows: dict[str, tuple[Setting, Group]]) -> int:
        return len({group for _, group in rows.values()})

    # In a shallow model a rule may be on and yet change nothing.
    every = [named(base) for base in complete[:_BASES]]
    return max(every, key=telling)


def _row(group: Group, turns: Sequence[Turn]) -> dict[str, Any]:
    attention, mlp = group.skipped
    return {
        **dataclasses.asdict(group.settings[0]),
        "same_masks": len(group.settings),
        "skipped_attention": attention,
        "skipped_mlp": mlp,
        **medians(turns),
    }


@dataclasses.dataclass(frozen=True)
class S2DOptions:
    """The sweep of S2D's thresholds.

    Attributes:
      thresholds: to try at each exit but the last, 0 to 1: 0 always leaves there, 1 never.
      max_new_tokens: of each text, which may end before.
      repeats: turns in which the finalists are measured.
    """

    thresholds: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
    max_new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        _check_repeats(self.repeats)
        if not self.thresholds or not all(0 <= value <= 1 for value in self.thresholds):
            raise ValueError(f"`thresholds` has {self.thresholds}; give numbers from 0 to 1")


# Settings of thresholds beyond which a sweep would take hours.
MOST_SETTINGS = 200


def s2d_grid(values: Sequence[float], exits: int) -> list[tuple[float, ...]]:
    """Thresholds for `exits` exits but the last: every choice that does not rise from exit to exit.

    As in the paper: what is sure enough to leave early would be sure enough later. So nothing is tried twice: an
    exit that is always taken (0) makes those after it unreachable, and they have 0 too.

    Raises:
      ValueError: they are too many to be measured.
    """
    falling = sorted(set(values), reverse=True)
    count = math.comb(len(falling) + exits - 2, exits - 1)
    if count > MOST_SETTINGS:
        raise ValueError(
            f"{len(falling)} thresholds at {exits - 1} exits are {count} settings, more than {MOST_SETTINGS}; "
            "give fewer `thresholds`"
        )
    return list(itertools.combinations_with_replacement(falling, exits - 1))


def tune_s2d(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: S2DOptions,
    drafter: S2D,
    draft: Any = None,
    *,
    on_progress: Report = lambda what: None,
    on_measured: Callable[[int, int, dict[str, Any]], None] = lambda done, total, best: None,
) -> dict[str, Any]:
    """Sweeps S2D's thresholds and measures tokens/s beside plain decoding, in turns, as `tune_asd` does.

    Args:
      lm: the target.
      prompts: token ids.
      options: of the sweep.
      drafter: the method, with any thresholds.
      draft: its parameters; None where the target drafts for itself.
      on_progress: told what is being done.
      on_measured: told how many measurements are done, of how many, and the best row so far.

    Returns:
      `results`, the best first: `thresholds`, `turns`, `score`, `tokens_per_second`,
      `plain_tokens_per_second`, `draft_acceptance_rate`; `settings`, `interrupted`.

    Raises:
      ValueError: the draft has one exit.
      KeyboardInterrupt: interrupted before the first measurement.
    """
    if len(drafter.exits) < 2:
        raise ValueError(f"the draft has one exit ({drafter.exits[0]} layers); there is nothing to tune")

    def method(thresholds: tuple[float, ...]) -> tuple[S2D, Any]:
        return dataclasses.replace(drafter, thresholds=jnp.asarray(thresholds, jnp.float32)), draft

    candidates = s2d_grid(options.thresholds, len(drafter.exits))
    on_progress("compiling")
    speed = Speed(lm, prompts, options.max_new_tokens, method(candidates[0]))
    race = Race[tuple[float, ...]](
        lambda thresholds: speed(method(thresholds)),
        options.repeats,
        lambda thresholds, turns: {"thresholds": list(thresholds), **medians(turns)},
        on_measured,
    )
    race.run(candidates)
    return {"results": race.results(), "settings": len(candidates), "interrupted": race.interrupted}


def _check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
