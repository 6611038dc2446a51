"""The heads of Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109) as pure functions.

Head i reads h (the input of the target's head, as in Medusa) and the embeddings of the pending token and of the i draft
tokens after it. Its first block maps these i + 2 vectors to one, Rx + r + SiLU(Wx + b). Its other blocks are Medusa's,
and it has an output matrix and bias of its own. Hydra++ replaces h by g: the output, final norm included, of a whole
Llama layer ("prefix attention") over the h of all tokens so far. Parameters:

    heads[i].blocks[0]  linear, residual [D, (i+2)·D]   bias, residual_bias [D]
    heads[i].blocks[j]  linear [D, D]   bias [D]            only j = 1 if the blocks after the first are shared
    heads[i]            head [V', D]   head_bias [V']
    prefix              layers, norm: of a Llama of one layer, see `model.llama`
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.heads.medusa.network import through_blocks
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL, AuxLayer, Params
from jaxspec.model.numerics import linear


@dataclasses.dataclass(frozen=True)
class HydraConfig:
    """The configuration of Hydra heads.

    Attributes:
      width: D.
      vocab_size: V of the target.
      num_heads: the number of heads.
      num_layers: the number of blocks of a head.
      repeated: whether the blocks after the first share their weights, as in the authors' code.
      prefix: the layer of Hydra++; None for Hydra.
      aux_layers: the target's hidden states that the heads read.
    """

    width: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    repeated: bool = True
    prefix: LlamaConfig | None = None
    aux_layers: tuple[AuxLayer, ...] = (FINAL,)
    kind: ClassVar[str] = "hydra"

    @property
    def shapes(self) -> Params:
        """The tree of their parameters, a shape tuple at each leaf."""
        width, biases = self.width, {"bias": (self.width,)}
        plain = {"linear": (width, width), **biases}
        more = min(1, self.num_layers - 1) if self.repeated else self.num_layers - 1
        heads = []
        for number in range(self.num_heads):
            read = (width, (number + 2) * width)
            first = {"linear": read, "residual": read, **biases, "residual_bias": (width,)}
            own = {"head": (self.vocab_size, width), "head_bias": (self.vocab_size,)}
            heads.append({"blocks": [first, *[plain] * more], **own})
        shapes: Params = {"heads": heads}
        if self.prefix is not None:
            whole = llama.param_shapes(self.prefix)
            shapes["prefix"] = {"layers": whole["layers"], "norm": whole["norm"]}
        return shapes


def usual(target: LlamaConfig) -> HydraConfig:
    """Returns the shape of a typical published head of a target: 4 heads of Hydra++."""
    return HydraConfig(
        target.hidden_size, target.vocab_size, num_heads=4, num_layers=4, prefix=target.truncated(1)
    )


def run_prefix(
    prefix: LlamaConfig, params: Params, hidden: jax.Array, start: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Runs the prefix attention of Hydra++ over h [B, T, D] of the tokens from position start[b] on.

    Returns:
      g [B, T, D], and the cache with these positions.
    """
    hidden, cache = llama.run_layers(prefix, params, hidden, start, cache)
    return llama.final_norm(prefix, params, hidden), cache


def logits(head: HydraConfig, params: Params, number: int, read: jax.Array) -> jax.Array:
    """Returns the logits float32[..., V'] of head `number`.

    `read` [..., number + 2, D] is h or g, and the embeddings of the pending token and of the draft tokens after it.
    """
    own = params["heads"][number]
    flat = read.reshape(*read.shape[:-2], -1)
    hidden = through_blocks(own["blocks"], head.num_layers, flat)
    return linear(hidden, own["head"], own["head_bias"].astype(jnp.float32), out_dtype=jnp.float32)
