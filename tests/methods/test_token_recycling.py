"""Token Recycling against a slow twin in plain Python, and the trees that it may draft."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec import methods
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.token_recycling_drafter import TokenRecyclingDrafter
from jaxspec.methods.trees import grown
from jaxspec.model.tree import Shape
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.testing import reference
from tests import refused, tiny

V, BUDGET, KEPT = tiny.TARGET.vocab_size, 12, 3
PROMPTS = ((1, 2, 3, 1, 4), (5,), (7, 1, 7, 1, 7, 1, 7, 2))
SHAPES = {
    "tree": Shape((-1, -1, 0, 0, 1, 2, -1), (0, 1, 0, 2, 0, 1, 2)),
    "chain": Shape((-1, 0, 1), (0, 0, 0)),
}


class Twin:
    """One text, with a matrix in a dictionary."""

    def __init__(self, shape: Shape, prompt: list[int]) -> None:
        self.shape = shape
        self.text = list(prompt)
        self.text.append(self.top_tokens([])[0])
        self.known: dict[int, list[int]] = {}
        self.length = len(prompt) + BUDGET
        self.rounds = self.drafted = 0

    def top_tokens(self, path: list[int]) -> list[int]:
        logits = reference.forward(tiny.TARGET, tiny.params(), [*self.text, *path])[-1]
        return np.argsort(-logits)[:KEPT].tolist()

    def round(self) -> None:
        paths: list[list[int] | None] = []
        room = self.length - len(self.text) - 1
        for parent, rank in zip(self.shape.parents, self.shape.ranks, strict=True):
            before = [] if parent < 0 else paths[parent]
            after = [] if before is None else self.known.get((before or self.text)[-1], [])
            there = before is not None and rank < len(after) and len(before) < room
            paths.append([*before, after[rank]] if there else None)
        # What verification says of every node, before anything is replaced.
        said = [(self.text[-1], self.top_tokens([]))]
        said += [(path[-1], self.top_tokens(path)) for path in paths if path is not None]
        accepted: list[int] = []
        while (after := self.top_tokens(accepted)[0]) is not None and [*accepted, after] in paths:
            accepted.append(after)
        self.text += [*accepted, self.top_tokens(accepted)[0]]
        self.known.update(dict(said))
        self.rounds += 1
        self.drafted += sum(path is not None for path in paths)


@pytest.mark.full
@pytest.mark.representatives("tree")
@pytest.mark.parametrize("kind", SHAPES)
def test_drafts_are_those_of_the_slow_twin(kind):
    """What is known of each token, round by round, in each row of a batch; and the text."""
    drafter = TokenRecyclingDrafter(SHAPES[kind], KEPT)
    loop = tiny.Loop(Parts(drafter, GreedyAcceptor(), Greedy()), Weights(tiny.params()))
    state, _ = loop.begin(PROMPTS, BUDGET, capacity=64)
    twins = [Twin(SHAPES[kind], list(prompt)) for prompt in PROMPTS]
    for _ in range(BUDGET):
        for row, twin in enumerate(twins):
            matrix = np.asarray(state.drafter_state[row])
            found = {token: [t for t in matrix[token].tolist() if t >= 0] for token in range(V)}
            if not state.done[row]:
                assert {token: after for token, after in found.items() if after} == twin.known
                twin.round()
        state, _ = loop.go_on(state, 1)
    assert state.done.all()
    for row, twin in enumerate(twins):
        assert tiny.generated(state, PROMPTS)[row] == twin.text[len(PROMPTS[row]) :]
        assert state.stats.num_rounds[row] == twin.rounds
        assert state.stats.num_draft_tokens[row] == twin.drafted
    assert sum(twin.rounds for twin in twins) < len(twins) * (BUDGET - 1)


# The trees


def test_a_tree_has_the_nodes_that_are_likeliest():
    """No node that was left out is likelier than one that is there; the first ranks reach the depth."""
    for nodes, depth, ranks in ((8, 4, 8), (26, 5, 8), (80, 6, 8), (5, 5, 3), (7, 3, 2)):
        shape = grown(nodes, depth, ranks)
        assert (len(shape.parents), shape.depth) == (nodes, depth)
        assert list(shape.depths) == sorted(shape.depths)
        chance = {(): 1.0}
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(shape.parents, shape.ranks, strict=True):
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, rank))
            chance[paths[-1]] = chance[before] * 0.46 / (rank + 1) ** 2
        others = {
            (*before, rank): chance[before] * 0.46 / (rank + 1) ** 2
            for before in chance
            for rank in range(ranks)
            if len(before) < depth and (*before, rank) not in chance
        }
        forced = {(0,) * length for length in range(1, depth + 1)}
        assert len(set(paths)) == nodes
        least = min((chance[path] for path in paths if path not in forced), default=1)
        assert max(others.values(), default=0) <= least + 1e-12


def test_the_large_tree_is_about_the_papers():
    depths = grown(80, 6, 8).depths
    assert [depths.count(depth) for depth in range(1, 7)] == [8, 21, 25, 19, 6, 1]


def test_options_say_what_is_drafted():
    lm = tiny.language_model()

    def shape(**options):
        return lm.drafter("token-recycling", **options)[0].shape

    assert (len(shape().parents), shape().depth) == (8, 4)
    assert (len(shape(tree="medium").parents), shape(tree="12x3").depth) == (26, 3)
    assert shape(num_draft_tokens=2).depth == 2
    assert shape(no_tree=True).parents == (-1, 0, 1, 2)
    assert shape(no_tree=True, num_draft_tokens=2).is_chain
    assert shape(num_draft_tokens=11).is_chain
    for count in (3, 9):  # of a choice: a maximum
        (one,) = lm.candidates(methods.Auto(among="token-recycling", num_draft_tokens=count))
        assert one.drafter.num_draft_tokens == min(count, 4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tree": "wide"}, "tree is 'wide'; give small, medium, large or TOKENSxDEPTH"),
        ({"tree": "3x4"}, "tree is '3x4'; give 1 <= DEPTH <= TOKENS <= 128"),
        ({"tree": "300x4"}, "tree is '300x4'; give 1 <= DEPTH <= TOKENS <= 128"),
        ({"tree": "8x4", "no_tree": True}, "tree='8x4' and no_tree contradict"),
        ({"tree": "8x4", "num_draft_tokens": 4}, "tree='8x4' and num_draft_tokens contradict"),
    ],
)
def test_wrong_trees_are_refused(options, line):
    with refused(line):
        methods.TokenRecycling(**options)
