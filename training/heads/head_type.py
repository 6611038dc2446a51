"""The base of the training of a head type, and the options of a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import Quantised
from training.heads.losses import LossName, Network
from training.loop import state_sharding
from training.losses.base import Loss

# The largest standard deviation of the logits of a head with a random hidden state.
_SPREAD = 2.0


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The shape of a head, and the number of steps that it predicts in training.

    Each option applies to some head types only. The defaults are the target's values, or the usual ones.

    Attributes:
      intermediate_size: width of EAGLE's or DFlash's gated MLP.
      aux_layers: the layers whose inputs EAGLE-3 or DFlash reads. Default: 2, half of the target's layers, and the last
        but two for EAGLE-3; five, spaced evenly, for DFlash.
      draft_vocab: a ranking of tokens, made by `jaxspec vocab` for the target: EAGLE-3's head chooses among these.
      draft_vocab_size: the number of these tokens. Without a ranking they are the most frequent tokens that are to be
        predicted in the training text.
      test_steps: steps of training-time test, each of which reads the output of the step before: 7 for EAGLE-3, and 1,
        which is none, for EAGLE-1.
      step_decay: the weight of step s, or of the head that drafts token s, is the s-th power of this number.
      feature_weight: EAGLE-1's weight of the distance from the target's next hidden state (w_reg in the S2D
        paper, Table 3).
      token_weight: EAGLE-1's weight of the loss of the distribution (w_cls).
      loss: of the target's distribution, for heads that learn it. ce: the cross-entropy. tv-ce: 0.9 × the total
        variation + 0.1 × ce (DSpark). lk: ce at first, the total variation as the acceptance grows (LK, hybrid).
        d-pace: ce, weighted by the expected length of the accepted draft in place of `step_decay` (D-PACE).
      num_heads: the number of Medusa's or Hydra's heads, each of which drafts one token: 5 and 4.
      shared_head: Medusa's heads read the target's output head, as its authors' last trainer makes them, instead of a
        matrix each. They are far smaller if the vocabulary is large.
      fc_norm: EAGLE-3 norms each auxiliary hidden state before it fuses them (EAGLE-3.1).
      norm_output: EAGLE-3 reads its own normed output for tokens that the target has not run (EAGLE-3.1).
      exit_layer: Kangaroo reads the output of the target's first layers, this number of them. Default 2.
      lora_rank: the rank of Uno's adapters. Default 16.
      block_sizes: the tokens of Uno's blocks in training, the pending one included, one size after the other.
      block_steps: the steps of each of these sizes; the last one stays.
      num_layers: the number of DFlash's or DSpark's layers. Default 2.
      block_size: the tokens of DFlash's or DSpark's block, the pending one included. Default 8; for DSpark 7.
      num_anchors: the number of random tokens of each window after which they predict a block, in each step.
      markov_rank: the rank of DSpark's bias by the token before. Default 256.
    """

    intermediate_size: int | None = None
    aux_layers: tuple[int, ...] = ()
    draft_vocab: Path | None = None
    draft_vocab_size: int | None = None
    test_steps: int | None = None
    step_decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    loss: LossName = "ce"
    num_heads: int | None = None
    shared_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    exit_layer: int | None = None
    lora_rank: int | None = None
    block_sizes: tuple[int, ...] = (2, 4, 6, 8)
    block_steps: int = 500
    num_layers: int | None = None
    block_size: int | None = None
    num_anchors: int = 64
    markov_rank: int | None = None

    def __post_init__(self):
        for name in (
            *("intermediate_size", "draft_vocab_size", "test_steps", "num_heads"),
            *("lora_rank", "block_steps", "num_layers", "num_anchors", "markov_rank"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a whole number of at least 1")
        if not self.block_sizes or min(self.block_sizes) < 2:
            raise ValueError(f"block_sizes is {self.block_sizes}; give whole numbers of at least 2")
        if self.block_size is not None and self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; give a whole number of at least 2")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"step_decay is {self.step_decay}; give a number above 0, and at most 1")
        pair = self.feature_weight, self.token_weight
        if min(pair) < 0 or not sum(pair):
            raise ValueError(
                f"feature_weight and token_weight are {pair}; give numbers of at least 0, not both 0"
            )


class Kind(NamedTuple):
    """How heads of a type are trained.

    Attributes:
      init: (options, the target's config and parameters, the head's tokens int32[N] or None for all, seed) → the
        network and its first parameters, float32.
      loss: (network, options, the head's tokens) → the loss.
      options: the names of the fields of `HeadOptions` that apply.
      unit: the unit of the loss.
      lengths: draft lengths for which the card reports the tokens per round, beside those of the usual length.
    """

    init: Callable[[HeadOptions, LlamaConfig, Params, np.ndarray | None, int], tuple[Network, Params]]
    loss: Callable[[Any, HeadOptions, np.ndarray | None], Loss]
    options: tuple[str, ...]
    unit: str = "nats per token"
    lengths: tuple[int, ...] = ()


def begin(
    kind: Kind,
    options: HeadOptions,
    target: tuple[LlamaConfig, Params],
    part: np.ndarray | None,
    seed: int,
    mesh: Mesh,
) -> tuple[Network, Params]:
    """Makes a network, and its first parameters straight in their shards; see `Kind.init`."""
    config, params = target
    networks: list[Network] = []

    def init(given: Params) -> Params:
        network, own = kind.init(options, config, given, part, seed)
        networks.append(network)
        return own

    own = state_sharding.make_sharded(mesh, init, params)
    return networks[0], own


def target_head(target: LlamaConfig, params: Params) -> jax.Array:
    """Returns a copy of the target's output head with the factor of its logits, float32[V, D]."""
    rows = llama.head(target, params)
    whole = rows.whole() if isinstance(rows, Quantised) else rows
    return jnp.array(whole, jnp.float32) * target.logit_multiplier


def bounded_norm(target: LlamaConfig, params: Params, rows: jax.Array) -> jax.Array:
    """Returns the target's final norm, made smaller where the logits of output rows [N, D] would be large.

    With a random hidden state, a sharp output head is confident without reason; a smaller norm limits its logits.
    """
    norm = jnp.array(params["norm"], jnp.float32) + target.norm_offset
    return norm * jnp.minimum(1.0, _SPREAD / jnp.mean(jnp.linalg.norm(rows * norm, axis=-1)))


def llama_block(options: HeadOptions, target: LlamaConfig) -> LlamaConfig:
    """Returns the config of one plain Llama layer with the target's widths, heads and RoPE."""
    return target.block(intermediate_size=options.intermediate_size or target.intermediate_size)
