"""EAGLE heads in training: all rows of a text draft at once, each from the target's states before it.

This is EAGLE-3's training-time test (Li et al. 2025, arXiv 2503.01840, section 3.1). At step s, row t is in the same
situation as the drafter after s draft tokens: its position is t + s, and its auxiliary hidden state is its own output
of the step before. It attends to the target's pairs up to t and to its own pairs of the steps before, but not to the
pairs that other rows have drafted.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.eagle import network
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.model import llama, rope
from jaxspec.model.cache import visible
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Attend, Params
from jaxspec.model.numerics import precision_of
from jaxspec.sampling import seed_key
from training.heads.head_type import HeadOptions, Kind, bounded_norm, llama_block, target_head
from training.heads.losses import Network, Weights, ahead, head_loss
from training.losses.base import Batch, Loss

# Keys and values [B, T, KV, hd] of each step so far.
Memory = list[tuple[jax.Array, jax.Array]]
# Less than any score.
_MASKED = -1e30


class EagleNetwork(Network[EagleConfig]):
    """An EAGLE head of one layer."""

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs `steps` steps of every row; what `network.logits` takes, `steps` arrays [B, T, D]."""
        segments, positions, block = batch["segments"], batch["positions"], self.head.block
        embedded = llama.embedding_rows(params if self.head.own_embedding else embedding, batch["tokens"])
        # Whatever the step, true pairs after t are not known yet.
        seen = (segments[:, :, None] == segments[:, None, :]) & visible(
            positions, positions[:, None, :], None
        )
        aux_hidden_state = network.fuse(self.head, params, aux_hidden_states)
        memory: Memory = []
        found = []
        for step in range(steps):
            turns = rope.tables(
                block, block.layer_type(0), positions + step, jnp.zeros(len(positions), jnp.int32)
            )
            token = ahead(embedded, 1 + step)
            hidden, memory = network.run_first(
                self.head, params, token, aux_hidden_state, turns, _attending(seen), memory
            )
            found.append(hidden)
            aux_hidden_state = network.fed_back(self.head, params, hidden)
        return found

    def reading(self, params: Params, step: int) -> Params:
        """Selects the parameters that `logits` reads; they are the same at each step."""
        del step
        return {name: params[name] for name in ("norm", "head") if name in params}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, N]."""
        return network.logits(self.head, own, self.target, target, output)


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


def _init_eagle(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[EagleNetwork, Params]:
    head = EagleConfig(llama_block(options, target), kind="eagle", fc_bias=True)
    return EagleNetwork(head, target), _drawn(head, target, params, part, seed)


def _init_eagle3(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[EagleNetwork, Params]:
    layers = target.num_layers
    aux_layers = options.aux_layers or network.usual_aux_layers(layers)
    if not all(0 <= layer <= layers for layer in aux_layers):
        raise ValueError(
            f"aux_layers is {aux_layers}; the target has {layers} layers: give numbers from 0 to {layers}"
        )
    size = target.vocab_size if part is None else len(part)
    head = EagleConfig(
        llama_block(options, target),
        aux_layers,
        "eagle3",
        target.hidden_size,
        size,
        aux_norm="each" if options.fc_norm else "none",
        output_is_normed=options.norm_output,
    )
    return EagleNetwork(head, target), _drawn(head, target, params, part, seed)


def _drawn(
    head: EagleConfig, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> Params:
    """Returns random matrices, norms of 1 and biases of 0; the output head is the target's, with limited logits."""
    made = llama.draw(head.shapes, seed_key(seed))
    if "head" in made:
        rows = target_head(target, params)
        made["head"] = rows if part is None else rows[part]
        made["norm"] = bounded_norm(target, params, made["head"])
    return made


def _eagle_loss(network: EagleNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """Smooth L1 of the hidden states and the loss of the target's distribution, weighted (EAGLE-1)."""
    weights = Weights(options.token_weight, options.feature_weight, options.step_decay, loss=options.loss)
    return head_loss(network, options.test_steps or 1, weights, part)


def _eagle3_loss(network: EagleNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The loss of the target's distribution at each step of training-time test (EAGLE-3)."""
    weights = Weights(decay=options.step_decay, loss=options.loss)
    return head_loss(network, options.test_steps or 7, weights, part)


_OPTIONS = ("intermediate_size", "test_steps", "step_decay", "loss")
_OF_EAGLE3 = ("aux_layers", "draft_vocab", "draft_vocab_size", "fc_norm", "norm_output")
KINDS = {
    "eagle": Kind(_init_eagle, _eagle_loss, (*_OPTIONS, "feature_weight", "token_weight")),
    "eagle3": Kind(_init_eagle3, _eagle3_loss, (*_OPTIONS, *_OF_EAGLE3)),
}
