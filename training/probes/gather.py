"""What linear probes of an early exit learn from: states and labels of draft tokens, from the real decoder.

AdaSPEED (section II.B) asks of each draft token whether the whole model would have said the same. The decoder
drafts, verifies and commits as it does for a user; beside it stands what every draft token's state was, and
what the verification thought of the token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec import decoding
from jaxspec.acceptance import GreedyAcceptor, RejectionAcceptor
from jaxspec.decoding import DecodeState, Parts, Request
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.numerics import rms_norm
from jaxspec.protocol import Drafter, Outcome, Prefill, Proposal, State, View, Weights
from jaxspec.sampling import Greedy, Law, Sampling, seed_key


class Examples(NamedTuple):
    """Draft tokens from which probes learn.

    Attributes:
      hidden: float32[N, D], the state each was drawn from, after the final norm.
      label: float32[N]. Greedy: 1 where the last layer says the same token, else 0. Sampled: min(1, p ÷ q),
        the probability with which the token is accepted.
      confidence: float32[N], the draft's own raw probability of the token, which a probe is to beat.
    """

    hidden: np.ndarray
    label: np.ndarray
    confidence: np.ndarray


@struct.dataclass
class Recording(Drafter):
    """A drafter that keeps its last proposal beside its state; else it is the drafter it wraps."""

    inner: LayerSkip

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """Draft tokens per round at most, K."""
        return self.inner.num_draft_tokens

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Widths of the verifications that are compiled."""
        return self.inner.verify_widths

    @property
    def reach(self) -> int:
        """Cache positions that a round may touch beyond the text, as of the wrapped drafter."""
        return self.inner.reach

    def init(self, params: Weights, view: View, prefill: Prefill) -> State:
        """Makes the state of the wrapped drafter: nothing was proposed yet."""
        return self.inner.init(params, view, prefill)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, law: Law
    ) -> tuple[Proposal, State, KVCache]:
        """Proposes as the wrapped drafter does, and keeps the proposal in the state."""
        proposal, state, cache = self.inner.propose(keys, params, state, view, law)
        return proposal, (state, proposal), cache

    def observe(self, params: Weights, state: State, outcome: Outcome) -> State:
        """Updates the state of the wrapped drafter."""
        return self.inner.observe(params, state[0], outcome), state[1]


@functools.partial(jax.jit, static_argnames="config")
def _round(config: LlamaConfig, weights: Weights, parts: Parts, state: DecodeState):
    """One round: the state after it, and of each draft token its state, label and confidence [B, K].

    A token counts only if all before it were accepted. What is asked of a probe is the chance of the next
    token given that the draft stands so far; after a rejection there is no draft any more.
    """
    target, exit_layer = weights.target, cast(Recording, parts.drafter).inner.exit_layer
    before = state.length
    state, outcome, _ = decoding.decode_round(config, weights, parts, state)
    own, proposal = state.drafter_state
    state = dataclasses.replace(state, drafter_state=own)

    # The verification once more, for its logits: the same rows over the same cache.
    rest = range(exit_layer, config.num_layers)
    verified, _ = llama.run_layers(config, target, proposal.exit_hidden, before - 1, state.cache, layers=rest)
    law = parts.law.log_probs(llama.logits(config, target, verified))[:, :-1]

    def of_drafted(log_probs: jax.Array) -> jax.Array:
        return jnp.take_along_axis(log_probs, proposal.tokens[..., None], axis=-1)[..., 0]

    drawn_with = 0.0 if proposal.log_probs is None else of_drafted(proposal.log_probs)
    label = jnp.exp(jnp.minimum(of_drafted(law) - drawn_with, 0.0))
    exits = proposal.exit_hidden[:, :-1]
    raw = jax.nn.log_softmax(llama.logits(config, target, exits), axis=-1)
    hidden = rms_norm(exits, target["norm"], config.rms_norm_eps)
    number = jnp.arange(label.shape[1])[None]
    counts = (number < outcome.drafted[:, None]) & (number <= outcome.accepted[:, None])
    return state, hidden, label, jnp.exp(of_drafted(raw)), counts


_prefill = jax.jit(decoding.prefill, static_argnames=("config", "chunk_size"))


def gather(
    config: LlamaConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    exit_layer: int,
    law: dict[str, float],
    *,
    num_draft_tokens: int,
    new_tokens: int,
    batch: int,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
) -> Examples:
    """Decodes after each prompt with the early exit as draft and keeps what probes learn from.

    Args:
      config: the model.
      params: its parameters.
      prompts: token ids of each.
      exit_layer: layers that draft.
      law: `temperature` (0: greedy), and `top_k`, `top_p`, `min_p` where not off.
      num_draft_tokens: K of every round.
      new_tokens: generated after each prompt.
      batch: prompts at once; prompts are gone through in such batches, a smaller last one left out unless it
        is the only one.
      seed: of the draws.
      report: is called with the number of prompts that are done.
    """
    capacity = 1 << (max(map(len, prompts)) + new_tokens + num_draft_tokens + 1).bit_length()
    drafter = Recording(LayerSkip(config, exit_layer, num_draft_tokens=num_draft_tokens))
    weights = Weights(params)
    parts_found: list[list[np.ndarray]] = [[], [], []]
    batch = min(batch, len(prompts))
    for first in range(0, len(prompts) - batch + 1, batch):
        parts = Parts(drafter, *_law(law, batch))
        request = _request(config, prompts[first : first + batch], capacity, new_tokens, seed + first)
        state, _ = _prefill(config, weights, parts, request, chunk_size=min(capacity, 64))
        while not bool(state.done.all()):
            state, *found, counts = _round(config, weights, parts, state)
            chosen = np.asarray(counts)
            for kept, array in zip(parts_found, found, strict=True):
                kept.append(np.asarray(array, np.float32)[chosen])
        report(first + batch)
    return Examples(*(np.concatenate(arrays) for arrays in parts_found))


def _law(numbers: dict[str, float], batch: int) -> tuple[Any, Law]:
    """The acceptor and the law. Rejection, token by token, is what a sampled label speaks of."""
    if not numbers.get("temperature"):
        return GreedyAcceptor(), Greedy()
    kinds = {"top_k": jnp.int32}
    rows = {name: jnp.full(batch, value, kinds.get(name, jnp.float32)) for name, value in numbers.items()}
    return RejectionAcceptor(), Sampling(**rows)


def _request(
    config: LlamaConfig, prompts: Sequence[Sequence[int]], capacity: int, new_tokens: int, seed: int
) -> Request:
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    return Request(
        tokens=jnp.asarray(tokens),
        length=length,
        limit=length + new_tokens,
        eos_ids=jnp.array([config.eos_token_ids or (-1,)] * len(prompts), jnp.int32),
        keys=jax.random.split(seed_key(seed), len(prompts)),
    )
