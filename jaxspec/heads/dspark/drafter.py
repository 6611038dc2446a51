"""A head that drafts a block in one pass, each token given the one before it: DSpark (arXiv 2607.05147)."""

from __future__ import annotations

from typing import ClassVar

import jax
from flax import struct

from jaxspec.heads.dflash.drafter import DFlashDrafter
from jaxspec.heads.dspark import network
from jaxspec.heads.dspark.network import DSparkConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Signal


@struct.dataclass
class Confidence:
    """An estimate of `stopping`: the acceptance that the head predicts, from the token before the drafted one.

    Examples:
      >>> import jax.numpy as jnp
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 1)))
      >>> round(float(jnp.exp(Confidence().log_probability(signal))[0]), 4)
      0.5
    """

    def log_probability(self, signal: Signal) -> jax.Array:
        """Returns the logarithm of the estimated probability of acceptance, float32[B]."""
        return jax.nn.log_sigmoid(signal.hidden[:, 0])


@struct.dataclass
class DSparkDrafter(DFlashDrafter):
    """Runs the block as DFlash, then drafts token after token, with a bias of the logits by the token before.

    If the head predicts the acceptance, the stop rule gets its logit, [B, 1], in place of hidden states.
    """

    independent: ClassVar[bool] = False

    head: DSparkConfig = struct.field(pytree_node=False)

    def given(
        self, params: Params, logits: jax.Array, hidden: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the logits with their bias, and the logit of the predicted acceptance, which a tree does not need."""
        row = params["markov_in"][token]
        if self.head.confidence != "none" and self.tree is None:
            hidden = network.confidence(self.head, params, hidden, row)[..., None]
        return logits + network.bias(params, row), hidden
