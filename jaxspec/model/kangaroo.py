"""The adapter of Kangaroo (Liu et al. 2024, arXiv 2404.18911) as pure functions: attention on an early exit.

It reads the target's residual stream after E layers, adds what its own attention writes (no MLP), and its own norm and
the target's head make the logits of the next token. Its keys and values are its own, RoPE at the token's position.
Parameters, of a layer what `llama.param_shapes` says of attention:

    layers[l].attention  norm, qkv, out     layers[l].mlp  empty     norm [D]

In place of the target's head there may be a `vocabulary`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class KangarooConfig:
    """What an adapter is made of.

    Attributes:
      block: its layers (one, as published), of which only the attention is there; `vocab_size` is the target's V.
      exit_layer: E, of how many of the target's layers it was trained to read the stream; None where its file is
        silent.
    """

    block: LlamaConfig
    exit_layer: int | None = None
    kind: ClassVar[str] = "kangaroo"

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        whole = llama.param_shapes(self.block)
        layers = [{"attention": layer["attention"], "mlp": {}} for layer in whole["layers"]]
        return {"layers": layers, "norm": whole["norm"]}


def run(
    head: KangarooConfig, params: Params, stream: jax.Array, start: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Runs the adapter over streams [B, T, D] of tokens from position start[b] on.

    Args:
      head: the adapter.
      params: its parameters.
      stream: the target's, after E layers.
      start: int32[B]; start + T ≤ the cache's capacity.
      cache: the adapter's, which holds every position before start.

    Returns:
      What `logits` takes, [B, T, D], and the cache with these positions.
    """
    attention = LayerPlan.skipping(head.block.num_layers, mlp=range(head.block.num_layers))
    return llama.run_layers(head.block, params, stream, start, cache, plan=attention)


def logits(
    head: KangarooConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """The logits of the next token: [..., D] from `run` → float32[..., V], or [..., N] of a vocabulary of N tokens."""
    return llama.logits_of_draft(target, target_params, params, head.block.rms_norm_eps, hidden)
