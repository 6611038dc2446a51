"""What a part of a model costs: some of its sublayers, over some rows, in a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.bench.profile import LIVE, ROUNDS
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.plan import LayerPlan


class SubmodelSteps:
    """A few steps of a part of a model, each fed what the one before gave: no method, nothing to decide.

    Args:
      lm: the model.
      plan: the sublayers that run.
      num_rows: tokens a step feeds.
      head: whether the final norm and the head run; without them only the layers do.
      capacity: of the cache.
    """

    def __init__(
        self, lm: LanguageModel, plan: LayerPlan, num_rows: int = 1, head: bool = True, capacity: int = 256
    ) -> None:
        config, self.rounds = lm.config, ROUNDS
        self._params = lm.params
        self._cache = kv.create(config, 1, capacity, lm.params["embed"].dtype)

        @functools.partial(jax.jit, donate_argnames="cache")
        def run(params, cache):
            def step(i, carry):
                hidden, cache = carry
                start = jnp.full(1, LIVE, jnp.int32) + i
                hidden, cache = llama.run_layers(config, params, hidden, start, cache, plan=plan)
                if head:
                    token = jnp.argmax(llama.logits(config, params, hidden), axis=-1)
                    hidden = llama.embed(params, token)
                return hidden, cache

            fed = jnp.arange(3, 3 + num_rows, dtype=jnp.int32)[None]
            return jax.lax.fori_loop(0, ROUNDS, step, (llama.embed(params, fed), cache))

        self._run = run

    def __call__(self) -> None:
        hidden, self._cache = self._run(self._params, self._cache)
        jax.block_until_ready(hidden)


def only_layers(num_layers: int, layers: Sequence[int]) -> LayerPlan:
    """The plan that runs these layers, whole."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    return LayerPlan.skipping(num_layers, others, others)
