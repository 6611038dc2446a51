"""Kangaroo's adapter as it is trained: on the early exit of every token of a text (Liu et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.model import kangaroo, llama, rope
from jaxspec.model.config import LlamaConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.llama import Params, Tap
from jaxspec.model.numerics import rms_norm
from training.losses.base import Batch
from training.losses.heads import ahead


@dataclasses.dataclass(frozen=True)
class KangarooNetwork:
    """An adapter; see `training.losses.heads.Network`.

    Attributes:
      head: what it is made of.
      target: the config of the model it drafts for.
    """

    head: KangarooConfig
    target: LlamaConfig

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The stream that it was told to read."""
        assert self.head.exit_layer is not None, "an adapter in training knows its exit"
        return (self.head.exit_layer,)

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, features: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs the adapter over every row; what `kangaroo.logits` takes, `steps` arrays [B, T, D].

        At step s it reads the pending token and the s tokens after it too, for the target's first layers have run them.
        """
        block, positions = self.head.block, batch["positions"]
        tables = rope.tables(block, positions, jnp.zeros(positions.shape[0], jnp.int32))
        attend = llama.packed(positions, batch["segments"])
        hidden = features
        for layer in params["layers"]:
            p = layer["attention"]
            normed = rms_norm(hidden, p["norm"], block.rms_norm_eps)
            hidden = hidden + llama.attention(block, p, normed, tables, attend, None)[0]
        return [ahead(hidden, 1 + step) for step in range(steps)]

    def reading(self, params: Params, step: int) -> Params:
        """Selects the adapter's norm."""
        del step
        return {"norm": params["norm"]}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, V]."""
        return kangaroo.logits(self.head, own, self.target, target, output)
