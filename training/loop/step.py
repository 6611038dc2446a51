"""One optimiser step: the state that it changes, and one jitted and donated function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training.losses.base import Batch, Given, Loss


@struct.dataclass
class TrainState:
    """All that a training step changes.

    Attributes:
      step: int32[], how many steps were taken.
      params: float32 masters.
      opt_state: Optax's.
    """

    step: jax.Array
    params: Params
    opt_state: Any


def init_state(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """Makes the training state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))


def make_step(
    loss: Loss, transform: optax.GradientTransformation, seed: int
) -> Callable[[TrainState, Batch, Params | None], tuple[TrainState, dict[str, jax.Array]]]:
    """Makes the jitted step: (state, batch, target) → (state, metrics). The state passed in is donated.

    The batch's leaves are [A, B, T]: A micro-batches, one after another. What the loss draws at random follows
    from `seed`, the step and the micro-batch alone. The target is another model's parameters, for losses that
    want them, or None. Metrics are float32 scalars: `loss` (nats per token, mean
    over all micro-batches), `tokens` (how many it averages over), `gradient_norm` (before clipping).
    """
    gradient = jax.value_and_grad(loss, has_aux=True)

    def step_fn(
        state: TrainState, batch: Batch, target: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(seed_key(seed), state.step)

        def measured(number, micro_batch):
            given = Given(state.step, jax.random.fold_in(key, number), target)
            (total, weight), grads = gradient(state.params, micro_batch, given)
            return total, weight, grads

        def micro(carry, numbered):
            return jax.tree.map(jnp.add, carry, measured(*numbered)), None

        count = batch["tokens"].shape[0]
        total, weight, grads = measured(0, jax.tree.map(lambda x: x[0], batch))
        if count > 1:
            others = (jnp.arange(1, count), jax.tree.map(lambda x: x[1:], batch))
            (total, weight, grads), _ = jax.lax.scan(micro, (total, weight, grads), others)
        weight = jnp.maximum(weight, 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": total / weight, "tokens": weight, "gradient_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step_fn, donate_argnums=0)
