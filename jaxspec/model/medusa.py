"""The heads of Medusa (Cai et al. 2024, arXiv 2401.10774) as pure functions: each predicts a token by itself.

Head i reads what the target's head read to say the pending token, h [D], and says the token i + 1 places after the
pending one: r blocks x + SiLU(Wx + b), then a matrix of its own, or the target's head. Parameters:

    heads[i].blocks[j]  linear [D, D]   bias [D], where it has one      one block where the r are one, repeated
    heads[i].head       [V', D], where each head has its own
    head                [V', D], where the heads share one that is not the target's

with V' tokens of the draft. Where V' is not the target's V, `vocabulary` says which they are; `head` is then its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL, Params, Tap
from jaxspec.model.numerics import linear


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """What the heads of Medusa are made of.

    Attributes:
      width: D.
      num_heads: how many there are.
      num_layers: r, blocks of a head.
      repeated: whether the blocks of a head are one and the same, as the authors' code makes them.
      bias: whether blocks have one.
      head_size: V', rows of the heads' own matrix or matrices; None where they read the target's head.
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
    taps: ClassVar[tuple[Tap, ...]] = (FINAL,)

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


def through_blocks(blocks: list[Params], num_layers: int, x: jax.Array) -> jax.Array:
    """What `num_layers` residual blocks make of x [..., I] → [..., D]; the last of `blocks` stands for those after it.

    A block with a `residual` [D, I] of its own, and its `residual_bias`, has it in place of the identity.
    """
    for number in range(num_layers):
        p = blocks[min(number, len(blocks) - 1)]
        straight = linear(x, p["residual"], p["residual_bias"]) if "residual" in p else x
        x = straight + jax.nn.silu(linear(x, p["linear"], p.get("bias")))
    return x


def logits(
    head: MedusaConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """What the heads say of hidden [..., D]: float32[..., K, V'] of the K heads in `params`."""
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
    return linear(jnp.stack(blocks, axis=-2), matrix, out_dtype=jnp.float32)
