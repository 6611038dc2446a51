"""Trees as candidates of `method="auto"`: the text, the reported numbers, and the choice between trees and chains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax import struct

from jaxspec.choosing import beliefs
from jaxspec.choosing.costs import DraftCost, StepCosts
from jaxspec.choosing.policy import Policy
from jaxspec.drafting import ngram_drafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import played_rounds
from jaxspec.methods import Auto, Eagle, Medusa, TokenRecycling
from jaxspec.methods.base import Candidate
from tests import tiny
from tests.forced import PROMPTS, auto, forced, tiny_candidate

# A row costs an eighth of a step, and rows are free.
PRICED, FREE = (
    StepCosts("a device", "tiny", "float32", 2, 0, ((1, 1, 8.0), (33, 1, last)), 1, 5.0, 0.0)
    for last in (40.0, 8.0)
)
NAMES = ("token-recycling", "eagle-tree", "medusa-tree", "eagle-tree-drawn", "hybrid-tree")


@pytest.mark.representatives("token-recycling", "eagle-tree")
@pytest.mark.parametrize("name", NAMES)
def test_a_text_with_rounds_of_a_tree_is_plain_decodings(name):
    """Other drafters have rounds too, finished rows are refilled, and caches grow."""
    lm = tiny.language_model()
    candidates = tiny_candidate(name), tiny_candidate("draft-model")
    turns = [(1, tiny.K, 3), (0, 0, 1), (2, 2, 2), (1, tiny.K, 1)]
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 7, "ignore_eos": True, "max_batch": 2}
        budgets = [40, 9, 30]
        with forced(turns, candidates), pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxspec.engine.buckets.START_CAPACITY", 32)
            rows = auto(lm, max_new_tokens=budgets, explain=True, **options)
        plain = lm.generate(list(PROMPTS), max_new_tokens=budgets, **options)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        assert {turn.name for turn in rows[0].choices} == {"off", name, "draft-model"}


@struct.dataclass
class Far(ngram_drafter.NGram):
    @property
    def reach(self):
        return self.num_draft_tokens + 9


@pytest.mark.representatives("token-recycling")
@pytest.mark.parametrize("name", ["token-recycling", "far"])
def test_a_round_that_writes_past_its_longest_draft_has_space_until_the_context_ends(name):
    lm = tiny.language_model(max_position_embeddings=32)
    far = Candidate("far", Far(num_draft_tokens=tiny.K), None, DraftCost(lookup=True))
    made = tiny_candidate(name) if name != "far" else far
    with forced([(1, tiny.K, 1)], (made,)):
        (row,) = auto(lm, [PROMPTS[1]], ignore_eos=True)
    assert row.tokens == lm.generate(PROMPTS[1], ignore_eos=True).tokens
    assert len(row.tokens) == 32 - len(PROMPTS[1])
    # The last round may write nothing but its own token; those before it drafted.
    assert all(drafted for drafted, _ in played_rounds(row.token_records)[-4:-1])


def test_nodes_off_the_path_are_no_positions():
    """A tree of 8 nodes and depth 3, in counts that another candidate makes 5 positions long."""
    counts = beliefs.with_rounds(beliefs.no_counts(1, 2, 5), 1, [[(8, 3), (8, 1), (0, 0)]], asked=3)
    assert counts.accept[0, 1].tolist() == [[2, 1], [1, 1], [1, 0], [0, 0], [0, 0]]
    assert counts.draft[0, 1].tolist() == [[2, 1], [2, 0], [2, 0], [0, 0], [0, 0]]


TREE = DraftCost(layers=0.1, head=False, adapts=True, rows=8, widths=(17,))
CHAIN = DraftCost(layers=0.1, head=False, widths=(1, 2, 3, 4, 5))


def test_a_tree_has_the_price_of_all_its_rows_and_one_length():
    drafting, verifying = 4 * PRICED.step_ms(8, 0.1, head=False), PRICED.step_ms(17)
    assert TREE.round_ms(PRICED, 4) == pytest.approx(drafting + verifying)
    one = Policy(["tree"], [TREE], [4], FREE, 1)
    one.begin_row(0, [1, 2, 3])
    assert one.outlook(np.array([9]), np.array([500])).length.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("costs", "of_tree", "best"), [(FREE, 3, "tree"), (FREE, 1, "chain"), (PRICED, 3, "chain")]
)
def test_a_tree_is_chosen_where_its_tokens_pay_for_its_rows(costs, of_tree, best):
    """It finds `of_tree` tokens each round, by 16 nodes, and the chain 2 of 4."""
    one = Policy(["tree", "chain"], [TREE, CHAIN], [4, 4], costs, 1)
    one.begin_row(0, [1, 2, 3])
    rounds = {"off": (0, 0), "tree": (16, of_tree), "chain": (4, 2)}
    chosen = []
    for _ in range(40):
        choice, _ = one.next(np.array([9]), np.array([500]), 8, None, lambda at: True)
        drafted, accepted = rounds[one.names[choice.candidate]]
        accepted = min(accepted, choice.length)
        drafted = choice.length if one.names[choice.candidate] == "chain" else drafted
        ms = (DraftCost(), TREE, CHAIN)[choice.candidate].round_ms(costs, choice.length)
        of_round = [(drafted, accepted)] * choice.rounds
        tokens = [5] * (choice.rounds * (1 + accepted))
        one.learn(choice[:2], [of_round], [tokens], np.array([9]), choice.rounds * ms, True)
        chosen.append((one.names[choice.candidate], choice.length))
    assert {name for name, _ in chosen[-10:]} == {best}
    assert all(length == 4 for name, length in chosen if name == "tree")


def test_a_tree_is_named_with_its_size_and_chosen_by_its_option():
    """Beside the chain of the same method, with options for the command line as for Python."""
    lm = tiny.language_model()
    lm.step_costs = FREE
    method = Auto.of({"among": ("token-recycling", "ngram"), "tree": "5x3"})
    assert [one.name for one in lm.candidates(method)] == ["token-recycling 5x3", "ngram"]
    both = Auto(among=(TokenRecycling(), TokenRecycling(no_tree=True)))
    assert [one.name for one in lm.candidates(both)] == ["token-recycling 8x4", "token-recycling"]
    with lm.compiled_early():
        for _ in range(2):
            result = lm.generate(
                PROMPTS[1], method="auto", among="token-recycling", tree="5x3", max_new_tokens=96,
                ignore_eos=True, explain=True,
            )  # fmt: skip
            lm.executables.wait()
    assert result.tokens == tiny.greedy(tuple(PROMPTS[1]), 96)
    assert "token-recycling 5x3" in {turn.name for turn in result.choices}
    assert sum(turn.num_tokens for turn in result.choices) == 95


@pytest.mark.parametrize(("kind", "case"), [(Eagle, "eagle"), (Medusa, "medusa")])
def test_a_heads_tree_has_a_price(kind, case, monkeypatch):
    """One pass of up to 10 rows for each level of EAGLE's, and one pass for all levels of Medusa's."""
    config = tiny.engine_config()
    drafter, own = tiny.drafter_of(f"{case}-tree", config=config)
    monkeypatch.setattr(kind, "build", lambda self, *given: (drafter, own))
    lm = LanguageModel(config, tiny.params(config))
    (one,) = lm.candidates(Auto(among=(kind(tree="26x2"),)))
    assert one.name == f"{case} {drafter.num_nodes}x{drafter.num_draft_tokens}"
    assert (one.cost.rows, one.cost.once, one.cost.adapts) == (10, kind is Medusa, True)
    costs = dataclasses.replace(FREE, num_layers=config.num_layers)
    assert one.cost.round_ms(costs, drafter.num_draft_tokens) > costs.step_ms()
