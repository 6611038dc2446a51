"""One optimiser step: the training state, and a jitted function that donates it."""

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
    """The state that a training step updates.

    Attributes:
      step: int32[], number of finished steps.
      params: parameters, float32 or bfloat16.
      opt_state: the state of the Optax optimiser.
    """

    step: jax.Array
    params: Params
    opt_state: Any


def init_state(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """Makes the training state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, transform.init(_wide(params)))


def make_step(
    loss: Loss, transform: optax.GradientTransformation, seed: int
) -> Callable[[TrainState, Batch, Params | None], tuple[TrainState, dict[str, jax.Array]]]:
    """Makes the jitted step: (state, batch, target) → (state, metrics). The state passed in is donated.

    The batch's leaves are [A, B, T]: A micro-batches, processed in sequence. The random numbers of the loss depend only
    on `seed`, the step and the micro-batch. The target is the parameters of another model, or None. Metrics are float32
    scalars: `loss` (nats per token, mean over all micro-batches), `tokens` (number of tokens in that mean),
    `gradient_norm` (before clipping).

    Gradients are summed, and the update is computed, in float32. Parameters in bfloat16 are then rounded at random, up
    or down with probabilities that keep the mean: an update of 2e-5 is below half of the distance between two
    bfloat16 numbers near 0.01, and rounding to the nearest would lose it.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)

    def step_fn(
        state: TrainState, batch: Batch, target: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(seed_key(seed), state.step)

        def measured(number, micro_batch):
            given = Given(state.step, jax.random.fold_in(key, number), target)
            (total, weight), grads = gradient(state.params, micro_batch, given)
            return total, weight, _wide(grads)

        def micro(carry, numbered):
            return jax.tree.map(jnp.add, carry, measured(*numbered)), None

        count, first = batch["tokens"].shape[0], jax.tree.map(lambda x: x[0], batch)
        if count == 1:
            total, weight, grads = measured(0, first)
        else:  # the program contains the micro-batch once
            shapes = jax.eval_shape(measured, 0, first)
            zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            (total, weight, grads), _ = jax.lax.scan(micro, zeros, (jnp.arange(count), batch))
        weight = jnp.maximum(weight, 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        wide = _wide(state.params)
        updates, opt_state = transform.update(grads, state.opt_state, wide)
        params = _kept(optax.apply_updates(wide, updates), state.params, key)
        metrics = {"loss": total / weight, "tokens": weight, "gradient_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step_fn, donate_argnums=0)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _kept(new: Params, old: Params, key: jax.Array) -> Params:
    """Rounds parameters to the dtypes of `old`; to bfloat16 at random, without bias."""
    # Micro-batches have the other keys that are folded from the same one.
    own = jax.random.fold_in(key, 2**32 - 1)
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    kept = [
        leaf if one.dtype == leaf.dtype else stochastically_rounded(leaf, jax.random.fold_in(own, number))
        for number, (leaf, one) in enumerate(pairs)
    ]
    params: Params = jax.tree.unflatten(jax.tree.structure(new), kept)
    return params


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two nearest bfloat16 numbers at random, so that the mean is `x`.

    bfloat16 is the upper half of float32. A random number is added to the lower half, which is then cut off.

    Examples:
      >>> some = stochastically_rounded(jnp.full(1000, 1 + 2**-9), jax.random.key(0))
      >>> sorted(set(some.tolist())), round(float(some.astype(jnp.float32).mean()), 4)
      ([1.0, 1.0078125], 1.002)
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
