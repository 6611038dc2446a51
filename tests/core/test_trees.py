"""Trees of draft tokens: attention of their rows, acceptance, and the cache after a round."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.tree_drafter import Dynamic, combine
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.tree import Shape, Tree
from jaxspec.protocol import Drafter, Proposal, Weights
from jaxspec.sampling import Distribution, Greedy, Sampling
from jaxspec.testing import reference
from jaxspec.tree_acceptance import chances, reject
from tests import refused, tiny

V, CAPACITY = tiny.TARGET.vocab_size, 64
PROMPTS = ((1, 2, 3), (5,), (7, 1, 7, 1, 7, 1, 7, 2))
LONGEST = 16
# The nodes are not sorted by depth.
SHAPE = Shape((-1, -1, 0, 2, 0, 1, 3, -1, 6))
DEPTH, NODES = SHAPE.depth, len(SHAPE.parents)


def path_to(parents, node: int) -> list[int]:
    """Returns the nodes from the root to a node, inclusive."""
    found: list[int] = []
    while node >= 0:
        found.insert(0, node)
        node = parents[node]
    return found


def random_parents(rng: np.random.Generator, nodes: int, depth: int) -> list[int]:
    parents: list[int] = []
    while len(parents) < nodes:
        parent = int(rng.integers(-1, len(parents)))
        if len(path_to(parents, parent)) < depth:
            parents.append(parent)
    return parents


def test_a_tree_knows_depths_and_paths():
    """One tree for all rows, or one for each row."""
    rng = np.random.default_rng(0)
    each = [random_parents(rng, NODES, DEPTH) for _ in range(4)]
    tree = Tree.from_parents(jnp.array(each), DEPTH)
    static = Tree.from_parents(SHAPE, DEPTH)
    assert (SHAPE.depths, DEPTH) == ((1, 1, 2, 3, 2, 2, 4, 1, 5), 5)
    for parents, row, of in [*((p, i, tree) for i, p in enumerate(each)), (SHAPE.parents, 0, static)]:
        for node in range(NODES):
            path = path_to(parents, node)
            assert of.depth[row, node + 1] == len(path)
            assert np.flatnonzero(of.behind[row, node + 1]).tolist() == [0, *(n + 1 for n in path)]
        assert np.flatnonzero(of.behind[row, 0]).tolist() == [0]


@pytest.mark.parametrize(
    ("parents", "ranks", "line"),
    [((-1, 1), (), "node 1 of a tree follows node 1"), ((-1, -2), (), "follows node -2"),
     ((-1, 0), (0,), "2 nodes and 1 ranks")],
)  # fmt: skip
def test_a_shape_that_is_no_tree_is_refused(parents, ranks, line):
    with refused(line):
        Shape(parents, ranks)


@pytest.mark.representatives("3-32-True", "3-256-False", "3-512-True")
@pytest.mark.parametrize(
    ("window", "capacity", "merged"), [(None, 256, True), (3, 256, False), (3, 32, True), (3, 512, True)]
)
def test_each_node_sees_its_own_path_alone(monkeypatch, capacity, window, merged):
    """The hidden states equal those of each path run alone, also with blocked attention and in a ring of 256 places."""
    config = dataclasses.replace(tiny.TARGET, sliding_windows=() if window is None else (window, None))
    rng = np.random.default_rng(1)
    # A row far from the next block, and one that crosses into it, or to the first place of a ring.
    starts = {32: [4, 9], 256: [20, 125], 512: [140, 253]}[capacity]
    monkeypatch.setattr(kv, "most_places", lambda config: (window and 256, None))
    monkeypatch.setattr(kv, "SPARE", 253)
    parents = [random_parents(rng, NODES, DEPTH) for _ in starts]
    texts = rng.integers(0, V, (2, capacity))
    drafts = rng.integers(0, V, (2, NODES + 1))
    weights, start = tiny.params(config), jnp.array(starts)
    forward = jax.jit(functools.partial(llama.run_layers, config))
    empty = kv.create(config, 2, capacity, jnp.float32, merged)
    fed = llama.embed(config, weights, jnp.asarray(texts[:, : max(starts)]))
    _, cache = forward(weights, fed, jnp.zeros(2, jnp.int32), empty)
    tree = Tree.from_parents(jnp.array(parents), DEPTH)
    hidden, written = forward(
        weights, llama.embed(config, weights, jnp.asarray(drafts)), start, cache, tree=tree
    )
    for row, node in [(row, node) for row in range(2) for node in range(NODES)]:
        path = [0, *(n + 1 for n in path_to(parents[row], node))]
        # Padded, so that paths of all lengths are one program; a token does not see those after it.
        chain = llama.embed(config, weights, jnp.asarray(drafts[:, path + [0] * (DEPTH + 1 - len(path))]))
        alone, after = forward(weights, chain, start, cache)
        np.testing.assert_allclose(hidden[row, node + 1], alone[row, len(path) - 1], atol=2e-5)
        if node == NODES - 1:
            moved = kv.move(written, start, jnp.array([path, path]), max(path) + 1)
            found = tiny.committed(moved, row, starts[row] + len(path))
            expected = tiny.committed(after, row, starts[row] + len(path))
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_path_is_taken_without_a_gather():
    """As on a TPU; an entry that is not finite and not on the path does not spread."""
    slots = np.random.default_rng(2).normal(size=(2, 3, 7, 4)).astype(np.float32)
    slots[0, 1, 5], slots[1, 2, 0] = np.nan, np.inf
    path = np.array([[0, 2, 4, 6], [1, 1, 3, 6]])
    found = kv.summed_along(jnp.asarray(slots), jnp.asarray(path))
    np.testing.assert_array_equal(found, np.take_along_axis(slots, path[:, None, :, None], axis=2))


@pytest.mark.parametrize("merged", [True, False])
def test_query_heads_apart_attend_as_together(merged):
    """As on a TPU."""
    rng = np.random.default_rng(3)
    batch, rows, kv_heads, group, size, slots = 2, 5, 3, 2, 4, 16
    queries = jnp.asarray(rng.normal(size=(batch, rows, kv_heads, group, size)), jnp.float32)
    heads = (batch * kv_heads,) if merged else (batch, kv_heads)
    layer = tuple(jnp.asarray(rng.normal(size=(*heads, slots, size)), jnp.float32) for _ in range(2))
    seen = jnp.asarray(rng.random((batch, rows, slots)) < 0.5).at[..., 0].set(True)
    together, apart = (kv.attend_where(queries, layer, seen, merged, apart=apart) for apart in (False, True))
    np.testing.assert_allclose(apart, together, atol=1e-6)


# The loop


@struct.dataclass
class Scripted(Drafter):
    """Drafts a tree whose nodes differ by `shift` from the script's tokens at their positions.

    Attributes:
      script: int32[B, N] texts.
      shift: int32[B, nodes]; a negative value marks an absent node.
      count: int32[B].
      parents: the tree.
      seen: whether the state keeps the outcome.
    """

    script: jax.Array
    shift: jax.Array
    count: jax.Array
    parents: Any
    drafts_trees: bool = struct.field(pytree_node=False, default=True)
    aux_layers: tuple[Any, ...] = struct.field(pytree_node=False, default=())
    num_top_tokens: int = struct.field(pytree_node=False, default=0)
    verify_widths: tuple[int, ...] = struct.field(pytree_node=False, default=(1, 4, NODES + 1))
    num_draft_tokens: int = struct.field(pytree_node=False, default=DEPTH)
    num_nodes: int = struct.field(pytree_node=False, default=NODES)
    reach: int = struct.field(pytree_node=False, default=NODES + 1)

    def begin(self, params, length, capacity, merged):
        return ()

    def absorb(self, params, state, aux_hidden_states, tokens, start, count):
        return state

    def init(self, params, view, prefill):
        batch, rows = len(view.length), NODES + 1
        state = {}
        if self.aux_layers:
            state["aux_hidden_states"] = jnp.zeros((batch, DEPTH + 1, tiny.TARGET.hidden_size))
        if self.num_top_tokens:
            state["fed"] = jnp.zeros((batch, rows), jnp.int32)
            state["top_tokens"] = jnp.zeros((batch, rows, self.num_top_tokens), jnp.int32)
        return state

    def propose(self, keys, params, state, view, distribution):
        depth = Tree.from_parents(self.parents, DEPTH).depth[:, 1:]
        columns = jnp.minimum(view.length[:, None] + depth - 1, self.script.shape[1] - 1)
        tokens = (jnp.take_along_axis(self.script, columns, axis=1) + self.shift) % V
        tokens = jnp.where(self.shift < 0, -1, tokens)
        return Proposal(tokens, self.count, parents=self.parents), state, view.cache

    def observe(self, params, state, outcome):
        return {name: getattr(outcome, name) for name in state}


@functools.cache
def truth(row: int) -> list[int]:
    return [*PROMPTS[row], *tiny.greedy(PROMPTS[row], LONGEST + DEPTH + 2)]


def shifts(rng: np.random.Generator, parents) -> np.ndarray:
    """Returns random shifts; siblings differ, and one of them is often right."""
    found = np.zeros(NODES, np.int32)
    for parent in range(-1, NODES):
        children = [node for node in range(NODES) if parents[node] == parent]
        others = rng.permutation(np.arange(1, V))[: len(children)]
        for child, shift in zip(children, others, strict=True):
            found[child] = shift
        if children and rng.random() < 0.95:
            found[rng.choice(children)] = 0
    found[rng.random(NODES) < 0.05] = -1
    return found


def scripted(seed: int, kind: str, **options: Any) -> tuple[Scripted, list[list[int]]]:
    """Returns a drafter and the tree of each row."""
    rng = np.random.default_rng(seed)
    parents = [
        list(SHAPE.parents) if kind == "static" else random_parents(rng, NODES, DEPTH) for _ in PROMPTS
    ]
    script = np.zeros((3, CAPACITY), np.int32)
    for row in range(3):
        script[row, : len(truth(row))] = truth(row)
    drafter = Scripted(
        jnp.asarray(script),
        jnp.asarray(np.stack([shifts(rng, one) for one in parents])),
        jnp.asarray(rng.choice([0, 2, NODES, NODES], 3), jnp.int32),
        SHAPE if kind == "static" else jnp.array(parents, jnp.int32),
        **options,
    )
    return drafter, parents


def loop_of(drafter: Any, distribution: Distribution | None = None, acceptor: Any = None) -> tiny.Loop:
    parts = Parts(drafter, acceptor or GreedyAcceptor(), distribution or Greedy())
    return tiny.Loop(parts, Weights(tiny.params()))


def simulated(drafter: Scripted, parents: list[int], row: int, budget: int, eos) -> dict[str, Any]:
    """Simulates the same rounds node by node; returns the text and the counts."""
    text, start = truth(row), len(PROMPTS[row])
    shift, count = np.asarray(drafter.shift)[row], int(drafter.count[row])
    tokens = [text[start]]
    counts = {"num_rounds": 0, "num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    histogram = [0] * (DEPTH + 1)
    while len(tokens) < budget and tokens[-1] not in eos:
        room = budget - len(tokens) - 1
        paths = [path_to(parents, node) for node in range(count)]
        there = [path for path in paths if len(path) <= room and shift[path[-1]] >= 0]
        good = [path for path in there if all(shift[node] == 0 for node in path)]
        accepted = max(map(len, good), default=0)
        drafted = len(there)
        counts["num_rounds"] += 1
        for made in range(1, accepted + 1):
            tokens.append(text[start + len(tokens)])
            if tokens[-1] in eos:
                accepted = made
                drafted = sum(len(path) <= made for path in there)
                break
        else:
            tokens.append(text[start + len(tokens)])
        counts["num_drafts"] += drafted > 0
        counts["num_draft_tokens"] += drafted
        counts["num_accepted_tokens"] += accepted
        histogram[accepted] += drafted > 0
    return {"tokens": tokens, **counts, "acceptance_histogram": histogram}


@pytest.mark.representatives("2-static-eos0", "2-static-eos1", "0-traced-eos1")
@pytest.mark.parametrize("eos", [(), (3, 9)])
@pytest.mark.parametrize(
    ("seed", "kind"), [(2, "static"), (5, "static"), (6, "static"), *((n, "traced") for n in (0, 4, 5))]
)
def test_what_is_committed_and_counted(seed, kind, eos):
    """For any right and wrong nodes in the trees, and any position of the end of text or of the budget."""
    drafter, parents = scripted(seed, kind)
    budgets = [LONGEST, *np.random.default_rng(seed).integers(2, LONGEST, 2).tolist()]
    loop = loop_of(drafter)
    state, first = loop.begin(PROMPTS, budgets, eos=eos, capacity=CAPACITY, log_probs=True)
    state, emitted = loop.go_on(state, log_probs=True)
    assert state.done.all()
    for row, prompt in enumerate(PROMPTS):
        expected = simulated(drafter, parents[row], row, budgets[row], eos)
        found = tiny.generated(state, PROMPTS)[row]
        assert found == expected.pop("tokens")
        assert {name: getattr(state.stats, name)[row].tolist() for name in expected} == expected
        reported = [float(first.log_probs[row, 0, 0]), *emitted.log_probs[row, : len(found) - 1, 0].tolist()]
        np.testing.assert_allclose(reported, tiny.log_probs(prompt, found), atol=1e-4)


@pytest.mark.representatives("traced")
@pytest.mark.parametrize("kind", ["static", "traced"])
def test_the_cache_is_that_of_plain_decoding(kind):
    """The slots of the committed tokens contain their keys and values in order."""
    loop, plain = loop_of(scripted(5, kind)[0]), loop_of(AutoregressiveDrafter())
    state, _ = loop.go_on(loop.begin(PROMPTS, LONGEST, capacity=CAPACITY)[0])
    expected, _ = plain.go_on(plain.begin(PROMPTS, LONGEST, capacity=CAPACITY)[0])
    for row in range(3):
        length = int(state.length[row]) - 1
        pair = tiny.committed(state.cache, row, length), tiny.committed(expected.cache, row, length)
        for one, other in zip(*pair, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.full
def test_aux_hidden_states_are_those_of_the_accepted_path():
    """The outcome has the hidden states of the pending token and of the accepted ones, in order."""
    drafter, _ = scripted(5, "traced", aux_layers=("final",))
    loop = loop_of(drafter)
    state, _ = loop.begin(PROMPTS, LONGEST, capacity=CAPACITY)
    most = 0
    for _ in range(4):
        before = np.asarray(state.length)
        state, emitted = loop.go_on(state, 1)
        for row, (prompt, text) in enumerate(zip(PROMPTS, tiny.generated(state, PROMPTS), strict=True)):
            count, start = int(emitted.count[row]), before[row] - 1
            most = max(most, count)
            stream: list[np.ndarray] = []
            reference.forward(tiny.TARGET, tiny.params(), [*prompt, *text], stream=stream)
            x = stream[-1][start : start + count]
            norm = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + tiny.TARGET.rms_norm_eps)
            expected = norm * np.asarray(tiny.params()["norm"])
            found = state.drafter_state["aux_hidden_states"][row, :count]
            np.testing.assert_allclose(found, expected, atol=1e-4)
    assert most > 2


@pytest.mark.representatives("traced")
@pytest.mark.parametrize("kind", ["static", "traced"])
def test_what_the_target_holds_likely_is_known_of_every_node(kind):
    """The top tokens are also returned for rejected nodes, each after its own path, but not for absent nodes."""
    drafter, parents = scripted(4, kind, num_top_tokens=3)
    drafter = drafter.replace(count=jnp.full(3, NODES))
    loop = loop_of(drafter)
    begun, _ = loop.begin(PROMPTS, LONGEST, capacity=CAPACITY)
    state, _ = loop.go_on(begun, 1)
    fed, top_tokens = (np.asarray(state.drafter_state[name]) for name in ("fed", "top_tokens"))
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, truth(row)[len(prompt)]]
        assert fed[row, 0] == text[-1]
        assert ((fed[row, 1:] < 0) == (np.asarray(drafter.shift)[row] < 0)).all()
        for node in [n for n in range(NODES) if all(fed[row, m + 1] >= 0 for m in path_to(parents[row], n))]:
            path = [fed[row, n + 1] for n in path_to(parents[row], node)]
            logits = reference.forward(tiny.TARGET, tiny.params(), [*text, *path])[-1]
            assert top_tokens[row, node + 1].tolist() == np.argsort(-logits)[:3].tolist()


@pytest.mark.full
@pytest.mark.representatives("traced")
@pytest.mark.parametrize(
    ("kind", "acceptor", "distribution"),
    [
        ("static", BlockAcceptor(), Sampling(jnp.array([0.0, 1.0, 0.7]))),
        ("traced", RejectionAcceptor(), Sampling(jnp.full(3, 0.8), top_p=jnp.array([0.9, 1.0, 0.7]))),
    ],
    ids=["static", "traced"],
)
def test_sampled_text_is_plain_decodings_token_for_token(kind, acceptor, distribution):
    """The keys are the same; the drafts follow another sampled text, so that some are accepted."""
    drafter, _ = scripted(8, kind)
    drafter = drafter.replace(count=jnp.full(3, NODES))
    accepted = 0
    for seeds in ((3, 4, 5), (60, 61, 62)):
        expected = loop_of(AutoregressiveDrafter(), distribution, acceptor).texts(
            PROMPTS, LONGEST, seeds=seeds, capacity=CAPACITY
        )
        script = np.zeros((3, CAPACITY), np.int32)
        for row, text in enumerate(expected):
            script[row, : len(PROMPTS[row]) + LONGEST] = [*PROMPTS[row], *text]
        script[:, ::7] = (script[:, ::7] + 1) % V
        loop = loop_of(drafter.replace(script=jnp.asarray(script)), distribution, acceptor)
        state, _ = loop.go_on(loop.begin(PROMPTS, LONGEST, seeds=seeds, capacity=CAPACITY)[0])
        assert tiny.generated(state, PROMPTS) == expected
        accepted += int(state.stats.num_accepted_tokens.sum())
    assert accepted > 12


# The most probable combinations


@pytest.mark.parametrize(("size", "depth", "nodes"), [(3, 4, 17), (6, 3, 9), (9, 2, 20), (3, 2, 16)])
def test_combinations_are_the_most_probable_of_all(size, depth, nodes):
    """By products in float64 over every path; a tree as large as all paths has all, and spare nodes are empty.

    Among equal products, of which rounded logits have many, any node may be kept, but none without its parent.
    """
    rng = np.random.default_rng(size)
    logits = rng.choice([0.3, 1.0, 4.0], (6, 1, 1)) * rng.standard_normal((6, depth, size))
    logits[3:] = np.round(logits[3:])
    found = combine(Dynamic(nodes, depth, nodes), jnp.asarray(logits, jnp.float32), 10 + jnp.arange(size))
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for row, share in enumerate(shares):
        every = {
            path: np.prod(share[np.arange(length), path])
            for length in range(1, depth + 1)
            for path in itertools.product(range(size), repeat=length)
        }
        best = sorted(every.values(), reverse=True)[:nodes]
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(found.tokens[row].tolist(), found.parents[row].tolist(), strict=True):
            if token >= 0:
                paths.append((*(paths[parent] if parent >= 0 else ()), token - 10))
        assert len(set(paths)) == len(best)
        assert (found.tokens[row, len(best) :] == -1).all()
        kept = sorted((every[path] for path in paths), reverse=True)
        np.testing.assert_allclose(kept, best, rtol=1e-5)


def test_combinations_end_before_a_position_that_is_not_finite():
    """And the other rows of the batch have theirs."""
    logits = jnp.zeros((2, 3, 4)).at[0, 1, 2].set(jnp.nan)
    found = combine(Dynamic(30, 3, 30), logits)
    assert sorted(found.tokens[0].tolist()) == [-1] * 26 + [0, 1, 2, 3]
    assert (found.tokens[1] >= 0).all()


# Drawn tokens


def some_distributions(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Returns flat and sharp distributions, and some with probabilities of 0."""
    sharpness = rng.choice([0.3, 1.0, 4.0], (count, 1))
    weights = np.exp(sharpness * rng.standard_normal((count, size)))
    weights *= rng.random((count, size)) > 0.2
    weights[np.arange(count), rng.integers(size, size=count)] += 0.1
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("most_siblings", [0, 2])
def test_a_pending_token_without_nodes_is_followed_by_the_targets_token(most_siblings):
    """In the narrowest verification of a choice, also if the largest number of siblings is unknown."""
    parents, logits = jnp.array([[-1, -1, 0]]), jnp.full((1, 1, 5), -1e9).at[0, 0, 3].set(0.0)
    none = Proposal(
        jnp.zeros((1, 0), jnp.int32), jnp.array([0]), jnp.zeros((1, 0, 5)),
        parents=parents, most_siblings=most_siblings,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), (1, 4))
    found = reject(keys, none, Tree.from_parents(parents, 3).rows(0, 1), logits, Sampling(jnp.array([1.0])))
    assert (found.count.tolist(), found.token.tolist()) == ([0], [3])


