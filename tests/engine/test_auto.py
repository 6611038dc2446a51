"""`method="auto"` in the engine: texts, candidates, prices, and the first text of a process."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxspec.costs.rounds import StepCosts
from jaxspec.decoding import Parts
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.methods import Auto, LayerSkip, NGram
from jaxspec.programs import compilation_cache
from jaxspec.session import auto
from tests import caching, refused, tiny
from tests.core.test_mesh import on_eight_devices
from tests.engine.test_prefix import SPREAD

PROMPT = (7, 1, 7, 1, 7, 1, 7, 2)
ALL = {"method": "auto", "among": ("ngram", "layerskip"), "exit_layer": 1}
LONG = {"max_new_tokens": 40, "ignore_eos": True}
# Costs of steps at which all candidates draft.
CHEAP = StepCosts("a device", "tiny", "float32", 2, 0, ((1, 1, 8.0), (33, 1, 8.0)), 1, 5.0, 0.0)


@pytest.fixture(scope="module")
def lm():
    made = tiny.language_model()
    made.warm_up(max_tokens=64, **ALL)
    return made


@pytest.fixture
def kept(tmp_path):
    with caching.user_cache(tmp_path):
        compilation_cache.enable()
        yield tmp_path


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}])
def test_texts_are_plain_decodings_and_drafted(lm, options):
    prompts = [list(PROMPT), [5]]  # several texts wait for the program
    found = lm.generate(prompts, **ALL, **LONG, **options)
    plain = lm.generate(prompts, method="autoregressive", **LONG, **options)
    assert [row.tokens for row in found] == [row.tokens for row in plain]
    if not options:  # the repetition is found without a model
        assert "ngram in " in found[0].drafted_by
        assert found[0].statistics.num_accepted_tokens >= 10


@pytest.mark.full
def test_exact_texts_are_plain_decodings_to_the_last_bit(lm):
    options = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": True, "exact": True}
    found = lm.generate([list(PROMPT), [5]], **ALL, **options)
    alone = [lm.generate(prompt, method="autoregressive", **options) for prompt in (list(PROMPT), [5])]
    texts = [[(one.id, one.log_prob) for one in row.token_records] for row in (*found, *alone)]
    assert texts[:2] == texts[2:]


@pytest.mark.full
def test_on_eight_devices(lm):
    program = """
import dataclasses
import json
import jax
from jaxspec import LanguageModel
from jaxspec.model.sharding import spread
from tests import tiny
from tests.engine.test_auto import ALL, LONG, PROMPT
from tests.engine.test_prefix import SPREAD

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
config, params = spread(mesh, SPREAD, tiny.params(SPREAD))
lm = LanguageModel(config, params, mesh=mesh)
for options in ({}, {"temperature": 0.8, "seed": 5}):
    rows = lm.generate([list(PROMPT), [5]], **ALL, **LONG, **options)
    print(json.dumps([[row.tokens, row.drafted_by] for row in rows]))
