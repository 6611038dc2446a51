"""Sorted speculative decoding: a draft with several exits, left as early as each token allows.

S2D (Kavehzadeh et al. 2024). The draft was trained so that each of its exits is a model of its own (SoFT).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainDrafter, ChainState
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest, once
from jaxspec.model.llama import Params
from jaxspec.model.prefill import run_prompts
from jaxspec.protocol import Prefill, Proposal, StopRule, View, Weights, rising_widths
from jaxspec.sampling import Law
from jaxspec.stopping import AdaptiveLength

# W of a draft with a cache of its own.
MAX_WAITING = 8


def reach_of(num_draft_tokens: int, sorted_target: bool) -> int:
    """The number of slots that a round of K draft tokens may write, see `S2D`."""
    return max(num_draft_tokens + 1, num_draft_tokens - 2 + _max_waiting(num_draft_tokens, sorted_target))


def _max_waiting(num_draft_tokens: int, sorted_target: bool) -> int:
    return num_draft_tokens if sorted_target else MAX_WAITING


@struct.dataclass
class Waiting:
    """How far the latest tokens of each row have come.

    A token that left early lacks the keys and values of the layers above its exit. It waits there until a later
    one goes deeper: then all that wait run together, as one block that reads the weights once. So every exit
    sees exactly what it would see if it alone were the model.

    `passed` never rises from exit to exit, and position p lies in slot p − passed[b, M − 1]: what has passed
    the last exit waits no longer.

    Attributes:
      passed: int32[B, M], how many positions have passed each of the M exits.
      hidden: [B, W, D], the residual stream of those that wait, after the last exit that each has passed, or its
        embedding before the first.
    """

    passed: jax.Array
    hidden: jax.Array

    @property
    def first(self) -> jax.Array:
        """int32[B], the position of the first that waits."""
        return self.passed[:, -1]

    def put(self, position: jax.Array, hidden: jax.Array, where: jax.Array | bool = True) -> Waiting:
        """With hidden [B, T, D] at positions [B, T], where that holds."""
        slot = jnp.where(where, position - self.first[:, None], self.hidden.shape[1])
        rows = jnp.arange(len(slot))[:, None]
        return dataclasses.replace(self, hidden=self.hidden.at[rows, slot].set(hidden, mode="drop"))

    def get(self, position: jax.Array) -> jax.Array:
        """What stands at positions [B, T], [B, T, D]."""
        slot = jnp.minimum(position - self.first[:, None], self.hidden.shape[1] - 1)
        return jnp.take_along_axis(self.hidden, slot[..., None], axis=1)


@struct.dataclass
class S2D(ChainDrafter):
    """Each draft token comes from the first exit that is sure of its most probable token.

    The draft is a model with a cache of its own, `params.drafter`; or, `sorted_target`, the target itself,
    below its last layer and in its own cache. At a temperature above 0 a token is drawn from the law of the
    exit that its maximum has chosen, and that law is what verification is told: exact. (To draw first and then
    ask how probable the drawn token is would not be.)

    Attributes:
      config: of the draft.
      exits: how many layers run up to each exit, rising; the last one is unconditional.
      thresholds: float32[M − 1] or [B, M − 1], τ: an exit but the last is taken if its largest raw
        probability is at least that; with 1 never, with 0 always, and then no layer behind it runs. So fixed
        exits are settings too, as fast as the plain drafts.
      rule: when to stop before K tokens; the paper's draft has a fixed K (`Constant`), this length adapts.
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
        """W. In the target's cache nothing waits across rounds, for verification fills it: K is all there is."""
        return _max_waiting(self.num_draft_tokens, self.sorted_target)

    @property
    def reach(self) -> int:
        """A block of W may begin at the last token that is fed."""
        return reach_of(self.num_draft_tokens, self.sorted_target)

    def taking_turns(self) -> S2D:
        """The same; only where it drafts in the target's cache, since no more than W tokens can wait in its own."""
        if not self.sorted_target:
            raise ValueError(
                "method s2d with a draft of its own cannot leave rounds to another; leave out `draft` where the model "
                "itself has sorted exits, or give another method as `second`"
            )
        return self

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Of its own, unless it is the target: a cache that holds the prompt, and nothing that waits."""
        state = super().init(params, view, prefill)
        if self.sorted_target:
            return state
        batch, capacity = view.tokens.shape
        cache = kv.create(self.config, batch, capacity, params.drafter["embed"].dtype, view.cache.merged)
        _, _, cache = run_prompts(
            self.config, params.drafter, view.tokens, view.start, cache, prefill.chunk_size
        )
        return state._replace(own=(cache, self._nothing(params.drafter, view.start)))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts token by token; what was rejected since the last round is forgotten first."""
        if self.sorted_target:
            carry = view.cache, self._nothing(params.target, view.start)
            draft = params.self_draft
            step = functools.partial(self._step, draft, view.start)
            proposal, (cache, _), state = self.draft(step, carry, keys, state, view, law, draft)
            return proposal, state, cache
        cache, waiting = state.own
        waiting = dataclasses.replace(waiting, passed=jnp.minimum(waiting.passed, view.start[:, None]))
        # The last draft token is never fed, so after "all accepted" it waits before the first layer.
        position = view.start[:, None] - 1
        before = llama.embed(params.drafter, jnp.take_along_axis(view.tokens, position, axis=1))
        waiting = waiting.put(position, before, waiting.passed[:, :1] <= position)
        step = functools.partial(self._step, params.drafter, view.start)
        proposal, own, state = self.draft(step, (cache, waiting), keys, state, view, law, params.drafter)
        return proposal, state._replace(own=own), view.cache

    def _nothing(self, draft: Params, start: jax.Array) -> Waiting:
        """All positions before `start` have passed every exit."""
        passed = jnp.broadcast_to(start[:, None], (len(start), len(self.exits)))
        shape = (len(start), self.max_waiting, self.config.hidden_size)
        return Waiting(passed, jnp.zeros(shape, draft["embed"].dtype))

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

        How deep the layers run is one decision for the batch: as deep as some active row wants. Where a token
        leaves is its row's own: it keeps the logits of its exit whatever runs after.
        """
        cache, waiting = carry
        position = (start + i)[:, None]
        waiting = waiting.put(position, llama.embed(draft, token[:, None]))
        # Before this is asked again two more may come: the last token of this draft, and the one after it.
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

        # `waiting.passed` stands still until the step is over: it says where each block begins.
        passed, left = waiting.passed, ~active
        logits = jnp.zeros((len(start), llama.head(self.config, draft).shape[0]), jnp.float32)
        hidden = jnp.zeros_like(waiting.hidden[:, 0])
        for number in range(len(self.exits)):
            deeper = jnp.any(~left)
            run = number == 0 or deeper | (full & self._is_reached(number))
            cache, waiting, passed = once(
                run, functools.partial(deepen, number=number), (cache, waiting, passed)
            )
            if number:  # where no row ever comes, nothing is kept up to date
                passed = passed.at[:, number].set(
                    jnp.where(self._is_reached(number), passed[:, number], passed[:, number - 1])
                )
            looked = functools.partial(look, number=number, waiting=waiting)
            offered = self._is_offered(number) & (number == 0 or deeper)
            logits, hidden, left = once(offered, looked, (logits, hidden, left))
        return logits, hidden, (cache, dataclasses.replace(waiting, passed=passed))

    def _is_sure(self, logits: jax.Array, number: int) -> jax.Array:
        """bool[B], whether each row takes exit `number`, whose logits are [B, V]."""
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
        """bool[], whether some row may take exit `number`."""
        return number == len(self.exits) - 1 or jnp.any(self.thresholds[..., number] < 1)

    def _is_reached(self, number: int) -> jax.Array:
        """bool[], whether some row may go on to exit `number`: none of those before is sure of everything."""
        return ~jnp.all(jnp.any(self.thresholds[..., :number] <= 0, axis=-1))

    def _through(
        self, draft: Params, number: int, position: jax.Array, cache: KVCache, waiting: Waiting
    ) -> tuple[KVCache, Waiting]:
        """Runs the layers up to an exit over all that waits before them, in the narrowest block that holds it.

        What of the block lies past `position` means nothing: no query sees those slots before they are written
        again.
        """
        begin = waiting.passed[:, number]
        longest = jnp.max(position[:, 0] + 1 - begin)
        layers = range(self.exits[number - 1] if number else 0, self.exits[number])

        def run(width: int, carry: tuple[KVCache, Waiting]) -> tuple[KVCache, Waiting]:
            cache, waiting = carry
            at = begin[:, None] + jnp.arange(width)
            hidden, cache = llama.run_layers(self.config, draft, waiting.get(at), begin, cache, layers=layers)
            return cache, waiting.put(at, hidden, at <= position)

        # Before the first layer waits, beside the token, at most the last one of a draft that was accepted whole.
        first_widest = 1 if self.sorted_target else 2
        widest = self.max_waiting if number else first_widest
        widths = rising_widths(widest - 1) if widest > 1 else (1,)
        return narrowest(widths, longest, run, (cache, waiting))
