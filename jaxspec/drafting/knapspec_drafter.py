"""Self-speculation that chooses skipped sublayers by their times and agreement: KnapSpec (arXiv 2602.20217)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.knapsack_drafter import KnapsackDrafter, find_paths
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import StopRule, View, Weights, rising_widths
from jaxspec.stopping import ConfidenceBelow, Constant, FixedGamma

# The largest ratio of two sublayers' times that counts.
MOST_WEIGHT = 5
# The first and the last sublayers that always run.
ENDS = 2


@struct.dataclass
class SublayerTimes:
    """The times of the sublayers of a step of one token, in any unit.

    Attributes:
      mlp: float32[], of an MLP.
      attention: float32[], of an attention without the cache.
      cached: float32[], of an attention, for each cached token that it reads.
      rest: float32[], of a step outside of its layers.
    """

    mlp: jax.Array
    attention: jax.Array
    cached: jax.Array
    rest: jax.Array

    def of(self, config: LlamaConfig, length: jax.Array, draft: bool = True) -> jax.Array:
        """Returns the time of each sublayer, float32[B, 2 L], with `length` int32[B] tokens in the cache.

        Args:
          config: the model, whose windows limit what an attention reads.
          length: of the texts.
          draft: whether `config.draft_window` holds too.
        """
        few = config.draft_window if draft else None
        windows = [config.window(layer) or (few and sum(few)) for layer in range(config.num_layers)]
        most = jnp.array([jnp.inf if window is None else window for window in windows])
        attention = self.attention + self.cached * jnp.minimum(length[:, None], most)
        return jnp.stack(jnp.broadcast_arrays(attention, self.mlp), axis=-1).reshape(len(length), -1)


def weights_of(times: jax.Array) -> jax.Array:
    """Returns the weights of sublayers, int32[B, N], 1 for the fastest, from their times float32[B, N]."""
    ratio = jnp.round(times / jnp.min(times, axis=1, keepdims=True))
    return jnp.clip(ratio, 1, MOST_WEIGHT).astype(jnp.int32)


@struct.dataclass
class KnapSpecDrafter(KnapsackDrafter):
    """The target drafts for itself without the sublayers whose time is best saved.

    Up to half of the weight of all sublayers is saved, their times in whole numbers. Of the paths that
    `find_paths` finds, the one with the most expected tokens for its time is taken, and its best draft length d,

        (1 − α^(d + 1)) ÷ (1 − α) ÷ (d · time of the path + time of a step),

    where α is the share of the last T tokens after which the path has the full model's most likely token. Drafts have
    d tokens if no stop rule ends them, otherwise K. A choice costs one pass of the model over R · T tokens.

    Attributes:
      config: the target.
      times: the times of its sublayers.
      num_rows: R, 1 more than the largest weight that is saved, static.
      num_fitted: T, static.
      refresh: rounds between two choices, at least 1.
      least_cosine: paths with a smaller mean cosine after a sublayer are dropped.
      rule: when to stop before K tokens; `Constant` for d tokens.
      num_draft_tokens: K, the largest d.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    times: SublayerTimes
    num_rows: int = struct.field(pytree_node=False)
    num_fitted: int = struct.field(pytree_node=False, default=8)
    refresh: jax.Array | int = 64
    least_cosine: jax.Array | float = 0.5
    rule: StopRule = ConfidenceBelow(FixedGamma(0.7))
    num_draft_tokens: int = struct.field(pytree_node=False, default=4)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of verification; every length of a draft is possible."""
        return rising_widths(self.num_draft_tokens)

    def choose(self, params: Weights, view: View) -> tuple[jax.Array, jax.Array]:
        """Returns the masks with the most expected tokens for their time, and the lengths of drafts."""
        config, most, batch = self.config, self.num_draft_tokens, len(view.length)
        times = self.times.of(config, view.start)
        weights, number = weights_of(times), jnp.arange(2 * config.num_layers)
        items = jnp.where((number >= ENDS) & (number < len(number) - ENDS), weights, 0)
        paths = find_paths(
            *(config, params.target, view, self.num_fitted, items, self.num_rows),
            budget=jnp.sum(weights, axis=1) // 2,
            least_cosine=self.least_cosine,
        )

        # One token after another: the logits of all paths and tokens may be larger than the model.
        def likely(hidden: jax.Array) -> jax.Array:
            return jnp.argmax(llama.logits(config, params.target, hidden), axis=-1)

        tokens = jnp.moveaxis(jax.lax.map(likely, jnp.moveaxis(paths.hidden, 2, 0)), 0, 2)
        agreement = paths.mean(tokens == tokens[:, :1])
        expected = jnp.cumsum(agreement[..., None] ** jnp.arange(most + 1), axis=-1)[..., 1:]
        path_time = self.times.rest + jnp.sum(paths.runs * times[:, None], axis=-1)
        step_time = self.times.rest + jnp.sum(self.times.of(config, view.start, draft=False), axis=-1)
        speed = expected / (path_time[..., None] * jnp.arange(1, most + 1) + step_time[:, None, None])
        best = jnp.argmax(jnp.where(paths.reached[..., None], speed, -1.0).reshape(batch, -1), axis=1)
        row, length = jnp.divmod(best.astype(jnp.int32), most)
        plan = jnp.take_along_axis(paths.runs, row[:, None, None], axis=1).reshape(batch, -1, 2)
        return plan, length + 1 if isinstance(self.rule, Constant) else jnp.full_like(length, most)
