"""The contracts of a drafter, as functions that raise an AssertionError if the contract is broken.

`check_drafter` checks all of them. `tests/core/test_conformance.py` runs them on every drafter, stop rule and acceptor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.acceptance import BlockAcceptor, CoupledAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.decoding import DecodeState, Parts
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Acceptor, Drafter, Prefill, Proposal, View, Weights
from jaxspec.sampling import Distribution, Greedy, Sampling, seed_key
from jaxspec.testing import distributions, reference
from jaxspec.testing.loop import Loop, committed, generated, greedy, num_compiled, run_rounds, view
from jaxspec.testing.models import CAPACITY, TARGET, params

# Prompts and budgets of different lengths; the last prompt repeats itself.
PROMPTS = ((1, 2, 3), (5,), (7, 1, 7, 1, 7, 1, 7, 2))
BUDGETS = (12, 9, 14)
DRAWS = 1500
# A vocabulary of four tokens, so that all texts can be enumerated.
FOUR = dataclasses.replace(
    TARGET, vocab_size=4, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1
)
ACCEPTORS: dict[str, Callable[[], Acceptor]] = {
    "greedy": GreedyAcceptor,
    "rejection": RejectionAcceptor,
    "block": BlockAcceptor,
    "coupled": CoupledAcceptor,
}
# Maps the target's config to a drafter and its parameters, None for a drafter without parameters.
MakeDrafter = Callable[[LlamaConfig], tuple[Drafter, Any]]


def check_drafter(
    make: Drafter | MakeDrafter,
    config: LlamaConfig = TARGET,
    acceptors: Iterable[str] = tuple(ACCEPTORS),
    report: Callable[[str], None] = lambda what: None,
) -> str:
    """Checks every contract of a drafter on small models; about a minute per acceptor on a CPU.

    Args:
      make: a drafter that works with every model, or a function that makes a drafter and its parameters for a target's
        config.
      config: the target of all checks except `check_sampled_distribution`, whose vocabulary has four tokens.
      acceptors: names among greedy, rejection, block and coupled.
      report: called with the name of each check before it begins.

    Returns:
      one line: the drafter, and the number of checks that passed.

    Raises:
      AssertionError: a contract is broken; the message names it and the failing example.

    Examples:
      >>> from jaxspec.drafting.ngram_drafter import NGramDrafter
      >>> check_drafter(NGramDrafter(num_draft_tokens=3), acceptors=["greedy"])
      'NGramDrafter passed 8 checks with the acceptors greedy'
    """
    small = dataclasses.replace(FOUR, num_layers=config.num_layers)
    names, passed, drafter = tuple(acceptors), 0, ""
    for name in names:
        loop = drafter_loop(make, name, config)
        drafter = type(loop.parts.drafter).__name__
        checks: list[Callable[[Any], None]] = [*CHECKS]
        if name == "coupled":
            checks.append(check_seeded_text)
        for check in checks:
            report(f"{check.__name__}, {name} acceptor")
            check(loop)
        if name != "greedy":
            report(f"check_sampled_distribution, {name} acceptor")
            check_sampled_distribution(functools.partial(drafter_loop, make, name, small))
        passed += len(checks) + (name != "greedy")
    return f"{drafter} passed {passed} checks with the acceptors {', '.join(names)}"


def drafter_loop(
    make: Drafter | MakeDrafter,
    acceptor: str,
    config: LlamaConfig = TARGET,
    distribution: Distribution | None = None,
) -> Loop:
    """Returns the loop of a drafter on a small model; see `check_drafter`.

    Examples:
      >>> from jaxspec.drafting.ngram_drafter import NGramDrafter
      >>> drafter_loop(NGramDrafter(num_draft_tokens=3), "greedy").parts.acceptor
      GreedyAcceptor()
    """
    drafter: Any = make
    own = None
    if not isinstance(make, Drafter):
        drafter, own = make(config)
    if distribution is None:
        distribution = Greedy() if acceptor == "greedy" else Sampling(jnp.array([0.0, 1.0, 0.7]))
    parts = Parts(drafter, ACCEPTORS[acceptor](), distribution)
    # Python numbers become arrays, so that other values have the same type and compile nothing.
    parts = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), parts)
    return Loop(parts, Weights(params(config), own), config)


@functools.partial(jax.jit, static_argnames="draws")
def propose(parts: Parts, weights: Weights, state: DecodeState, draws: int) -> tuple[Proposal, Any]:
    """Returns the proposals and caches of many calls of `propose` from one state, [draws, B, ...]."""
    view = View(state.tokens, state.length, state.cache, budget=jnp.full_like(state.length, 99))
    keys = jax.random.split(seed_key(9), (draws, len(state.length)))

    def once(keys: jax.Array) -> tuple[Proposal, Any]:
        proposal, _, cache = parts.drafter.propose(
            keys, weights, state.drafter_state, view, parts.distribution
        )
        return proposal, cache

    return jax.vmap(once)(keys)


def check_loan(loop: Loop) -> None:
    """Checks that `propose` does not change a bit of the committed slots of the target's cache."""
    state, _ = loop.begin(PROMPTS, BUDGETS)
    for _ in range(2):  # after the prefill, and after some rounds
        _, caches = propose(loop.parts, loop.weights, state, DRAWS)
        for row, length in enumerate(np.asarray(state.length)):
            lent = committed(state.cache, row, length - 1)
            back = committed(jax.tree.map(lambda leaf: leaf[-1], caches), row, length - 1)
            assert all(array.any() for array in lent), "the cache is empty, so nothing is checked"
            for before, after in zip(lent, back, strict=True):
                assert (before == after).all(), f"the draft changed committed slots of row {row}'s cache"
        state, _ = loop.go_on(state, 2)


