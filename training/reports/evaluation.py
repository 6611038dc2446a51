"""Held-out loss by task type, and the acceptance of the drafts of early exits.

Acceptance is measured on held-out text: at each position the exit's most likely token is compared with the target's.
This is greedy drafting with the text as context, in one forward pass. The decoder's acceptance on generated text
differs a little, and is too expensive to measure at every checkpoint.

If the model chooses among a part of the vocabulary, losses count only positions whose next token is in the part.
Acceptance counts all positions.
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

# Draft tokens per round for the mean acceptance length; the default of `generate`.
NUM_DRAFT_TOKENS = 5
# By name: the sum over a batch and the count that divides it, float32[] each.
Sums = dict[str, tuple[jax.Array, jax.Array]]
# (params, the target's or None, batch [B, T]) -> sums
Measure = Callable[[Params, Params | None, Batch], Sums]
# (params, held-out batches by kind, weight by kind) -> figures
MeasureKinds = Callable[[Params, Mapping[str, Sequence[Windows]], Mapping[str, float]], dict[str, float]]


def make_measure(
    config: LlamaConfig,
    dtype: str,
    exits: Sequence[int] = (),
    judged: Sequence[int] = (),
    target: tuple[LlamaConfig, Params] | None = None,
    part: np.ndarray | None = None,
) -> MeasureKinds:
    """Makes the measurement taken at each checkpoint.

    Args:
      config: the model.
      dtype: dtype of the written weights; the parameters are rounded to it.
      exits: number of layers at each exit; exits beyond the present depth are left out.
      judged: `held_out_loss` is the mean over these exits; () for the last layer only.
      target: the model that verifies the exits' drafts; None for this model's own last layer.
      part: int32[N], the tokens among which the model chooses, ascending; None for all.

    Returns:
      (params, held-out batches by kind, weight by kind) → `held_out_loss` (weighted mean over the kinds, nats per
      token), and for every exit E its loss `exit_loss/E`, `acceptance/E` (share of positions) and
      `mean_acceptance_length/E` (tokens per round of `NUM_DRAFT_TOKENS` drafts, including the target's own), and
      `accepted_token_I/E` (share of the rounds that accept draft token I and all before it); each also by kind, as
      `held_out_loss/KIND`. A kind without `NUM_DRAFT_TOKENS` consecutive targets has no figures of rounds, and does
      not count in their mean over all kinds.
    """
    target_config, target_params = target if target is not None else (config, None)
    return by_kind(measure_batch(config, exits, judged, target_config, part), target_params, dtype)


def measure_batch(
    config: LlamaConfig,
    exits: Sequence[int],
    judged: Sequence[int],
    target_config: LlamaConfig,
    part: np.ndarray | None = None,
) -> Measure:
    """Makes the jitted measurement of a batch; see `make_measure`."""

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
            sums |= of_rounds(
                steps, rounds, "accepted_token_{}/" + f"{layers}", f"mean_acceptance_length/{layers}"
            )
        return sums

    return measure


def rounded(params: Params, dtype: str) -> Params:
    """Rounds parameters to a dtype and keeps their own, because a loss is measured in the precision of training.

    Examples:
      >>> rounded({"x": jnp.float32(1 / 3)}, "bfloat16")["x"].item()
      0.333984375
    """
    kind = jnp.finfo(dtype)

    def round_leaf(leaf: jax.Array) -> jax.Array:
        # XLA may remove a pair of conversions, but not this operation.
        exact = jnp.promote_types(leaf.dtype, dtype) == kind.dtype
        return leaf if exact else jax.lax.reduce_precision(leaf, kind.nexp, kind.nmant)

    found: Params = jax.tree.map(round_leaf, params)
    return found


def by_kind(measure: Measure, target: Params | None, dtype: str) -> MeasureKinds:
    """Applies a measurement to each task type, and to all by a weighted mean.

    Args:
      measure: the measurement of a batch.
      target: parameters of another model, passed to `measure`.
      dtype: dtype of the written weights; the parameters are rounded to it.

    Returns:
      (params, held-out batches by kind, weight by kind) → each figure NAME, and by kind as NAME/KIND. A figure with
      count 0 in a kind is left out there.
    """

    @jax.jit
    def measure_written(params: Params, given: Params | None, batch: Batch) -> Sums:
        return measure(rounded(params, dtype), given, batch)

    def all_kinds(
        params: Params, held_out: Mapping[str, Sequence[Windows]], weights: Mapping[str, float]
    ) -> dict[str, float]:
        result: dict[str, float] = {}
        over: dict[str, float] = {}  # total weight of the kinds that have a figure
        for kind, batches in held_out.items():
            found = [measure_written(params, target, batch) for batch in batches]
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


def acceptance_in_words(measured: Mapping[str, float]) -> str:
    """Returns the mean acceptance lengths of a measurement over all task types, for a line of a log; "" without any.

    Examples:
      >>> acceptance_in_words({"mean_acceptance_length/2": 1.5, "mean_acceptance_length/2/qa": 1.4})
      'mean acceptance length 1.50 at exit 2'
    """
    name = "mean_acceptance_length"
    lengths = [f"{measured[name]:.2f}"] if name in measured else []
    if not lengths:
        ends = {
            key.removeprefix(f"{name}/"): value for key, value in measured.items() if key.startswith(name)
        }
        lengths = [f"{value:.2f} at exit {end}" for end, value in ends.items() if end.isdecimal()]
    return f"mean acceptance length {', '.join(lengths)}" if lengths else ""


def of_rounds(agrees: Sequence[jax.Array], rounds: jax.Array, by_position: str, length: str) -> Sums:
    """Returns the acceptance of rounds: by position, and the mean number of tokens of a round.

    Args:
      agrees: for each draft token of a round bool[B, T], whether the target chooses it too.
      rounds: bool[B, T], the positions at which rounds begin.
      by_position: name of the share of the rounds that accept draft token {} and all before it.
      length: name of the number of accepted draft tokens and one more, per round.
    """
    count, accepted, sums = num_targets(rounds), rounds, Sums()
    for number, agree in enumerate(agrees, 1):
        accepted = accepted & agree
        sums[by_position.format(number)] = num_targets(accepted), count
    return sums | {length: (count + sum(total for total, _ in sums.values()), count)}


def whole_rounds(mask: jax.Array, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> jax.Array:
    """Returns the positions of `mask` after which a whole round of drafts has targets, bool[B, T]."""
    whole = mask
    for ahead in range(1, num_draft_tokens):
        following = jnp.roll(mask, -ahead, axis=1).at[:, -ahead:].set(False)
        whole = whole & following
    return whole
