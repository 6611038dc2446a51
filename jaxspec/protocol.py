"""The interfaces of the parts of a method, and the records that the loop passes to them.

A part (drafter, stop rule, acceptor, distribution) is a `flax.struct` dataclass. Its structure is static and compared
by value; its numbers are leaves, scalar or [B]; so that a new value does not recompile. The state of a part is a pytree
whose leaves have the batch as first axis (except KV caches), so that the loop can replace a finished row in any state.

B rows; K = `num_draft_tokens`, the most tokens drafted in a round; V vocabulary; D width of the model.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.allowed_tokens import Grammars
from jaxspec.model.cache import KVCache
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Parents, Shape
from jaxspec.penalties import Penalties
from jaxspec.sampling import Distribution

State = Any


class Weights(NamedTuple):
    """All parameters of a method. They are arguments of the compiled loop, never constants in it.

    Attributes:
      target: the target's.
      drafter: the drafter's own: a draft model or heads. For a target that drafts for itself: None, or a dict of
        the entries that replace its own, for example a `vocabulary` (see `model.llama`).

    Examples:
      >>> weights = Weights(target={"embed": jnp.zeros((4, 2))})
      >>> weights.drafter is None, list(weights.self_draft)
      (True, ['embed'])
    """

    target: Params
    drafter: Any = None

    @property
    def self_draft(self) -> Params:
        """The parameters with which a target drafts for itself."""
        return self.target if self.drafter is None else {**self.target, **self.drafter}


@struct.dataclass
class View:
    """The inputs of a drafter.

    Attributes:
      tokens: int32[B, N], the first length[b] are committed, the rest is meaningless.
      length: int32[B]. Token length − 1 is pending: no cache holds it yet.
      cache: the target's, holding positions below length − 1. A drafter may write its slots from
        length − 1 on; it must not change the committed ones.
      budget: int32[B], the row's budget of draft tokens: the tokens left, minus the one that verification adds;
        0 in a finished row.
      draws: [B], the rows' keys, from which those that will draw the target's next tokens follow (`sampling.keys_at`,
        `sampling.drawn_by`), if the acceptor is `coupled`. A draft that is drawn by the same keys is accepted more
        often. None for other acceptors, whose draws the draft must not see.
      penalties: changes of the target's logits that follow from the text before a position; None for none. A draft that
        applies them is accepted more often.

    Examples:
      >>> view = View(jnp.array([[7, 8, 9, 0]]), jnp.array([3]), cache=None, budget=jnp.array([4]))
      >>> int(view.start[0]), int(view.pending[0])
      (2, 9)
    """

    tokens: jax.Array
    length: jax.Array
    cache: KVCache
    budget: jax.Array
    draws: jax.Array | None = None
    penalties: Penalties | None = None

    @property
    def start(self) -> jax.Array:
        """The position of each row's pending token, int32[B]."""
        return self.length - 1

    @property
    def grammar(self) -> Grammars | None:
        """The grammars of the rows; None for none."""
        return None if self.penalties is None else self.penalties.grammar

    @property
    def pending(self) -> jax.Array:
        """The pending token of each row, int32[B]."""
        return jnp.take_along_axis(self.tokens, self.start[:, None], axis=1)[:, 0]


@struct.dataclass
class Prefill:
    """The results of the prefill that a drafter may use.

    Attributes:
      hidden: [B, D] of the last prompt token, before the final norm.
      similarities: float32[B, L, 2], per attention (0) and MLP (1) sublayer the mean cosine between the
        residual stream before and after it, over the prompt; free for a drafter that ignores it.
      chunk_size: positions fed at once, static; a drafter with its own cache uses the same size.
      absorbed: the result of `Drafter.absorb` over the prompts. For drafters without auxiliary layers, the result of
        `Drafter.absorbed` for earlier texts with the same first `start` tokens; None if there is none.
      start: int32[B], the positions of the first tokens fed; None for 0.
      vectors: float32[B, D], the mean over the tokens fed of the hidden states after the final norm; free for a drafter
        that ignores it.

    Examples:
      >>> prefill = Prefill(hidden=jnp.zeros((1, 8)), similarities=jnp.ones((1, 2, 2)), chunk_size=16)
      >>> prefill.chunk_size
      16
    """

    hidden: jax.Array
    similarities: jax.Array
    chunk_size: int = struct.field(pytree_node=False)
    absorbed: Any = None
    start: jax.Array | None = None
    vectors: jax.Array | None = None


