"""Prefill: feeds the prompts, draws the first tokens, and prepares the state of the drafter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec import verification
from jaxspec.decoding.records import Caches, DecodeState, Emitted, Parts, Request, Stats, is_eos, put_rows
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model import prefill as prompts
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import either, run_if
from jaxspec.protocol import Drafter, Prefill, State, View, Weights
from jaxspec.sampling import fold_in, is_finite


def prefill(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    request: Request,
    caches: Caches | None = None,
    *,
    chunk_size: int,
    merged: bool = True,
) -> tuple[DecodeState, Emitted]:
    """Feeds the prompts and draws the first token of each row, which is then pending.

    Equal to `start_prefill`, `feed` of all chunks and `end_prefill`.

    Args:
      config: the target.
      params: all parameters.
      parts: the method.
      request: the rows; their N is the capacity.
      caches: the caches, of the same capacity, that hold the tokens before `request.start`; None for empty ones. If
        the drafter has auxiliary layers, `caches.absorbed` is None only if every row starts at 0.
      chunk_size: positions fed at once, static, at most N.
      merged: the layout of the cache, static, see `model.cache`.

    Returns:
      The state, and the emitted tokens: one per row, none where the logits are not finite.
    """
    stop = prompts.num_chunks(request.length, request.start, chunk_size)
    aux_drafter = aux_drafter_of(parts)
    fed = start_prefill(config, params, request, aux_drafter, caches, merged=merged)
    fed = feed(config, params, request, fed, jnp.int32(0), stop, aux_drafter, chunk_size=chunk_size)
    return end_prefill(config, params, parts, request, fed, chunk_size=chunk_size)


def aux_drafter_of(parts: Parts) -> Drafter | None:
    """Returns the drafter if it reads auxiliary hidden states of the prompts, else None."""
    return parts.drafter if parts.drafter.aux_layers else None


def start_prefill(
    config: LlamaConfig,
    params: Weights,
    request: Request,
    aux_drafter: Drafter | None = None,
    caches: Caches | None = None,
    *,
    merged: bool = True,
) -> prompts.Prefilling:
    """Returns the state of a prefill before its first chunk.

    `aux_drafter` is the result of `aux_drafter_of`; `caches` is as in `prefill`; `merged` is the layout of the cache,
    static, see `model.cache`.
    """
    batch, capacity = request.tokens.shape
    aux_layers = () if aux_drafter is None else aux_drafter.aux_layers
    if caches is None:
        caches = Caches(kv.create(config, batch, capacity, params.target["embed"].dtype, merged))
    cache, absorbed = caches.cache, caches.absorbed
    if absorbed is None and aux_drafter is not None:
        absorbed = aux_drafter.begin(params, request.length, capacity, merged)
    return prompts.start_prefill(config, params.target, request.length, cache, aux_layers, absorbed)


def empty_caches(
    config: LlamaConfig, params: Weights, drafter: Drafter, length: jax.Array, capacity: int, merged: bool
) -> Caches:
    """Returns caches of B rows that hold no token, to which those of earlier texts can be copied with `insert`.

    Args:
      config: the target.
      params: all parameters.
      drafter: the drafter that continues.
      length: int32[B], the tokens of each prompt.
      capacity: slots per row, static.
      merged: the layout of the cache, static, see `model.cache`.
    """
    cache = kv.create(config, length.shape[0], capacity, params.target["embed"].dtype, merged)
    return Caches(cache, drafter.begin(params, length, capacity, merged))


def feed(
    config: LlamaConfig,
    params: Weights,
    request: Request,
    fed: prompts.Prefilling,
    first: jax.Array,
    stop: jax.Array,
    aux_drafter: Drafter | None = None,
    *,
    chunk_size: int,
) -> prompts.Prefilling:
    """Feeds the chunks of the prompts from number `first` up to number `stop`, int32 scalars; see `prefill`."""
    arguments = (config, params.target, request.tokens, request.length, fed, first, stop, chunk_size)
    if aux_drafter is None:
        return prompts.feed(*arguments, start=request.start)
    absorb = functools.partial(aux_drafter.absorb, params)
    return prompts.feed(*arguments, aux_drafter.aux_layers, absorb, request.start)


def end_prefill(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    request: Request,
    fed: prompts.Prefilling,
    *,
    chunk_size: int,
) -> tuple[DecodeState, Emitted]:
    """Draws the first tokens after the last chunk of the prompts; see `prefill`."""
    _check_keys(request.keys)
    fed = fed.averaged(request.length, request.start)
    batch, hidden, cache = request.tokens.shape[0], fed.hidden, fed.cache
    logits = llama.logits(config, params.target, hidden)
    judged, penalties = logits, parts.penalties
    grammar = None if penalties is None else penalties.grammar
    if grammar is not None:
        judged = grammar.mask(logits[:, None], grammar.state[:, None])[:, 0]
    if penalties is not None:

        def apply(logits: jax.Array) -> jax.Array:
            return penalties.apply(logits[:, None], request.tokens, request.length)[:, 0]

        judged = run_if(penalties.active(request.length), apply, judged)
    sound = is_finite(judged)
    token = either(
        parts.distribution.drawing,
        lambda: parts.distribution.draw(fold_in(request.keys, request.length), judged)[0],
        lambda: jnp.argmax(judged, axis=-1).astype(jnp.int32),
    )
    if (reported := parts.reports) is not None:
        like, given = (batch, 1, logits.shape[-1]), lambda: (logits[:, None], token[:, None])
        reported = verification.report_of(reported, config.exact, like, given)
    count = sound.astype(jnp.int32)
    length = request.length + count
    done = ~sound | is_eos(token[:, None], request.eos_ids)[:, 0] | (length >= request.limit)
    state_after = jnp.zeros_like(length)
    if grammar is not None:
        state_after = grammar.step(grammar.state, token)
        done |= grammar.ends(state_after)
    tokens = put_rows(request.tokens, token[:, None], request.length, count)
    view = View(tokens, length, cache, jnp.where(done, 0, request.limit - length - 1))
    state = DecodeState(
        tokens=tokens,
        length=length,
        limit=request.limit,
        eos_ids=request.eos_ids,
        keys=request.keys,
        done=done,
        broken=~sound,
        grammar=state_after,
        cache=cache,
        drafter_state=_begun(params, parts, fed, view, request, chunk_size),
        stats=Stats(jnp.zeros((batch, parts.drafter.num_draft_tokens + 3), jnp.int32)),
    )
    emitted = Emitted(
        tokens=token[:, None],
        count=count,
        drafted=jnp.zeros((batch, 1), bool),
        proposed=jnp.zeros((batch, 1), jnp.int32),
        log_probs=reported,
        length=length,
        done=done,
        broken=state.broken,
        stats=state.stats,
    )
    return state, emitted


def _begun(
    params: Weights, parts: Parts, fed: prompts.Prefilling, view: View, request: Request, chunk_size: int
) -> State:
    """Returns the drafter's state after the prompts of the request; the pending token after them is not fed."""
    length, absorbed, aux_drafter = request.length, fed.absorbed, aux_drafter_of(parts)
    if aux_drafter is not None and fed.aux_hidden_state is not None:
        last, pending = fed.aux_hidden_state[:, None], view.pending[:, None]
        absorbed = aux_drafter.absorb(params, absorbed, last, pending, length - 1, view.length - length)
    prefill = Prefill(fed.hidden, fed.similarities, chunk_size, absorbed, request.start, fed.vectors)
    return parts.drafter.init(params, view, prefill)


def _check_keys(keys: jax.Array) -> None:
    """Raises ValueError for key types with which `jax.vmap` draws equal numbers in all rows."""
    kind = jax.random.key_impl(keys)
    if kind != "threefry2x32":
        raise ValueError(f"keys are of {kind}; make them with jaxspec.sampling.seed_key, of threefry2x32")
