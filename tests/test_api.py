"""The Python face at its edges: seeds, prompts, options, budgets, compilation that fails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.ngram import NGram
from jaxspec.engine.executables import Executables
from jaxspec.io import memory
from jaxspec.protocol import Outcome, Weights
from tests import tiny


def test_a_row_with_its_own_seed_does_not_depend_on_its_place(lm):
    """Alone or anywhere in a list, the same seed draws the same text."""
    options = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    both = lm.generate([[3, 4], [3, 4]], seed=[7, 8], **options)
    turned = lm.generate([[3, 4], [3, 4]], seed=[8, 7], **options)
    assert [row.tokens for row in both] == [row.tokens for row in turned[::-1]]
    assert both[0].tokens != both[1].tokens


def test_an_array_is_a_prompt(lm):
    """NumPy ids are as good as a list's."""
    assert (
        lm.generate(np.array([3, 4, 5]), max_new_tokens=3).tokens
        == lm.generate([3, 4, 5], max_new_tokens=3).tokens
    )


def test_the_default_budget_is_what_the_context_leaves(lm):
    """A long prompt is no error where nobody asked for a number of tokens."""
    prompt = [3] * (lm.config.context_length - 2)
    assert len(lm.generate(prompt, ignore_eos=True).tokens) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "draft-model", "draft_exit": 1, "stop_rule": "bogus"}, "unknown stop_rule 'bogus'"),
        ({"method": "ngram", "match": "best"}, "unknown match 'best'"),
        ({"method": "ngram", "acceptor": "typical"}, "unknown acceptor 'typical'"),
        ({"method": "ngram", "num_draft_tokens": 1000}, "at most 128"),
        ({"method": "ngram", "ngram_max": 1000}, "max <= 128"),
        ({"method": NGram(), "num_draft_tokens": 3}, "num_draft_tokens belongs to a method's name"),
        ({"seed": -1}, "--seed is -1"),
        ({"top_k": 2**40, "temperature": 1.0}, "--top-k"),
        ({"seed": [1, 2]}, "seed has 2 values for 1 prompts"),
    ],
)
def test_what_is_refused(lm, options, message):
    """Every wrong option is one line."""
    with pytest.raises(ValueError, match=message) as error:
        lm.generate([3, 4], max_new_tokens=2, **options)
    assert "\n" not in str(error.value)


def test_a_cache_that_does_not_fit_is_refused(lm, monkeypatch):
    """With numbers, before anything is computed."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"cache does not fit.*batch 1"):
        lm.generate([3, 4], max_new_tokens=2)


def test_a_failed_compilation_is_tried_again():
    """An interruption while compiling must not stay."""
    executables, fails = Executables(), [True]

    @jax.jit
    def double(x):
        if fails:
            fails.clear()
            raise KeyboardInterrupt
        return 2 * x

    with pytest.raises(KeyboardInterrupt):
        executables.call(double, jnp.ones(2))
    assert executables.call(double, jnp.ones(2)).tolist() == [2, 2]
    assert executables.num_compilations == 1


def test_a_finished_row_is_never_behind():
    """Else every later round would feed the draft model once more for it."""
    drafter = DraftModel(tiny.SMALL)
    drafted = jnp.array([5, 5, 0])
    outcome = Outcome(jnp.zeros((3, 6), jnp.int32), jnp.array([6, 3, 0]), drafted, jnp.array([5, 2, 0]))
    state = ChainState((), ((), jnp.zeros(3, bool)))
    _, behind = drafter.observe(Weights(None), state, outcome).own
    assert behind.tolist() == [True, False, False]
