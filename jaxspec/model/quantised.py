"""Weights of few bits, with one scale per output channel: what is multiplied by, never what is computed with.

A product reads the small numbers, makes the computation's own of them as it goes, and scales its result (`numerics`).
Everything else stays as it is: activations, caches, norms, biases, and an embedding that is no head, of which a step
reads one row a token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.model.config import LlamaConfig

# The leaves of `llama.param_shapes` that are multiplied by.
_MATRICES = frozenset({"qkv", "out", "gate_up", "down", "head"})


@struct.dataclass
class Quantised:
    """A weight [*O, I] of small whole numbers; it stands where the array would.

    Attributes:
      packed: int8 [*O, I], or of 4 bits uint8 [*O, I ÷ 2] of two numbers a byte. (Programs that are compiled ahead do
        not take arrays of JAX's int4.)
      scale: [*O], of the dtype to compute in: the weight is its whole numbers × scale.
      bits: of a number, 8 or 4, static.

    Examples:
      >>> weight = quantised(jnp.array([[1.0, -0.5], [0.0, 0.02]]))
      >>> weight.values().tolist(), weight.shape, str(weight.dtype)
      ([[127, -64], [0, 127]], (2, 2), 'float32')
      >>> quantised(jnp.array([[1.0, -0.5]]), bits=4).values().tolist()
      [[7, -4]]
      >>> weight[1:].whole().round(3).tolist()
      [[0.0, 0.02]]
    """

    packed: Any
    scale: Any
    bits: int = struct.field(pytree_node=False, default=8)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *channels, size = self.packed.shape
        return (*channels, size * 8 // self.bits)

    @property
    def dtype(self) -> Any:
        """The dtype to compute in."""
        return self.scale.dtype

    def __getitem__(self, rows: Any) -> Quantised:
        """Returns some of the output channels; `rows` must not index the last axis."""
        return Quantised(self.packed[rows], self.scale[rows], self.bits)

    def values(self) -> jax.Array:
        """Returns the whole numbers, int8 or int4 [*O, I]."""
        if self.bits == 8:
            numbers: jax.Array = self.packed
            return numbers
        return jax.lax.bitcast_convert_type(self.packed, jnp.int4).reshape(self.shape)

    def whole(self) -> jax.Array:
        """Returns the weight as an array; for a few rows, or where it does not matter that it is large."""
        weight: jax.Array = self.values().astype(self.dtype) * self.scale[..., None]
        return weight


@functools.partial(jax.jit, static_argnames="bits")
def quantised(weight: jax.Array, bits: int = 8) -> Quantised:
    """A weight [*O, I] rounded to the nearest of 2^bits − 1 numbers, the largest of each output channel exactly.

    I is even where bits is 4. The scale is rounded to the weight's dtype first, so that its rounding costs the values
    nothing.
    """
    largest = 2 ** (bits - 1) - 1
    wide = weight.astype(jnp.float32)
    kind = jnp.finfo(weight.dtype)
    scale = jax.lax.reduce_precision(jnp.max(jnp.abs(wide), axis=-1) / largest, kind.nexp, kind.nmant)
    scale = jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(jnp.round(wide / scale[..., None]), -largest, largest)
    if bits == 8:
        packed = values.astype(jnp.int8)
    else:
        pairs = values.astype(jnp.int4).reshape(*values.shape[:-1], -1, 2)
        packed = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
    return Quantised(packed, scale.astype(weight.dtype), bits)


def is_quantised(node: Any) -> bool:
    """Whether a node of a tree of parameters is a quantised weight."""
    return isinstance(node, Quantised)


def is_multiplied(config: LlamaConfig, name: str) -> bool:
    """Whether the leaf of this name (`layers/0/mlp/down`) is quantised: a matrix, or an embedding that is the head."""
    last = name.rpartition("/")[2]
    return last in _MATRICES or (last == "embed" and config.tie_embeddings)


def quantise(config: LlamaConfig, params: Any, bits: int = 8) -> Any:
    """Parameters with their matrices quantised, one after the other; what is not quantised is not copied.

    Args:
      config: the model.
      params: its parameters, as arrays or quantised already: these are rounded again.
      bits: 8 or 4.
    """

    def leaf(path: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not is_multiplied(config, name):
            return weight
        return quantised(weight.whole() if is_quantised(weight) else weight, bits)

    return jax.tree.map_with_path(leaf, params, is_leaf=is_quantised)


def sharding_of(sharding: NamedSharding, ndim: int, bits: int) -> Quantised:
    """Where a quantised weight of `ndim` axes lies whose array would lie so: a scale goes with its output channel."""
    axes = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return Quantised(sharding, NamedSharding(sharding.mesh, PartitionSpec(*axes[:-1])), bits)


def shardings_for(shardings: Any, params: Any) -> Any:
    """The shardings of parameters of which some are quantised, from those of arrays in their places."""

    def leaf(sharding: NamedSharding, weight: Any) -> Any:
        return sharding_of(sharding, len(weight.shape), weight.bits) if is_quantised(weight) else sharding

    return jax.tree.map(leaf, shardings, params)
