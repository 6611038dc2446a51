"""Losses of heads: small networks that read what a frozen target computes, and predict the tokens that follow.

Row t of a head has read the target up to token t, and the tokens up to t + 1. At step s = 0, 1, … it predicts token
t + 2 + s, for which the target's own distribution is that after token t + 1 + s. Where the target has not run, a head
goes on from its own output, as it drafts; the tokens are the text's.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

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
    split,
)

# How a head learns the target's distribution p, with its own distribution q of a token. With α = Σ min(p, q), the
# probability that the token is accepted, and −Σ p · log q as cross-entropy, the loss of a token is
#
#   ce        the cross-entropy
#   tv-ce     0.9 · (1 − α) + 0.1 · cross-entropy, where 1 − α is the total variation of p and q (DSpark, arXiv
#             2607.05147, as in the option {"tv": 0.9, "ce": 0.1} of speculators)
#   lk        λ · KL(p ‖ q) + (1 − λ) · (1 − α) with λ = exp(−3 · α), the hybrid objective (LK, arXiv 2602.23881)
#   d-pace    w · cross-entropy, where token s of a draft of S has the weight w_s = Σ_{m ≥ s} Π_{i ≤ m} (α_i + 1) ÷ 2
#             (D-PACE, arXiv 2605.18810, smoothing 0.5). There α is q of the text's token: Σ min(p, q) if p is certain.
#
# λ and w have no gradient.
LossName = Literal["ce", "tv-ce", "lk", "d-pace"]
Shape = TypeVar("Shape", bound=HeadConfig)


@dataclasses.dataclass(frozen=True)
class Network(abc.ABC, Generic[Shape]):
    """A type of head in training.

    Attributes:
      head: its configuration.
      target: the config of the model it drafts for.
    """

    head: Shape
    target: LlamaConfig

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The target's auxiliary hidden states that the head reads: those of its configuration, if it has any."""
        layers: tuple[AuxLayer, ...] = self.head.aux_layers  # type: ignore[attr-defined]
        return layers

    @abc.abstractmethod
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

    @abc.abstractmethod
    def reading(self, params: Params, step: int) -> Params:
        """Selects the parameters that turn an output of a step into logits; what the head lacks is the target's."""

    @abc.abstractmethod
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
    """Moves the values of token t + count into row t, [B, T, …]; those of the last rows have no meaning."""
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
    """The weights of the terms and of the steps of a head's loss.

    Attributes:
      distribution: of the distance from the target's distribution, which `loss` names.
      aux_hidden_state: of the smooth L1 distance of an output from the target's own auxiliary hidden state; 0 for
        outputs that are none.
      decay: step s counts decay^s; not used with d-pace, whose weights take its place.
      text: of the cross-entropy with the text's own tokens.
      loss: the distance from the target's distribution.
    """

    distribution: float = 1.0
    aux_hidden_state: float = 0.0
    decay: float = 1.0
    text: float = 0.0
    loss: LossName = "ce"


