"""The kinds of heads that can be trained: how each begins, and what it minimises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import eagle, llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.llama import Params
from jaxspec.model.medusa import MedusaConfig
from jaxspec.sampling import seed_key
from training.losses.base import Loss
from training.losses.eagle import EagleNetwork
from training.losses.heads import Network, Weights, head_loss
from training.losses.kangaroo import KangarooNetwork
from training.losses.several import SeveralNetwork

# The largest standard deviation of the logits of an EAGLE-3 head before its first step.
_SPREAD = 2.0


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The shape of a head, and how far it looks ahead in training; what is not given is the target's, or usual.

    Each is an option of some kinds only.

    Attributes:
      intermediate_size: width of EAGLE's gated MLP.
      taps: layers whose input EAGLE-3 reads; 2, half of the target's and the last but two.
      draft_vocab: a ranking of tokens, made by `jaxspec vocab` for the target: EAGLE-3's head chooses among these.
      draft_vocab_size: how many of them; without a ranking, of the tokens most frequent in the training text that is
        to be predicted.
      test_steps: steps of training-time test, of which each reads the output of the one before: 7 for EAGLE-3, and 1,
        which is none, for EAGLE-1.
      step_decay: step s, or the head that drafts token s, from 0, counts the s-th power of it.
      num_heads: how many heads of Medusa or Hydra, each of which drafts one token: 5 and 4.
      shared_head: Medusa's heads read the target's own head, as its last trainer makes them, in place of a matrix each:
        far smaller where the vocabulary is large.
      exit_layer: Kangaroo reads what so many of the target's layers make: 2.
    """

    intermediate_size: int | None = None
    taps: tuple[int, ...] = ()
    draft_vocab: Path | None = None
    draft_vocab_size: int | None = None
    test_steps: int | None = None
    step_decay: float = 0.8
    num_heads: int | None = None
    shared_head: bool = False
    exit_layer: int | None = None

    def __post_init__(self):
        for name in ("intermediate_size", "draft_vocab_size", "test_steps", "num_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a whole number of at least 1")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"step_decay is {self.step_decay}; give a number above 0, and at most 1")


class Kind(NamedTuple):
    """What sets a kind of head apart.

    Attributes:
      init: (options, the target's config and parameters, the tokens it may choose int32[N] or None for all, seed) →
        the network, and float32 parameters to begin with.
      loss: (network, options, tokens) → what is minimised.
      options: the names of those in `HeadOptions` that it has.
    """

    init: Callable[[HeadOptions, LlamaConfig, Params, np.ndarray | None, int], tuple[Network, Params]]
    loss: Callable[[Any, HeadOptions, np.ndarray | None], Loss]
    options: tuple[str, ...]


