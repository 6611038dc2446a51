"""Self-speculation that chooses skipped layers during the text, by dynamic programming: CLaSp (Chen et al. 2025)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.knapsack_drafter import KnapsackDrafter, find_paths
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import StopRule, View, Weights
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


@struct.dataclass
class CLaSpDrafter(KnapsackDrafter):
    """The target drafts for itself without the M layers that changed its last verified token least.

    A choice costs about one pass of the model over M + 1 tokens.

    Attributes:
      config: the target.
      num_skipped: M, the number of skipped layers, 1 to L − 1, static.
      refresh: rounds between two choices, at least 1.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    num_skipped: int = struct.field(pytree_node=False)
    refresh: jax.Array | int = 16
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)

    def choose(self, params: Weights, view: View) -> tuple[jax.Array, jax.Array]:
        """Returns the masks without M layers, and K."""
        batch = len(view.length)
        layers = jnp.ones((batch, self.config.num_layers), jnp.int32)
        paths = find_paths(self.config, params.target, view, 1, layers, self.num_skipped + 1)
        plan = jnp.broadcast_to(paths.runs[:, -1, :, None], (batch, self.config.num_layers, 2))
        return plan, jnp.full(batch, self.num_draft_tokens, jnp.int32)