def check_log_probs(loop: Loop) -> None:
    """Checks that the frequencies of draft tokens agree with the proposal's `log_probs`, for every row and place."""
    state, _ = loop.begin(PROMPTS, BUDGETS)
    proposal, _ = propose(loop.parts, loop.weights, state, DRAWS)
    if proposal.log_probs is None:
        # Point masses: another call with other keys must give the same tokens.
        tokens, count = np.asarray(proposal.tokens), np.asarray(proposal.count)
        assert (count == count[:1]).all(), (
            "a drafter without log_probs must propose the same number each time"
        )
        there = np.arange(tokens.shape[-1]) < count[..., None]
        same = (tokens == tokens[:1]) | ~there
        assert same.all(), "a drafter without log_probs must propose the same tokens each time"
        return
    probs = np.exp(np.asarray(proposal.log_probs, np.float64))
    for row, place in itertools.product(range(len(PROMPTS)), range(probs.shape[2])):
        tokens = np.asarray(proposal.tokens)[:, row, place]
        there = (np.asarray(proposal.count)[:, row] > place) & (tokens >= 0)  # nodes of a tree may be empty
        where = f"row {row}, draft token {place}"
        assert place > 0 or there.all(), f"{where}: no token is drafted although the budget is not 0"
        q = probs[there, row, place]
        assert np.allclose(q.sum(axis=-1), 1, atol=1e-5), f"{where}: the probabilities do not sum to 1"
        drawn = np.eye(q.shape[1])[tokens[there]]
        assert (drawn[q == 0] == 0).all(), f"{where}: a token of probability 0 was drawn"
        spread = np.sqrt((q * (1 - q)).sum(axis=0)) + 1
        off = np.abs((drawn - q).sum(axis=0) / spread).max()
        assert off < 4.5, f"{where}: draft tokens do not follow log_probs ({off:.1f} standard deviations)"


def check_no_recompilation(loop: Loop) -> None:
    """Checks that other prompts, budgets, seeds, numbers, ends of texts, limits and halted rows compile nothing."""
    state, _ = loop.begin(PROMPTS, BUDGETS)
    loop.go_on(state)
    sizes = num_compiled()
    other = dataclasses.replace(loop, parts=jax.tree.map(_changed, loop.parts))
    prompts = ((4, 4, 9, 1, 12, 0, 3, 3, 3, 2, 1), (2, 1), (11,))
    state, _ = other.begin(prompts, (3, 20, 8), seeds=(8, 8, 1000), eos=(3, 4))
    state, _ = other.go_on(state, rounds=2, halt=[False, False, True])
    other.go_on(state, rounds=50)
    assert num_compiled() == sizes, "another number compiled another program"