def _init_eagle(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[EagleNetwork, Params]:
    head = HeadConfig(_block(options, target), kind="eagle", fc_bias=True)
    return EagleNetwork(head, target), _drawn(head, target, params, part, seed)


def _init_eagle3(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[EagleNetwork, Params]:
    layers = target.num_layers
    taps = options.taps or eagle.usual_taps(layers)
    if not all(0 <= tap <= layers for tap in taps):
        raise ValueError(f"taps is {taps}; the target has {layers} layers: give numbers from 0 to {layers}")
    size = target.vocab_size if part is None else len(part)
    head = HeadConfig(_block(options, target), taps, "eagle3", target.hidden_size, size)
    return EagleNetwork(head, target), _drawn(head, target, params, part, seed)


def _block(options: HeadOptions, target: LlamaConfig) -> LlamaConfig:
    """One plain Llama layer of the target's widths, heads and RoPE."""
    return dataclasses.replace(
        target,
        num_layers=1,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(),
        model_type="llama",
    )


def _drawn(
    head: HeadConfig, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> Params:
    """Random matrices, norms 1, biases 0; what makes logits begins as the target's, with a limit to their size."""
    made = llama.draw(head.shapes, seed_key(seed))
    if "head" in made:
        rows, norm = llama.head(target, params), jnp.array(params["norm"], jnp.float32)
        made["head"] = jnp.array(rows if part is None else rows[part], jnp.float32)
        # Of an output that is still random a sharp head is wrongly sure; the norm makes its logits no larger than this.
        spread = jnp.mean(jnp.linalg.norm(made["head"] * norm, axis=-1))
        made["norm"] = norm * jnp.minimum(1.0, _SPREAD / spread)
    return made


def _eagle_loss(network: EagleNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The smooth L1 distance of the features, and a tenth of the cross-entropy with the target's law (EAGLE-1)."""
    weights = Weights(law=0.1, feature=1.0, decay=options.step_decay)
    return head_loss(network, options.test_steps or 1, weights, part)


def _eagle3_loss(network: EagleNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The cross-entropy with the target's law at each step of training-time test (EAGLE-3)."""
    return head_loss(network, options.test_steps or 7, Weights(decay=options.step_decay), part)


def _init_medusa(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[SeveralNetwork, Params]:
    """Blocks that change nothing, and the target's head, in whose stead each head has its own if not `shared_head`."""
    del part, seed
    rows = None if options.shared_head else target.vocab_size
    count = options.num_heads or 5
    head = MedusaConfig(target.hidden_size, count, head_size=rows, own_heads=not options.shared_head)
    made = _zeros(head.shapes)
    for one in made["heads"] if head.own_heads else ():
        one["head"] = jnp.array(llama.head(target, params), jnp.float32)
    return SeveralNetwork(head, target), made


def _init_hydra(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[SeveralNetwork, Params]:
    """As Medusa's: of what a head reads, its block hands on what the target's head reads."""
    del part, seed
    head = HydraConfig(target.hidden_size, target.vocab_size, options.num_heads or 4)
    made = _zeros(head.shapes)
    for one in made["heads"]:
        block = one["blocks"][0]
        block["residual"] = jnp.eye(*block["residual"].shape)
        one["head"] = jnp.array(llama.head(target, params), jnp.float32)
    return SeveralNetwork(head, target), made


def _init_kangaroo(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[KangarooNetwork, Params]:
    """An attention that writes nothing, and the target's norm: the target's own early exit."""
    del part
    last = target.num_layers - 1
    if not last:
        raise ValueError(
            "Kangaroo's adapter reads an early exit, and the target has one layer; choose another kind"
        )
    exit_layer = min(2, last) if options.exit_layer is None else options.exit_layer
    if not 1 <= exit_layer <= last:
        raise ValueError(
            f"exit_layer is {exit_layer}; the target has {target.num_layers} layers: give a number from 1 to {last}"
        )
    head = KangarooConfig(_block(options, target), exit_layer)
    made = llama.draw(head.shapes, seed_key(seed))
    for layer in made["layers"]:
        layer["attention"]["out"] *= 0
    made["norm"] = jnp.array(params["norm"], jnp.float32)
    return KangarooNetwork(head, target), made


def _zeros(shapes: Params) -> Params:
    made: Params = jax.tree.map(jnp.zeros, shapes, is_leaf=llama.is_shape)
    return made


def _several_loss(network: SeveralNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The cross-entropy of each head with the text's token that it is to say (Medusa-1, Hydra)."""
    weights = Weights(law=0.0, text=1.0, decay=options.step_decay)
    return head_loss(network, network.head.num_heads, weights, part)


def _kangaroo_loss(network: KangarooNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The cross-entropy with the target's law of the next token (Kangaroo)."""
    del options
    return head_loss(network, 1, Weights(), part)


_EAGLE = ("intermediate_size", "test_steps", "step_decay")
KINDS: dict[str, Kind] = {
    "eagle": Kind(_init_eagle, _eagle_loss, _EAGLE),
    "eagle3": Kind(_init_eagle3, _eagle3_loss, (*_EAGLE, "taps", "draft_vocab", "draft_vocab_size")),
    "medusa": Kind(_init_medusa, _several_loss, ("num_heads", "shared_head", "step_decay")),
    "hydra": Kind(_init_hydra, _several_loss, ("num_heads", "step_decay")),
    "kangaroo": Kind(_init_kangaroo, _kangaroo_loss, ("exit_layer",)),
}
