"""Which settings (α, m, n) of ASD are worth measuring on given prompts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.asd import admg

# α and (m, n) of the paper, Table 2.
PAPER_ALPHA = 0.985
EVERYS, KEEP_LASTS = (0, 2, 3, 4, 5), (0, 1, 2, 3)
_QUANTILES = (0.2, 0.4, 0.6, 0.8)


@dataclasses.dataclass(frozen=True)
class Setting:
    """α, m and n of `drafting.asd.admg`; 1, 0 and 0 switch their rules off."""

    alpha: float
    every: int
    keep_last: int

    @property
    def rules(self) -> int:
        """How many of the three rules are on."""
        return (self.alpha < 1) + (self.every > 0) + (self.keep_last > 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Settings that give the same masks on all prompts, so that one measurement serves all of them.

    Attributes:
      settings: the first stands for all: it has the fewest rules on, and of such the most cautious numbers.
      plans: bool[P, L, 2], the mask of each prompt, True for what runs.
    """

    settings: tuple[Setting, ...]
    plans: np.ndarray

    @property
    def skipped(self) -> tuple[float, float]:
        """Attention and MLP sublayers skipped, means over the prompts."""
        attention, mlp = (~self.plans).sum(axis=1).mean(axis=0)
        return float(attention), float(mlp)


def default_alphas(similarities: np.ndarray) -> tuple[float, ...]:
    """Quantiles of the attention sublayers' similarities float[P, L], the paper's α, and 1 (off), rising.

    Each is rounded down to three digits, so that its sublayer is among those that go.
    """
    quantiles = np.floor(1e3 * np.quantile(similarities, _QUANTILES)) / 1e3
    return tuple(sorted({*(float(q) for q in quantiles if 0 < q < 1), PAPER_ALPHA, 1.0}))


def grid(alphas: Sequence[float], everys: Sequence[int], keep_lasts: Sequence[int]) -> list[Setting]:
    """Every combination.

    Raises:
      ValueError: a number is outside its range.
    """
    off = "0 (off) or positive whole numbers below 2^31"
    for name, values, fits, wanted in (
        ("alphas", alphas, lambda alpha: 0 < alpha <= 1, "numbers above 0 and at most 1 (off)"),
        ("everys", everys, lambda every: 0 <= every < 2**31, off),
        ("keep_lasts", keep_lasts, lambda keep: 0 <= keep < 2**31, off),
    ):
        for value in values:
            if not fits(value):
                raise ValueError(f"`{name}` has {value}; give {wanted}")
    return [Setting(*numbers) for numbers in itertools.product(alphas, everys, keep_lasts)]


def grouped(similarities: jax.Array | np.ndarray, settings: Sequence[Setting]) -> list[Group]:
    """The settings by the masks that they give.

    Left out are settings under which some prompt's draft would skip every sublayer, or all prompts' none.

    Args:
      similarities: float32[P, L], C of each prompt and attention sublayer.
      settings: to be grouped.
    """
    settings = sorted(settings, key=lambda s: (s.rules, -s.alpha, -s.keep_last, -s.every))
    found: dict[bytes, list[Setting]] = {}
    masks: dict[bytes, np.ndarray] = {}
    for setting, plans in zip(settings, masks_of(similarities, settings), strict=True):
        if plans.any(axis=(1, 2)).all() and not plans.all():
            found.setdefault(plans.tobytes(), []).append(setting)
            masks[plans.tobytes()] = plans
    return [Group(tuple(same), masks[key]) for key, same in found.items()]


def masks_of(similarities: jax.Array | np.ndarray, settings: Sequence[Setting]) -> np.ndarray:
    """The masks of each setting and prompt, bool[S, P, L, 2]."""
    alpha, every, keep_last = zip(*map(dataclasses.astuple, settings), strict=True)

    def column(values: Sequence[float], dtype) -> jax.Array:
        return jnp.asarray(values, dtype)[:, None, None]

    numbers = column(alpha, jnp.float32), column(every, jnp.int32), column(keep_last, jnp.int32)
    return np.asarray(admg(jnp.asarray(similarities), *numbers))


def ablation(setting: Setting) -> dict[str, Setting]:
    """The rows of the paper's ablation (Table 5) for a setting with all rules on, by name."""
    return {
        "all rules": setting,
        "cosine and rule 2": dataclasses.replace(setting, every=0),
        "cosine alone": dataclasses.replace(setting, every=0, keep_last=0),
        "rules 1 and 2": dataclasses.replace(setting, alpha=1.0),
    }
