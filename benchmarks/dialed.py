"""A random model whose synthetic acceptance can be changed in place, and an EAGLE head that predicts it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.cases import START
from benchmarks.synthetic_acceptance import dial_model, turned
from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.sampling import seed_key

# The first settings to try, with falling agreement; then the number of corrections for each rate.
SETTINGS = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8)
CORRECTIONS = 2


class Dial:
    """A model whose first layers agree with the whole model at a chosen rate; see `benchmarks.synthetic_acceptance`.

    There is one set of weights, which each change of the rate modifies in place.

    Args:
      name: name of the shape.
      config: the shape; its head becomes untied.
      dtype: dtype of weights and cache.
      device: device of the weights.
      length: tokens of the texts on which agreement is measured.

    Attributes:
      lm: the model.
    """

    def __init__(
        self, name: str, config: LlamaConfig, dtype: DTypeLike, device: jax.Device, length: int
    ) -> None:
        with jax.default_device(device):
            config, params = dial_model(config, 1.0, config.num_layers, seed_key(0), dtype)
        self.lm = LanguageModel(config, params, name=name, device=device)
        self._factors, self._length = np.ones(config.num_layers), length
        self._tried: dict[int, dict[float, float]] = {}
        self._chosen: dict[tuple[int, float], float] = {}

    def turn(self, depth: int, scale: float) -> None:
        """Scales the residual branches of the layers from `depth` on; the earlier ones are at full strength."""
        wanted = np.where(np.arange(self.lm.config.num_layers) < depth, 1.0, scale)
        self.lm.params = turned(self.lm.params, tuple(map(float, wanted / self._factors)))
        self._factors = wanted

    def agreement(self, depth: int) -> float:
        """Returns the share of the tokens of a greedy text that the first `depth` layers predict."""
        result = self.lm.generate(
            START, method="autoregressive", max_new_tokens=self._length, ignore_eos=True
        )
        text = jnp.asarray([*START, *result.tokens])[None]
        predicted = _predicted(self.lm.config, depth, llama.truncate(self.lm.params, depth), text[:, :-1])
        return float(jnp.mean((predicted == text[:, 1:])[:, len(START) - 1 :]))

    def turn_to(self, depth: int, rate: float) -> float:
        """Sets a scale at which the first `depth` layers agree at about this rate; returns the measured rate."""
        tried = self._tried.setdefault(depth, {})
        if (depth, rate) in self._chosen:
            scale = self._chosen[depth, rate]
            self.turn(depth, scale)
            return tried[scale]
        for scale in SETTINGS if not tried else ():
            tried[scale] = self._try(depth, scale)
        for _ in range(CORRECTIONS):
            scale = between(tried, rate)
            if scale in tried:
                break
            tried[scale] = self._try(depth, scale)
        best = self._chosen[depth, rate] = min(tried, key=lambda scale: abs(tried[scale] - rate))
        self.turn(depth, best)
        return tried[best]

    def _try(self, depth: int, scale: float) -> float:
        self.turn(depth, scale)
        return self.agreement(depth)

    @functools.cached_property
    def eagle(self) -> tuple[EagleConfig, Any]:
        """Makes an EAGLE head that predicts the next token from the last one, as the model does at scale 0.

        It passes the token's embedding to the model's head, and adds nearly nothing.
        """
        head = EagleConfig(self.lm.config.truncated(1))
        dtype, width = self.lm.params["embed"].dtype, head.block.hidden_size
        with jax.default_device(self.lm.device):
            params = llama.draw(head.shapes, seed_key(1), dtype)
            params["fc"] = jnp.eye(width, 2 * width, dtype=dtype)
        (layer,) = params["layers"]
        for part, name in (("attention", "out"), ("mlp", "down")):
            layer[part][name] = layer[part][name] * 1e-3
        return head, params


def between(tried: dict[float, float], rate: float) -> float:
    """Interpolates the setting for a rate of agreement linearly in the logarithm of the setting.

    Args:
      tried: measured rate by setting.
      rate: the wanted rate; beyond the measured ones, the nearest setting is returned.

    Examples:
      >>> round(between({0.01: 0.9, 0.1: 0.7, 1.0: 0.1}, 0.8), 3)
      0.032
    """
    scales = sorted(tried, reverse=True)
    # Measured rates are not always monotone.
    rates = np.maximum.accumulate([tried[scale] for scale in scales])
    return math.exp(float(np.interp(rate, rates, np.log(scales))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predicted(config: LlamaConfig, depth: int, params: llama.Params, text: jax.Array) -> jax.Array:
    batch, length = text.shape
    start = jnp.zeros(batch, jnp.int32)
    cache = kv.create(config.truncated(max(depth, 1)), batch, length, params["embed"].dtype)
    hidden = llama.embed(config, params, text)
    hidden, _ = llama.run_layers(config, params, hidden, start, cache, layers=range(depth))
    return jnp.argmax(llama.logits(config, params, hidden), axis=-1)
