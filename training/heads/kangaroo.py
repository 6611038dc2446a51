"""Kangaroo's adapter as it is trained: on the early exit of every token of a text (Liu et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.kangaroo import network
from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.model import llama, rope
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.sampling import seed_key
from training.heads.head_type import HeadOptions, Kind, llama_block
from training.heads.losses import Network, Weights, ahead, head_loss
from training.losses.base import Batch, Loss


class KangarooNetwork(Network[KangarooConfig]):
    """An adapter."""

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The stream that it was told to read."""
        assert self.head.exit_layer is not None, "an adapter in training knows its exit"
        return (self.head.exit_layer,)

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs the adapter over every row; what `network.logits` takes, `steps` arrays [B, T, D].

        At step s it reads the pending token and the s tokens after it too, for the target's first layers have run them.
        """
        block, positions = self.head.block, batch["positions"]
        turns = rope.tables(block, block.layer_type(0), positions, jnp.zeros(len(positions), jnp.int32))
        attend = llama.packed(positions, batch["segments"])
        hidden = aux_hidden_states
        for layer in params["layers"]:
            hidden, _ = llama.attention_sublayer(block, layer["attention"], hidden, turns, attend)
        return [ahead(hidden, 1 + step) for step in range(steps)]

    def reading(self, params: Params, step: int) -> Params:
        """Selects the adapter's norm."""
        del step
        return {"norm": params["norm"]}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, V]."""
        return network.logits(self.head, own, self.target, target, output)


def _init_kangaroo(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[KangarooNetwork, Params]:
    """Returns an attention that adds nothing, with the target's norm: the target's own early exit."""
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
    head = KangarooConfig(llama_block(options, target), exit_layer)
    made = llama.draw(head.shapes, seed_key(seed))
    for layer in made["layers"]:
        layer["attention"]["out"] *= 0
    made["norm"] = jnp.array(params["norm"], jnp.float32) + target.norm_offset
    return KangarooNetwork(head, target), made


def _kangaroo_loss(network: KangarooNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """The loss of the target's distribution of the next token (Kangaroo)."""
    return head_loss(network, 1, Weights(loss=options.loss), part)


KINDS = {"kangaroo": Kind(_init_kangaroo, _kangaroo_loss, ("exit_layer", "loss"))}
