"""DSpark (arXiv 2607.05147): a head of DFlash whose draft tokens depend on the token before them.

To the logits of each row the head adds a bias of rank r, W₂·W₁[the token before]. A confidence head predicts from the
row's normed hidden state, and perhaps W₁[the token before], the logit of the probability that the token is accepted.
Further parameters, for a vocabulary of V tokens, V' of which have rows in the head's own output matrix if it has one:

    markov_in [V, r]   markov_out [V or V', r]   confidence [1, D] or [1, D + r]   confidence_bias [1]
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxspec.heads.dflash import network
from jaxspec.heads.dflash.network import DFlashConfig
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.numerics import linear, rms_norm


@dataclasses.dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """The configuration of a DSpark head.

    Attributes:
      rank: r.
      confidence: what the confidence head reads: `hidden`, also W₁ of the token before (`both`), or `none` without a
        confidence head.
    """

    first: int = 0
    rank: int = 256
    confidence: Literal["none", "hidden", "both"] = "both"
    kind: ClassVar[str] = "dspark"

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        size = self.block.vocab_size
        own: Params = {"markov_in": (size, self.rank), "markov_out": (self.head_size or size, self.rank)}
        if self.confidence != "none":
            width = self.block.hidden_size + (self.rank if self.confidence == "both" else 0)
            own |= {"confidence": (1, width), "confidence_bias": (1,)}
        return super().shapes | own


def usual(target: LlamaConfig) -> DSparkConfig:
    """Returns the shape of a typical published head of a target: 5 layers, blocks of 7 tokens, rank 256."""
    of_dflash = network.usual(target)
    return DSparkConfig(of_dflash.block, of_dflash.aux_layers, 7, of_dflash.mask_id)


def bias(params: Params, row: jax.Array) -> jax.Array:
    """Returns the bias of the logits, float32[..., V], from `markov_in` of the token before, [..., r]."""
    return linear(row, params["markov_out"], out_dtype=jnp.float32)


def confidence(head: DSparkConfig, params: Params, hidden: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the logit of the predicted acceptance, float32[...], of hidden states [..., D] of `run_head`."""
    read = rms_norm(hidden, params["norm"], head.block.rms_norm_eps)
    if head.confidence == "both":
        read = jnp.concatenate([read, row.astype(read.dtype)], axis=-1)
    product = linear(read, params["confidence"], out_dtype=jnp.float32)[..., 0]
    found: jax.Array = product + params["confidence_bias"][0].astype(jnp.float32)
    return found
