"""Typical acceptance: Medusa's rule, which changes the target's distribution, and its labels in all outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor
from jaxspec.lossy import TypicalAcceptor
from jaxspec.methods.acceptors import LOSSY, AcceptorName, build_acceptor
from jaxspec.model.tree import Shape, Tree
from jaxspec.protocol import Proposal
from jaxspec.sampling import Greedy, Sampling
from tests import refused, tiny

V, K, ROWS = 5, 3, 400


def typical(probs: np.ndarray, tokens: list[int]) -> int:
    """Returns the number of accepted drafts of a row with distributions [K + 1, V], by the authors' rule."""
    for count, token in enumerate(tokens):
        p = probs[count]
        entropy = -sum(one * np.log(one) for one in p if one > 0)
        if not p[token] > min(0.09, 0.3 * np.exp(-entropy)):
            return count
    return len(tokens)


def decided(temperature: np.ndarray):
    rng = np.random.default_rng(2)
    logits = (2 * rng.standard_normal((ROWS, K + 1, V))).astype(np.float32)
    tokens, count = rng.integers(V, size=(ROWS, K)), rng.integers(K + 1, size=ROWS)
    # At temperature 0 a good draft is often the most probable token.
    tokens = np.where(rng.random((ROWS, K)) < 0.7, logits[:, :K].argmax(axis=-1), tokens)
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32))
    keys, distribution = (
        jax.random.split(jax.random.key(0), ROWS),
        Sampling(jnp.asarray(temperature, jnp.float32)),
    )
    return logits, proposal, TypicalAcceptor().accept(keys, proposal, jnp.asarray(logits), distribution)


def test_what_is_typical_stands():
    temperature = np.linspace(0.5, 1.5, ROWS)
    logits, proposal, found = decided(temperature)
    scaled = np.exp(np.float64(logits) / temperature[:, None, None])
    probs = scaled / scaled.sum(axis=-1, keepdims=True)
    drafts = [
        row[:count] for row, count in zip(proposal.tokens.tolist(), proposal.count.tolist(), strict=True)
    ]
    expected = [typical(*one) for one in zip(probs, drafts, strict=True)]
    assert found.count.tolist() == expected
    assert len(set(expected)) == K + 1
    # The token after them is drawn from the distribution at that position.
    at = probs[np.arange(ROWS), expected]
    drawn = np.eye(V)[np.asarray(found.token)]
    assert (np.abs((drawn - at).sum(axis=0)) < 4.5 * np.sqrt((at * (1 - at)).sum(axis=0))).all()


def test_of_a_tree_the_longest_path_of_typical_tokens_stands():
    """Among equally long paths the more probable one; each node is judged by the distribution after its parent."""
    parents, rng = (-1, -1, 0, 0, 1, 1, 2, 4), np.random.default_rng(6)
    depth, nodes = 3, len(parents)
    logits = (1.5 * rng.standard_normal((ROWS, nodes + 1, V))).astype(np.float32)
    tokens = rng.integers(-1, V, size=(ROWS, nodes))
    tokens[:, 1::2] = (tokens[:, ::2] + 1) % V  # siblings differ
    temperature = np.linspace(0.5, 1.5, ROWS)
    keys = jax.random.split(jax.random.key(0), (ROWS, depth + 1))
    found = TypicalAcceptor().accept_tree(
        keys,
        Proposal(jnp.asarray(tokens, jnp.int32), jnp.full(ROWS, nodes)),
        Tree.from_parents(Shape(parents), depth),
        jnp.asarray(logits),
        Sampling(jnp.asarray(temperature, jnp.float32)),
    )
    scaled = np.exp(np.float64(logits) / temperature[:, None, None])
    probs = scaled / scaled.sum(axis=-1, keepdims=True)
    lengths, distributions = set(), []
    for row in range(ROWS):
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        good = [[]]
        for path in paths:
            rows = [0, *(node + 1 for node in path)]
            drafts = [int(tokens[row, node]) for node in path]
            if min(drafts) >= 0 and typical(probs[row, rows], drafts) == len(path):
                good.append(path)

        def probability(path: list[int], row: int = row) -> float:
            rows = [0, *(node + 1 for node in path)]
            return float(
                np.prod([probs[row, at, tokens[row, node]] for at, node in zip(rows, path, strict=False)])
            )

        best = max(good, key=lambda path: (len(path), probability(path)))
        assert int(found.count[row]) == len(best)
        assert found.path[row, : len(best) + 1].tolist() == [0, *(node + 1 for node in best)]
        lengths.add(len(best))
        distributions.append(probs[row, best[-1] + 1 if best else 0])
    assert lengths == {0, 1, 2, 3}
    at, drawn = np.stack(distributions), np.eye(V)[np.asarray(found.token)]
    assert (np.abs((drawn - at).sum(axis=0)) < 4.5 * np.sqrt((at * (1 - at)).sum(axis=0))).all()


def test_a_row_of_temperature_zero_is_greedy():
    logits, proposal, found = decided(np.zeros(ROWS))
    keys = jax.random.split(jax.random.key(0), ROWS)
    greedy = GreedyAcceptor().accept(keys, proposal, jnp.asarray(logits), Greedy())
    assert found.count.tolist() == greedy.count.tolist()
    assert found.token.tolist() == greedy.token.tolist()


def test_it_follows_another_distribution():
    """A draft of probable tokens is always accepted, although the target would sometimes draw another token."""
    keys = jax.random.split(jax.random.key(0), 100)
    likely = Proposal(jnp.zeros((100, 1), jnp.int32), jnp.ones(100, jnp.int32))
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.6, 0.3, 0.1])), (100, 2, 3))
    found = TypicalAcceptor().accept(keys, likely, logits, Sampling(jnp.ones(100)))
    assert found.count.tolist() == [1] * 100


def test_it_is_never_a_default_and_greedy_text_needs_none():
    assert set(LOSSY) == {"typical"}
    defaults: list[AcceptorName | None] = [None, "block", "rejection"]
    assert not any(isinstance(build_acceptor(name, True), TypicalAcceptor) for name in defaults)
    assert isinstance(build_acceptor("typical", sampling=True), TypicalAcceptor)
    assert isinstance(build_acceptor("typical", sampling=False), BlockAcceptor)


@pytest.mark.slow
def test_a_result_says_so():
    lm = tiny.language_model()
    options = {"method": "ngram", "acceptor": "typical", "max_new_tokens": 4}
    drawn, greedy = lm.generate([[3, 4, 3, 4], [3, 4, 3, 4]], temperature=[1.0, 0.0], **options)
    assert (drawn.lossy, greedy.lossy) == (True, False)
    assert "tokens/s, lossy>" in repr(drawn)
    assert "lossy" not in repr(greedy)
    assert not lm.generate([3, 4], temperature=1.0, max_new_tokens=2, acceptor="typical").lossy
    options |= {"method": "token-recycling", "temperature": 1.0}
    assert lm.generate([3, 4, 3, 4], tree="3x2", **options).lossy
    assert lm.generate([3, 4, 3, 4], no_tree=True, num_draft_tokens=2, **options).lossy
    with refused("give one of greedy, rejection, block, coupled, typical"):
        lm.generate([3, 4], acceptor="usual")
