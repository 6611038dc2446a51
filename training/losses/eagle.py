"""EAGLE heads as they are trained: every row of a text drafts at once, each from the true features before it.

EAGLE-3's training-time test (Li et al. 2025, arXiv 2503.01840, section 3.1): at step s row t stands where the drafter
stands after s drafts. Its feature is its own output of the step before, its position t + s, and it sees the true pairs
up to t and its own of the steps before: no row sees what another has drafted.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxspec.model import eagle, llama, rope
from jaxspec.model.cache import visible
from jaxspec.model.config import LlamaConfig
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.llama import Attend, Params, Tap
from jaxspec.model.numerics import precision_of
from training.losses.base import Batch
from training.losses.heads import ahead

# Keys and values [B, T, KV, hd] of each step so far.
Memory = list[tuple[jax.Array, jax.Array]]
# Less than any score.
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class EagleNetwork:
    """An EAGLE head of one layer; see `training.losses.heads.Network`.

    Attributes:
      head: what it is made of.
      target: the config of the model it drafts for.
    """

    head: HeadConfig
    target: LlamaConfig

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the head reads of its target."""
        return self.head.taps

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, features: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs `steps` steps of every row; what `eagle.logits` takes, `steps` arrays [B, T, D]."""
        segments, positions = batch["segments"], batch["positions"]
        embedded = llama.embed(params if self.head.own_embedding else embedding, batch["tokens"])
        # Whatever the step, true pairs after t are not known yet.
        seen = (segments[:, :, None] == segments[:, None, :]) & visible(
            positions, positions[:, None, :], None
        )
        feature = eagle.fuse(self.head, params, features)
        memory: Memory = []
        found = []
        for step in range(steps):
            tables = rope.tables(self.head.block, positions + step, jnp.zeros(positions.shape[0], jnp.int32))
            token = ahead(embedded, 1 + step)
            hidden, memory = eagle.run_first(
                self.head, params, token, feature, tables, _attending(seen), memory
            )
            found.append(hidden)
            feature = eagle.fed_back(self.head, params, hidden)
        return found

    def reading(self, params: Params, step: int) -> Params:
        """Selects the parameters that `logits` reads; they are the same at each step."""
        del step
        return {name: params[name] for name in ("norm", "head") if name in params}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, N]."""
        return eagle.logits(self.head, own, self.target, target, output)


def _attending(seen: jax.Array) -> Attend:
    """Attention of a step over the true pairs where `seen` bool[B, T, T], and over the row's own of later steps."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        memory = [*memory, (k, v)]
        (keys, values), own = memory[0], memory[1:]
        scale, precision = 1.0 / math.sqrt(q.shape[-1]), precision_of(q.dtype)
        product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None, None], product("btkgd,bskd->bkgts", q, keys) * scale, _MASKED)
        wide = q.astype(jnp.float32)
        # One key a query: sums of products, where XLA would make thousands of tiny matrices.
        mine = [jnp.sum(wide * key[:, :, :, None], axis=-1, keepdims=True) * scale for key, _ in own]
        top = jnp.max(scores, axis=-1, keepdims=True)
        for score in mine:
            top = jnp.maximum(top, _by_head(score))
        # The maximum cancels out.
        top = jax.lax.stop_gradient(top)
        weights = jnp.exp(scores - top)
        total = _by_token(jnp.sum(weights, axis=-1, keepdims=True))
        mixed = product("bkgts,bskd->btkgd", weights.astype(q.dtype), values)
        for score, (_, value) in zip(mine, own, strict=True):
            weight = jnp.exp(score - _by_token(top))
            total += weight
            mixed += weight * value[:, :, :, None]
        return (mixed / total).astype(q.dtype), memory

    return attend


def _by_head(scores: jax.Array) -> jax.Array:
    """[B, T, KV, G, 1] → [B, KV, G, T, 1]."""
    return scores.transpose(0, 2, 3, 1, 4)


def _by_token(scores: jax.Array) -> jax.Array:
    """[B, KV, G, T, 1] → [B, T, KV, G, 1]."""
    return scores.transpose(0, 3, 1, 2, 4)
