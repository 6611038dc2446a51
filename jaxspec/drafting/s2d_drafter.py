"""Sorted speculative decoding, S2D (Kavehzadeh et al. 2024): a draft with several exits, chosen per token.

The draft is trained so that each exit is a model by itself (SoFT).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain_drafter import ChainDrafter, ChainState, empty_cache, prompt_cache
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest, once
from jaxspec.model.llama import Params
from jaxspec.protocol import Prefill, Proposal, StopRule, View, Weights, rising_widths
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveLength

# W for a draft with its own cache, see `Waiting`.
MAX_WAITING = 8


@struct.dataclass
class Waiting:
    """The tokens of each row that have not run through all layers yet.

    A token that left at an early exit lacks the keys and values of the layers above. It waits there until a later
    token goes deeper. Then all waiting tokens run through the next layers as one block, which reads the weights
    once. So every exit computes exactly the same as a model that ends there.

    `passed` never increases from exit to exit. Position p has slot p − passed[b, M − 1], because tokens that have
    passed the last exit no longer wait.

    Attributes:
      passed: int32[B, M], the number of positions that have passed each of the M exits.
      hidden: [B, W, D], the residual stream of each waiting token after the last exit that it has passed, or its
        embedding before the first.
    """

    passed: jax.Array
    hidden: jax.Array

    @property
    def first(self) -> jax.Array:
        """The position of the first waiting token, int32[B]."""
        return self.passed[:, -1]

    def put(self, position: jax.Array, hidden: jax.Array, where: jax.Array | bool = True) -> Waiting:
        """Returns the tokens with hidden [B, T, D] written at positions [B, T], where `where` bool[B, T] is True."""
        slot = jnp.where(where, position - self.first[:, None], self.hidden.shape[1])
        rows = jnp.arange(len(slot))[:, None]
        return dataclasses.replace(self, hidden=self.hidden.at[rows, slot].set(hidden, mode="drop"))

    def get(self, position: jax.Array) -> jax.Array:
        """Returns the streams at positions [B, T], [B, T, D]."""
        slot = jnp.minimum(position - self.first[:, None], self.hidden.shape[1] - 1)
        return jnp.take_along_axis(self.hidden, slot[..., None], axis=1)


@struct.dataclass
class S2DDrafter(ChainDrafter):
    """Each draft token comes from the first exit whose largest probability reaches a threshold.

    The draft is a model with its own cache, `params.drafter`, or with `sorted_target` the target itself, below its
    last layer and in its own cache. At a temperature above 0, the exit is chosen by its largest probability, before
    the draw, and `log_probs` is the distribution of that exit. This is exact; a choice by the probability of the
    drawn token would not be.

    Attributes:
      config: the draft's.
      exits: the number of layers up to each of the M exits, rising; the last exit has no threshold.
      thresholds: float32[M − 1] or [B, M − 1], τ: an exit is used if its largest raw probability is at least τ. 1
        disables an exit. With 0 it is always used and no layer above it runs, so fixed exits are as fast as plain
        drafts.
      rule: when to stop before K tokens; the paper has a fixed K (`Constant`), the default adapts the length.
      num_draft_tokens: K.
      sorted_target: whether the target drafts for itself.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    exits: tuple[int, ...] = struct.field(pytree_node=False)
    thresholds: jax.Array
    rule: StopRule = AdaptiveLength(maximum=12)
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)
    sorted_target: bool = struct.field(pytree_node=False, default=False)

    @property
    def max_waiting(self) -> int:
        """W; K in the target's cache, because verification fills it and no token waits across rounds."""
        return self.num_draft_tokens if self.sorted_target else MAX_WAITING

    @property
    def reach(self) -> int:
        """The number of slots that a round may write: a block of W may begin at the last token fed."""
        return max(super().reach, self.num_draft_tokens - 2 + self.max_waiting)

    def taking_turns(self) -> S2DDrafter:
        """Returns the drafter itself; only with `sorted_target`, because at most W tokens can wait in a cache."""
        if not self.sorted_target:
            raise ValueError(
                "method s2d with a draft model cannot take turns with another method; omit `draft` if the model itself "
                "has sorted exits, or give another method as `second`"
            )
        return self

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with a cache of the prompt and no waiting tokens as `own` (none for the target)."""
        state = super().init(params, view, prefill)
        if self.sorted_target:
            return state
        cache = prompt_cache(self.config, params.drafter, view, prefill)
        return state._replace(own=(cache, self._nothing(params.drafter, view.start)))

    def begin(
        self, params: Weights, length: jax.Array, capacity: int, merged: bool
    ) -> tuple[KVCache, jax.Array] | None:
        """Returns an empty cache and its number of positions, 0; None for the target's cache."""
        if self.sorted_target:
            return None
        return empty_cache(self.config, params.drafter, length, capacity, merged)

    def absorbed(self, state: ChainState) -> tuple[KVCache, jax.Array] | None:
        """Returns the cache and the number of positions that have passed all exits; None for the target's cache."""
        if self.sorted_target:
            return None
        cache, waiting = state.own
        return cache, waiting.first

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts token by token."""
        if self.sorted_target:
            # Verification has filled the cache up to the pending token, so no token waits.
            carry = view.cache, self._nothing(params.target, view.start)
            draft = params.self_draft
            step = functools.partial(self._step, draft, view.start)
            proposal, (cache, _), state = self.draft(step, carry, keys, state, view, distribution, draft)
            return proposal, state, cache
        cache, waiting = state.own
        # Rejected tokens are dropped: no exit has passed a position beyond the committed ones.
        waiting = dataclasses.replace(waiting, passed=jnp.minimum(waiting.passed, view.start[:, None]))
        # The last draft token was not fed, so after full acceptance it waits before the first layer.
        position = view.start[:, None] - 1
        before = llama.embed(self.config, params.drafter, jnp.take_along_axis(view.tokens, position, axis=1))
        waiting = waiting.put(position, before, waiting.passed[:, :1] <= position)
        step = functools.partial(self._step, params.drafter, view.start)
        proposal, own, state = self.draft(
            step, (cache, waiting), keys, state, view, distribution, params.drafter
        )
        return proposal, state._replace(own=own), view.cache

    def _nothing(self, draft: Params, start: jax.Array) -> Waiting:
        """Returns the state without waiting tokens: all positions before `start` have passed every exit."""
        passed = jnp.broadcast_to(start[:, None], (len(start), len(self.exits)))
        shape = (len(start), self.max_waiting, self.config.hidden_size)
        return Waiting(passed, jnp.zeros(shape, llama.stream_of(draft)))

    def _step(
        self,
        draft: Params,
        start: jax.Array,
        carry: tuple[KVCache, Waiting],
        token: jax.Array,
        i: jax.Array,
        active: jax.Array,
    ) -> tuple[jax.Array, jax.Array, tuple[KVCache, Waiting]]:
        """Feeds the tokens and tries the exits in order.

        The batch runs as deep as the deepest active row. Each row keeps the logits of its own exit.
        """
        cache, waiting = carry
        position = (start + i)[:, None]
        waiting = waiting.put(position, llama.embed(self.config, draft, token[:, None]))
        # The slots must suffice until the next step, before which two more tokens may come: the last of this draft,
        # which is not fed, and the pending one after it.
        full = jnp.any(position + 2 >= waiting.first[:, None] + self.max_waiting) & (not self.sorted_target)

        def deepen(
            carry: tuple[KVCache, Waiting, jax.Array], number: int
        ) -> tuple[KVCache, Waiting, jax.Array]:
            cache, waiting, passed = carry
            cache, waiting = self._through(draft, number, position, cache, waiting)
            return cache, waiting, passed.at[:, number].set(position[:, 0] + 1)

        def look(
            seen: tuple[jax.Array, jax.Array, jax.Array], number: int, waiting: Waiting
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            logits, hidden, left = seen
            here = waiting.get(position)[:, 0]
            new = llama.logits(self.config, draft, here)
            sure = self._is_sure(new, number)
            stays = left[:, None]
            return jnp.where(stays, logits, new), jnp.where(stays, hidden, here), left | sure

        # `waiting.passed` is the first position of each block, so it is not updated before the end of the step.
        passed, left = waiting.passed, ~active
        logits = jnp.zeros((len(start), llama.head(self.config, draft).shape[0]), jnp.float32)
        hidden = jnp.zeros_like(waiting.hidden[:, 0])
        for number in range(len(self.exits)):
            # Go deeper if a row has no exit yet, or to free the slots of waiting tokens.
            deeper = jnp.any(~left)
            run = number == 0 or deeper | (full & self._is_reached(number))
            cache, waiting, passed = once(
                run, functools.partial(deepen, number=number), (cache, waiting, passed)
            )
            if number:  # an exit that no row can reach counts as passed, so that no token waits for it
                passed = passed.at[:, number].set(
                    jnp.where(self._is_reached(number), passed[:, number], passed[:, number - 1])
                )
            looked = functools.partial(look, number=number, waiting=waiting)
            offered = self._is_offered(number) & (number == 0 or deeper)
            logits, hidden, left = once(offered, looked, (logits, hidden, left))
        return logits, hidden, (cache, dataclasses.replace(waiting, passed=passed))

    def _is_sure(self, logits: jax.Array, number: int) -> jax.Array:
        """Returns whether each row uses exit `number`, whose logits are [B, V], bool[B]."""
        everything = jnp.ones(len(logits), bool)
        if number == len(self.exits) - 1:
            return everything

        def compared() -> jax.Array:
            threshold = self.thresholds[..., number]
            largest = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
            return (largest >= threshold) & (threshold < 1)

        sure: jax.Array = jax.lax.cond(self._is_reached(number + 1), compared, lambda: everything)
        return sure

    def _is_offered(self, number: int) -> jax.Array | bool:
        """Returns whether some row may use exit `number`, bool[]."""
        return number == len(self.exits) - 1 or jnp.any(self.thresholds[..., number] < 1)

    def _is_reached(self, number: int) -> jax.Array:
        """Returns whether some row may go on to exit `number`, that is, has no τ of 0 before it, bool[]."""
        return ~jnp.all(jnp.any(self.thresholds[..., :number] <= 0, axis=-1))

    def _through(
        self, draft: Params, number: int, position: jax.Array, cache: KVCache, waiting: Waiting
    ) -> tuple[KVCache, Waiting]:
        """Runs the layers up to an exit on all tokens that wait before them, in the narrowest block that fits.

        Rows of the block past `position` are meaningless: no query sees their slots before they are overwritten.
        """
        begin = waiting.passed[:, number]
        longest = jnp.max(position[:, 0] + 1 - begin)
        layers = range(self.exits[number - 1] if number else 0, self.exits[number])

        def run(width: int, carry: tuple[KVCache, Waiting]) -> tuple[KVCache, Waiting]:
            cache, waiting = carry
            at = begin[:, None] + jnp.arange(width)
            hidden, cache = llama.run_layers(self.config, draft, waiting.get(at), begin, cache, layers=layers)
            return cache, waiting.put(at, hidden, at <= position)

        # Before the first layer, at most the last token of a fully accepted draft waits beside the current one.
        first_widest = 1 if self.sorted_target else 2
        widest = self.max_waiting if number else first_widest
        widths = rising_widths(widest - 1) if widest > 1 else (1,)
        return narrowest(widths, longest, run, (cache, waiting))
