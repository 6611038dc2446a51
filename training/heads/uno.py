"""Training of Uno's adapters (arXiv 2609.04010): the target learns to predict tokens from noise in place of text.

One pass runs the text, and noise at the same positions. The noise is divided into blocks. A row of noise sees the text
before its block and the earlier rows of the block, and learns the distribution that the target has after the text's own
token at this position. The adapters apply to the noise only, and nothing else is trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.uno import network
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.sampling import seed_key
from training.heads.head_type import HeadOptions, Kind
from training.heads.losses import Network, ahead
from training.losses.base import (
    Batch,
    Given,
    Loss,
    early_gradient,
    head_of,
    next_token_targets,
    num_targets,
    pieces,
)

RANK = 16
# Keys and values, [B, T, KV, hd] each.
Pair = tuple[jax.Array, jax.Array]


class UnoNetwork(Network[UnoConfig]):
    """An adapter."""

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The last residual stream: the target itself predicts the first token of a draft."""
        return (self.target.num_layers,)

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs a block after every row; returns `steps` arrays [B, T, D]."""
        found, count, positions = [ahead(aux_hidden_states, 1)], steps - 1, batch["positions"]
        column = jnp.arange(positions.shape[1])[None]
        shifted = []
        for shift in range(count):
            last = blocks(positions, count, shift)
            before = jnp.maximum(column - (positions - last), 0)
            pending = jnp.take_along_axis(batch["tokens"], before, axis=1)
            noise = network.noise(self.head, pending, positions)
            shifted.append(run_blocks(self, params, embedding, batch, noise, last)[1])
        # The block after row t + 1, the pending one, begins at the position after it.
        which = (-(positions + 2) % max(count, 1))[None, :, :, None]
        for step in range(1, steps):
            rows = jnp.roll(jnp.stack(shifted), -(1 + step), axis=2)
            found.append(jnp.take_along_axis(rows, which, axis=0)[0])
        return found

    def reading(self, params: Params, step: int) -> Params:
        """Returns no parameters: the target's norm and head make the logits."""
        del params, step
        return {}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, V]."""
        del own
        return llama.logits(self.target, target, output)


def blocks(positions: jax.Array, count: int | jax.Array, shift: int | jax.Array) -> jax.Array:
    """Divides noise into blocks of `count` rows; returns the position before the block of each row, int32[B, T].

    Args:
      positions: int32[B, T].
      count: rows of noise of a block.
      shift: the number of rows, below `count`, by which the first block is shorter; a scalar or [B, 1].

    Examples:
      >>> blocks(jnp.arange(6)[None], count=3, shift=1).tolist()
      [[-2, -2, 1, 1, 1, 4]]
    """
    return (positions + shift) // count * count - shift - 1


def run_blocks(
    net: UnoNetwork, own: Params, params: Params, batch: Batch, noise: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs packed documents, and noise at the same positions.

    Args:
      net: the adapter.
      own: its parameters.
      params: of the target.
      batch: the documents, [B, T].
      noise: int32[B, T], the noise tokens.
      last: int32[B, T], the position of the last token of the text that each row of noise sees, see `blocks`.

    Returns:
      The streams of the text and of the noise before the final norm, [B, T, D] each.
    """
    config, positions, segments = net.target, batch["positions"], batch["segments"]
    adapted = network.adapted(config, params, net.head, own, jnp.ones(positions.shape[1], bool))
    same = segments[:, :, None] == segments[:, None, :]
    within = same & (last[:, :, None] == last[:, None, :])
    text, hidden = (llama.embed(config, params, of) for of in (batch["tokens"], noise))
    for number, (clean, noisy) in enumerate(zip(params["layers"], adapted["layers"], strict=True)):
        of = config.layer_type(number)
        turns = rope.tables(config, of, positions, jnp.zeros(positions.shape[0], jnp.int32))
        causal = llama.packed(positions, segments, of.window, config.scores)
        near = kv.visible(positions, positions[:, None, :], of.window)
        before = same & near & (positions[:, None, :] <= last[:, :, None])
        seen = jnp.concatenate([before, within & near], axis=2)

        def keep(q: jax.Array, k: jax.Array, v: jax.Array, _: None, causal=causal) -> tuple[jax.Array, Pair]:
            return causal(q, k, v, None)[0], (k, v)

        def both(
            q: jax.Array, k: jax.Array, v: jax.Array, of_text: Pair, seen=seen
        ) -> tuple[jax.Array, None]:
            joined = [
                jnp.concatenate(pair, axis=1).swapaxes(1, 2) for pair in zip(of_text, (k, v), strict=True)
            ]
            mixed = []
            for begin in range(0, q.shape[1], llama.QUERIES_AT_ONCE):
                part = slice(begin, begin + llama.QUERIES_AT_ONCE)
                pair = (joined[0], joined[1])
                mixed.append(kv.attend_where(q[:, part], pair, seen[:, part], False, config.scores))
            return jnp.concatenate(mixed, axis=1), None

        text, of_text = llama.attention_sublayer(config, clean["attention"], text, turns, keep)
        text = llama.mlp(config, clean["mlp"], text)
        hidden, _ = llama.attention_sublayer(config, noisy["attention"], hidden, turns, both, of_text)
        hidden = llama.mlp(config, noisy["mlp"], hidden)
    return text, hidden


def _init(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[UnoNetwork, Params]:
    """Returns adapters that add nothing. The noise is one token, the last of the vocabulary."""
    del params, part
    rank = options.lora_rank or RANK
    head = UnoConfig(target.plain, rank, float(rank), (target.vocab_size - 1, target.vocab_size))
    made = llama.draw(head.shapes, seed_key(seed))
    for layer in made["layers"]:
        for sublayer in layer.values():
            sublayer |= {name: 0 * leaf for name, leaf in sublayer.items() if name.endswith("_b")}
    return UnoNetwork(head, target), made


def _loss(net: UnoNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """Returns the L1 distance of the distributions after noise and after text, at the positions that are learned."""
    del part
    sizes = jnp.array(options.block_sizes)

    def loss(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        assert given.target is not None, "an adapter has a target"
        of_shift, of_noise = jax.random.split(given.key)
        count = sizes[jnp.minimum(given.step // options.block_steps, len(sizes) - 1)] - 1
        shift = jax.random.randint(of_shift, (batch["tokens"].shape[0], 1), 0, count)
        last = blocks(batch["positions"], count, shift)
        noise = jax.random.randint(of_noise, batch["tokens"].shape, *net.head.noise)
        text, hidden = run_blocks(net, params, given.target, batch, noise, last)
        mask = next_token_targets(batch)[1] & (last >= 0)

        def apart(
            nothing: None, hidden: jax.Array, rows: tuple[jax.Array, jax.Array], theirs: Params
        ) -> jax.Array:
            del nothing
            text, mask = rows
            wanted, found = (
                jax.nn.softmax(llama.logits(net.target, theirs, one), axis=-1) for one in (text, hidden)
            )
            return jnp.sum(jnp.where(mask, jnp.sum(jnp.abs(wanted - found), axis=-1), 0.0))

        theirs, rows = head_of(given.target), (jax.lax.stop_gradient(text), mask)
        return early_gradient(apart, pieces(text, theirs), None, hidden, rows, theirs), num_targets(mask)

    return loss


KINDS = {
    "uno": Kind(
        _init,
        _loss,
        ("lora_rank", "block_sizes", "block_steps"),
        unit="L1 distance of the distributions",
        lengths=(2, 4, 6, 8, 12, 16),
    )
}
