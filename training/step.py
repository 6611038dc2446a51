"""One optimiser step: a record, an Optax chain, one jitted and donated function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxspec.model.llama import Params
from training.losses import Batch, Loss


@struct.dataclass
class TrainState:
    """All that a step changes.

    Attributes:
      step: int32[], how many steps were taken.
      params: float32 masters.
      opt_state: Optax's.
    """

    step: jax.Array
    params: Params
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with linear warm-up, cosine decay and clipping.

    Attributes:
      learning_rate: the peak, reached after warm-up.
      final_fraction: the learning rate at the last step, as a fraction of the peak.
      warmup: steps of linear warm-up.
      b1: decay of Adam's first moment, a step.
      b2: decay of Adam's second moment, a step.
      weight_decay: decoupled, on matrices and the embedding only; norms and biases have none.
      clip: the gradient's largest global norm.
      accumulate: micro-batches a step; their gradients add up to that of one batch so many times larger.
    """

    learning_rate: float = 3e-3
    final_fraction: float = 0.02
    warmup: int = 100
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1

    def __post_init__(self):
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; give the micro-batches a step, at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")


def schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """The learning rate by step: 0 at first, the peak after warm-up, `final_fraction` of it at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=min(options.warmup, max(1, steps // 2)),
        decay_steps=max(2, steps),
        end_value=options.learning_rate * options.final_fraction,
    )


def decayed(params: Params) -> Any:
    """Which leaves weight decay acts on: a tree of bool. Norms and biases are left alone."""

    def is_matrix(path, leaf) -> bool:
        del leaf
        name = path[-1].key
        return name != "norm" and not name.endswith("bias")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def optimizer(options: OptimizerOptions, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW on the schedule of `steps` steps."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            schedule(options, steps),
            b1=options.b1,
            b2=options.b2,
            weight_decay=options.weight_decay,
            mask=decayed,
        ),
    )


def init_state(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))


def make_step(
    loss: Loss, transform: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step: (state, batch) → (state, metrics). The state passed in is donated.

    The batch's leaves are [A, B, T]: A micro-batches, one after another. Metrics are float32 scalars: `loss`
    (nats a token, mean over all micro-batches), `tokens` (how many it averages over), `gradient_norm` (before
    clipping).
    """

    def summed(params, batch, step):
        total, weight = loss(params, batch, step)
        return total, weight

    gradient = jax.value_and_grad(summed, has_aux=True)

    def step_fn(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        def micro(carry, micro_batch):
            (total, weight), grads = gradient(state.params, micro_batch, state.step)
            return jax.tree.map(jnp.add, carry, (total, weight, grads)), None

        count = batch["tokens"].shape[0]
        first = jax.tree.map(lambda x: x[0], batch)
        (total, weight), grads = gradient(state.params, first, state.step)
        carry = (total, weight, grads)
        if count > 1:
            carry, _ = jax.lax.scan(micro, carry, jax.tree.map(lambda x: x[1:], batch))
        total, weight, grads = carry
        weight = jnp.maximum(weight, 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": total / weight, "tokens": weight, "gradient_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step_fn, donate_argnums=0)


def make_evaluate(loss: Loss) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """The jitted measure: (params, batch [B, T]) → (sum of losses in nats, tokens), without gradients."""
    return jax.jit(lambda params, batch: loss(params, batch, jnp.zeros((), jnp.int32)))
