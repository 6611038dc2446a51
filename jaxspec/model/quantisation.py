"""Weights quantised to 8 or 4 bits, with one scale per output channel.

A product reads the small numbers and scales its result (`numerics.linear`). It converts them to the dtype of the
activations on the fly, or, for weights with `Outliers`, rounds the activations to int8. Caches, norms, biases and
untied embeddings, of which a step reads one row per token, are not quantised.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.model.config import LlamaConfig

# The number of input channels that products with int8 activations compute apart. More channels do not reduce the loss
# (docs/measurements/cpu.md).
NUM_OUTLIERS = 64
# The leaves of `llama.param_shapes` that are matrices of products.
_MATRICES = frozenset({"qkv", "out", "gate_up", "down", "head"})


@struct.dataclass
class Outliers:
    """The N input channels of an int8 weight [*O, I] with the largest activations, which products compute apart.

    Attributes:
      channels: int32[N], indices of these channels, ascending.
      packed: int8 [*O, N], their part of the weight.
      rest: float32[I], 0 for these channels and 1 for the others.
    """

    channels: Any
    packed: Any
    rest: Any


@struct.dataclass
class Quantised:
    """A weight [*O, I] of small whole numbers, used in place of the array.

    Attributes:
      packed: int8 [*O, I], or for 4 bits uint8 [*O, I ÷ 2] with two numbers per byte. (Programs that are compiled ahead
        of time do not accept arrays of JAX's int4.)
      scale: [*O], in the dtype of the computation; the weight is whole numbers × scale.
      outliers: the channels that a product with int8 activations computes apart; None if activations are not rounded.
      bits: bits per number, 8 or 4, static.
    """

    packed: Any
    scale: Any
    outliers: Outliers | None = None
    bits: int = struct.field(pytree_node=False, default=8)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *channels, size = self.packed.shape
        return (*channels, size * 8 // self.bits)

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.scale.dtype

    def __getitem__(self, rows: Any) -> Quantised:
        """Returns some of the output channels; `rows` must not index the last axis."""
        outliers = self.outliers
        if outliers is not None:
            outliers = Outliers(outliers.channels, outliers.packed[rows], outliers.rest)
        return Quantised(self.packed[rows], self.scale[rows], outliers, self.bits)

    def values(self) -> jax.Array:
        """Returns the whole numbers, int8 or int4 [*O, I]."""
        if self.bits == 8:
            numbers: jax.Array = self.packed
            return numbers
        return jax.lax.bitcast_convert_type(self.packed, jnp.int4).reshape(self.shape)

    def whole(self) -> jax.Array:
        """Returns the dequantised weight, [*O, I] in `dtype`."""
        weight: jax.Array = self.values().astype(self.dtype) * self.scale[..., None]
        return weight


@functools.partial(jax.jit, static_argnames="count")
def with_outliers(weight: Quantised, largest: jax.Array, count: int = NUM_OUTLIERS) -> Quantised:
    """Returns an int8 weight for products with int8 activations.

    Args:
      weight: [*O, I], in int8.
      largest: float32[I], the largest activation of each input channel in a text.
      count: number of channels that are computed apart, at most I.
    """
    size = weight.shape[-1]
    channels = jnp.sort(jax.lax.top_k(largest, min(count, size))[1])
    rest = jnp.ones(size, jnp.float32).at[channels].set(0)
    return Quantised(weight.packed, weight.scale, Outliers(channels, weight.packed[..., channels], rest))


@functools.partial(jax.jit, static_argnames="bits")
def quantised(weight: jax.Array, bits: int = 8) -> Quantised:
    """Rounds a weight [*O, I] to the nearest of 2^bits − 1 levels per output channel.

    I must be even if bits is 4. The largest magnitude of each channel maps to the largest level.
    """
    # The scale is rounded to the weight's dtype before it divides, so that the values do not add its rounding error.
    largest = 2 ** (bits - 1) - 1
    wide = weight.astype(jnp.float32)
    info = jnp.finfo(weight.dtype)
    scale = jax.lax.reduce_precision(jnp.max(jnp.abs(wide), axis=-1) / largest, info.nexp, info.nmant)
    scale = jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(jnp.round(wide / scale[..., None]), -largest, largest)
    if bits == 8:
        packed = values.astype(jnp.int8)
    else:
        pairs = values.astype(jnp.int4).reshape(*values.shape[:-1], -1, 2)
        packed = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
    return Quantised(packed, scale.astype(weight.dtype), bits=bits)


def is_quantised(node: Any) -> bool:
    """Returns whether a node of a parameter tree is a quantised weight."""
    return isinstance(node, Quantised)


def is_multiplied(config: LlamaConfig, name: str) -> bool:
    """Returns whether the leaf of this name (`layers/0/mlp/down`) is to be quantised: a matrix or a tied embedding."""
    last = name.rpartition("/")[2]
    return last in _MATRICES or (last == "embed" and config.tie_embeddings)


def quantise(config: LlamaConfig, params: Any, bits: int = 8) -> Any:
    """Returns parameters with quantised matrices; other leaves are not copied.

    Args:
      config: the model.
      params: its parameters. Leaves that are quantised already are rounded again.
      bits: 8 or 4.
    """

    def leaf(path: Any, weight: Any) -> Any:
        # The matrix below an adapter is quantised; the adapter is not.
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/base")
        if not is_multiplied(config, name):
            return weight
        return quantised(weight.whole() if is_quantised(weight) else weight, bits)

    return jax.tree.map_with_path(leaf, params, is_leaf=is_quantised)


def sharding_of(sharding: NamedSharding, ndim: int, bits: int) -> Quantised:
    """Returns the shardings of a quantised weight of `ndim` axes from that of its array: scales follow output axes."""
    axes = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return Quantised(sharding, NamedSharding(sharding.mesh, PartitionSpec(*axes[:-1])), bits=bits)


def shardings_for(shardings: Any, params: Any) -> Any:
    """Returns the shardings of `params`, some of them quantised, from those of plain arrays."""

    def leaf(sharding: NamedSharding, weight: Any) -> Any:
        return sharding_of(sharding, len(weight.shape), weight.bits) if is_quantised(weight) else sharding

    return jax.tree.map(leaf, shardings, params)