def _changed(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return jnp.roll(leaf, 1) if leaf.dtype == bool else jnp.asarray(leaf * 0.9, leaf.dtype)


def check_params_are_arguments(loop: Loop) -> None:
    """Checks that no parameter is a constant of the program: all constants are smaller than the smallest matrix."""
    state, _ = loop.begin(PROMPTS, BUDGETS)
    arguments = (loop.weights, loop.parts, state, jnp.int32(1), jnp.zeros(len(PROMPTS), bool))
    traced = run_rounds.trace(loop.config, *arguments, window=CAPACITY)
    batch, config = len(PROMPTS), loop.config
    ended = jnp.zeros((batch, config.hidden_size)), jnp.ones((batch, config.num_layers, 2))
    aux_drafter, absorbed = decoding.aux_drafter_of(loop.parts), None
    if aux_drafter is not None:
        absorbed = aux_drafter.begin(loop.weights, state.length, state.capacity, state.cache.merged)
    fed = Prefill(*ended, chunk_size=8, absorbed=absorbed, vectors=ended[0])
    begun = jax.make_jaxpr(_begun)(loop.parts.drafter, loop.weights, state, fed)
    smallest = min(leaf.size for leaf in jax.tree.leaves(loop.weights) if leaf.ndim > 1)
    largest = max(largest_constant(traced.jaxpr), largest_constant(begun))
    assert largest < smallest, f"the program has a constant of {largest} elements; pass it as a parameter"


def check_begin(loop: Loop) -> None:
    """Checks that `begin` returns the shapes of `absorbed`, so that texts can continue from empty caches."""
    drafter = loop.parts.drafter
    state, _ = loop.begin(PROMPTS, BUDGETS)
    begin = functools.partial(drafter.begin, capacity=state.capacity, merged=state.cache.merged)
    found, expected = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
        for shapes in (
            jax.eval_shape(begin, loop.weights, state.length),
            jax.eval_shape(drafter.absorbed, state.drafter_state),
        )
    )
    assert found == expected, (
        f"begin returns {found}, and absorbed returns {expected}; give them the same shapes"
    )


def _begun(drafter: Drafter, weights: Weights, state: DecodeState, prefill: Prefill) -> Any:
    return drafter.init(weights, view(state), prefill)


def largest_constant(closed: Any) -> int:
    """Returns the size of the largest constant in a closed jaxpr and the jaxprs that it calls."""
    sizes = [np.size(const) for const in closed.consts]
    for equation in closed.jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                sizes.append(largest_constant(value))
    return max(sizes, default=0)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "consts") and hasattr(value, "jaxpr")


def check_greedy_text(loop: Loop) -> None:
    """Checks that greedy rows have the text of a slow decoder without a cache, with and without an end of text."""
    found = loop.texts(PROMPTS, BUDGETS)
    rows = range(len(PROMPTS)) if isinstance(loop.parts.acceptor, GreedyAcceptor) else [0]
    for row in rows:
        _same(found[row], greedy(PROMPTS[row], BUDGETS[row], (), loop.config), row)
    ends = tuple(greedy(PROMPTS[0], 12, (), loop.config)[4:6])
    state, _ = loop.begin(PROMPTS, BUDGETS, eos=ends)
    state, _ = loop.go_on(state)
    for row in rows:
        _same(generated(state, PROMPTS)[row], greedy(PROMPTS[row], BUDGETS[row], ends, loop.config), row)


def _same(found: Sequence[int], expected: Sequence[int], row: int) -> None:
    assert list(found) == list(expected), f"row {row}: the text is {found}, plain decoding's {expected}"


def check_seeded_text(loop: Loop) -> None:
    """Checks that with the coupled acceptor each row equals the text that plain decoding draws with the row's key."""
    parts = dataclasses.replace(loop.parts, drafter=AutoregressiveDrafter(), acceptor=BlockAcceptor())
    plain = Loop(parts, Weights(loop.weights.target), loop.config)
    for seeds in ((1, 2, 3), (44, 55, 66)):
        found, expected = (one.texts(PROMPTS, BUDGETS, seeds=seeds) for one in (loop, plain))
        for row in range(len(PROMPTS)):
            _same(found[row], expected[row], row)


def check_rows_are_independent(loop: Loop) -> None:
    """Checks that a row's text depends neither on the other rows of its batch nor on the number of rounds per call."""
    one = loop.texts(PROMPTS, BUDGETS, seeds=(3, 4, 5))
    other = loop.texts(((2, 2), PROMPTS[1], (6,)), (3, BUDGETS[1], 5), seeds=(11, 4, 12))
    assert one[1] == other[1], f"beside other rows the text is {other[1]} instead of {one[1]}"
    check_calls(loop)


