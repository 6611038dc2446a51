"""Finds the fastest setting (α, m, n) of ASD on given prompts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.drafting.asd_drafter import ASDDrafter, admg
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.tuning.objectives import Speed
from jaxspec.measuring.tuning.race import OnMeasured, Race, Turn, medians
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.measuring.tuning.tuning_options import ASDGrid, Sweep
from jaxspec.model.sharding import fetched

# Values of m and n in Table 2 of the paper; 0 turns a rule off.
EVERYS, KEEP_LASTS = (0, 2, 3, 4, 5), (0, 1, 2, 3)
_QUANTILES = (0.2, 0.4, 0.6, 0.8)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Settings that give the same masks on all prompts; they share one measurement.

    Attributes:
      settings: the settings. The first represents the group: it has the fewest rules on, then the most cautious
        numbers.
      plans: bool[P, L, 2], the mask of each prompt; True for a sublayer that runs.
    """

    settings: tuple[ASDNumbers, ...]
    plans: np.ndarray

    @property
    def skipped(self) -> tuple[float, float]:
        """Attention and MLP sublayers skipped, means over the prompts."""
        attention, mlp = (~self.plans).sum(axis=1).mean(axis=0)
        return float(attention), float(mlp)


def default_alphas(similarities: np.ndarray) -> tuple[float, ...]:
    """Quantiles of the attention sublayers' similarities float[P, L], the paper's α, and 1 (off), ascending.

    Quantiles are rounded down to three decimals, so that the sublayer at a quantile is skipped.
    """
    quantiles = np.floor(1e3 * np.quantile(similarities, _QUANTILES)) / 1e3
    return tuple(sorted({*(float(q) for q in quantiles if 0 < q < 1), ASDNumbers().alpha, 1.0}))


def grid(alphas: Sequence[float], everys: Sequence[int], keep_lasts: Sequence[int]) -> list[ASDNumbers]:
    """All combinations of the given values.

    Raises:
      ValueError: a value is outside its range.
    """
    for name, values in (("alpha", alphas), ("every", everys), ("keep_last", keep_lasts)):
        for value in values:
            try:
                ASDNumbers(**{name: value})  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"`{name}s` has {value}; {str(error).partition('; ')[2]}") from None
    return [ASDNumbers(*numbers) for numbers in itertools.product(alphas, everys, keep_lasts)]


def grouped(similarities: jax.Array | np.ndarray, settings: Sequence[ASDNumbers]) -> list[Group]:
    """Groups settings by the masks that they give.

    A setting is dropped if it skips every sublayer for some prompt, or none for all prompts.

    Args:
      similarities: float32[P, L], similarity C of each prompt and attention sublayer.
      settings: the settings.
    """
    settings = sorted(settings, key=lambda s: (s.rules, -s.alpha, -s.keep_last, -s.every))
    found: dict[bytes, list[ASDNumbers]] = {}
    masks: dict[bytes, np.ndarray] = {}
    for setting, plans in zip(settings, masks_of(similarities, settings), strict=True):
        if plans.any(axis=(1, 2)).all() and not plans.all():
            found.setdefault(plans.tobytes(), []).append(setting)
            masks[plans.tobytes()] = plans
    return [Group(tuple(same), masks[key]) for key, same in found.items()]


def masks_of(similarities: jax.Array | np.ndarray, settings: Sequence[ASDNumbers]) -> np.ndarray:
    """The masks of each setting and prompt, bool[S, P, L, 2]."""
    alpha, every, keep_last = zip(*map(dataclasses.astuple, settings), strict=True)

    def column(values: Sequence[float], dtype: DTypeLike) -> jax.Array:
        return jnp.asarray(values, dtype)[:, None, None]

    numbers = column(alpha, jnp.float32), column(every, jnp.int32), column(keep_last, jnp.int32)
    return np.asarray(admg(jnp.asarray(similarities), *numbers))


@shows_progress
def tune_asd(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    tried: ASDGrid | None = None,
    sweep: Sweep | None = None,
    *,
    on_progress: OnProgress = lambda step: None,
    on_measured: OnMeasured = lambda done, total, best: None,
) -> dict[str, Any]:
    """Measures the speed-up of each setting (α, m, n) over plain decoding, alternating with it.

    Settings with the same masks on every prompt share a measurement. Every group is measured once; then the
    fastest groups are measured again, `sweep.repeats` times. An interrupt (Ctrl-C) ends the sweep; the finished
    measurements are returned.

    Args:
      lm: the model.
      prompts: token ids.
      tried: the settings to try; by default those of `ASDGrid`.
      sweep: tokens per prompt and repeats.
      on_progress: called with a description of the current step.
      on_measured: called with the number of finished measurements, their total, and the best row so far.

    Returns:
      `results`, the best first: `alpha`, `every`, `keep_last`, `same_masks` (the number of settings with these
      masks), `skipped_attention`, `skipped_mlp` (means over the prompts), `turns`, `score` (the speed-up, the
      median over the turns), `tokens_per_second`, `plain_tokens_per_second`, `draft_acceptance_rate`;
      `similarities` (`min`, `mean`, `max`), `settings`, `distinct`, `interrupted`.

    Raises:
      ValueError: a value is outside its range, or no setting skips a sublayer.
      KeyboardInterrupt: interrupted before the first measurement.
    """
    tried, sweep = tried or ASDGrid(), sweep or Sweep()
    on_progress("reading the prompts")
    # Only the prompts' similarities are used, so any two tokens serve as the texts after them.
    _, gathered, _ = prepare_texts(lm, prompts, [[0, 0]] * len(prompts))
    similarities = fetched(gathered)[:, :, 0]
    settings = grid(
        tried.alphas or default_alphas(similarities), tried.everys or EVERYS, tried.keep_lasts or KEEP_LASTS
    )
    found = grouped(similarities, settings)
    if not found:
        raise ValueError(
            "no setting skips a sublayer on these prompts; give lower `alphas`, or `everys` above 0"
        )
    on_progress("compiling")
    speed = Speed(lm, prompts, sweep.max_new_tokens, _drafter(lm, found[0].settings[0]))
    race = Race[Group](lambda group: speed(_drafter(lm, group.settings[0])), sweep.repeats, _row, on_measured)
    race.run(found)
    return {
        "results": race.results(),
        "similarities": {
            "min": float(similarities.min()),
            "mean": float(similarities.mean()),
            "max": float(similarities.max()),
        },
        "settings": len(settings),
        "distinct": len(found),
        "interrupted": race.interrupted,
    }


def _drafter(lm: LanguageModel, setting: ASDNumbers) -> ASDDrafter:
    return ASDDrafter(
        lm.config, jnp.float32(setting.alpha), jnp.int32(setting.every), jnp.int32(setting.keep_last)
    )


def _row(group: Group, turns: Sequence[Turn]) -> dict[str, Any]:
    attention, mlp = group.skipped
    return {
        **dataclasses.asdict(group.settings[0]),
        "same_masks": len(group.settings),
        "skipped_attention": attention,
        "skipped_mlp": mlp,
        **medians(turns),
    }