"""
    lines = on_eight_devices(program)
    one = LanguageModel(SPREAD, tiny.params(SPREAD))
    for line, options in zip(lines, ({}, {"temperature": 0.8, "seed": 5}), strict=True):
        plain = one.generate([list(PROMPT), [5]], method="autoregressive", **LONG, **options)
        found = json.loads(line)
        assert [tokens for tokens, _ in found] == [row.tokens for row in plain]
        assert all("in " in drafted_by for _, drafted_by in found)


@pytest.mark.full
def test_rows_join_and_leave(lm):
    prompts, lengths = [list(PROMPT), [5], [3, 4, 3], [9]], [30, 3, 12, 20]
    rows = lm.generate(prompts, max_batch=2, max_new_tokens=lengths, ignore_eos=True, **ALL)
    expected = [tiny.greedy(tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
    assert [row.tokens for row in rows] == expected
    assert all(row.drafted_by.startswith("auto: ") for row in rows)


def test_a_text_begins_without_the_program_of_drafts(kept):
    """It is compiled after the first text; the next process has it stored."""
    for expected in ([False, False, True], [False, True, True]):
        lm, texts = tiny.language_model(), []
        alone = lm.generate(list(PROMPT), max_new_tokens=1, **ALL)
        assert alone.drafted_by == "auto: plain decoding"
        for _ in expected:
            texts.append(lm.generate(list(PROMPT), **ALL, **LONG))
            lm.executables.wait()
        assert all(text.tokens == tiny.greedy(PROMPT, 40) for text in texts)
        assert ["ngram in " in text.drafted_by for text in texts] == expected
        why = "was not ready in time" if expected[1] else "is not compiled yet"
        assert why in texts[0].drafted_by


def test_a_model_gets_its_chance_without_copies():
    lm = tiny.language_model()
    lm.step_costs = CHEAP
    for _ in range(3):
        text = lm.generate([5], method="auto", among="layerskip", exit_layer=1, **LONG)
        lm.executables.wait()
    assert "layerskip" in text.drafted_by


def test_no_program_is_compiled_for_a_text_that_has_ended(monkeypatch):
    monkeypatch.setattr(auto, "_LONG", 8)
    lm, end = tiny.language_model(), tiny.greedy(PROMPT, 3)[-1]
    text = lm.generate(list(PROMPT), stop_token_ids=[end], **ALL, max_new_tokens=40)
    compiled = lm.executables.num_compilations
    lm.executables.wait()
    assert len(text.tokens) <= 3
    assert lm.executables.num_compilations == compiled


@pytest.mark.full
def test_the_drafter_takes_over_within_a_long_text(monkeypatch):
    monkeypatch.setattr(auto, "_LONG", 8)
    lm, text = tiny.language_model(), []
    for piece in lm.stream(list(PROMPT), method="auto", among="ngram", **LONG):
        text += [token.id for token in piece.token_records]
        lm.executables.wait()  # after the first piece
    assert text == tiny.greedy(PROMPT, 40)
    assert piece.statistics.num_accepted_tokens >= 15


def test_with_an_acceptor_under_which_drafts_change_the_text_the_text_waits(kept):
    lm = tiny.language_model()
    text = lm.generate(list(PROMPT), temperature=1.0, acceptor="block", **ALL, **LONG)
    assert text.statistics.num_draft_tokens > 0


def test_a_text_that_ends_in_the_prefill_has_no_rounds(lm):
    first, second = lm.generate(
        [list(PROMPT)] * 2, max_batch=1, max_new_tokens=[40, 1], ignore_eos=True, **ALL
    )
    assert "ngram in" in first.drafted_by
    assert second.drafted_by == "auto: plain decoding"


def test_an_error_of_the_compiler_is_the_callers(monkeypatch):
    """Not in the background, where nobody sees it, and not only in the first request of a server."""

    def fails(*given):
        raise ValueError("no such instruction")

    model = tiny.language_model()
    monkeypatch.setattr("jaxspec.programs.executables._compiled", fails)
    with refused("no such instruction"):
        model.warm_up(**ALL)
    scheduler = Scheduler(model)
    with refused("no such instruction"):
        scheduler.warm_up(**ALL)
    assert scheduler.idle


def test_without_candidates_there_is_plain_decoding(monkeypatch):
    monkeypatch.setattr(Auto, "candidates", lambda *given: ())
    result = tiny.language_model().generate([5], method="auto", max_new_tokens=4, ignore_eos=True)
    assert (result.tokens, result.drafted_by) == (
        tiny.greedy((5,), 4),
        "auto: plain decoding, no method is offered",
    )


def test_early_exits_share_layers_only_with_each_other(lm):
    """A verification begins after one layer in all rows."""
    drafter, _ = lm.drafter(Auto(among=(LayerSkip(exit_layer=1), NGram()), num_draft_tokens=3))
    alone, _ = lm.drafter(Auto(among=(LayerSkip(exit_layer=1),), num_draft_tokens=3))
    # One draft token has a width of its own beside a lookup.
    np.testing.assert_allclose(drafter.prices.draft[:, 0, 2:], alone.prices.draft[:, 0, 2:])
    assert Parts(drafter, None, None).verify_widths[0] == 1
    assert isinstance(lm.drafter("autoregressive")[0], AutoregressiveDrafter)


def test_another_packages_method_is_offered_too():
    class Theirs(NGram):
        name = "theirs"

        @classmethod
        def offered(cls, target, resources):
            return (cls(ngram_max=2),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.methods.registry.available", lambda: ({"theirs": Theirs}, []))
        assert [one.name for one in tiny.language_model().candidates(Auto())] == ["theirs"]


@pytest.mark.parametrize(
    ("accept", "names"), [((0.99,) * 9, ["exit 1"]), ((0.2, 0.2), []), (None, ["exit 1"])]
)
def test_a_method_with_a_record_must_promise_a_gain(accept, names):
    class Exit(LayerSkip):
        name = "exit"

        @classmethod
        def offered(cls, target, resources):
            return (cls(exit_layer=1),)

        def expectation(self, target, resources):
            return accept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.methods.registry.available", lambda: ({"exit": Exit}, []))
        lm = tiny.language_model()
        assert [one.name for one in lm.candidates(Auto())] == names
        assert len(lm.candidates(Auto(among=(Exit(exit_layer=1),)))) == 1


def test_a_plan_beside_the_model_is_a_candidate(tmp_path):
    from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
    from jaxspec.model.plan import LayerPlan

    lm = tiny.language_model()
    lm.directory = tmp_path
    write_plan(tmp_path / PLAN_NAME, lm.fingerprint, LayerPlan.skipping(2, [0], [0]), {})
    found = {one.name: one.cost for one in lm.candidates(Auto())}
    assert list(found) == ["draft-verify", "ngram"]
    np.testing.assert_allclose(found["draft-verify"].layers, 1.0)


def test_a_plan_drafts_with_a_window_after_a_long_text(tmp_path):
    """Both are candidates where the cache of the longest text is a good part of what a draft reads."""
    from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
    from jaxspec.model.plan import LayerPlan

    config = dataclasses.replace(tiny.TARGET, max_position_embeddings=2**20)
    lm = LanguageModel(config, tiny.params(config))
    lm.directory = tmp_path
    write_plan(tmp_path / PLAN_NAME, lm.fingerprint, LayerPlan.skipping(2), {})
    few, whole = "draft-verify window 4,2048", "draft-verify"
    assert [one.name for one in lm.candidates(Auto())] == [whole, few, "ngram"]
    prices = lm.drafter(Auto())[0].prices
    for tokens, cheaper in ((500, whole), (50_000, few)):
        _, draft = prices.for_rows(np.int32(1), np.int32(tokens))
        assert (draft[0, 1:] < draft[1, 1:]).all() == (cheaper == whole)
        assert (draft[0, 1:] > draft[1, 1:]).all() == (cheaper == few)


def test_without_costs_a_cached_token_has_the_price_of_its_bytes():
    """The cache has the dtype of the weights, and a layer with a window reads no more of a longer text."""

    def price(config, dtype):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.params(config))
        lm = LanguageModel(config, params)
        step, of_token = lm.drafter(Auto(among=(LayerSkip(exit_layer=1),)))[0].prices.verify[0, 0]
        return float(of_token / step)

    whole = price(tiny.TARGET, "float32")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny.params(tiny.TARGET)))
    weights -= tiny.params(tiny.TARGET)["embed"].nbytes
    per_token = 2 * 4 * tiny.TARGET.num_layers * tiny.TARGET.num_kv_heads * tiny.TARGET.head_dim
    assert whole == pytest.approx(per_token / weights, rel=1e-3)
    assert price(tiny.TARGET, "float16") == pytest.approx(whole, rel=1e-3)
    half = dataclasses.replace(tiny.TARGET, sliding_windows=(None, 4))
    assert price(half, "float32") == pytest.approx(whole / 2, rel=1e-3)


@pytest.mark.full
def test_an_offered_candidate_that_cannot_be_built_is_left_out(tmp_path):
    """An error is raised only if it is named."""
    from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
    from jaxspec.model.plan import LayerPlan

    lm = tiny.language_model()
    lm.directory = tmp_path
    write_plan(tmp_path / PLAN_NAME, "another", LayerPlan.skipping(2, [0], [0]), {})
    with pytest.warns(RuntimeWarning, match="^auto leaves out draft-verify: .* belongs to another model"):
        assert [one.name for one in lm.candidates(Auto())] == ["ngram"]
    with refused("belongs to another model"):
        lm.candidates(Auto(among="draft-verify"))
