"""The kinds of heads that can be trained: how each begins, what it minimises, how it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.io.head_writer import write_head
from jaxspec.model import eagle, llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.llama import Params
from training.losses.base import Loss
from training.losses.eagle import EagleNetwork
from training.losses.heads import Network, Weights, head_loss

# The largest standard deviation of the logits of an EAGLE-3 head before its first step.
_SPREAD = 2.0


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The shape of a head, and how far it looks ahead in training; what is not given is the target's, or usual.

    Attributes:
      intermediate_size: width of its gated MLP.
      taps: layers whose input EAGLE-3 reads; 2, half of the target's and the last but two.
      draft_vocab: a ranking of tokens, made by `jaxspec vocab` for the target: EAGLE-3's head chooses among these.
      draft_vocab_size: how many of them; without a ranking, of the tokens most frequent in the training text that is
        to be predicted.
      test_steps: steps of training-time test, of which each reads the output of the one before: 7 for EAGLE-3, and 1,
        which is none, for EAGLE-1.
      step_decay: step s, from 0, counts the s-th power of it.
    """

    intermediate_size: int | None = None
    taps: tuple[int, ...] = ()
    draft_vocab: Path | None = None
    draft_vocab_size: int | None = None
    test_steps: int | None = None
    step_decay: float = 0.8

    def __post_init__(self):
        for name in ("intermediate_size", "draft_vocab_size", "test_steps"):
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
      write: (directory, network, parameters, the target's fingerprint, tokens, dtype) → bytes of weights.
      chooses: whether it may have a vocabulary of its own.
    """

    init: Callable[[HeadOptions, LlamaConfig, Params, np.ndarray | None, int], tuple[Network, Params]]
    loss: Callable[[Any, HeadOptions, np.ndarray | None], Loss]
    write: Callable[[Path, Any, Params, str, np.ndarray | None, np.dtype], int]
    chooses: bool = False


def _init_eagle(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[EagleNetwork, Params]:
    if options.taps:
        raise ValueError(
            f"taps is {options.taps}; EAGLE-1 reads what the target's head reads: leave taps out"
        )
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
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def _drawn(
    head: HeadConfig, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> Params:
    """Random matrices, norms 1, biases 0; what makes logits begins as the target's, with a limit to their size."""
    flat, tree = jax.tree.flatten_with_path(eagle.param_shapes(head), is_leaf=llama.is_shape)
    drawn = []
    for index, (path, shape) in enumerate(flat):
        name = path[-1].key
        if name.endswith("norm"):
            drawn.append(jnp.ones(shape))
        elif name.endswith("bias"):
            drawn.append(jnp.zeros(shape))
        else:
            key = jax.random.fold_in(jax.random.key(seed), index)
            drawn.append(jax.random.normal(key, shape) * shape[-1] ** -0.5)
    made: Params = jax.tree.unflatten(tree, drawn)
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


def _write_eagle(
    directory: Path,
    network: EagleNetwork,
    params: Params,
    target: str,
    part: np.ndarray | None,
    dtype: np.dtype,
) -> int:
    return write_head(directory, network.head, params, target, part, dtype)


KINDS: dict[str, Kind] = {
    "eagle": Kind(_init_eagle, _eagle_loss, _write_eagle),
    "eagle3": Kind(_init_eagle3, _eagle3_loss, _write_eagle, chooses=True),
}
