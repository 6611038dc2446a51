"""Self-speculation by early exit: LayerSkip (Elhoushi et al. 2024) and AdaSPEED."""

from __future__ import annotations

import jax
from flax import struct

from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.exit_drafter import ExitDrafter
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import Constant


@struct.dataclass
class LayerSkipDrafter(ExitDrafter):
    """Drafts with the target's first E layers, final norm and head; verification reuses those layers.

    AdaSPEED is this drafter with the rule `ProductBelow`.

    Attributes:
      config: the target.
      exit_layer: E, from 1 to L − 1.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    exit_layer: int = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache, and keeps the hidden states for verification."""

        def read(
            stream: jax.Array, position: jax.Array, own: tuple[()]
        ) -> tuple[jax.Array, jax.Array, tuple[()]]:
            del position
            return llama.logits(self.config, params.self_draft, stream[:, 0]), stream[:, 0], own

        proposal, _, state, cache = self.draft_from_exit(read, (), keys, params, state, view, distribution)
        return proposal, state, cache
