"""Losses as pure functions of (params, batch, given). They return a sum over tokens and the weight that divides it.

With sums instead of means, accumulated micro-batches give exactly the gradient of one large batch. The number of layers
is taken from the parameters, so that a loss also serves a model whose depth grows.

A draft may choose among a part of the vocabulary, the tokens `part`. Outside it, its distribution q is 0. A token of
the
target is accepted with probability Σ min(p, q) ≤ p(part), so that q should follow p inside the part. Therefore a
position whose next token is outside is left out, and the target's distribution is restricted to the part with weight
p(part). Both are the same loss, because E[1(x in part) · −log q(x)] = p(part) · cross-entropy(p given part, q) for x
drawn from p. Acceptance counts such positions as rejections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

# tokens, segments, positions and learn, [B, T] each; see `training.data.packing`.
Batch = Mapping[str, Any]


@struct.dataclass
class Given:
    """The inputs of a loss beside parameters and batch.

    Attributes:
      step: int32[], number of finished steps.
      key: random key of the loss.
      target: parameters of another model that is not trained, or None.
    """

    step: jax.Array
    key: jax.Array
    target: Params | None = None


# -> sum of losses in nats, float32[], and the number of tokens in it, float32[]
Loss = Callable[[Params, Batch, Given], tuple[jax.Array, jax.Array]]


def layer_outputs(
    config: LlamaConfig,
    params: Params,
    batch: Batch,
    remat: bool | str = False,
    keep: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Runs packed documents; returns the residual stream after every layer, L arrays [B, T, D] before the final norm.

    Args:
      config: the model.
      params: the model's parameters.
      batch: packed documents, which do not attend to each other.
      remat: recompute each layer in the backward pass instead of storing its inner values; the name of a policy in
        `jax.checkpoint_policies` selects values that are stored nevertheless.
      keep: per layer bool[B], the rows on which the layer runs; for the others it is the identity.
    """
    hidden = llama.embed(config, params, batch["tokens"])
    outputs = []
    policy = getattr(jax.checkpoint_policies, remat) if isinstance(remat, str) else None
    for layer, p in enumerate(params["layers"]):
        block = functools.partial(llama.run_block, config, config.layer_type(layer))
        run = jax.checkpoint(block, policy=policy) if remat else block
        kept = None if keep is None else keep[layer]
        hidden = run(p, hidden, batch["positions"], batch["segments"], keep=kept)
        outputs.append(hidden)
    return outputs


