"""`method="auto"` with what texts and models may be: other numbers, damaged weights, stop strings, Ctrl-C."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.choosing.costs import StepCosts
from jaxspec.engine.auto.turns import Switching
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods import Auto, Hybrid, NGram
from jaxspec.model.quantisation import quantise
from tests import tiny
from tests.forced import PROMPTS, auto, forced, tiny_candidate

# Plain decoding, lookup, an early exit.
TURNS = [(0, 0, 2), (1, 2, 2), (2, 3, 2)]
FREE = StepCosts("a device", "tiny", "float32", 2, 0, ((1, 1, 9.0), (11, 1, 9.0)), 1, 5.0, 0.0)


def made():
    return tuple(map(tiny_candidate, ("ngram", "layerskip")))


def texts(lm, prompts=PROMPTS, **options):
    """Plain decoding's, and those of choices that change."""
    plain = lm.generate(list(prompts), **options)
    with forced(TURNS, made()):
        return plain, auto(lm, prompts, **options)


@pytest.mark.representatives("bfloat16")
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_text_is_plain_decodings_in_other_numbers(kind):
    config, params = tiny.engine_config(), tiny.params(tiny.TARGET)
    if kind == "int8":
        params = quantise(config, jax.tree.map(jnp.asarray, params))
    else:
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    plain, mine = texts(LanguageModel(config, params), max_new_tokens=30, ignore_eos=True)
    assert [row.tokens for row in mine] == [row.tokens for row in plain]
    assert sum(row.statistics.num_accepted_tokens for row in mine) > 0


def test_a_result_names_what_drafted_in_its_own_text():
    """The short text ends before the first draft."""
    lm = tiny.language_model()
    with forced([(0, 0, 2), (1, 2, 2)], made()):
        short, long = auto(lm, PROMPTS[:2], max_new_tokens=[3, 20], ignore_eos=True)
    assert short.drafted_by == "auto: plain decoding, no draft is expected to pay"
    assert long.drafted_by == "auto: ngram"


@pytest.mark.full
def test_a_text_ends_where_logits_are_not_finite():
    config, params = tiny.engine_config(), tiny.params(tiny.TARGET)
    last = tiny.greedy(PROMPTS[0], 20)[9]
    damaged = {**params, "embed": jnp.asarray(params["embed"]).at[last].set(jnp.nan)}
    with pytest.warns(RuntimeWarning, match="not finite"):
        plain, mine = texts(LanguageModel(config, damaged), PROMPTS[:1], max_new_tokens=20, ignore_eos=True)
    assert mine[0].finish_reason == plain[0].finish_reason == "error"
    assert mine[0].tokens == plain[0].tokens


@pytest.mark.full
def test_stop_strings_and_a_contexts_end():
    lm = tiny.language_model(max_position_embeddings=48)
    whole = lm.generate("ab", ignore_eos=True)
    stop = whole.text[12:15]
    for options in ({"stop": stop}, {"stop": stop, "logprobs": True}, {}):
        (plain,), (mine,) = texts(lm, ["ab"], ignore_eos=True, **options)
        assert (mine.text, mine.tokens, mine.finish_reason) == (plain.text, plain.tokens, plain.finish_reason)


@pytest.mark.full
def test_texts_of_one_seed_are_drawn_apart():
    """What one accepts has a say in how the other goes on: by the same numbers it would tell what they will be."""
    lm = tiny.language_model()
    options = {"temperature": 1.0, "seed": [3, 3], "max_new_tokens": 12, "ignore_eos": True}
    plain = lm.generate([[5], [5]], **options)
    mine = lm.generate([[5], [5]], method="auto", acceptor="block", **options)
    assert plain[0].tokens == plain[1].tokens == mine[0].tokens != mine[1].tokens
    # With the coupled acceptor drafts do not influence a text, so that equal randomness reveals nothing.
    coupled = lm.generate([[5], [5]], method="auto", **options)
    assert plain[0].tokens == coupled[0].tokens == coupled[1].tokens


@pytest.mark.full
def test_an_interruption_leaves_the_next_text_as_it_is():
    lm, turns = tiny.language_model(), []
    learn = Switching.learn

    def interrupted(self, *given):
        turns.append(1)
        if len(turns) == 3:
            raise KeyboardInterrupt
        return learn(self, *given)

    with pytest.MonkeyPatch.context() as patch, forced(TURNS, made()):
        patch.setattr(Switching, "learn", interrupted)
        write = functools.partial(auto, lm, PROMPTS[:1], max_new_tokens=30, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            write()
        assert write()[0].tokens == tiny.greedy(PROMPTS[0], 30)


# More to choose among


@pytest.mark.full
def test_a_hybrid_is_chosen_as_one():
    """With the options of its two methods beside `among`."""
    lm = tiny.language_model()
    lm.step_costs = FREE
    method = Auto.of({"among": "hybrid", "exit_layer": 1, "first": "ngram", "num_draft_tokens": tiny.K})
    (candidate,) = lm.candidates(method)
    assert (candidate.cost.layers, candidate.cost.lookup, candidate.cost.shared) == (1, True, 1)
    assert isinstance(method.methods()[0], Hybrid)
    assert candidate.drafter.num_draft_tokens == tiny.K
    with forced([(0, 0, 2), (1, tiny.K, 3)], (candidate,)):
        rows = auto(lm, max_new_tokens=30, ignore_eos=True)
    assert [row.tokens for row in rows] == [tiny.greedy(tuple(prompt), 30) for prompt in PROMPTS]
    assert sum(row.statistics.num_accepted_tokens for row in rows) > 0


def test_another_packages_method_is_offered_too():
    class Theirs(NGram):
        name = "theirs"

        @classmethod
        def offered(cls, target, resources):
            return (cls(ngram_max=2),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.methods.registry.available", lambda: ({"theirs": Theirs}, []))
        assert [one.name for one in tiny.language_model().candidates(Auto())] == ["theirs"]


def test_a_plan_beside_the_model_is_a_candidate(tmp_path):
    from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
    from jaxspec.model.plan import LayerPlan

    lm = tiny.language_model()
    lm.directory = tmp_path
    write_plan(tmp_path / PLAN_NAME, lm.fingerprint, LayerPlan.skipping(2, [0], [0]), {})
    found = {one.name: one.cost for one in lm.candidates(Auto())}
    assert list(found) == ["draft-verify", "ngram", "suffix"]
    np.testing.assert_allclose(found["draft-verify"].layers, 1.0)


@pytest.mark.full
def test_what_is_offered_and_cannot_be_built_is_left_out(tmp_path):
    """Of what is named, the error stands."""
    from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
    from jaxspec.model.plan import LayerPlan

    lm = tiny.language_model()
    lm.directory = tmp_path
    write_plan(tmp_path / PLAN_NAME, "another", LayerPlan.skipping(2, [0], [0]), {})
    with pytest.warns(RuntimeWarning, match="^auto leaves out draft-verify: .* belongs to another model"):
        assert [one.name for one in lm.candidates(Auto())] == ["ngram", "suffix"]
    with pytest.raises(ValueError, match="belongs to another model"):
        lm.candidates(Auto(among="draft-verify"))
