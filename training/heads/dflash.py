"""DFlash heads in training: blocks after many tokens of a text at once (Chen et al. 2026, arXiv 2602.06036).

A block begins with a token of the text, its anchor, as if it was the pending token; mask tokens follow. The rows of a
block see each other, and the text before the anchor through the target's auxiliary hidden states. Blocks do not see
each other.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.dflash import network
from jaxspec.heads.dflash.network import DFlashConfig
from jaxspec.model import llama, rope
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.numerics import precision_of
from jaxspec.sampling import seed_key
from training.heads.head_type import HeadOptions, Kind, bounded_norm, target_head
from training.heads.losses import Network, Weights, ahead, at_rows, head_loss
from training.losses.base import Batch, Loss

# Keys and values [B, T, KV, hd] of the text.
Pair = tuple[jax.Array, jax.Array]


class DFlashNetwork(Network[DFlashConfig]):
    """A head of DFlash."""

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs a block after each row, whose pending token is the one after it; at most `steps` arrays [B, R, D]."""
        hidden = self.blocks(params, embedding, batch, aux_hidden_states)[:, :, self.head.first :]
        return [hidden[:, :, row] for row in range(min(steps, self.head.longest))]

    def blocks(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array
    ) -> jax.Array:
        """Returns the hidden states of the block after each row, [B, R, block_size, D]."""
        head, block, positions = self.head, self.head.block, batch["positions"]
        size, none = head.block_size, jnp.zeros(len(positions), jnp.int32)

        def turns(of: jax.Array) -> rope.Tables:
            return rope.tables(block, block.layer_type(0), of, none)

        column = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
        same = at_rows(batch, batch["segments"])[..., None] == batch["segments"][:, None]
        seen = same & (column[:, None] <= at_rows(batch, column)[..., None])
        tokens = at_rows(batch, ahead(batch["tokens"], 1))[..., None]
        tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, size - 1)), constant_values=head.mask_id)
        hidden = llama.embedding_rows(embedding, tokens.reshape(len(tokens), -1))
        places = at_rows(batch, positions)[..., None] + 1 + jnp.arange(size)
        own, attend = turns(places.reshape(len(places), -1)), _attending(seen, size)
        text = network.pairs(head, params, aux_hidden_states, turns(positions))
        for layer, pair in zip(params["layers"], text, strict=True):
            hidden, _ = llama.attention_sublayer(block, layer["attention"], hidden, own, attend, pair)
            hidden = llama.mlp(block, layer["mlp"], hidden)
        return hidden.reshape(*tokens.shape, -1)

    def reading(self, params: Params, step: int) -> Params:
        """Returns the head's norm; the target's head makes the logits."""
        del step
        return {"norm": params["norm"]}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, R, D] → float32[B, R, V]."""
        return network.logits(self.head, own, self.target, target, output)


def _attending(seen: jax.Array, size: int) -> llama.Attend:
    """Attention of blocks of `size` rows over the text where `seen` bool[B, R, T], and over the block's own rows."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, text: Pair) -> tuple[jax.Array, None]:
        batch, rows, length = seen.shape
        queries, keys, values = (one.reshape(batch, rows, size, *one.shape[2:]) for one in (q, k, v))
        precision = precision_of(q.dtype)
        product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        far = product("brikgd,btkd->brkgit", queries, text[0])
        far = jnp.where(seen[:, :, None, None, None], far, -jnp.inf)
        near = product("brikgd,brjkd->brkgij", queries, keys)
        scores = jnp.concatenate([far, near], axis=-1) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        mixed = product("brkgit,btkd->brikgd", weights[..., :length], text[1])
        mixed += product("brkgij,brjkd->brikgd", weights[..., length:], values)
        return mixed.astype(q.dtype).reshape(q.shape), None

    return attend


def shape(options: HeadOptions, target: LlamaConfig) -> DFlashConfig:
    """Returns the configuration of a head: 2 layers of the target's size, blocks of 8, by default.

    The mask token is the last of the target's vocabulary.

    Raises:
      ValueError: the head cannot read these layers.
    """
    layers, last = options.num_layers or 2, target.num_layers - 1
    aux_layers = options.aux_layers or tuple(
        max(1, min(layer, last)) for layer in network.usual_aux_layers(target.num_layers, 5)
    )
    if not all(1 <= layer <= last for layer in aux_layers):
        raise ValueError(
            f"aux_layers is {aux_layers}; DFlash reads outputs of layers other than the last, and the target has "
            f"{target.num_layers} layers: give numbers from 1 to {last}"
        )
    size = options.intermediate_size or target.intermediate_size
    block = target.block(num_layers=layers, intermediate_size=size, qk_norm=True, model_type="qwen3")
    return DFlashConfig(block, aux_layers, options.block_size or 8, target.vocab_size - 1)


def drawn(head: DFlashConfig, target: LlamaConfig, params: Params, seed: int) -> Params:
    """Returns random matrices and norms of 1; the last norm is the target's, with limited logits."""
    made = llama.draw(head.shapes, seed_key(seed))
    made["norm"] = bounded_norm(target, params, target_head(target, params))
    return made


def _init(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[DFlashNetwork, Params]:
    del part
    head = shape(options, target)
    return DFlashNetwork(head, target), drawn(head, target, params, seed)


def _loss(network: DFlashNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """Returns the loss of the target's distribution, over the tokens of random blocks."""
    steps, weights = network.head.longest, Weights(decay=options.step_decay, loss=options.loss)
    return head_loss(network, steps, weights, part, options.num_anchors)


OPTIONS = ("num_layers", "block_size", "num_anchors", "aux_layers", "intermediate_size", "step_decay", "loss")
KINDS = {"dflash": Kind(_init, _loss, OPTIONS)}
