"""Heads of Medusa and Hydra as they are trained: every row of a text is read by all heads, each for its own token.

Of row t, head s is to say token t + 2 + s, as the drafter's head s does after the pending token t + 1. Hydra's heads
read the text's own tokens in between (Ankner et al. 2024), where the drafter's read those drafted.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.llama import Params, Tap
from jaxspec.model.medusa import MedusaConfig, through_blocks
from jaxspec.model.numerics import linear
from training.losses.base import Batch
from training.losses.heads import ahead


@dataclasses.dataclass(frozen=True)
class SeveralNetwork:
    """Heads of which each has a step of its own; see `training.losses.heads.Network`.

    Attributes:
      head: what they are made of; Hydra's without a prefix attention.
      target: the config of the model they draft for.
    """

    head: MedusaConfig | HydraConfig
    target: LlamaConfig

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the heads read of their target."""
        return self.head.taps

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, features: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs the blocks of the first `steps` heads on every row; arrays [B, T, D]."""
        embedded, read = llama.embed(embedding, batch["tokens"]), features
        found = []
        for step, one in enumerate(params["heads"][:steps]):
            if isinstance(self.head, HydraConfig):
                read = jnp.concatenate([read, ahead(embedded, 1 + step)], axis=-1)
            found.append(through_blocks(one["blocks"], self.head.num_layers, read))
        return found

    def reading(self, params: Params, step: int) -> Params:
        """Selects the matrix of a step's head, where it has one."""
        return {name: leaf for name, leaf in params["heads"][step].items() if name != "blocks"}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, N]."""
        bias = own["head_bias"].astype(jnp.float32) if "head_bias" in own else None
        matrix = own["head"] if "head" in own else llama.head(self.target, target)
        return linear(output, matrix, bias, out_dtype=jnp.float32)
