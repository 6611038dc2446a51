"""Training of the heads of Medusa and Hydra: all heads read every row of a text, each with its own target.

At row t, head s predicts token t + 2 + s, like the drafter's head s after the pending token t + 1. Hydra's heads read
the text's own tokens in between (Ankner et al. 2024); in the drafter they read the draft tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.heads.medusa.network import MedusaConfig, through_blocks
from jaxspec.model import llama
from jaxspec.model.llama import Params
from jaxspec.model.numerics import linear
from training.heads.head_type import HeadOptions
from training.heads.losses import Network, Weights, ahead, head_loss
from training.losses.base import Batch, Loss


class SeveralNetwork(Network[MedusaConfig | HydraConfig]):
    """Several heads, one per step."""

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs the blocks of the first `steps` heads on every row; returns arrays [B, T, D]."""
        embedded, read = llama.embedding_rows(embedding, batch["tokens"]), aux_hidden_states
        found = []
        for step, one in enumerate(params["heads"][:steps]):
            if isinstance(self.head, HydraConfig):
                read = jnp.concatenate([read, ahead(embedded, 1 + step)], axis=-1)
            found.append(through_blocks(one["blocks"], self.head.num_layers, read))
        return found

    def reading(self, params: Params, step: int) -> Params:
        """Selects the matrices of the head of a step, if it has its own."""
        return {name: leaf for name, leaf in params["heads"][step].items() if name != "blocks"}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes the logits of outputs: [B, T, D] → float32[B, T, N]."""
        bias = own["head_bias"].astype(jnp.float32) if "head_bias" in own else None
        matrix = own["head"] if "head" in own else llama.head(self.target, target)
        return linear(output, matrix, bias, out_dtype=jnp.float32)


def zeros(shapes: Params) -> Params:
    """Returns parameters of zeros for a tree of shapes."""
    made: Params = jax.tree.map(jnp.zeros, shapes, is_leaf=llama.is_shape)
    return made


def several_loss(network: SeveralNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """Returns the loss: the cross-entropy of each head with its token of the text (Medusa-1, Hydra)."""
    weights = Weights(distribution=0.0, text=1.0, decay=options.step_decay)
    return head_loss(network, network.head.num_heads, weights, part)