@struct.dataclass
class Proposal:
    """A chain of draft tokens per row, or a tree.

    Attributes:
      tokens: int32[B, K]; for a tree [B, N], one per node, where −1 marks an empty node without children.
      count: int32[B], number of proposed tokens, at most K; for a tree N.
      log_probs: float32[B, K, V], the distribution of each token given the earlier ones; None if every token is
        deterministic (a point mass). For a tree [B, N, V], given its ancestors and its earlier siblings.
      exit_hidden: [B, K + 1, D], the residual stream of (pending, draft 1, …, draft K) after the target's
        first `exit_layer` layers, valid up to entry count[b]; their KV is in the cache, so that verification
        runs only the other layers. If these are all layers, [B, 1, D] of the pending token, and verification runs the
        draft tokens only. None where the draft shares no layers.
      exit_layer: E, static.
      parents: None for a chain. For a tree, the parent of each node: a `Shape`, or int32[B, N] with the number of
        an earlier node, −1 for the pending token. A drawn token may determine which children it gets, never which
        siblings.
      most_siblings: the largest number of siblings in a tree whose `parents` are an array, static; 0 if unknown. Only
        `log_probs` need it.

    Examples:
      >>> proposal = Proposal(tokens=jnp.array([[4, 5, 0]]), count=jnp.array([2]))
      >>> proposal.tokens[0, : int(proposal.count[0])].tolist()
      [4, 5]
    """

    tokens: jax.Array
    count: jax.Array
    log_probs: jax.Array | None = None
    exit_hidden: jax.Array | None = None
    exit_layer: int = struct.field(pytree_node=False, default=0)
    parents: Parents | None = None
    most_siblings: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class Beside:
    """Rows that run beside a verification: the drafter reads their hidden states, the acceptor does not see them.

    Attributes:
      tokens: int32[B, M].
      shape: the tree of the rows after the pending one: the K tokens of a chain, then these M, static.
      params: the parameters of the pass; for the rows of the proposal they must equal the target's.

    Examples:
      >>> beside = Beside(jnp.array([[5]]), Shape((-1, 0, 0)), params={})  # beside the second token of a chain
      >>> beside.shape.num_nodes - beside.tokens.shape[1]
      2
    """

    tokens: jax.Array
    shape: Shape
    params: Params


@struct.dataclass
class Acceptance:
    """The accepted draft tokens, and the token after them.

    Attributes:
      count: int32[B], number of accepted draft tokens.
      token: int32[B], the next token: the bonus token if all drafts were accepted, else the correction.
      path: int32[B, K + 1], for a tree, the rows of the pending token (0) and of the accepted nodes (node + 1), in
        text order; entries after count[b] are padding. None for a chain.

    Examples:
      >>> acceptance = Acceptance(count=jnp.array([2]), token=jnp.array([9]))
      >>> int(acceptance.count[0]), int(acceptance.token[0])
      (2, 9)
    """

    count: jax.Array
    token: jax.Array
    path: jax.Array | None = None


@struct.dataclass
class Outcome:
    """The tokens that a round committed, after end-of-text and budget were applied.

    Attributes:
      tokens: int32[B, K + 1].
      count: int32[B], how many of them were committed; 0 in a finished row.
      drafted: int32[B], draft tokens verified.
      accepted: int32[B], draft tokens committed.
      aux_hidden_states: [B, K + 1, F], the target's hidden states, as the drafter's `aux_layers`, of (pending, draft 1,
        …, draft K). Entry i belongs to the token before `tokens[:, i]` and is valid below count[b]. None for other
        drafters, and if they follow in a later outcome, in which nothing is drafted.
      start: int32[B], the position of the pending token that `aux_hidden_states` begin with; None without them.
      fed: int32[B, K + 1], for a tree [B, N + 1]: the verified tokens, the pending one first, −1 in empty rows.
        None unless the drafter has `num_top_tokens`.
      top_tokens: int32[B, K + 1, M] or [B, N + 1, M], the top M target tokens after each of `fed`, −1 where a grammar
        allows fewer, for a drafter whose `num_top_tokens` is M; None for others.
      beside: [B, M, D], the residual streams of the rows of `Drafter.beside` after all layers; None without them.

    Examples:
      >>> drafted, accepted = jnp.array([3]), jnp.array([1])
      >>> outcome = Outcome(jnp.array([[4, 9, 0, 0]]), jnp.array([2]), drafted, accepted)
      >>> float(outcome.accepted[0] / outcome.drafted[0]) < 0.5
      True
    """

    tokens: jax.Array
    count: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    aux_hidden_states: jax.Array | None = None
    start: jax.Array | None = None
    fed: jax.Array | None = None
    top_tokens: jax.Array | None = None
    beside: jax.Array | None = None


