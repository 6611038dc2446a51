"""The heads of Medusa (Cai et al. 2024, arXiv 2401.10774) as pure functions: each predicts a token by itself.

Head i reads h [D], from which the target's head predicted the pending token, and predicts the token i + 1 places after
the pending one: r blocks x + SiLU(Wx + b), then a matrix of its own or the target's head. Parameters:

    heads[i].blocks[j]  linear [D, D]   bias [D], optional      only j = 0 if the r blocks share their weights
    heads[i].head       [V', D], if each head has its own
    head                [V', D], if the heads share one that is not the target's

with V' draft tokens. If V' is not the target's V, `vocabulary` maps them to token ids, and contains `head`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL, AuxLayer, Params
from jaxspec.model.numerics import linear


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """The configuration of Medusa heads.

    Attributes:
      width: D.
      num_heads: the number of heads.
      num_layers: r, the number of blocks of a head.
      repeated: whether the blocks of a head share their weights, as in the authors' code.
      bias: whether blocks have a bias.
      head_size: V', the rows of the heads' own matrix or matrices; None if they use the target's head.
      own_heads: whether each head has a matrix of its own.
    """

    width: int
    num_heads: int
    num_layers: int = 1
    repeated: bool = True
    bias: bool = True
    head_size: int | None = None
    own_heads: bool = False
    kind: ClassVar[str] = "medusa"
    aux_layers: ClassVar[tuple[AuxLayer, ...]] = (FINAL,)

    @property
    def shapes(self) -> Params:
        """The tree of their parameters, a shape tuple at each leaf."""
        block: Params = {"linear": (self.width, self.width)}
        if self.bias:
            block["bias"] = (self.width,)
        one: Params = {"blocks": [block] * (min(1, self.num_layers) if self.repeated else self.num_layers)}
        shared: Params = {}
        if self.head_size is not None:
            (one if self.own_heads else shared)["head"] = (self.head_size, self.width)
        return {"heads": [one] * self.num_heads, **shared}


def usual(target: LlamaConfig) -> MedusaConfig:
    """Returns the shape of a typical published head of a target: 5 heads, each with a matrix of its own."""
    return MedusaConfig(target.hidden_size, num_heads=5, head_size=target.vocab_size, own_heads=True)


def through_blocks(blocks: list[Params], num_layers: int, x: jax.Array) -> jax.Array:
    """Applies `num_layers` residual blocks: [..., I] → [..., D]. The last of `blocks` is repeated as needed.

    A block with a `residual` [D, I] and a `residual_bias` uses them in place of the identity.
    """
    for number in range(num_layers):
        p = blocks[min(number, len(blocks) - 1)]
        straight = linear(x, p["residual"], p["residual_bias"]) if "residual" in p else x
        x = straight + jax.nn.silu(linear(x, p["linear"], p.get("bias")))
    return x


def logits(
    head: MedusaConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """Returns the logits of the K heads in `params`: hidden [..., D] → float32[..., K, V']."""
    blocks: Any = [through_blocks(one["blocks"], head.num_layers, hidden) for one in params["heads"]]
    if head.own_heads:
        pairs = zip(blocks, params["heads"], strict=True)
        each = [linear(x, one["head"], out_dtype=jnp.float32) for x, one in pairs]
        return jnp.stack(each, axis=-2)
    if "head" in params:
        matrix = params["head"]
    else:
        few = {name: params[name] for name in ("vocabulary",) if name in params}
        matrix = llama.head(target, {**target_params, **few})
    products = linear(jnp.stack(blocks, axis=-2), matrix, out_dtype=jnp.float32)
    return products if "head" in params else llama.scaled_logits(target, products)
