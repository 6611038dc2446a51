"""The plan of a forward pass: the sublayers that run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A static plan: hashable, so a jitted function can be specialised to it; a pytree without leaves.

    The other form of a plan is a traced bool array [L, 2], from `traced()`: one executable then runs
    every plan. In both, column 0 is attention, column 1 the MLP, and True means run.

    Attributes:
      run: L pairs (attention, MLP).
    """

    run: tuple[tuple[bool, bool], ...]

    @classmethod
    def skipping(
        cls, num_layers: int, attention: Collection[int] = (), mlp: Collection[int] = ()
    ) -> LayerPlan:
        """Returns the plan of `num_layers` layers without these 0-based attention and MLP sublayers.

        Raises:
          ValueError: a skipped layer is outside 0 … L − 1.
        """
        attention, mlp = frozenset(attention), frozenset(mlp)
        outside = sorted(layer for layer in attention | mlp if not 0 <= layer < num_layers)
        if outside:
            raise ValueError(
                f"the plan skips layers {outside} of a model with {num_layers} layers; "
                f"layers are counted from 0 to {num_layers - 1}"
            )
        return cls(tuple((layer not in attention, layer not in mlp) for layer in range(num_layers)))

    @classmethod
    def from_array(cls, run: np.ndarray) -> LayerPlan:
        """Returns the static form of bool[L, 2]."""
        return cls(tuple((bool(attention), bool(mlp)) for attention, mlp in run))

    def __getitem__(self, layer: int) -> tuple[bool, bool]:
        return self.run[layer]

    @property
    def num_layers(self) -> int:
        """L, skipped ones included."""
        return len(self.run)

    @property
    def skip_attention(self) -> tuple[int, ...]:
        """0-based layers whose attention is skipped."""
        return tuple(layer for layer, (attention, _) in enumerate(self.run) if not attention)

    @property
    def skip_mlp(self) -> tuple[int, ...]:
        """0-based layers whose MLP is skipped."""
        return tuple(layer for layer, (_, mlp) in enumerate(self.run) if not mlp)

    def traced(self) -> jax.Array:
        """Returns the plan as an array, bool[L, 2]."""
        with jax.ensure_compile_time_eval():  # known where a drafter is built from shapes, too
            return jnp.asarray(self.run, bool)
