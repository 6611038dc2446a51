"""DSpark heads in training (arXiv 2607.05147): DFlash's blocks, with a bias by the text's token before each row.

The confidence head learns the share of draft tokens that the target accepts, 1 − TV of the two distributions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.heads.dspark import network
from jaxspec.heads.dspark.network import DSparkConfig
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.heads import dflash
from training.heads.dflash import DFlashNetwork
from training.heads.head_type import HeadOptions, Kind
from training.heads.losses import Weights, accepted, ahead, at_rows, head_loss
from training.losses.base import Batch, Loss


@dataclasses.dataclass(frozen=True)
class DSparkNetwork(DFlashNetwork):
    """A head of DSpark, whose outputs are [B, R, D + r]: a hidden state, then `markov_in` of the token before."""

    head: DSparkConfig

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Runs a block after each row, whose pending token is the one after it; at most `steps` arrays."""
        hidden = super().outputs(params, embedding, batch, aux_hidden_states, steps)
        before = [at_rows(batch, ahead(batch["tokens"], 1 + step)) for step in range(len(hidden))]
        rows = (params["markov_in"][tokens].astype(hidden[0].dtype) for tokens in before)
        return [jnp.concatenate(pair, axis=-1) for pair in zip(hidden, rows, strict=True)]

    def reading(self, params: Params, step: int) -> Params:
        """Returns the norm, the bias and the confidence head; the target's head makes the logits."""
        del step
        names = ("norm", "markov_out", "confidence", "confidence_bias")
        return {name: params[name] for name in names}

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, R, D + r] → float32[B, R, V]."""
        hidden, row = self._parts(output)
        return super().logits({"norm": own["norm"]}, target, hidden) + network.bias(own, row)

    def confidence_loss(
        self, own: Params, output: jax.Array, wanted: jax.Array, logits: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Returns the sum of the cross-entropies of the predicted and the true acceptance, which has no gradient.

        Args:
          own, output: as in `logits`.
          wanted, logits: float32[B, R, V], of the target and of the head.
          mask: bool[B, R], the tokens that count.
        """
        share = jax.lax.stop_gradient(accepted(wanted, logits))
        found = network.confidence(self.head, own, *self._parts(output))
        crossed = share * jax.nn.log_sigmoid(found) + (1 - share) * jax.nn.log_sigmoid(-found)
        return -jnp.sum(jnp.where(mask, crossed, 0.0))

    def _parts(self, output: jax.Array) -> tuple[jax.Array, jax.Array]:
        width = self.head.block.hidden_size
        return output[..., :width], output[..., width:]


def _init(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[DSparkNetwork, Params]:
    """Returns a head of DFlash at its start; the bias and the confidence are 0."""
    del part
    like = dflash.shape(options, target)
    rank = options.markov_rank or DSparkConfig.rank
    head = DSparkConfig(like.block, like.aux_layers, options.block_size or 7, like.mask_id, rank=rank)
    made = dflash.drawn(head, target, params, seed)
    made |= {name: 0 * made[name] for name in ("markov_out", "confidence")}
    return DSparkNetwork(head, target), made


def _loss(network: DSparkNetwork, options: HeadOptions, part: np.ndarray | None) -> Loss:
    """Returns DFlash's loss, and that of the confidence head."""
    steps, weights = network.head.longest, Weights(decay=options.step_decay, loss=options.loss)
    return head_loss(network, steps, weights, part, options.num_anchors, network.confidence_loss)


KINDS = {"dspark": Kind(_init, _loss, (*dflash.OPTIONS, "markov_rank"))}