@struct.dataclass
class Signal:
    """The inputs of a stop rule after draft token number `step` (from 0).

    Attributes:
      step: int32 scalar.
      token: int32[B].
      logits: float32[B, V], the draft's raw logits, with grammar and penalties applied; [B, N] for a draft with its own
        vocabulary.
      hidden: [B, D], the draft's last hidden state before the final norm.
      index: int32[B], the token's index in `logits`; None if it is the token itself.

    Examples:
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), logits=jnp.zeros((1, 4)), hidden=jnp.zeros((1, 8)))
      >>> signal.logits.shape
      (1, 4)
    """

    step: jax.Array
    token: jax.Array
    logits: jax.Array
    hidden: jax.Array
    index: jax.Array | None = None


class StopRule(Protocol):
    """Decides, after each draft token, whether to draft another.

    A rule is a stopping time: after draft token i it decides on token i + 1. It cannot withdraw a token, because
    that would bias the text.

    Examples:
      >>> from jaxspec.stopping import AdaptiveLength
      >>> rule: StopRule = AdaptiveLength(first=2)
      >>> state = rule.init(batch_size=1)
      >>> signal = Signal(jnp.int32(0), jnp.array([3]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> stopped, state = rule.stop(state, signal)
      >>> stopped.tolist()
      [False]
    """

    def init(self, batch_size: int) -> State: ...

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]: ...

    def observe(self, state: State, outcome: Outcome) -> State: ...


