"""The base of drafters that draft token by token: the drafting loop, and the state of the stop rule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import once, run_if
from jaxspec.model.llama import Params
from jaxspec.model.plan import LayerPlan
from jaxspec.model.prefill import run_prompts
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.penalties import Penalties
from jaxspec.protocol import (
    Drafter,
    Outcome,
    Prefill,
    Proposal,
    Signal,
    State,
    StopRule,
    View,
    Weights,
    rising_widths,
)
from jaxspec.sampling import Distribution, categorical, drawn_by, fold_in, is_finite, keys_at
from jaxspec.stopping import Constant

Carry = TypeVar("Carry")
# (carry, token int32[B], index of the step, whether each row still drafts bool[B])
#   -> logits float32[B, V] ([B, N] for a draft with a reduced vocabulary), hidden [B, D], carry
Step = Callable[[Carry, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, Carry]]


def draft_chain(
    step: Step[Carry],
    carry: Carry,
    token: jax.Array,
    budget: jax.Array,
    num_draft_tokens: int,
    keys: jax.Array,
    distribution: Distribution,
    rule: StopRule,
    rule_state: State,
    vocabulary: Vocabulary | None = None,
    draws: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Proposal, Carry, State]:
    """Drafts up to K tokens per row, one after another, until the rule has stopped every row.

    A draft ends before a token whose logits are not finite. That depends only on the tokens before it, so the text
    keeps its distribution. Rows that have stopped are computed along with the others; their tokens past `count` are
    meaningless and their rule's state does not change.

    Args:
      step: the draft model's step; its results are ignored in rows that no longer draft.
      carry: the first carry of `step`, for example a cache.
      token: int32[B], the pending token.
      budget: int32[B], the budget of draft tokens per row; 0 for a row that does not draft.
      num_draft_tokens: K, at least 1.
      keys: per-row keys [B].
      distribution: the sampling distribution, applied to the draft's logits.
      rule: called after every draft token.
      rule_state: its state.
      vocabulary: the tokens of the step's logits; None for all.
      draws: returns the keys [B] with which the target will draw a token in the place of draft token i, see
        `protocol.View`; None if the draft must not use them.

    Returns:
      The proposal, the last carry and the rule's state.

    Examples:
      >>> from jaxspec.sampling import Greedy
      >>> def step(carry, token, i, active):  # the next number is the most likely token
      ...     return jax.nn.one_hot(token + 1, 9), jnp.zeros((1, 2)), carry
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> proposal, _, _ = draft_chain(step, (), jnp.array([3]), jnp.array([9]), 4, keys, Greedy(), Constant(), ())
      >>> proposal.tokens.tolist()
      [[4, 5, 6, 7]]
    """
    batch = token.shape[0]

    def sample(
        i: jax.Array, logits: jax.Array, drawn: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the index of draft token i in the logits, and the proposal's probabilities with its own."""
        drawn_from = drawn[1]
        if draws is not None:
            # The coupled acceptor compares tokens only, so the proposal needs no probabilities.
            return _coupled_draw(draws(i), distribution.log_probs(logits), vocabulary), drawn_from
        index, log_probs = distribution.draw(fold_in(keys, i), logits)
        if log_probs is None or drawn_from is None:
            return index, drawn_from
        # The proposal has tokens and probabilities of the whole vocabulary; the rule reads the draft's own logits.
        every = log_probs if vocabulary is None else vocabulary.spread(log_probs)
        return index, jax.lax.dynamic_update_slice(drawn_from, every[:, None], (0, i, 0))

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, active, token, proposal, rule_state, carry = state
        logits, hidden, carry = step(carry, token, i, active)
        with jax.named_scope("sampling"):
            index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            # A batch without sampled rows does not draw, and does not write the probabilities, which nothing reads.
            index, drawn_from = once(
                distribution.drawing, functools.partial(sample, i, logits), (index, proposal.log_probs)
            )
        token = index if vocabulary is None else vocabulary.ids[index]
        signal = Signal(i, token, logits, hidden, index)
        # After NaN or inf a row proposes nothing more; this token is not counted.
        active &= is_finite(logits)
        tokens = jax.lax.dynamic_update_slice(proposal.tokens, token[:, None], (0, i))
        proposal = Proposal(tokens, proposal.count + active, drawn_from)
        # The token is kept even if the rule stops after it: whether it is dropped must not depend on its value.
        stopped, moved = rule.stop(rule_state, signal)
        return (
            i + 1,
            active & ~stopped & (i + 1 < budget),
            token,
            proposal,
            keep_rows(active, moved, rule_state),
            carry,
        )

    drawn_from = None
    if draws is None and distribution.drawing is not False:
        logits = jax.eval_shape(step, carry, token, jnp.int32(0), budget > 0)[0]
        size = logits.shape[-1] if vocabulary is None else vocabulary.size
        drawn_from = jnp.zeros((batch, num_draft_tokens, size), jnp.float32)
    empty = Proposal(jnp.zeros((batch, num_draft_tokens), jnp.int32), jnp.zeros(batch, jnp.int32), drawn_from)
    state = (jnp.int32(0), budget > 0, token, empty, rule_state, carry)
    with jax.named_scope(f"trips_{num_draft_tokens}"):  # for a reader of the compiled program
        state = jax.lax.while_loop(lambda s: (s[0] < num_draft_tokens) & jnp.any(s[1]), body, state)
    return state[3], state[5], state[4]