def check_calls(loop: Loop) -> None:
    """Checks that the text is the same in calls of two rounds as in one call."""
    one = loop.texts(PROMPTS, BUDGETS, seeds=(3, 4, 5))
    state, _ = loop.begin(PROMPTS, BUDGETS, seeds=(3, 4, 5))
    while not state.done.all():
        state, _ = loop.go_on(state, 2)
    assert generated(state, PROMPTS) == one, "the text depends on the number of rounds per call"


def check_refill(loop: Loop, statistics: bool = True) -> None:
    """Checks that rows which replace others in a running batch with a grown cache have the same rounds as in their own.

    Args:
      loop: the loop.
      statistics: whether the counts of rounds and drafts are compared in addition to the texts; False for a drafter
        whose drafts for a row depend on the other rows.
    """
    others, _ = loop.begin(PROMPTS, BUDGETS, seeds=(3, 4, 5))
    alone, _ = loop.go_on(others)
    expected = generated(alone, PROMPTS)
    # Grown to the capacity of all other checks, to use the same compiled program.
    small = CAPACITY // 2
    state, _ = loop.begin(((2, 2), PROMPTS[1], (6,)), (3, BUDGETS[1], 5), seeds=(11, 4, 12), capacity=small)
    state, _ = loop.go_on(decoding.grow(state, CAPACITY), 2)
    for leaf in jax.tree.leaves(state.drafter_state, is_leaf=_is_cache):
        assert _is_cache(leaf) or (leaf.ndim and leaf.shape[0] == len(PROMPTS)), (
            f"the drafter's state has an array of shape {leaf.shape}; its first axis must be that of the rows"
        )
    for row in (0, 2):  # into the same rows, because each row has its own temperature
        state = decoding.insert(state, jnp.int32(row), others, jnp.int32(row))
    state, _ = loop.go_on(state)
    found = generated(state, PROMPTS)
    assert found == expected, f"as replacements of other rows, the texts are {found} instead of {expected}"
    if not statistics:
        return
    # A wrong drafter state does not change the text, only the numbers of drafted and accepted tokens.
    for field in dataclasses.fields(state.stats):
        ours, theirs = (np.asarray(getattr(one.stats, field.name)).tolist() for one in (state, alone))
        assert ours == theirs, f"as replacements of other rows, {field.name} is {ours} instead of {theirs}"


def _is_cache(node: object) -> bool:
    return isinstance(node, KVCache)


def check_sampled_distribution(loop_of: Callable[[Distribution], Loop], rows: int = 8_000) -> None:
    """Checks by a χ² test that sampled texts of the whole loop follow the target's distribution of texts.

    Args:
      loop_of: maps a sampling distribution to the loop, on a model with four tokens.
      rows: the number of texts of the first of two prompts; the second has half as many.
    """
    prompts, budget, eos = ((1, 3, 1), (2,)), 4, (2,)
    batch = [prompts[row % 3 == 2] for row in range(3 * rows // 2)]
    numbers: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95}
    distribution = Sampling(
        jnp.full(len(batch), numbers["temperature"]), top_p=jnp.full(len(batch), numbers["top_p"])
    )
    loop = loop_of(distribution)
    texts = loop.texts(batch, budget, eos=eos, capacity=16)
    for prompt in prompts:

        def next_probs(prefix: tuple[int, ...], prompt: tuple[int, ...] = prompt) -> np.ndarray:
            logits = reference.forward(loop.config, params(loop.config), [*prompt, *prefix])
            return distributions.warp(logits[-1], **numbers)

        expected = distributions.text_distribution(next_probs, budget, eos)
        assert len(expected) > 30, "too few texts are possible for a test"
        found = [tuple(text) for text, row in zip(texts, batch, strict=True) if row == prompt]
        p_value = distributions.chi_square(found, expected)
        assert p_value > 1e-3, f"texts do not follow the target's distribution (χ² test: p = {p_value:.1e})"


CHECKS = (
    check_loan,
    check_log_probs,
    check_no_recompilation,
    check_params_are_arguments,
    check_begin,
    check_greedy_text,
    check_rows_are_independent,
    check_refill,
)
