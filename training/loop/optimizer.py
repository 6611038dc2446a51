"""Makes the optimiser: AdamW, Muon or Adafactor with a schedule, weight decay and clipping, as an Optax chain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxspec.model.llama import Params
from training.data import sizing
from training.data.sizing import AUTO, Sized

# Root mean square of Muon's updates at learning rate 1, about that of AdamW.
_MUON_RMS = 0.2
# The axes (reduction, output) of each matrix of a layer. Other axes index matrices of one leaf: the key/value heads of
# `qkv`, gate and up of `gate_up`.
_MATRICES = {
    "qkv": contrib.MuonDimensionNumbers(2, 1),
    "out": contrib.MuonDimensionNumbers(1, 0),
    "gate_up": contrib.MuonDimensionNumbers(2, 1),
    "down": contrib.MuonDimensionNumbers(1, 0),
}


# The defaults of a model from random weights, and those of a pretrained one, which are SoFT's (S2D paper, appendix).
FROM_SCRATCH = {"learning_rate": 3e-3, "warmup": 100, "weight_decay": 0.1}
FROM_PRETRAINED = {"learning_rate": 2e-5, "warmup": 0.04, "weight_decay": 0.0}


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, Muon or Adafactor, with linear warm-up, decay and clipping.

    Attributes:
      algorithm: `adamw`, `muon` or `adafactor`. Muon updates the matrices of the layers with their orthogonalised
        momentum (Jordan et al. 2024), scaled to AdamW's update size (Liu et al. 2025, "Muon is Scalable for LLM
        Training", equation 4), and embedding, head and norms as AdamW. Both use Nesterov momentum. Adafactor (Shazeer
        and Stern 2018) keeps no first moment, and only row and column means of each matrix's second moment. Its updates
        have about the size of AdamW's at the same learning rate.
      moments: dtype of the first moment of AdamW and Muon. The second moment is always float32, because a step
        changes it by less than bfloat16 resolves.
      learning_rate: the peak, reached after warm-up. Default: 3e-3 from scratch, 2e-5 from a pretrained model.
      schedule: `cosine` decays from warm-up to the last step; `constant` stays at the peak and decays, as a cosine,
        only
        over the last `decay_steps`, so that a run may be extended until then.
      decay_steps: number of steps of decay in the `constant` schedule.
      final_fraction: the learning rate at the last step, as a fraction of the peak.
      warmup: number of steps of linear warm-up; below 1, a share of all steps. Default: 100 from scratch, 0.04 from a
        pretrained model.
      b1: decay of Adam's first moment per step.
      b2: decay of Adam's second moment per step.
      weight_decay: decoupled weight decay, on matrices and the embedding only, not on norms and biases. Default: 0.1
        from scratch, 0 from a pretrained model.
      clip: largest global norm of the gradient.
      accumulate: micro-batches per step. The gradient equals that of one batch of all of them. `auto`: 1 from
        scratch; from a pretrained model, as many as make 128 rows, if there is enough text.
    """

    algorithm: Literal["adamw", "muon", "adafactor"] = "adamw"
    moments: Literal["float32", "bfloat16"] = "float32"
    learning_rate: float | None = None
    schedule: Literal["cosine", "constant"] = "cosine"
    decay_steps: int = 500
    final_fraction: float = 0.02
    warmup: float | None = None
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float | None = None
    clip: float = 1.0
    accumulate: Sized = AUTO

    def __post_init__(self):
        sizing.check(self, accumulate=1, decay_steps=1)
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; give a number above 0")
        for name, most in (("warmup", math.inf), ("weight_decay", math.inf), ("final_fraction", 1)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; give a number from 0{'' if most > 1 else ' to 1'}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number from 0 to below 1")
        if self.algorithm == "adafactor" and self.moments != "float32":
            raise ValueError(f"moments is {self.moments}; adafactor keeps no first moment: leave moments out")

    def completed(self, usual: Mapping[str, float] = FROM_SCRATCH) -> Self:
        """Replaces the options that are None by usual numbers."""
        missing: dict[str, Any] = {name: usual[name] for name in usual if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """Returns the learning rate by step, from 0: it rises in equal steps from the first one on, has its peak after
    warm-up, and `final_fraction` of it at `steps`.
    """
    options = options.completed()
    assert options.learning_rate is not None
    assert options.warmup is not None
    warmup = round(options.warmup if options.warmup >= 1 else options.warmup * steps)
    warmup = min(warmup, max(1, steps // 2))
    decay = steps - warmup
    if options.schedule == "constant":
        decay = min(decay, options.decay_steps)
    return optax.join_schedules(
        [
            # The first step has a rate above 0, else its batch would train nothing.
            lambda step: options.learning_rate * (step + 1) / (warmup + 1),
            optax.constant_schedule(options.learning_rate),
            optax.cosine_decay_schedule(options.learning_rate, max(1, decay), options.final_fraction),
        ],
        [warmup, steps - decay],
    )


def decayed(params: Params) -> Any:
    """Marks the leaves with weight decay, as a tree of bool: all but norms and biases."""

    def is_matrix(path, leaf) -> bool:
        del leaf
        name = path[-1].key
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def orthogonalised(params: Params) -> Any:
    """Marks the leaves that Muon updates, in Optax's form: the axes of each matrix of a layer, None for the others."""

    def dimensions(path, leaf) -> contrib.MuonDimensionNumbers | None:
        del leaf
        return _MATRICES.get(path[-1].key) if path[0].key == "layers" else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def make_optimizer(
    options: OptimizerOptions, steps: int, held: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Makes the optimiser: clipping, then AdamW, Muon or Adafactor on the schedule of `steps` steps.

    Args:
      options: the settings.
      steps: the last step.
      held: names of parameters that are not trained and have no moments; their gradients are 0.
    """
    options = options.completed()
    assert options.weight_decay is not None
    rate, decay, dtype = schedule(options, steps), options.weight_decay, jnp.dtype(options.moments)
    if options.algorithm == "muon":
        moving = contrib.muon(
            rate,
            weight_decay=decay,
            weight_decay_mask=decayed,
            adam_b1=options.b1,
            adam_b2=options.b2,
            adam_weight_decay=decay,
            mu_dtype=dtype,
            consistent_rms=_MUON_RMS,
            muon_weight_dimension_numbers=orthogonalised,
        )
        moving = _sparing_norms(moving)
    elif options.algorithm == "adafactor":
        moving = optax.adafactor(
            rate,
            multiply_by_parameter_scale=False,
            # Optax applies this decay after the learning rate.
            weight_decay_rate=(lambda step: rate(step) * decay) if decay else None,
            weight_decay_mask=decayed,
        )
    else:
        moving = optax.adamw(rate, options.b1, options.b2, mu_dtype=dtype, weight_decay=decay, mask=decayed)
    chain = optax.chain(optax.clip_by_global_norm(options.clip), moving)
    if not held:
        return chain
    return optax.masked(chain, lambda params: {name: name not in held for name in params})


def _sparing_norms(moving: optax.GradientTransformation) -> optax.GradientTransformation:
    """Excludes norms and biases from weight decay: Optax's Muon has no mask for its AdamW part.

    Only the decay reads the parameters, so zeros in their place switch it off. The state is unchanged.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        zeroed = jax.tree.map(lambda p, on: p if on else jnp.zeros_like(p), params, decayed(params))
        return moving.update(updates, state, zeroed)

    return optax.GradientTransformation(moving.init, update)