def _coupled_draw(keys: jax.Array, log_probs: jax.Array, vocabulary: Vocabulary | None) -> jax.Array:
    """Draws an index, int32[B], with the Gumbel noise that the target uses for each token with these keys [B]."""
    if vocabulary is None:
        return categorical(keys, log_probs)
    # Noise is drawn for all V tokens, then gathered, so that each token gets the same noise as in the target's draw.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary.size,), log_probs.dtype))(keys)
    return jnp.argmax(log_probs + noise[:, vocabulary.ids], axis=-1).astype(jnp.int32)


def _penalised(
    step: Step[Carry], view: View, penalties: Penalties, vocabulary: Vocabulary | None
) -> Step[tuple[Carry, jax.Array, jax.Array]]:
    """Returns the step with grammars and penalties for text and draft so far.

    Its carry also has the tokens of both, int32[B, N], and the states of the grammars, int32[B].
    """
    row, grammar = jnp.arange(view.length.shape[0]), penalties.grammar

    def penalised(
        carry: tuple[Carry, jax.Array, jax.Array], token: jax.Array, i: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[Carry, jax.Array, jax.Array]]:
        inner, text, state = carry
        logits, hidden, inner = step(inner, token, i, active)
        if grammar is not None:
            # In step 0 the state has read the pending token already.
            state = jnp.where(i > 0, grammar.step(state, token), state)
            ids = None if vocabulary is None else vocabulary.ids
            logits = grammar.mask(logits[:, None], state[:, None], ids)[:, 0]
        # In step 0 this writes the pending token again, which the text already has.
        text = text.at[row, view.start + i].set(token)

        def apply(logits: jax.Array) -> jax.Array:
            every = logits if vocabulary is None else vocabulary.spread(logits)
            every = penalties.apply(every[:, None], text, view.length + i)[:, 0]
            return every if vocabulary is None else every[:, vocabulary.ids]

        return run_if(penalties.active(view.length), apply, logits), hidden, (inner, text, state)

    return penalised


