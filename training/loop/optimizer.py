"""The optimiser: AdamW or Muon on a schedule, with decay and clipping, as an Optax chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxspec.model.llama import Params

# Root mean square of Muon's updates at rate 1: about AdamW's.
_MUON_RMS = 0.2
# The axes (reduction, output) of each matrix of a layer; the axes left over tell matrices of one leaf apart: the
# key/value heads of `qkv`, gate and up of `gate_up`.
_MATRICES = {
    "qkv": contrib.MuonDimensionNumbers(2, 1),
    "out": contrib.MuonDimensionNumbers(1, 0),
    "gate_up": contrib.MuonDimensionNumbers(2, 1),
    "down": contrib.MuonDimensionNumbers(1, 0),
}


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW or Muon, with linear warm-up, decay and clipping.

    Attributes:
      algorithm: `adamw`, or `muon`: the matrices of the layers move by their momentum made orthogonal (Jordan et al.
        2024), with updates as large as AdamW's at the same rate (Liu et al. 2025, "Muon is Scalable for LLM
        Training", equation 4); embedding, head and norms by AdamW. Both with Nesterov momentum.
      learning_rate: the peak, reached after warm-up.
      schedule: `cosine` decays from warm-up to the last step; `constant` stays at the peak and decays, as a
        cosine, over the last `decay_steps` only, so that a run may be made longer until then.
      decay_steps: of the `constant` schedule.
      final_fraction: the learning rate at the last step, as a fraction of the peak.
      warmup: steps of linear warm-up.
      b1: decay of Adam's first moment, a step.
      b2: decay of Adam's second moment, a step.
      weight_decay: decoupled, on matrices and the embedding only; norms and biases have none.
      clip: the gradient's largest global norm.
      accumulate: micro-batches per step; their gradients add up to that of one batch as large as all of them.
    """

    algorithm: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    decay_steps: int = 500
    final_fraction: float = 0.02
    warmup: int = 100
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1

    def __post_init__(self):
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; give the micro-batches per step, at least 1")
        if self.decay_steps < 1:
            raise ValueError(f"decay_steps is {self.decay_steps}; give a whole number of at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")


def schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """Makes the learning rate by step: 0 at first, the peak after warm-up, `final_fraction` of it at `steps`."""
    warmup = min(options.warmup, max(1, steps // 2))
    decay = steps - warmup
    if options.schedule == "constant":
        decay = min(decay, options.decay_steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, options.learning_rate, warmup),
            optax.constant_schedule(options.learning_rate),
            optax.cosine_decay_schedule(options.learning_rate, max(1, decay), options.final_fraction),
        ],
        [warmup, steps - decay],
    )


def decayed(params: Params) -> Any:
    """Marks the leaves on which weight decay acts, as a tree of bool: all but norms and biases."""

    def is_matrix(path, leaf) -> bool:
        del leaf
        name = path[-1].key
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def orthogonalised(params: Params) -> Any:
    """Marks the leaves that Muon moves, in Optax's form: the axes of each matrix of a layer, None for all else."""

    def dimensions(path, leaf) -> contrib.MuonDimensionNumbers | None:
        del leaf
        return _MATRICES.get(path[-1].key) if path[0].key == "layers" else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def make_optimizer(
    options: OptimizerOptions, steps: int, held: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Makes the optimiser: clipping, then AdamW or Muon on the schedule of `steps` steps.

    Args:
      options: which.
      steps: the last step.
      held: names of parameters that stay as they are and have no moments; their gradients are 0.
    """
    rate = schedule(options, steps)
    if options.algorithm == "muon":
        moving = contrib.muon(
            rate,
            weight_decay=options.weight_decay,
            weight_decay_mask=decayed,
            adam_b1=options.b1,
            adam_b2=options.b2,
            adam_weight_decay=options.weight_decay,
            consistent_rms=_MUON_RMS,
            muon_weight_dimension_numbers=orthogonalised,
        )
        moving = _sparing_norms(moving)
    else:
        moving = optax.adamw(
            rate, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay, mask=decayed
        )
    chain = optax.chain(optax.clip_by_global_norm(options.clip), moving)
    if not held:
        return chain
    return optax.masked(chain, lambda params: {name: name not in held for name in params})


def _sparing_norms(moving: optax.GradientTransformation) -> optax.GradientTransformation:
    """Spares norms and biases the weight decay of an optimiser: Optax's Muon has no mask for what AdamW moves.

    Decay is all that reads the values of the parameters, so zeros spare those leaves. The state stays the same.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        zeroed = jax.tree.map(lambda p, on: p if on else jnp.zeros_like(p), params, decayed(params))
        return moving.update(updates, state, zeroed)

    return optax.GradientTransformation(moving.init, update)
