"""Losses at early exits: SoFT, the mean over a few exits, and LayerSkip, exits by turns under layer dropout.

Every exit uses the shared final norm and head, in one forward pass of the whole model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.losses.base import (
    Batch,
    Given,
    Loss,
    among,
    divergence,
    head_loss,
    head_of,
    layer_outputs,
    next_token_targets,
    num_targets,
)


def soft_loss(
    config: LlamaConfig,
    exits: Sequence[int],
    remat: bool | str = False,
    target: LlamaConfig | None = None,
    distil_weight: float = 0.0,
    part: np.ndarray | None = None,
) -> Loss:
    """Makes the loss of sorted fine-tuning: the mean over the exits of their cross-entropy (S2D paper, section 3.1).

    Args:
      config: the model.
      exits: number of layers at each exit.
      remat: see `training.losses.base.layer_outputs`.
      target: the config of `given.target`, from which the exits may be distilled.
      distil_weight: weight of the divergence from the target's distribution in each exit's loss; the rest is the
        cross-entropy with the text.
      part: int32[N], the tokens among which the exits choose, ascending; None for all.
    """

    def loss(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        outputs = layer_outputs(config, params, batch, remat)
        learned = next_token_targets(batch)
        targets, mask = among(part, *learned)
        head = head_of(params, part)
        total = jnp.float32(0)
        if distil_weight < 1:
            losses = [head_loss(config, head, outputs[layers - 1], targets, mask) for layers in exits]
            total += (1 - distil_weight) * jnp.mean(jnp.stack(losses))
        if distil_weight > 0:
            assert target is not None
            assert given.target is not None
            last = layer_outputs(target, given.target, batch)[-1]
            wanted = jax.lax.stop_gradient(llama.logits(target, head_of(given.target), last))
            for layers in exits:
                logits = llama.logits(config, head, outputs[layers - 1])
                total += distil_weight * divergence(wanted, logits, learned[1], part) / len(exits)
        return total, num_targets(mask)

    return loss


@dataclasses.dataclass(frozen=True)
class LayerSkipOptions:
    """The LayerSkip recipe: layer dropout and early-exit loss.

    Attributes:
      max_dropout: dropout rate of the last layer, per sample; lower layers have smaller rates, the first 0.
      dropout_over_time: `exponential` raises the rates from 0 over the run, `constant` keeps them. Default:
        exponential from scratch, constant for a pretrained model.
      early_exit_scale: weight of the exits before the last layer.
      curriculum: which exits a step trains beside the last layer: `rotational`, every `rotation`-th, shifted by one
        each step; `gradual`, more and more, from the last layer downwards.
      rotation: R of the rotational curriculum.
    """

    max_dropout: float = 0.1
    dropout_over_time: Literal["exponential", "constant"] | None = None
    early_exit_scale: float = 0.2
    curriculum: Literal["rotational", "gradual"] = "rotational"
    rotation: int = 8

    def __post_init__(self):
        if not 0 <= self.max_dropout < 1:
            raise ValueError(f"max_dropout is {self.max_dropout}; give a rate from 0 to below 1")
        if not self.early_exit_scale >= 0:
            raise ValueError(f"early_exit_scale is {self.early_exit_scale}; give a number of at least 0")
        if self.rotation < 1:
            raise ValueError(f"rotation is {self.rotation}; give a whole number of at least 1")


def exit_weights(layers: int, scale: float) -> np.ndarray:
    """Returns the weights of the exits, e(l) in equation 4 of the LayerSkip paper, float64[L].

    They grow with the square of the depth; the last layer has an additional weight.
    """
    sums = np.cumsum(np.arange(layers, dtype=np.float64))
    weights = scale * sums
    weights[-1] = layers - 1 + scale * (sums[layers - 2] if layers > 1 else 0.0)
    # For a single layer the formula gives 0, but this layer must be trained.
    return weights if layers > 1 else np.ones(1)


def enabled_exits(options: LayerSkipOptions, layers: int, step: jax.Array, steps: int) -> jax.Array:
    """Marks the exits that step `step` of `steps` trains, bool[L]; always the last one."""
    layer = jnp.arange(layers)
    if options.curriculum == "rotational":
        on = (layer - step) % options.rotation == 0
    else:
        on = step >= 0.5 * steps * (layers - layer) / layers
    return on | (layer == layers - 1)


def most_exits(options: LayerSkipOptions, layers: int) -> int:
    """Returns the largest number of exits below the last layer that a step trains."""
    below = layers - 1
    return -(-below // options.rotation) if options.curriculum == "rotational" else below


def dropout_rates(options: LayerSkipOptions, layers: int, step: jax.Array, steps: int) -> jax.Array:
    """Returns the dropout rates of the layers at step `step`, float32[L]: p_max · S(t) · D(l), equations 1–3.

    If the options leave S open, it is that of training from scratch.
    """
    depth = np.expm1(np.arange(layers) * math.log(2) / max(1, layers - 1))
    over_time = jnp.expm1(step * math.log(2) / max(1, steps - 1))
    if options.dropout_over_time == "constant":
        over_time = jnp.float32(1.0)
    return jnp.asarray(options.max_dropout * over_time * depth, jnp.float32)


def layerskip_loss(
    config: LlamaConfig, options: LayerSkipOptions, steps: int, remat: bool | str = False
) -> Loss:
    """Makes the LayerSkip loss: Σ over the enabled exits of normalised weight × cross-entropy, under layer dropout.

    The final norm and head are shared by all exits. A dropped layer is the identity; the others are not rescaled.
    An exit that is off costs nothing under the rotational curriculum. Under the gradual one, the number of active
    exits changes with the step, so every step computes all.
    """

    def loss(params: Params, batch: Batch, given: Given) -> tuple[jax.Array, jax.Array]:
        layers, rows = len(params["layers"]), batch["tokens"].shape[0]
        drawn = jax.random.uniform(given.key, (layers, rows))
        keep = drawn >= dropout_rates(options, layers, given.step, steps)[:, None]
        outputs = layer_outputs(config, params, batch, remat, list(keep))
        on = enabled_exits(options, layers, given.step, steps)
        weights = jnp.where(on, jnp.asarray(exit_weights(layers, options.early_exit_scale), jnp.float32), 0.0)
        weights = weights / jnp.sum(weights)
        targets, mask = next_token_targets(batch)
        head = head_of(params)
        total = weights[-1] * head_loss(config, head, outputs[-1], targets, mask)
        count = most_exits(options, layers)
        if count:
            # The number of active exits depends only on the options. They are gathered into an array of that size, so
            # that under the rotational curriculum the others cost nothing.
            (chosen,) = jnp.nonzero(on[:-1], size=count, fill_value=layers - 1)
            stacked = jnp.stack(outputs)
            weights = weights.at[-1].set(0.0)
            for number in range(count):
                layer = chosen[number]
                total += jax.lax.cond(
                    weights[layer] > 0,
                    lambda layer: weights[layer] * head_loss(config, head, stacked[layer], targets, mask),
                    lambda layer: jnp.float32(0),
                    layer,
                )
        return total, num_targets(mask)

    return loss
