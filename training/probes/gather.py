"""Gathers the training examples of linear probes: states and labels of draft tokens, from the real decoder.

AdaSPEED (section II.B) predicts for each draft token whether the whole model would accept it. The decoder drafts,
verifies and commits as usual; this module records the state of every draft token and the result of its verification.
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
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Drafter, Outcome, Prefill, Proposal, State, View, Weights
from jaxspec.sampling import Distribution, Greedy, Sampling, is_greedy, seed_key


class Examples(NamedTuple):
    """Draft tokens from which probes learn.

    Attributes:
      hidden: float32[N, D], the states after the final norm, from which the tokens were drawn.
      label: float32[N]. Greedy: 1 if the last layer chooses the same token, else 0. Sampled: min(1, p ÷ q), the
        probability that the token is accepted.
      confidence: float32[N], the draft's own raw probability of the token, the baseline for a probe.
    """

    hidden: np.ndarray
    label: np.ndarray
    confidence: np.ndarray


@struct.dataclass
class RecordingDrafter(Drafter):
    """A drafter that wraps another one, and keeps its last proposal in the state."""

    inner: LayerSkipDrafter

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """Largest number of draft tokens per round, K."""
        return self.inner.num_draft_tokens

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Widths of the compiled verifications."""
        return self.inner.verify_widths

    @property
    def reach(self) -> int:
        """Cache positions that a round of the wrapped drafter may touch beyond the text."""
        return self.inner.reach

    def init(self, params: Weights, view: View, prefill: Prefill) -> State:
        """Makes the state of the wrapped drafter, without a proposal."""
        return self.inner.init(params, view, prefill)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, distribution: Distribution
    ) -> tuple[Proposal, State, KVCache]:
        """Proposes with the wrapped drafter, and keeps the proposal in the state."""
        proposal, state, cache = self.inner.propose(keys, params, state, view, distribution)
        return proposal, (state, proposal), cache

    def observe(self, params: Weights, state: State, outcome: Outcome) -> State:
        """Updates the state of the wrapped drafter."""
        return self.inner.observe(params, state[0], outcome), state[1]


@functools.partial(jax.jit, static_argnames="config")
def _round(config: LlamaConfig, weights: Weights, parts: Parts, state: DecodeState):
    """Runs one round; returns the new state, and each draft token's state, label, confidence and mask [B, K].

    A token counts only if all tokens before it were accepted: a probe estimates the probability of the next token
    given an accepted draft, and a round ends at its first rejection.
    """
    target, exit_layer = weights.target, cast(RecordingDrafter, parts.drafter).inner.exit_layer
    before = state.length
    state, outcome, _ = decoding.decode_round(config, weights, parts, state)
    own, proposal = state.drafter_state
    state = dataclasses.replace(state, drafter_state=own)

    # Repeat the verification for its logits: the same rows over the same cache.
    rest = range(exit_layer, config.num_layers)
    verified, _ = llama.run_layers(config, target, proposal.exit_hidden, before - 1, state.cache, layers=rest)
    distribution = parts.distribution.log_probs(llama.logits(config, target, verified))[:, :-1]

    def of_drafted(log_probs: jax.Array) -> jax.Array:
        return jnp.take_along_axis(log_probs, proposal.tokens[..., None], axis=-1)[..., 0]

    drawn_with = 0.0 if proposal.log_probs is None else of_drafted(proposal.log_probs)
    label = jnp.exp(jnp.minimum(of_drafted(distribution) - drawn_with, 0.0))
    exits = proposal.exit_hidden[:, :-1]
    raw = jax.nn.log_softmax(llama.logits(config, target, exits), axis=-1)
    hidden = llama.final_norm(config, target, exits)
    number = jnp.arange(label.shape[1])[None]
    counts = (number < outcome.drafted[:, None]) & (number <= outcome.accepted[:, None])
    return state, hidden, label, jnp.exp(of_drafted(raw)), counts


_prefill = jax.jit(decoding.prefill, static_argnames=("config", "chunk_size"))


def gather(
    config: LlamaConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    exit_layer: int,
    distribution: dict[str, float],
    *,
    num_draft_tokens: int,
    new_tokens: int,
    batch: int,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
) -> Examples:
    """Decodes after each prompt with the early exit as draft, and returns the examples for probes.

    Args:
      config: the model.
      params: the model's parameters.
      prompts: token ids of each prompt.
      exit_layer: number of layers of the draft.
      distribution: the sampling distribution: `temperature` (0: greedy), and `top_k`, `top_p`, `min_p` where not off.
      num_draft_tokens: K of every round.
      new_tokens: number of tokens to generate after each prompt.
      batch: number of prompts at once. A smaller last batch is left out unless it is the only one.
      seed: seed of the sampling.
      report: called with the number of finished prompts.
    """
    capacity = 1 << (max(map(len, prompts)) + new_tokens + num_draft_tokens + 1).bit_length()
    drafter = RecordingDrafter(LayerSkipDrafter(config, exit_layer, num_draft_tokens=num_draft_tokens))
    weights = Weights(params)
    parts_found: list[list[np.ndarray]] = [[], [], []]
    batch = min(batch, len(prompts))
    for first in range(0, len(prompts) - batch + 1, batch):
        parts = Parts(drafter, *_distribution(distribution, batch))
        request = _request(config, prompts[first : first + batch], capacity, new_tokens, seed + first)
        state, _ = _prefill(config, weights, parts, request, chunk_size=min(capacity, 64))
        while not bool(state.done.all()):
            state, *found, counts = _round(config, weights, parts, state)
            chosen = np.asarray(counts)
            for kept, array in zip(parts_found, found, strict=True):
                kept.append(np.asarray(array, np.float32)[chosen])
        report(first + batch)
    return Examples(*(np.concatenate(arrays) for arrays in parts_found))


def _distribution(numbers: dict[str, float], batch: int) -> tuple[Any, Distribution]:
    """Returns acceptor and sampling distribution. Sampled labels are defined for rejection, token by token."""
    if is_greedy(numbers.get("temperature", 0.0)):
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
