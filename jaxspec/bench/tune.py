"""Measures the numbers of a method on given prompts, and finds the fastest."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.bench.calibration import Report, calibrate
from jaxspec.bench.objectives import Speed
from jaxspec.drafting.asd import ASD
from jaxspec.engine.language_model import LanguageModel
from jaxspec.selection import asd_grid
from jaxspec.selection.asd_grid import Group, Setting

# Groups that are measured anew once all have been measured once.
FINALISTS = 6
# Settings with all rules on, from the fastest down, among which the ablation looks for one where each matters.
_BASES = 12


@dataclasses.dataclass(frozen=True)
class ASDOptions:
    """The sweep of ASD.

    Attributes:
      alphas: α's to try, 1 for off; empty for quantiles of the similarities, the paper's .985 and off.
      everys: m's to try, 0 for off.
      keep_lasts: n's to try, 0 for off.
      max_new_tokens: generated after each prompt.
      repeats: turns in which the finalists are measured.
    """

    alphas: tuple[float, ...] = ()
    everys: tuple[int, ...] = asd_grid.EVERYS
    keep_lasts: tuple[int, ...] = asd_grid.KEEP_LASTS
    max_new_tokens: int = 32
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats is {self.repeats}; give at least 1")


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
    and the rows of the paper's ablation anew, in turns, which is what counts. Interrupted (Ctrl-C), it ends
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
            "no setting skips anything on these prompts; give a lower --alpha, or --every above 0"
        )
    on_progress("compiling")
    speed = Speed(lm, prompts, options.max_new_tokens, _drafter(lm, found[0].settings[0]))
    measured: dict[Group, list[dict[str, Any]]] = {group: [] for group in found}
    anew: dict[Group, list[dict[str, Any]]] = {}
    total = len(found) + options.repeats * min(FINALISTS, len(found))
    rows: dict[str, tuple[Setting, Group]] = {}
    interrupted = False

    def measure(group: Group, into: list[dict[str, Any]]) -> None:
        into.append(speed(_drafter(lm, group.settings[0])))
        done = sum(map(len, (*measured.values(), *anew.values())))
        # Single turns do not compare with medians of many.
        on_measured(done, total, ranked(anew or measured)[0])

    def ranked(turns: dict[Group, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        reports = [_row(group, taken) for group, taken in turns.items() if taken]
        return sorted(reports, key=lambda row: -row["score"])

    try:
        for group in found:
            measure(group, measured[group])
        fastest = sorted(found, key=lambda group: -measured[group][0]["score"])
        rows = _ablation_rows(fastest, similarities)
        finalists = dict.fromkeys([*fastest[:FINALISTS], *(group for _, group in rows.values())])
        anew = {group: [] for group in finalists}
        total = len(found) + options.repeats * len(finalists)
        for turn in range(options.repeats):
            for group in finalists if turn % 2 == 0 else reversed(finalists):
                measure(group, anew[group])
    except KeyboardInterrupt:
        interrupted = True
        if not any(measured.values()):
            raise
    final = {group: turns for group, turns in anew.items() if turns}
    once = {group: turns for group, turns in measured.items() if group not in final}
    return {
        "results": ranked(final) + ranked(once),
        "ablation": [
            {"rules": name, **_row(group, turns), **dataclasses.asdict(setting)}
            for name, (setting, group) in rows.items()
            if (turns := final.get(group) or measured.get(group))
        ],
        "similarities": {
            "min": float(similarities.min()),
            "mean": float(similarities.mean()),
            "max": float(similarities.max()),
        },
        "settings": len(settings),
        "distinct": len(found),
        "interrupted": interrupted,
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


def _row(group: Group, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    attention, mlp = group.skipped

    def median(name: str) -> float | None:
        known = [turn[name] for turn in turns if turn[name] is not None]
        return statistics.median(known) if known else None

    return {
        **dataclasses.asdict(group.settings[0]),
        "same_masks": len(group.settings),
        "skipped_attention": attention,
        "skipped_mlp": mlp,
        "turns": len(turns),
        **{name: median(name) for name in turns[0]},
    }
