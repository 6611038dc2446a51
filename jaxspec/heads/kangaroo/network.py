"""The adapter of Kangaroo (Liu et al. 2024, arXiv 2404.18911) as pure functions: attention on an early exit.

It reads the target's residual stream after E layers and adds the output of its own attention (no MLP). Its own norm and
the target's head give the logits of the next token. It has its own key-value cache, with RoPE at the token's position.
Parameters, with the attention shapes of `llama.param_shapes`:

    layers[l].attention  norm, qkv, out     layers[l].mlp  empty     norm [D]

A `vocabulary` may replace the target's head.
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
    """The configuration of an adapter.

    Attributes:
      block: its layers (one, as published), without their MLPs; `vocab_size` is the target's V.
      exit_layer: E, the number of target layers before the stream that it was trained on; None if its file does not
        record it.
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


def usual(target: LlamaConfig) -> KangarooConfig:
    """Returns the shape of a typical published head of a target: an exit after 2 layers."""
    return KangarooConfig(target.block(), min(2, target.num_layers - 1))


def run_head(
    head: KangarooConfig, params: Params, stream: jax.Array, start: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Runs the adapter over streams [B, T, D] of tokens from position start[b] on.

    Args:
      head: the adapter's configuration.
      params: its parameters.
      stream: the target's residual stream after E layers.
      start: int32[B]; start + T ≤ the cache's capacity.
      cache: the adapter's, with every position before `start`.

    Returns:
      The hidden states [B, T, D] for `logits`, and the cache with these positions.
    """
    attention = LayerPlan.skipping(head.block.num_layers, mlp=range(head.block.num_layers))
    return llama.run_layers(head.block, params, stream, start, cache, plan=attention)


def logits(
    head: KangarooConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """Returns the logits of the next token: [..., D] of `run_head` → float32[..., V], or [..., N] of a vocabulary."""
    return llama.logits_of_draft(target, target_params, params, head.block.rms_norm_eps, hidden)
