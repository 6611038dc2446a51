"""A text whose caches are kept for a text that begins with the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.decoding import Caches
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The tokens of a text, and the caches that hold all of them but the last.

    Attributes:
      tokens: int32[n], on the host.
      caches: the caches, of one row; the session that continues from them uses them up.
    """

    tokens: np.ndarray
    caches: Caches

    def without_drafter(self) -> Prefix:
        """Returns the same text for another method, which cannot use the drafter's caches."""
        return dataclasses.replace(self, caches=Caches(self.caches.cache))

    def start(self, prompt: Sequence[int], drafter: Drafter, config: LlamaConfig) -> int:
        """Returns the position from which a prompt has to be fed; 0 if the caches are of no use.

        The last common token is fed again. If it is the text's last one, no cache holds it; otherwise the drafter's
        caches may hold its hidden states together with another next token.

        Args:
          prompt: the token ids of the new text.
          drafter: the drafter with which it begins.
          config: the target.
        """
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches)):
            return 0  # a call that used them up was interrupted
        if drafter.aux_layers and self.caches.absorbed is None:
            return 0  # the head needs hidden states of all tokens
        dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
        if dynamic and max(len(prompt), len(self.tokens)) > config.max_position_embeddings:
            return 0  # rotations depend on the length of the prompt, for each text another one
        size = min(len(prompt), len(self.tokens))
        differs = np.flatnonzero(np.asarray(prompt[:size]) != self.tokens[:size])
        return max((int(differs[0]) if len(differs) else size) - 1, 0)
