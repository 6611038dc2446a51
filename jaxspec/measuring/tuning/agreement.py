"""Agreement rate of a draft with skipped sublayers with its model, from one parallel pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.plan import LayerPlan
from jaxspec.model.prefill import run_prompts


@struct.dataclass
class AgreementTexts:
    """Greedy texts of a model, prepared for scoring its drafts.

    Attributes:
      cache: keys and values of the prompts, from the whole model.
      start: int32[B], length of each prompt.
      tokens: int32[B, T], the text after each prompt, padded on the right; T is at least 2.
      count: int32[B], length of each text without padding.
    """

    cache: KVCache
    start: jax.Array
    tokens: jax.Array
    count: jax.Array


def prepare(
    config: LlamaConfig,
    params: Params,
    prompts: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    *,
    chunk_size: int,
    merged: bool = True,
) -> tuple[AgreementTexts, jax.Array, jax.Array]:
    """Prefills the prompts with the whole model.

    Args:
      config: the model.
      params: its parameters.
      prompts: int32[B, N], padded on the right; N is a multiple of `chunk_size`, at least length + T.
      length: int32[B], length of each prompt.
      tokens: int32[B, T], the model's greedy text after each prompt, padded on the right.
      count: int32[B], length of each text without padding.
      chunk_size: positions per prefill chunk, static.
      merged: the cache's layout, static, see `model.cache`.

    Returns:
      The texts, and of each prompt the similarities float32[B, L, 2] and the vector float32[B, D], see
      `jaxspec.model.prefill.run_prompts`.
    """
    batch, capacity = prompts.shape
    cache = kv.create(config, batch, capacity, params["embed"].dtype, merged)
    _, similarities, cache, vectors = run_prompts(config, params, prompts, length, cache, chunk_size)
    return AgreementTexts(cache, length, tokens, count), similarities, vectors


def agreement(
    config: LlamaConfig, params: Params, texts: AgreementTexts, plan: LayerPlan | jax.Array
) -> jax.Array:
    """The share of the model's own tokens that its draft would propose, float32 scalar from 0 to 1.

    The draft reads a whole text in one pass, so that every position has the model's own tokens as context. Keys
    and values of the prompt are the whole model's, those of the text are the draft's. SWIFT (Xia et al. 2024,
    §4.2) scores masks in this way: one prefill replaces a generation.

    Args:
      config: the model.
      params: its parameters.
      texts: B texts; all tokens but the first of each are compared.
      plan: the sublayers that the draft runs, static or traced bool[L, 2].
    """
    real = jnp.arange(1, texts.tokens.shape[1])[None] < texts.count[:, None]
    agrees = proposed(config, params, texts, plan) == texts.tokens[:, 1:]
    return jnp.mean(agrees, where=real, dtype=jnp.float32)


def proposed(
    config: LlamaConfig, params: Params, texts: AgreementTexts, plan: LayerPlan | jax.Array
) -> jax.Array:
    """The draft's greedy token after each token of the texts but the last, int32[B, T − 1]; see `agreement`."""
    hidden = llama.embed(config, params, texts.tokens[:, :-1])
    hidden, _ = llama.run_layers(config, params, hidden, texts.start, texts.cache, plan=plan)
    return jnp.argmax(llama.logits(config, params, hidden), axis=-1)


def exit_choices(config: LlamaConfig, params: Params, texts: AgreementTexts) -> jax.Array:
    """The top token of every exit after each token of the texts but the last.

    An exit applies the final norm and head to the state after E layers, as in LayerSkip (Elhoushi et al. 2024).
    On the model's own greedy text, its agreement with the last exit shows how often a draft of the first E layers
    is right after a correct context. Layers pass through the head one at a time.

    Returns:
      int32[L, B, T − 1]; entry l is the exit after l + 1 layers.
    """
    hidden = llama.embed(config, params, texts.tokens[:, :-1])
    states = llama.run_with_aux(
        config, params, hidden, texts.start, texts.cache, (), watch=lambda _, state: state
    ).watched
    assert states is not None
    chosen: jax.Array = jax.lax.map(
        lambda state: jnp.argmax(llama.logits(config, params, state), axis=-1), states[:, 1]
    )
    return chosen
