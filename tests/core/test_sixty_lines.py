"""The introduction in docs/speculative_decoding_in_60_lines.py gives what the loop gives."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.model import cache, llama
from tests import tiny

PATH = Path(__file__).parents[2] / "docs" / "speculative_decoding_in_60_lines.py"
K = 3


@functools.cache
def lines():
    spec = importlib.util.spec_from_file_location("sixty_lines", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forward(config, params, tokens):
    """The logits after every token of a text, without a cache that outlives the call."""
    slots = cache.create(config, batch_size=1, capacity=len(tokens), dtype=jnp.float32)
    hidden = llama.embed(config, params, tokens[None])
    hidden, _ = llama.run_layers(config, params, hidden, jnp.zeros(1, jnp.int32), slots)
    return llama.logits(config, params, hidden[0])


def test_it_is_as_short_as_it_says():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.full
def test_greedy_text_and_rounds_are_the_loops():
    prompt = (7, 1, 7, 1, 7, 2)
    small = tiny.small_model()
    target = functools.partial(forward, tiny.TARGET, tiny.params())
    draft = functools.partial(forward, small.config, small.params)
    text, rounds = lines().generate(
        target, draft, lines().greedy, K, 12, jax.random.key(0), jnp.array(prompt)
    )
    assert text.tolist() == [*prompt, *tiny.greedy(prompt, 12)]
    lm = tiny.language_model()
    found = lm.generate(
        prompt, method="draft-model", draft=small, num_draft_tokens=K, max_new_tokens=12, ignore_eos=True
    )
    assert found.tokens == tiny.greedy(prompt, 12)
    # The loop's first token comes with the prompt, here it takes part of a round.
    assert abs(int(rounds) - found.statistics.num_rounds) <= 1


@pytest.mark.full
def test_sampled_text_follows_the_targets_distribution():
    """χ² of all texts of three tokens, of a target and a draft that are tables of the token before."""
    tables = jax.random.normal(jax.random.key(1), (2, 3, 3))
    target, draft = (functools.partial(jnp.take, table, axis=0) for table in tables)
    distribution = functools.partial(jax.nn.softmax, axis=-1)
    keys = jax.random.split(jax.random.key(2), 20_000)
    texts = jax.vmap(lambda key: lines().generate(target, draft, distribution, 2, 3, key, jnp.array([0]))[0])(
        keys
    )
    p = np.asarray(distribution(tables[0]))
    expected = np.einsum("a,ab,bc->abc", p[0], p, p).reshape(-1)
    seen = np.bincount(np.ravel_multi_index(np.asarray(texts[:, 1:]).T, (3, 3, 3)), minlength=27)
    assert stats.chisquare(seen, expected / expected.sum() * len(keys)).pvalue > 1e-4