@pytest.mark.representatives("3-1", "3-2", "3-3", "4-2")
@pytest.mark.parametrize(("size", "siblings"), [(3, 1), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_siblings_drawn_without_replacement_leave_the_distribution(size, siblings):
    """The accepted token, summed over all ways to draw the siblings, follows the target's distribution.

    The whole tree then does too, because the children of an accepted node are drawn given that node alone.
    """
    rng = np.random.default_rng(size * 10 + siblings)
    targets, drafts = some_distributions(rng, 60, size), some_distributions(rng, 60, size)
    # All drafts of each pair of distributions, and their probabilities.
    pairs, tokens, distributions, masses = [], [], [], []
    for pair, ways in itertools.product(range(60), itertools.permutations(range(size), siblings)):
        left, mass, drawn, drawn_from = drafts[pair].copy(), 1.0, [], []
        for token in ways:
            if left.sum() == 0:  # no token is left, neither for any other order of draws
                drawn.append(-1)
                drawn_from.append(left)
                mass *= 1.0 if token == min(set(range(size)) - set(ways[: len(drawn) - 1])) else 0.0
                continue
            drawn_from.append(left / left.sum())
            mass *= drawn_from[-1][token]
            drawn.append(token)
            left[token] = 0
        if mass > 0:
            for values, one in ((pairs, pair), (tokens, drawn), (distributions, drawn_from), (masses, mass)):
                values.append(one)
    with np.errstate(divide="ignore"):
        log_distributions = np.log(np.array(distributions))
    chance, rest = chances(
        jnp.asarray(targets[pairs], jnp.float32),
        jnp.asarray(tokens),
        jnp.asarray(log_distributions, jnp.float32),
    )
    found, total = np.zeros_like(targets), np.zeros(60)
    for pair, drawn, mass, stands, distribution in zip(
        pairs, tokens, masses, np.asarray(chance), np.asarray(rest), strict=True
    ):
        total[pair] += mass
        for token, probability in zip(drawn, stands, strict=True):
            if token >= 0:
                found[pair, token] += mass * probability
                mass *= 1 - probability
        found[pair] += mass * distribution
    np.testing.assert_allclose(total, 1, atol=1e-9)
    np.testing.assert_allclose(found, targets, atol=2e-6)
