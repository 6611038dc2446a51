"""Over how many rows a round runs: as few as its draft needs on a CPU, all of them on an accelerator."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding import Parts
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model.control import narrowest
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from tests import tiny

WIDTHS = (1, 4, 6)


@pytest.fixture
def accelerator(monkeypatch):
    """What is chosen by the platform is chosen as on an accelerator."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, default, **others: default(*given))


def ran(needed):
    """Which widths ran."""

    def run(width, carry):
        return carry.at[width].add(1)

    found = jax.jit(lambda needed: narrowest(WIDTHS, needed, run, jnp.zeros(7, jnp.int32)))(needed)
    return [width for width in range(7) if found[width]]


def test_the_narrowest_that_holds_a_draft_runs():
    assert [ran(needed) for needed in (0, 1, 2, 4, 5, 6)] == [[], [1], [4], [4], [6], [6]]


def test_the_widest_runs_on_an_accelerator(accelerator):
    assert [ran(needed) for needed in (0, 1, 2, 4, 5, 6)] == [[], [6], [6], [6], [6], [6]]


@pytest.mark.parametrize(("platform", "compiled"), [("cpu", {1, 4, 6}), ("tpu", {6}), ("cuda", {6})])
def test_what_is_compiled(platform, compiled):
    """Each width is another copy of a model."""

    def run(width, carry):
        return carry + jnp.sum(jnp.ones((width, 3, 5)) * carry)

    loop = jax.jit(lambda needed: narrowest(WIDTHS, needed, run, jnp.float32(1)))
    text = loop.trace(jnp.int32(2)).lower(lowering_platforms=(platform,)).as_text()
    assert {int(width) for width in re.findall(r"tensor<(\d)x3x5xf32>", text)} == compiled


@pytest.mark.full
def test_no_other_is_traced_where_only_the_widest_is_compiled():
    """Tracing a width takes as long as tracing the model; the text is the same."""
    prompts, texts, widths = [[5], [7, 1, 7, 1, 7, 1, 7, 2]], [], []
    for one_width in (False, True):
        drafter = NGramDrafter(num_draft_tokens=9)
        parts = Parts(drafter, tiny.ACCEPTORS["greedy"](), Greedy(), one_width=one_width)
        loop = tiny.Loop(parts, Weights(tiny.params()))
        texts.append(loop.texts(prompts))
        state, _ = loop.begin(prompts)
        traced = jax.make_jaxpr(lambda state, loop=loop: loop.go_on(state))(state)
        widths.append(set(re.findall(rf"f32\[2,(\d+),{tiny.TARGET.vocab_size}\]", str(traced))))
    assert texts[0] == texts[1]
    assert widths == [{"1", "2", "5", "10"}, {"10"}]


@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", ["ngram", "s2d", "s2d-target", "choosing", "eagle3", "token-recycling"])
def test_texts_with_the_widest_alone(accelerator, name):
    config = dataclasses.replace(tiny.config_of(name), vocab_size=17)
    lm = LanguageModel(config, tiny.params(config))
    prompts = [[5], [7, 1, 7, 1, 7, 1, 7, 2]]
    rows = lm.generate(prompts, max_new_tokens=16, method=tiny.drafter_of(name, "confidence", config))
    assert [row.tokens for row in rows] == [tiny.greedy(prompt, 16, config=config) for prompt in prompts]
    assert sum(row.statistics.num_draft_tokens for row in rows) > 0
