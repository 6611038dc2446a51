"""Measures a head on held-out text: its loss, and the share of its drafts that the target would accept.

Drafting is greedy with the text as context, from every position at once: the head's most likely token at each step is
compared with the target's. The decoder's own acceptance is too expensive to measure at every checkpoint.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training.heads.losses import Network, ahead, look, predicted
from training.losses.base import Batch, Given, Loss, head_of
from training.reports.evaluation import NUM_DRAFT_TOKENS, MeasureKinds, Sums, by_kind, of_rounds


def make_measure(
    network: Network, loss: Loss, target: Params, dtype: str, part: np.ndarray | None = None
) -> MeasureKinds:
    """Makes the measurement taken at each checkpoint.

    Args:
      network: the head.
      loss: the training loss.
      target: parameters of its target.
      dtype: dtype of the written weights; the parameters are rounded to it.
      part: int32[N], the tokens among which it chooses, ascending; None for all.

    Returns:
      see `evaluation.by_kind`: `held_out_loss` (per token, see `Kind.unit`), `acceptance/I` for each of
      `NUM_DRAFT_TOKENS` draft tokens, or fewer if the network drafts fewer (the share of the rounds that accept it and
      all before it), and `mean_acceptance_length`, tokens per round.
    """

    @jax.jit
    def measure(params: Params, given: Params | None, batch: Batch) -> Sums:
        assert given is not None, "a head has a target"
        params = jax.tree.map(lambda leaf: leaf.astype(given["embed"].dtype), params)
        # A loss that changes with the steps is measured as it is at the end.
        nothing = Given(jnp.int32(np.iinfo(np.int32).max), seed_key(0), given)
        sums: Sums = {"held_out_loss": loss(params, batch, nothing)}
        seen = look(network.target, given, batch, network.aux_layers)
        outputs = network.outputs(params, given, batch, seen.aux_hidden_states, NUM_DRAFT_TOKENS)
        rounds = jnp.all(jnp.stack([predicted(batch, step) for step in range(NUM_DRAFT_TOKENS)]), axis=0)
        agrees = []
        for step, output in enumerate(outputs):
            own = network.reading(params, step)
            chosen = jnp.argmax(network.logits(own, head_of(given), output), axis=-1)
            chosen = chosen if part is None else jnp.asarray(part)[chosen]
            agrees.append(chosen == ahead(seen.best, 1 + step))
        return sums | of_rounds(agrees, rounds, "acceptance/{}", "mean_acceptance_length")

    return by_kind(measure, target, dtype)
