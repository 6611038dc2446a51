"""What is measured of a head on held-out text: its loss, and which of its drafts the target would accept.

Greedy drafting with the text as context, from every position at once: the head's most likely token at each step is
compared with the target's. The decoder's own figure is for the card: it is far dearer to take at every checkpoint.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training.losses.base import Batch, Given, Loss, head_of, num_targets
from training.losses.heads import Network, ahead, look, predicted
from training.reports.evaluation import NUM_DRAFT_TOKENS, MeasureKinds, Sums, by_kind, emitted


def make_measure(
    network: Network, loss: Loss, target: Params, part: np.ndarray | None = None
) -> MeasureKinds:
    """Makes the measurement taken at each checkpoint.

    Args:
      network: the head.
      loss: of its training.
      target: its target's parameters.
      part: int32[N], the tokens that it may choose, rising; None for all.

    Returns:
      what `evaluation.by_kind` returns: `held_out_loss` (nats per token), `acceptance/I` for each of
      `NUM_DRAFT_TOKENS` draft tokens, or as many as the network drafts if these are fewer (the share of the rounds
      that accept it and all before it), and `mean_acceptance_length`, tokens per round.
    """

    @jax.jit
    def measure(params: Params, given: Params | None, batch: Batch) -> Sums:
        assert given is not None, "a head has a target"
        params = jax.tree.map(lambda leaf: leaf.astype(given["embed"].dtype), params)
        nothing = Given(jnp.int32(0), seed_key(0), given)
        sums: Sums = {"held_out_loss": loss(params, batch, nothing)}
        seen = look(network.target, given, batch, network.taps, part)
        outputs = network.outputs(params, given, batch, seen.features, NUM_DRAFT_TOKENS)
        rounds = jnp.all(jnp.stack([predicted(batch, step) for step in range(NUM_DRAFT_TOKENS)]), axis=0)
        agrees, standing = [], rounds
        for step, output in enumerate(outputs):
            own = network.reading(params, step)
            chosen = jnp.argmax(network.logits(own, head_of(given), output), axis=-1)
            chosen = chosen if part is None else jnp.asarray(part)[chosen]
            agrees.append(chosen == ahead(seen.best, 1 + step))
            standing = standing & agrees[-1]
            sums[f"acceptance/{step + 1}"] = num_targets(standing), num_targets(rounds)
        sums["mean_acceptance_length"] = emitted(agrees, rounds), num_targets(rounds)
        return sums

    return by_kind(measure, target)