def next_token_targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the target of each position, int32[B, T], and whether it has one, bool[B, T].

    The last position of a segment has no target, because its next token belongs to another document or window.
    Padding, whose segment is 0, has none either, nor has a position before a token that is context only.
    """
    tokens, segments = batch["tokens"], batch["segments"]
    following = jnp.roll(segments, -1, axis=1).at[:, -1].set(0)
    mask = (segments == following) & (segments > 0) & jnp.roll(batch["learn"], -1, axis=1)
    return jnp.roll(tokens, -1, axis=1), mask


def among(part: np.ndarray | None, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Converts targets to indices into a part of the vocabulary, and masks targets outside it.

    Args:
      part: int32[N], the tokens of the part, ascending; None for the whole vocabulary.
      targets: int32[B, T], tokens.
      mask: bool[B, T].

    Returns:
      indices into the part, int32[B, T]; and the mask, False also where the target is outside the part.

    Examples:
      >>> among(np.array([2, 5]), jnp.array([[5, 4, 2]]), jnp.array([[True, True, False]]))[1].tolist()
      [[True, False, False]]
    """
    if part is None:
        return targets, mask
    tokens = jnp.asarray(part)
    number = jnp.minimum(jnp.searchsorted(tokens, targets), len(part) - 1)
    return number, mask & (tokens[number] == targets)


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the sum over the masked positions of −log softmax(logits)[target], in nats, float32[].

    Args:
      logits: float32[B, T, V].
      targets: int32[B, T].
      mask: bool[B, T]; positions with False are left out.
    """
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0))


def divergence(
    wanted: jax.Array, logits: jax.Array, mask: jax.Array, part: np.ndarray | None = None
) -> jax.Array:
    """Returns the sum over the masked positions of KL(softmax(wanted) ‖ softmax(logits)), in nats, float32[].

    Args:
      wanted: float32[B, T, V], the target's logits.
      logits: float32[B, T, V], or [B, T, N] with a part.
      mask: bool[B, T].
      part: int32[N], the tokens of `logits`; then the sum is over p(part) · KL(p given part ‖ softmax(logits)).
    """
    log_p, log_q = jax.nn.log_softmax(wanted, axis=-1), jax.nn.log_softmax(logits, axis=-1)
    within = log_p
    if part is not None:
        log_p = log_p[..., part]
        within = log_p - jax.nn.logsumexp(log_p, axis=-1, keepdims=True)
    return jnp.sum(jnp.where(mask, jnp.sum(jnp.exp(log_p) * (within - log_q), axis=-1), 0.0))


def head_of(params: Params, part: np.ndarray | None = None) -> Params:
    """Selects the parameters from residual stream to logits: final norm and head (or tied embedding).

    With a `part` of the vocabulary, int32[N], the head has only the rows of its tokens.
    """
    name = "head" if "head" in params else "embed"
    head = params[name]
    return {"norm": params["norm"], name: head if part is None else head[part]}


def head_loss(
    config: LlamaConfig, head: Params, hidden: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    """Returns the sum of the cross-entropies of residual streams [B, T, D] after the final norm and head, float32[]."""

    def total(head: Params, hidden: jax.Array, rows: Any, given: None) -> jax.Array:
        del given
        return cross_entropy(llama.logits(config, head, hidden), *rows)

    return early_gradient(total, 1, head, hidden, (targets, mask), None)


# Maximum number of logits of a row of the batch that exist at a time; 2²⁶ of float32 take 268 MB.
_MAX_LOGITS = 2**26


def pieces(hidden: jax.Array, head: Params) -> int:
    """Returns into how many pieces to divide the positions of [B, T, D], so that a piece's logits are few.

    For heads that are not trained: on a mesh, each piece would exchange the gradient of a trained head. A length
    without a divisor up to twice the necessary number has one piece.

    Args:
      hidden: the residual streams, or an array with their shape.
      head: its `head` or `embed`, [V, D], makes the logits.
    """
    length, vocab = hidden.shape[1], head["head" if "head" in head else "embed"].shape[0]
    least = -(-length * vocab // _MAX_LOGITS)
    return next((count for count in range(least, 2 * least + 1) if length % count == 0), 1)


def split(rows: Any, count: int) -> Any:
    """Divides the positions of arrays [B, T, …] into pieces, [count, B, T ÷ count, …]."""
    return jax.tree.map(
        lambda one: jnp.moveaxis(one.reshape(one.shape[0], count, -1, *one.shape[2:]), 1, 0), rows
    )


def joined(rows: Any) -> Any:
    """Joins pieces of positions, the inverse of `split`."""
    return jax.tree.map(lambda one: jnp.moveaxis(one, 0, 1).reshape(one.shape[1], -1, *one.shape[3:]), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def early_gradient(
    total: Callable[[Any, jax.Array, Any, Any], jax.Array],
    count: int,
    learned: Any,
    stream: jax.Array,
    rows: Any,
    given: Any,
) -> jax.Array:
    """Computes `total(learned, stream, rows, given)`, float32[], and in the forward pass also its gradient.

    The backward pass then stores arrays of the size of `learned` and `stream`, such as a head and a residual stream,
    instead of the logits of every exit or step. The logits of one piece of the positions exist at a time.

    Args:
      total: a sum over the positions of `stream` and `rows`.
      count: the number of pieces; it divides T.
      learned: parameters.
      stream: [B, T, D].
      rows: arrays [B, T, …]. They have no gradient.
      given: other arguments. They have no gradient.
    """
    if count == 1:
        return total(learned, stream, rows, given)

    def piece(value: jax.Array, part: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
        return value + total(learned, *part, given), None

    return jax.lax.scan(piece, jnp.float32(0), split((stream, rows), count))[0]


def _early_forward(total, count, learned, stream, rows, given):
    graded = jax.value_and_grad(total, argnums=(0, 1))
    if count == 1:
        return graded(learned, stream, rows, given)

    def piece(sums, part):
        value, (of_learned, of_stream) = graded(learned, *part, given)
        return jax.tree.map(jnp.add, sums, (value, of_learned)), of_stream

    # Sums over the pieces are float32, as within a product.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), learned)
    (value, of_learned), of_stream = jax.lax.scan(
        piece, (jnp.float32(0), zeros), split((stream, rows), count)
    )
    rounded = jax.tree.map(lambda sums, leaf: sums.astype(leaf.dtype), of_learned, learned)
    return value, (rounded, joined(of_stream))


def _early_backward(total, count, gradients, cotangent):
    del total, count
    return *jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients), None, None


early_gradient.defvjp(_early_forward, _early_backward)


def in_dtype(loss: Loss, dtype: jnp.dtype) -> Loss:
    """Makes a loss compute its products in `dtype`. Floating-point parameters are rounded.

    Gradients have the parameters' dtype.

    Sums within a product, norms, softmax and the loss itself stay float32.
    """

    def rounded(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
        )

    def cast(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        return loss(rounded(params), batch, Given(given.step, given.key, rounded(given.target)))

    return cast


def holding(loss: Loss, names: Sequence[str]) -> Loss:
    """Makes a loss treat the named parameters as constants: their gradient is 0, and is not computed."""

    def held(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        still = {name: jax.lax.stop_gradient(params[name]) for name in names if name in params}
        return loss({**params, **still}, batch, given)

    return held


def num_targets(mask: jax.Array) -> jax.Array:
    """Counts the positions with a target, float32[]."""
    return jnp.sum(mask, dtype=jnp.float32)


def next_token(config: LlamaConfig, remat: bool | str = False, part: np.ndarray | None = None) -> Loss:
    """Makes the ordinary language-model loss: cross-entropy of every next token within its document.

    Args:
      config: the model.
      remat: see `layer_outputs`.
      part: int32[N], the tokens among which the model chooses, ascending; None for all.
    """

    def loss(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        del given
        targets, mask = among(part, *next_token_targets(batch))
        hidden = layer_outputs(config, params, batch, remat)[-1]
        return head_loss(config, head_of(params, part), hidden, targets, mask), num_targets(mask)

    return loss