def keep_rows(active: jax.Array, new: State, old: State) -> State:
    """Returns `new` in the rows where `active` bool[B], `old` elsewhere; the first axis of every leaf is B.

    Examples:
      >>> keep_rows(jnp.array([True, False]), jnp.array([1, 2]), jnp.array([3, 4])).tolist()
      [1, 4]
    """

    def choose(n: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.where(active.reshape(-1, *(1,) * (n.ndim - 1)), n, o)

    return jax.tree.map(choose, new, old)


def model_step(
    config: LlamaConfig, params: Params, start: jax.Array, plan: LayerPlan | jax.Array | None = None
) -> Step[KVCache]:
    """Returns the step of a model whose carry is its cache; `start`, int32[B], is the pending token's position.

    Examples:
      >>> from jaxspec.model import cache
      >>> from jaxspec.testing import TARGET, params
      >>> step = model_step(TARGET, params(), start=jnp.array([0]))
      >>> slots = cache.create(TARGET, batch_size=1, capacity=8, dtype=jnp.float32)
      >>> logits, hidden, slots = step(slots, jnp.array([3]), jnp.int32(0), jnp.array([True]))
      >>> logits.shape, hidden.shape
      ((1, 13), (1, 16))
    """

    def step(
        cache: KVCache, token: jax.Array, i: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        del active  # rows are computed together, so skipping some saves nothing
        hidden = llama.embed(config, params, token[:, None])
        hidden, cache = llama.run_layers(config, params, hidden, start + i, cache, plan=plan)
        return llama.logits(config, params, hidden[:, 0]), hidden[:, 0], cache

    return step


def empty_cache(
    config: LlamaConfig, params: Params, length: jax.Array, capacity: int, merged: bool
) -> tuple[KVCache, jax.Array]:
    """Returns the empty cache of a draft model, and the number of its valid positions, int32[B]; see `Drafter.begin`.

    Examples:
      >>> from jaxspec.testing import TARGET, params
      >>> empty_cache(TARGET, params(), jnp.array([3, 1]), capacity=4, merged=True)[1].tolist()
      [0, 0]
    """
    cache = kv.create(config, len(length), capacity, params["embed"].dtype, merged)
    return cache, jnp.zeros_like(length)


def prompt_cache(config: LlamaConfig, params: Params, view: View, prefill: Prefill) -> KVCache:
    """Returns the cache of a draft model with the committed tokens of each row, except the pending one.

    Args:
      config: the draft model's.
      params: its parameters.
      view: the committed tokens.
      prefill: its `absorbed` is None, or such a cache and the number of its valid positions, int32[B]. Of these, the
        ones before `prefill.start` are not fed again.

    Examples:
      >>> from jaxspec.testing import TARGET, params
      >>> tokens, cache = jnp.array([[1, 2, 3, 0]]), kv.create(TARGET, 1, 4, jnp.float32)
      >>> view = View(tokens, jnp.array([3]), cache, budget=jnp.array([0]))
      >>> prefill = Prefill(jnp.zeros((1, 16)), jnp.zeros((1, 2, 2)), chunk_size=4)
      >>> prompt_cache(TARGET, params(), view, prefill).capacity
      4
    """
    if prefill.absorbed is None or prefill.start is None:
        capacity, merged = view.tokens.shape[1], view.cache.merged
        cache, start = empty_cache(config, params, view.start, capacity, merged)[0], None
    else:
        cache, held = prefill.absorbed
        start = jnp.minimum(held, prefill.start)
    config = dataclasses.replace(config, draft_window=None)  # a prompt is read as a whole
    return run_prompts(config, params, view.tokens, view.start, cache, prefill.chunk_size, start)[2]


class ChainState(NamedTuple):
    """The state of a `ChainDrafter`: its rule's state, and `own`, the state of the subclass.

    Examples:
      >>> ChainState(rule=()).own
      ()
    """

    rule: State
    own: State = ()


class ChainDrafter(Drafter):
    """A base for drafters with a stop rule: a subclass adds `propose`, which calls `draft`.

    Attributes:
      rule: when to stop before K tokens.
      num_draft_tokens: K.

    Examples:
      >>> class Mine(ChainDrafter):
      ...     rule, num_draft_tokens = Constant(), 4
      ...     def propose(self, keys, params, state, view, distribution):
      ...         step = model_step(CONFIG, params.drafter, view.start)
      ...         proposal, _, state = self.draft(step, state.own, keys, state, view, distribution, params.drafter)
      ...         return proposal, state, view.cache
      >>> Mine().verify_widths, Mine().reach
      ((5,), 5)
    """

    rule: StopRule

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of verification: only K + 1 if each draft has K tokens, else also narrower ones."""
        if isinstance(self.rule, Constant):
            return (self.num_draft_tokens + 1,)
        return rising_widths(self.num_draft_tokens)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the state of a new text: the stop rule's initial state."""
        return ChainState(self.rule.init(view.length.shape[0]))

    def draft(
        self,
        step: Step[Carry],
        carry: Carry,
        keys: jax.Array,
        state: ChainState,
        view: View,
        distribution: Distribution,
        params: Params | None = None,
    ) -> tuple[Proposal, Carry, ChainState]:
        """Drafts after the pending tokens, see `draft_chain`.

        If `params`, the draft's parameters, have a `vocabulary`, the step's logits are of its tokens.
        """
        vocabulary = None if params is None else params.get("vocabulary")
        own = view.draws
        draws = None if own is None else lambda i: drawn_by(keys_at(own, view.length + i))
        begin: tuple[Step[Any], Any] = (step, carry)
        # A draft under the target's penalties is accepted more often; only then must the step carry the text.
        if view.penalties is not None:
            state_now = jnp.zeros_like(view.length) if view.grammar is None else view.grammar.state
            begin = _penalised(step, view, view.penalties, vocabulary), (carry, view.tokens, state_now)
        proposal, end, rule = draft_chain(
            *(
                *begin,
                view.pending,
                view.budget,
                self.num_draft_tokens,
                keys,
                distribution,
                self.rule,
                state.rule,
            ),
            vocabulary,
            draws,
        )
        return proposal, end if view.penalties is None else end[0], state._replace(rule=rule)

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Updates the stop rule."""
        return state._replace(rule=self.rule.observe(state.rule, outcome))
