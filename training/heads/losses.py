"""Losses of heads: small networks that read what a frozen target computes, and predict the tokens that follow.

Row t of a head has read the target up to token t, and the tokens up to t + 1. At step s = 0, 1, … it predicts token
t + 2 + s, for which the target's own distribution is that after token t + 1 + s. Where the target has not run, a head
goes on from its own output, as it drafts; the tokens are the text's.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.head import HeadConfig
from jaxspec.model.llama import AuxLayer, Params
from training.losses.base import (
    Batch,
    Given,
    Loss,
    among,
    cross_entropy,
    early_gradient,
    head_of,
    joined,
    layer_outputs,
    next_token_targets,
    num_targets,
    pieces,
    soft_cross_entropy,
    split,
)


class Network(Protocol):
    """A kind of head as its losses see it.

    Attributes:
      target: the config of the model it drafts for.
      aux_layers: what it reads of that model.
      head: what it is made of.
    """

    @property
    def target(self) -> LlamaConfig:
        """The config of the model it drafts for."""

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """What it reads of that model."""

    @property
    def head(self) -> HeadConfig:
        """The configuration of the head."""

    def outputs(
        self, params: Params, embedding: Params, batch: Batch, aux_hidden_states: jax.Array, steps: int
    ) -> list[jax.Array]:
        """Returns the output of each row at each step, at most `steps` arrays [B, T, D]; fewer if it has fewer heads.

        Args:
          params: the parameters of the head.
          embedding: the parameters of the target; only Uno uses more than `embed`.
          batch: packed documents.
          aux_hidden_states: [B, T, F], the auxiliary hidden states of each token.
          steps: the number of steps.
        """

    def reading(self, params: Params, step: int) -> Params:
        """Selects the parameters that turn an output of a step into logits; what the head lacks is the target's."""

    def logits(self, own: Params, target: Params, output: jax.Array) -> jax.Array:
        """Computes logits of outputs: [B, T, D] → float32[B, T, N]; `own` is of `reading`."""


class Seen(NamedTuple):
    """The results of the target on a batch.

    Attributes:
      aux_hidden_states: [B, T, F], the auxiliary hidden states of each token.
      stream: [B, T, D], the last residual stream.
      best: int32[B, T], the most likely token after each token, among all tokens.
    """

    aux_hidden_states: jax.Array
    stream: jax.Array
    best: jax.Array


def look(target: LlamaConfig, params: Params, batch: Batch, aux_layers: tuple[AuxLayer, ...]) -> Seen:
    """Runs the frozen target over packed documents.

    Args:
      target, params: of the target.
      batch: see `training.data.packing`.
      aux_layers: what its heads read, see `model.llama`.
    """
    streams = [llama.embed(target, params, batch["tokens"]), *layer_outputs(target, params, batch)]
    head = head_of(params)

    def best_of(stream: jax.Array) -> jax.Array:
        return jnp.argmax(llama.logits(target, head, stream), axis=-1)

    count = pieces(streams[-1], head)
    best = joined(jax.lax.map(best_of, split(streams[-1], count))) if count > 1 else best_of(streams[-1])
    aux_hidden_states = llama.aux_hidden_states_of(target, params, streams, aux_layers)
    seen: Seen = jax.lax.stop_gradient(Seen(aux_hidden_states, streams[-1], best))
    return seen


def ahead(values: jax.Array, count: int) -> jax.Array:
    """Moves what belongs to token t + count into row t, [B, T, …]; the last rows get what means nothing there."""
    return jnp.roll(values, -count, axis=1)


def predicted(batch: Batch, step: int) -> jax.Array:
    """Marks the rows whose token t + 2 + step belongs to their document and is learned, bool[B, T]."""
    _, follows = next_token_targets(batch)
    segments, count = batch["segments"], 1 + step
    same = (segments == ahead(segments, count)).at[:, -count:].set(False)
    return same & (segments > 0) & ahead(follows, count)


def at_rows(batch: Batch, values: jax.Array) -> jax.Array:
    """Selects the rows `batch["rows"]`, int32[B, R], of values [B, T, …]: [B, R, …]; all rows if there are none."""
    rows = batch.get("rows")
    if rows is None:
        return values
    return jnp.take_along_axis(values, rows.reshape(*rows.shape, *[1] * (values.ndim - 2)), axis=1)