class Drafter(abc.ABC):
    """The base class of drafters: a drafter proposes tokens, and the target verifies them.

    A subclass is a `flax.struct` dataclass. It declares `num_draft_tokens` (K) and defines `propose`. Every other
    member has a default, which suits a drafter that keeps no state, proposes chains and reads nothing of the target.
    All properties are static: they fix the shapes of the compiled loop.

    A drafter that reads the target's auxiliary hidden states (a trained head such as EAGLE's) overrides `aux_layers`,
    `begin`, `absorb` and `absorbed`. One that proposes trees overrides `drafts_trees` and `num_nodes`. One that skips
    sublayers of the target by a mask that is data overrides `static`, `plans` and `specialised`.

    Examples:
      >>> class Echo(Drafter):
      ...     num_draft_tokens = 1
      ...     def propose(self, keys, params, state, view, distribution):
      ...         return Proposal(view.pending[:, None], jnp.minimum(view.budget, 1)), state, view.cache
      >>> Echo().reach, Echo().verify_widths, Echo().aux_layers
      (2, (2,), ())
    """

    # K, the most tokens of a proposal that follow one another: the length of a chain or the depth of a tree. It has no
    # default and is not a property, because a property would prevent a dataclass field of this name.
    num_draft_tokens: int

    @property
    def num_nodes(self) -> int:
        """The most tokens of a proposal: K for a chain, the number of nodes for a tree."""
        return self.num_draft_tokens

    @property
    def drafts_trees(self) -> bool:
        """Whether proposals are trees, that is, have `parents`."""
        return False

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The numbers of rows for which a verification is compiled, rising to `num_nodes` + 1.

        Each round uses the narrowest width that holds its longest draft. On an accelerator, where rows are nearly free,
        only the last width is compiled, see `model.control.narrowest`.
        """
        return (self.num_nodes + 1,)

    @property
    def reach(self) -> int:
        """How many slots after the committed tokens a round may write, at least `num_nodes` + 1.

        No round begins unless every cache has that many free slots.
        """
        return self.num_nodes + 1

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The target's hidden states that the drafter reads, in this order, see `model.llama.AuxLayer`."""
        return ()

    @property
    def num_top_tokens(self) -> int:
        """How many of the target's most likely tokens the drafter reads after each verified token, see `Outcome`."""
        return 0

    @property
    def static(self) -> bool:
        """Whether the host compiles a program for the mask that all rows share, and uses it once it is compiled."""
        return False

    @property
    def mixes_rows(self) -> bool:
        """Whether a row's drafts depend on the other rows, which must then have different randomness."""
        return False

    def taking_turns(self) -> Drafter:
        """Returns the drafter for a text in which other drafters have some of the rounds.

        In those rounds its `observe` sees that nothing was drafted.

        Raises:
          ValueError: the drafter's state must follow every round; one line.
        """
        return self

    def init(self, params: Weights, view: View, prefill: Prefill) -> State:
        """Returns the state of a new text after its prefill; `view.length` counts the first generated token."""
        return ()

    @abc.abstractmethod
    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, distribution: Distribution
    ) -> tuple[Proposal, State, KVCache]:
        """Returns a proposal, the new state, and the target's cache, which the drafter may have used for its drafts.

        Args:
          keys: a key per row, [B].
          params: the target's parameters and the drafter's.
          state: the drafter's state.
          view: the committed tokens of the rows.
          distribution: the distribution from which draft tokens are drawn.
        """

    def beside(self, params: Weights, view: View, proposal: Proposal) -> Beside | None:
        """Returns rows that run beside the verification of a chain, None for none; `reach` counts them."""
        return None

    def observe(self, params: Weights, state: State, outcome: Outcome) -> State:
        """Returns the state after a round that committed `outcome`."""
        return state

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the part of a state that `absorbed` returns, before the first token of a prompt: empty caches.

        A drafter that overrides `absorbed` overrides it too. One with `aux_layers` absorbs a prompt into the result.

        Args:
          params: the target's parameters and the drafter's.
          length: int32[B], the lengths of the prompts.
          capacity: slots per row of the drafter's own caches.
          merged: the layout of the caches, see `model.cache`.
        """
        if self.aux_layers:
            raise TypeError(f"{type(self).__name__} has auxiliary layers; it must define begin and absorb")
        return None

    def absorb(
        self,
        params: Weights,
        state: State,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> State:
        """Returns the state of a drafter with `aux_layers` after it has absorbed more tokens.

        It is called for each chunk of a prompt, then for the prompt's last token with the first generated token. The
        last result becomes `Prefill.absorbed`. Afterwards `observe` gets the auxiliary hidden states of each round in
        its outcome.

        Args:
          params: the target's parameters and the drafter's.
          state: the result of the previous call.
          aux_hidden_states: [B, T, F], the auxiliary hidden states of T tokens, concatenated.
          tokens: int32[B, T], the token after each of them: a head predicts the token after both.
          start: int32[B], the position of the first of the T tokens.
          count: int32[B], how many of the T tokens are valid.
        """
        raise TypeError(f"{type(self).__name__} has auxiliary layers; it must define begin and absorb")

    def absorbed(self, state: State) -> State:
        """Returns the part of a state with which a text continues that begins with the same tokens.

        A drafter with a cache of its own overrides it, so that the next turn of a conversation feeds only new tokens,
        and `begin`.
        For a drafter with `aux_layers` it is a state of `absorb`; otherwise `init` gets it as `Prefill.absorbed`, with
        zeros in the rows that do not continue. The result may have absorbed more tokens than the two texts share; these
        must not have any effect. With the default, None, the drafter's state starts empty, and one with `aux_layers`
        needs the whole prompt fed.

        Args:
          state: the state of a text, after its prefill or after a round.
        """
        return None

    def plans(self, state: State, live: jax.Array) -> jax.Array:
        """Returns the mask of each row, bool[B, L, 2], from its state and the live rows, bool[B]."""
        raise TypeError(f"{type(self).__name__} skips no sublayers; its mask has no meaning")

    def specialised(self, plan: LayerPlan) -> Drafter:
        """Returns the same drafter, with the same state, for rows that all have this mask."""
        raise TypeError(f"{type(self).__name__} skips no sublayers; its mask has no meaning")


class StatelessRule(StopRule):
    """A base for stop rules that remember nothing: a subclass adds `stop`.

    Examples:
      >>> class AfterTwo(StatelessRule):
      ...     def stop(self, state, signal):
      ...         return jnp.full(signal.token.shape, signal.step >= 1), state
      >>> signal = Signal(jnp.int32(1), jnp.array([3]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> AfterTwo().stop((), signal)[0].tolist()
      [True]
    """

    def init(self, batch_size: int) -> State:
        """Returns the state of a part without one, ()."""
        return ()

    def observe(self, state: State, outcome: Outcome) -> State:
        """Returns the state as it was: nothing is learnt."""
        return state


class Acceptor(abc.ABC):
    """The base class of acceptors, which compare a proposal with the target's logits and keep no state.

    A subclass is a `flax.struct` dataclass that defines `accept`. Trees are accepted by `tree_acceptance.walk`, or by
    `tree_acceptance.reject` if their tokens were drawn, unless the acceptor has an `accept_tree` with the same
    signature. Rows of a tree's logits may be NaN; they must not change what is accepted before them.

    Class attributes:
      accept_tree: accepts a path of a tree; None for the functions above.
      coupled: whether the acceptor draws the target's token at each position independently of the draft. Its keys are
        then those of the positions, [B, T], and drafters receive them too (`View.draws`).

    Examples:
      >>> from jaxspec.acceptance import GreedyAcceptor
      >>> from jaxspec.sampling import Greedy
      >>> acceptor: Acceptor = GreedyAcceptor()
      >>> proposal = Proposal(jnp.array([[1, 2]]), jnp.array([2]))
      >>> logits = jax.nn.one_hot(jnp.array([[1, 3, 0]]), 4)
      >>> acceptance = acceptor.accept(jax.random.split(jax.random.key(0), 1), proposal, logits, Greedy())
      >>> int(acceptance.count[0]), int(acceptance.token[0])
      (1, 3)
    """

    accept_tree: ClassVar[Callable[..., Acceptance] | None] = None
    coupled: ClassVar[bool] = False

    @abc.abstractmethod
    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Returns the number of accepted draft tokens and the token after them.

        Args:
          keys: [B], a key per row; [B, T] for a `coupled` acceptor.
          proposal: T − 1 draft tokens per row.
          logits: float32[B, T, V], the target's logits after (pending, draft 1, …, draft T − 1).
          distribution: the target's sampling distribution.
        """


def rising_widths(num_draft_tokens: int) -> tuple[int, ...]:
    """Returns the verify widths of a drafter that often proposes less than K, or nothing: 1, 5, 17, 65 and K + 1.

    Each width is another copy of the model to compile, so those above half of K + 1 are left out.

    Examples:
      >>> rising_widths(5), rising_widths(10), rising_widths(40)
      ((1, 6), (1, 5, 11), (1, 5, 17, 41))
    """
    full = num_draft_tokens + 1
    return (1, *(width for width in (5, 17, 65) if 2 * width <= full), full)


def kinds_of(part: Any) -> tuple[type, ...]:
    """Returns the classes of a part and of the parts in it: static, they keep the programs of two parts apart.

    JAX compares the structures of two dataclasses by their fields, not by their names, and separates them only by hash;
    without the classes it would sometimes run the program of one for the other.

    Examples:
      >>> from jaxspec.stopping import ConfidenceBelow, FixedGamma, ProductBelow
      >>> confidence, product = ConfidenceBelow(FixedGamma(0.5)), ProductBelow(FixedGamma(0.5))
      >>> jax.tree.structure(confidence) == jax.tree.structure(product), kinds_of(confidence) == kinds_of(product)
      (True, False)
    """
    if isinstance(part, tuple):
        return tuple(kind for member in part for kind in kinds_of(member))
    # JAX sometimes puts dataclass objects in the place of leaves.
    if not dataclasses.is_dataclass(part) or jax.tree_util.all_leaves([part]):
        return ()
    return type(part), *kinds_of(tuple(getattr(part, field.name) for field in dataclasses.fields(part)))
