"""Held-out loss by kind of work, and how many tokens an early exit would draft that its target accepts.

Acceptance is measured on held-out text: at each position the exit's most likely token is compared with the
target's. That is greedy drafting with the text as context, in one forward pass; the decoder's own figure on
generated text is a little different, and far dearer to take at every checkpoint.

Of a model that chooses among a part of the vocabulary, the losses are those of positions whose next token is in it;
acceptance is of all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.data.packing import Windows
from training.losses.base import (
    Batch,
    among,
    cross_entropy,
    head_of,
    layer_outputs,
    next_token_targets,
    num_targets,
)

# Draft tokens per round for which mean acceptance length is reported; the default of `generate`.
NUM_DRAFT_TOKENS = 5
# By name a sum over a batch and the count that divides it, float32[] each.
Sums = dict[str, tuple[jax.Array, jax.Array]]
# (params, the target's or None, batch [B, T]) -> sums
Measure = Callable[[Params, Params | None, Batch], Sums]
# (params, held-out batches by kind, weight by kind) -> figures
MeasureKinds = Callable[[Params, Mapping[str, Sequence[Windows]], Mapping[str, float]], dict[str, float]]


def make_measure(
    config: LlamaConfig,
    exits: Sequence[int] = (),
    judged: Sequence[int] = (),
    target: tuple[LlamaConfig, Params] | None = None,
    part: np.ndarray | None = None,
) -> MeasureKinds:
    """Makes the measurement taken at each checkpoint.

    Args:
      config: the model.
      exits: how many layers each exit runs; those beyond the present depth are left out.
      judged: the exits over whose losses `held_out_loss` is the mean; () for the last layer alone.
      target: the model that is to accept what the exits draft; None for this model's own last layer.
      part: int32[N], the tokens among which the model chooses, rising; None for all.

    Returns:
      (params, held-out batches by kind, weight by kind) → `held_out_loss` (weighted mean over the kinds, nats
      per token), and for every exit E its loss `exit_loss/E`, `acceptance/E` (share of positions) and
      `mean_acceptance_length/E` (tokens per round of `NUM_DRAFT_TOKENS` drafts, the target's own included);
      each also by kind, as `held_out_loss/KIND`. A kind without a run of `NUM_DRAFT_TOKENS` targets has no
      mean acceptance length, and does not count in the one over all kinds.
    """
    target_config, target_params = target if target is not None else (config, None)

    def best(logits: jax.Array) -> jax.Array:
        number = jnp.argmax(logits, axis=-1)
        return number if part is None else jnp.asarray(part)[number]

    @jax.jit
    def measure(params: Params, given: Params | None, batch: Batch) -> Sums:
        outputs = layer_outputs(config, params, batch)
        following, mask = next_token_targets(batch)
        targets, inside = among(part, following, mask)
        live = sorted({*exits, *judged, len(outputs)} & set(range(1, len(outputs) + 1)))
        logits = {n: llama.logits(config, head_of(params, part), outputs[n - 1]) for n in live}
        losses = {n: cross_entropy(logits[n], targets, inside) for n in live}
        wanted = [losses[n] for n in judged] or [losses[len(outputs)]]
        tokens = num_targets(inside)
        sums = {"held_out_loss": (jnp.mean(jnp.stack(wanted)), tokens)}
        if not exits:
            return sums
        chosen = best(logits[len(outputs)])
        if given is not None:
            last = layer_outputs(target_config, given, batch)[-1]
            chosen = jnp.argmax(llama.logits(target_config, head_of(given), last), axis=-1)
        rounds, positions = whole_rounds(mask), num_targets(mask)
        for layers in sorted(set(exits) & set(live)):
            sums[f"exit_loss/{layers}"] = losses[layers], tokens
            agrees = (best(logits[layers]) == chosen) & mask
            sums[f"acceptance/{layers}"] = num_targets(agrees), positions
            steps = [jnp.roll(agrees, -ahead, axis=1) for ahead in range(NUM_DRAFT_TOKENS)]
            sums[f"mean_acceptance_length/{layers}"] = emitted(steps, rounds), num_targets(rounds)
        return sums

    return by_kind(measure, target_params)


def by_kind(measure: Measure, target: Params | None) -> MeasureKinds:
    """Takes a measurement of each kind of text, and their mean by weight.

    Args:
      measure: of a batch.
      target: the parameters of another model that it is given.

    Returns:
      (params, held-out batches by kind, weight by kind) → each figure NAME, and by kind as NAME/KIND. A figure that
      counts nothing in a kind is left out there.
    """

    def all_kinds(
        params: Params, held_out: Mapping[str, Sequence[Windows]], weights: Mapping[str, float]
    ) -> dict[str, float]:
        result: dict[str, float] = {}
        over: dict[str, float] = {}  # the weights of the kinds that have a figure
        for kind, batches in held_out.items():
            found = [measure(params, target, batch) for batch in batches]
            for name in found[0]:
                value, count = (sum(float(sums[name][i]) for sums in found) for i in range(2))
                if not count:
                    continue
                result[f"{name}/{kind}"] = value / count
                result[name] = result.get(name, 0.0) + weights[kind] * value / count
                over[name] = over.get(name, 0.0) + weights[kind]
        if "held_out_loss" not in over:
            raise ValueError("no held-out text has a token to predict; give more text, or other sources")
        return result | {name: result[name] / share for name, share in over.items()}

    return all_kinds


def emitted(agrees: Sequence[jax.Array], rounds: jax.Array) -> jax.Array:
    """Sum over the rounds of the tokens that each emits, float32[]: the drafts accepted in a row, and one more.

    Args:
      agrees: for each draft token of a round bool[B, T], whether the target chooses it too.
      rounds: bool[B, T], where rounds begin.
    """
    run, accepted = jnp.ones_like(rounds), jnp.zeros(rounds.shape)
    for agree in agrees:
        run = run & agree
        accepted += run
    return jnp.sum(jnp.where(rounds, accepted + 1, 0.0))


def whole_rounds(mask: jax.Array, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> jax.Array:
    """Positions from which a whole round of drafts can be judged, bool[B, T], of those that can be."""
    whole = mask
    for ahead in range(1, num_draft_tokens):
        following = jnp.roll(mask, -ahead, axis=1).at[:, -ahead:].set(False)
        whole = whole & following
    return whole