def accepted(wanted: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns Σ min(softmax(wanted), softmax(logits)), the probability that a draft token is accepted.

    Args:
      wanted: float32[B, T, N], the target's logits.
      logits: float32[B, T, N], for the same tokens.

    Returns:
      float32[B, T].

    Examples:
      >>> logits = jnp.log(jnp.array([[[0.2, 0.8], [0.5, 0.5]]]))
      >>> accepted(logits[:, :1], logits[:, 1:]).round(4).tolist()  # 0.2 + 0.5
      [[0.699999988079071]]
    """
    return jnp.sum(jnp.minimum(jax.nn.softmax(wanted), jax.nn.softmax(logits)), axis=-1)


def distance(loss: LossName, wanted: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the loss of each token, float32[B, T], before the weights of D-PACE; arguments as in `accepted`."""
    p, log_q = jax.nn.softmax(wanted), jax.nn.log_softmax(logits)
    crossed = -jnp.sum(p * log_q, axis=-1)
    if loss in ("ce", "d-pace"):
        return crossed
    chance = accepted(wanted, logits)
    if loss == "tv-ce":
        return 0.9 * (1 - chance) + 0.1 * crossed
    far = jax.lax.stop_gradient(jnp.exp(-3 * chance))
    divergence = crossed + jnp.sum(p * jax.nn.log_softmax(wanted), axis=-1)
    return far * divergence + (1 - far) * (1 - chance)


def pace(chances: jax.Array, masks: jax.Array) -> jax.Array:
    """Returns the weights of D-PACE for the steps of each row, float32[S, B, T].

    Args:
      chances: float32[S, B, T], the probability that the token of a step is accepted.
      masks: bool[S, B, T], the tokens that count. Others have weight 0 and do not end a draft.

    Examples:
      >>> pace(jnp.array([1.0, 0.0, 1.0]).reshape(3, 1, 1), jnp.ones((3, 1, 1), bool)).ravel().tolist()
      [2.0, 1.0, 0.5]
    """
    reached = jnp.cumprod(jnp.where(masks, (chances + 1) / 2, 1.0), axis=0)
    return jnp.where(masks, jnp.cumsum(jnp.where(masks, reached, 0.0)[::-1], axis=0)[::-1], 0.0)


def head_loss(
    network: Network,
    steps: int,
    weights: Weights,
    part: np.ndarray | None = None,
    num_rows: int | None = None,
    further: Callable[[Params, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> Loss:
    """Makes the loss of a head per token, in nats for `ce`: the mean over the steps, each weighted.

    A position counts where the target's own choice is one that the head has (EAGLE-3, section 3.2 and its code).

    Args:
      network: the head; its target's parameters are `given.target`.
      steps: how many tokens each row predicts.
      weights: of the terms and steps.
      part: int32[N], the tokens that the head may choose, rising; None for all.
      num_rows: the number of random rows of each window that predict, for networks that read `batch["rows"]`; None for
        all rows.
      further: (parameters of `reading`, output, the target's logits, the head's, mask) → a term of the loss of a step.
    """
    shares = (1.0 if weights.loss == "d-pace" else weights.decay) ** np.arange(steps)
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

        # In one piece, the steps share the target's logits; else each piece computes them.
        shared = count == 1 and num_rows is None
        source = wanted_of(theirs, seen.stream) if shared else seen.stream
        known = inside(part, seen.best)

        def rows_of(step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
            mask = predicted(batch, step) & ahead(known, 1 + step)
            wanted, tokens = ahead(source, 1 + step), ahead(batch["tokens"], 2 + step)
            return at_rows(batch, wanted), at_rows(batch, tokens), at_rows(batch, mask)

        def logits_of(
            own: Params, output: jax.Array, source: jax.Array, theirs: Params
        ) -> tuple[jax.Array, jax.Array]:
            wanted = source if shared else wanted_of(theirs, source)
            return wanted, network.logits(own, theirs, output)

        def told(own: Params, output: jax.Array, rows: tuple[Any, ...], theirs: Params) -> jax.Array:
            source, tokens, mask, weight = rows
            (wanted, logits), loss = logits_of(own, output, source, theirs), jnp.float32(0)
            if weights.distribution:
                lost = distance(weights.loss, wanted, logits)
                lost = lost if weight is None else weight * lost
                loss += weights.distribution * jnp.sum(jnp.where(mask, lost, 0.0))
            if weights.text:
                loss += weights.text * cross_entropy(logits, *among(part, tokens, mask))
            if further is not None:
                loss += further(own, output, wanted, logits, mask)
            return loss

        def chance(step: int, output: jax.Array) -> jax.Array:
            def of_piece(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
                return accepted(*logits_of(network.reading(params, step), *rows, theirs))

            rows = output, rows_of(step)[0]
            return joined(jax.lax.map(of_piece, split(rows, count))) if count > 1 else of_piece(rows)

        paces: Sequence[jax.Array | None] = [None] * len(outputs)
        if weights.loss == "d-pace":
            chances = jnp.stack([chance(step, output) for step, output in enumerate(outputs)])
            masks = jnp.stack([rows_of(step)[2] for step in range(len(outputs))])
            paces = list(jax.lax.stop_gradient(pace(chances, masks)))
        total = jnp.float32(0)
        for step, output in enumerate(outputs):
            rows = *rows_of(step), paces[step]
            said = early_gradient(told, count, network.reading(params, step), output, rows, theirs)
            total += float(shares[step]) * said
            if weights.aux_hidden_state:
                far = smooth_l1(output, at_rows(batch, ahead(seen.aux_hidden_states, 1 + step)), rows[2])
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