def inside(part: np.ndarray | None, tokens: jax.Array) -> jax.Array:
    """Marks the tokens, int32[B, T], that are in a part of the vocabulary, bool[B, T]; None has all."""
    if part is None:
        return jnp.ones(tokens.shape, bool)
    return jnp.isin(tokens, jnp.asarray(part))


@dataclasses.dataclass(frozen=True)
class Weights:
    """What of a head's loss counts how much.

    Attributes:
      distribution: of the cross-entropy with the target's distribution.
      aux_hidden_state: of the smooth L1 distance of an output from the target's own auxiliary hidden state; 0 for
        outputs that are none.
      decay: step s counts decay^s.
      text: of the cross-entropy with the text's own tokens.
    """

    distribution: float = 1.0
    aux_hidden_state: float = 0.0
    decay: float = 1.0
    text: float = 0.0


def head_loss(
    network: Network,
    steps: int,
    weights: Weights,
    part: np.ndarray | None = None,
    num_rows: int | None = None,
) -> Loss:
    """Makes the loss of a head, in nats per token: the mean over the steps, each weighted.

    A position counts where the target's own choice is one that the head has (EAGLE-3, section 3.2 and its code).

    Args:
      network: the head; its target's parameters are `given.target`.
      steps: how many tokens each row predicts.
      weights: of the terms and steps.
      part: int32[N], the tokens that the head may choose, rising; None for all.
      num_rows: the number of random rows of each window that predict, for networks that read `batch["rows"]`; None for
        all rows.
    """
    shares = weights.decay ** np.arange(steps)
    shares = shares / shares.sum()

    def loss(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        assert given.target is not None, "a head has a target"
        seen = look(network.target, given.target, batch, network.aux_layers)
        if num_rows is not None:
            noise = jnp.where(predicted(batch, 0), jax.random.uniform(given.key, batch["tokens"].shape), 1.0)
            batch = {**batch, "rows": jnp.argsort(noise, axis=1)[:, :num_rows]}
        outputs = network.outputs(params, given.target, batch, seen.aux_hidden_states, steps)
        theirs = head_of(given.target)
        # A head of its own is trained.
        count = 1 if "head" in network.reading(params, 0) else pieces(outputs[0], theirs)

        def wanted_of(theirs: Params, stream: jax.Array) -> jax.Array:
            logits = llama.logits(network.target, theirs, stream)
            return logits if part is None else logits[..., jnp.asarray(part)]

        def told(
            own: Params, output: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array], theirs: Params
        ) -> jax.Array:
            source, tokens, mask = rows
            logits, loss = network.logits(own, theirs, output), jnp.float32(0)
            if weights.distribution:
                wanted = source if shared else wanted_of(theirs, source)
                loss += weights.distribution * soft_cross_entropy(wanted, logits, mask)
            if weights.text:
                loss += weights.text * cross_entropy(logits, *among(part, tokens, mask))
            return loss

        # In one piece, the steps share the target's logits; else each piece computes them.
        shared = count == 1 and num_rows is None
        source = wanted_of(theirs, seen.stream) if shared else seen.stream
        total, known = jnp.float32(0), inside(part, seen.best)
        for step, output in enumerate(outputs):
            mask = at_rows(batch, predicted(batch, step) & ahead(known, 1 + step))
            wanted, tokens = ahead(source, 1 + step), ahead(batch["tokens"], 2 + step)
            rows = at_rows(batch, wanted), at_rows(batch, tokens), mask
            said = early_gradient(told, count, network.reading(params, step), output, rows, theirs)
            total += float(shares[step]) * said
            if weights.aux_hidden_state:
                far = smooth_l1(output, at_rows(batch, ahead(seen.aux_hidden_states, 1 + step)), mask)
                total += float(shares[step]) * weights.aux_hidden_state * far
        return total, num_targets(at_rows(batch, predicted(batch, 0) & ahead(known, 1)))

    return loss


def smooth_l1(found: jax.Array, wanted: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the masked positions of the smooth L1 distance, the mean over the width, float32[].

    Args:
      found, wanted: [B, T, D].
      mask: bool[B, T].

    Examples:
      >>> at = jnp.array([[[0.5, 3.0]]])
      >>> float(smooth_l1(at, 0 * at, jnp.ones((1, 1), bool)))  # (0.5² ÷ 2 + (3 − ½)) ÷ 2
      1.3125
    """
    apart = jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32))
    distance = jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5)
    return jnp.sum(jnp.where(mask, jnp.mean(distance, axis=-1), 0.0))
