"""The blocks of `jaxspec.model.llama` against the slow float64 reference, on every flag of a config."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.lora import adapted
from jaxspec.model.numerics import LOOPED, cosine
from jaxspec.model.plan import LayerPlan
from jaxspec.model.prefill import run_prompts
from jaxspec.model.quantisation import Quantised, quantise, with_outliers
from jaxspec.model.tree import Shape, Tree
from jaxspec.testing import reference
from tests import refused, tiny

TOLERANCE = 1e-4
CAPACITY = 32
# These tests check numbers, not the compiler, and compilation takes most of their time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

BASE = LlamaConfig(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)
CONFIGS = {
    "grouped": BASE,
    "multi_head": dataclasses.replace(BASE, num_kv_heads=4, rms_norm_eps=1e-2),
    "multi_query": dataclasses.replace(BASE, num_kv_heads=1, rope_theta=50.0),
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "biases": dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True, model_type="qwen2", sliding_windows=(None, 4)),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, model_type="qwen3", head_dim=8, num_kv_heads=1),
    "head_dim": dataclasses.replace(BASE, head_dim=10),
    "linear": dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 4.0)),
    "dynamic": dataclasses.replace(BASE, max_position_embeddings=8, rope_scaling=RopeScaling("dynamic", 3.0)),
    "llama3": dataclasses.replace(
        BASE,
        head_dim=12,
        rope_theta=500.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=40),
    ),
    "sliding": dataclasses.replace(BASE, model_type="mistral", sliding_windows=(5, 5)),
    "int8_cache": dataclasses.replace(BASE, kv_cache_dtype="int8"),
    "draft_window": dataclasses.replace(BASE, draft_window=(2, 4), kv_cache_dtype="int8"),
    "one_token": dataclasses.replace(BASE, draft_window=(0, 1)),
    "draft_window_and_windows": dataclasses.replace(BASE, draft_window=(1, 3), sliding_windows=(None, 5)),
    **{name: tiny.with_block(name, BASE) for name in tiny.BLOCKS},
    # Its cache keeps the windows only, see `rings`.
    "rings": dataclasses.replace(BASE, model_type="mistral", sliding_windows=(2, 5)),
}
LENGTHS = (13, 1, 9)


@functools.cache
def _params(name: str):
    return reference.random_params(CONFIGS[name], seed=len(name))


@functools.cache
def _texts(num_rows: int = len(LENGTHS)) -> np.ndarray:
    """Returns right-padded random rows; tokens after a row's length must have no effect."""
    return np.random.default_rng(3).integers(0, BASE.vocab_size, (num_rows, max(LENGTHS) + 3))


@functools.partial(jit, static_argnames=("config", "plan"))
def _forward(config, params, tokens, start, cache, plan=None):
    return llama.forward(config, params, tokens, start, cache, plan=plan)


def _cache(config, num_rows, rope_length, merged=True):
    cache = kv.create(config, num_rows, CAPACITY, jnp.float32, merged)
    return cache.replace(rope_length=jnp.full(num_rows, rope_length, jnp.int32))


@pytest.mark.parametrize("name", ["grouped", "dynamic", "sliding"])
def test_whole_rows_at_once(name):
    config, params, texts = CONFIGS[name], _params(name), _texts()
    length = texts.shape[1]
    cache = _cache(config, len(texts), length)
    logits, _, _ = _forward(config, params, texts, np.zeros(len(texts), np.int32), cache)
    for row, text in enumerate(texts):
        expected = reference.forward(config, params, text)
        np.testing.assert_allclose(np.asarray(logits)[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.representatives("grouped", "qwen3", "llama3", "rings", *tiny.BLOCKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_pieces_then_token_by_token(monkeypatch, name):
    """Ragged prompts are prefilled in chunks, then every row continues from its own length."""
    config, params, texts = CONFIGS[name], _params(name), _texts()
    if name == "rings":  # as small as possible for chunks of 4 tokens
        monkeypatch.setattr(kv, "MOST_ROWS", 4)
        monkeypatch.setattr(kv, "most_places", lambda config: tuple(w + 4 for w in config.sliding_windows))
    length = np.asarray(LENGTHS, np.int32)

    @jit
    def prefill(params, tokens, length):
        cache = _cache(config, len(tokens), 0)
        last, _, cache, _ = run_prompts(config, params, tokens, length, cache, chunk_size=4)
        return llama.logits(config, params, last), cache

    first, cache = prefill(params, np.where(np.arange(16) < length[:, None], texts[:, :16], 0), length)
    logits = [first]
    for step in range(2):
        token = np.asarray([text[n + step] for n, text in zip(LENGTHS, texts, strict=True)])
        out, _, cache = _forward(config, params, token[:, None], length + step, cache)
        logits.append(np.asarray(out)[:, 0])
    for row, (n, text) in enumerate(zip(LENGTHS, texts, strict=True)):
        expected = reference.forward(config, params, text[: n + 2], rope_length=n)
        np.testing.assert_allclose(np.stack(logits, axis=1)[row], expected[n - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["grouped", "tied", "qwen2"])
@pytest.mark.parametrize("chunk_size", [4, 16])
def test_similarities_of_prompts(name, chunk_size):
    """And their vectors. Each row uses only its own tokens, in several chunks or in one, also a prompt of one token."""
    config, params = CONFIGS[name], _params(name)
    texts, length = _texts()[:, :16], np.asarray(LENGTHS, np.int32)
    run = jit(functools.partial(run_prompts, config, chunk_size=chunk_size))
    last, similarities, _, vectors = run(params, texts, length, _cache(config, len(texts), 0))
    assert (vectors.dtype, vectors.shape) == (jnp.float32, (len(texts), config.hidden_size))
    assert (similarities.dtype, similarities.shape) == (jnp.float32, (len(texts), config.num_layers, 2))
    for row, (n, text) in enumerate(zip(LENGTHS, texts, strict=True)):
        stream: list[np.ndarray] = []
        reference.forward(config, params, text[:n], stream=stream)
        expected = []
        for before, after in itertools.pairwise(stream):
            norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
            expected.append(np.mean(np.sum(before * after, axis=1) / norms))
        found = similarities[row].reshape(-1)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_allclose(last[row], stream[-1][-1], atol=TOLERANCE)
        sizes = np.sqrt(np.mean(stream[-1] ** 2, axis=1, keepdims=True) + config.rms_norm_eps)
        normed = stream[-1] / sizes * np.asarray(params["norm"])
        np.testing.assert_allclose(vectors[row], normed.mean(axis=0), atol=TOLERANCE)


def test_the_cosine_of_nothing():
    """It is zero, not NaN, and 16-bit numbers are computed in float32."""
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-18, 0.0], [200.0, 100.0]])
    y = jnp.array([[4.0, 3.0], [1.0, 1.0], [1.0, 0.0], [200.0, 100.0]])
    np.testing.assert_allclose(cosine(x, y), [0.96, 0, 1, 1], rtol=1e-6)
    half = cosine(x.astype(jnp.float16), y.astype(jnp.float16))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, [0.96, 0, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("num_rows", [1, kv.UNROLLED_ROWS + 1])
def test_cache_layouts_and_writes(merged, num_rows):
    """Both layouts, and the writes of few and of many rows: two blocks of tokens at ragged starts."""
    config, params, texts = BASE, _params("grouped"), _texts(num_rows)
    first = np.asarray(np.arange(num_rows) % 4 + 3, np.int32)
    cache = _cache(config, num_rows, 0, merged)
    # The first block is longer than some rows; later writes overwrite its values after their length.
    _, _, cache = _forward(config, params, texts[:, :6], np.zeros(num_rows, np.int32), cache)
    block = np.stack([text[n : n + 5] for n, text in zip(first, texts, strict=True)])
    logits, _, _ = _forward(config, params, block, first, cache)
    for row in range(num_rows):
        n = int(first[row])
        expected = reference.forward(config, params, texts[row, : n + 5])
        np.testing.assert_allclose(np.asarray(logits)[row], expected[n:], atol=TOLERANCE, rtol=0)


def test_grow_and_insert_keep_the_rows():
    config, params, texts = BASE, _params("grouped"), _texts()
    _, _, cache = _forward(config, params, texts[:, :6], np.zeros(3, np.int32), _cache(config, 3, 0))
    _, _, single = _forward(config, params, texts[:1, 6:12], np.zeros(1, np.int32), _cache(config, 1, 0))
    cache = kv.insert(cache, jnp.int32(1), single)
    assert kv.grow(cache, 2 * CAPACITY).capacity == 2 * CAPACITY
    rows = [texts[0, :7], np.append(texts[0, 6:12], texts[1, 6]), texts[2, :7]]
    logits, _, _ = _forward(
        config, params, texts[:, 6:7], np.full(3, 6, np.int32), kv.grow(cache, 2 * CAPACITY)
    )
    for row, text in enumerate(rows):
        expected = reference.forward(config, params, text)[-1]
        np.testing.assert_allclose(np.asarray(logits)[row, 0], expected, atol=TOLERANCE, rtol=0)


PLANS = [
    LayerPlan.skipping(2, attention=[0]),
    LayerPlan.skipping(2, mlp=[1]),
    LayerPlan.skipping(2, attention=[1], mlp=[0]),
    LayerPlan.skipping(2, attention=[0, 1], mlp=[0, 1]),
]


@functools.cache
def _plan_logits(plan: LayerPlan) -> np.ndarray:
    return np.stack([reference.forward(BASE, _params("grouped"), text, run=plan.run) for text in _texts()])


def test_traced_plans_share_one_executable():
    config, params, texts = BASE, _params("grouped"), _texts()
    run = jit(lambda *args: llama.forward(config, *args[:-1], plan=args[-1]))
    for plan in PLANS:
        args = params, texts, np.zeros(3, np.int32), _cache(config, 3, 0)
        logits, _, _ = run(*args, plan.traced())
        np.testing.assert_allclose(logits, _plan_logits(plan), atol=TOLERANCE, rtol=0)
    assert run._cache_size() == 1


def test_static_plans():
    config, params, texts = BASE, _params("grouped"), _texts()
    for plan in PLANS[2:]:
        args = params, texts, np.zeros(3, np.int32), _cache(config, 3, 0)
        logits, _, _ = _forward(config, *args, plan=plan)
        np.testing.assert_allclose(logits, _plan_logits(plan), atol=TOLERANCE, rtol=0)


def test_layer_ranges():
    """An early exit, and the remaining layers from its output."""
    config, params, texts = CONFIGS["qwen2"], _params("qwen2"), _texts()
    short = config.truncated(1)

    @jit
    def run(params, tokens):
        start = jnp.zeros(len(tokens), jnp.int32)
        hidden, cache = llama.embed(config, params, tokens), _cache(config, len(tokens), 0)
        hidden, cache = llama.run_layers(config, params, hidden, start, cache, layers=range(1))
        early = llama.logits(config, params, hidden)
        hidden, cache = llama.run_layers(config, params, hidden, start, cache, layers=range(1, 2))
        late = llama.logits(config, params, hidden)
        cut = llama.truncate(params, 1)
        return early, late, llama.forward(short, cut, tokens, start, _cache(short, len(tokens), 0))[0]

    early, late, cut = map(np.asarray, run(params, texts))
    for row, text in enumerate(texts):
        expected = reference.forward(config, params, text, num_layers=1)
        np.testing.assert_allclose(early[row], expected, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(cut[row], expected, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(late[row], reference.forward(config, params, text), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["sliding", "biases", "gemma", "olmo"])
def test_training_block_sees_only_its_segment(name):
    """Two documents packed in one row have the same outputs as each alone."""
    config, params, text = CONFIGS[name], _params(name), _texts()[0]
    cut = 8  # beyond it, the rotation of `olmo` depends on the length of the text
    positions = np.asarray([[*range(cut), *range(len(text) - cut)]])
    segments = np.asarray([[0] * cut + [1] * (len(text) - cut)])

    @jit
    def run(params, tokens):
        hidden = llama.embed(config, params, tokens)
        for layer, p in enumerate(params["layers"]):
            hidden = llama.run_block(config, config.layer_type(layer), p, hidden, positions, segments)
        return llama.logits(config, params, hidden)

    expected = [reference.forward(config, params, part) for part in (text[:cut], text[cut:])]
    logits = run(params, text[None])[0]
    np.testing.assert_allclose(logits, np.concatenate(expected), atol=TOLERANCE, rtol=0)


def test_parameters_counted_and_initialised():
    config = CONFIGS["biases"].truncated(1)
    params = jit(llama.init_params, static_argnums=0)(config, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == llama.param_shapes(config)
    assert llama.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    for path, leaf in jax.tree.leaves_with_path(params):
        name, width = path[-1].key, leaf.shape[-1]
        if name == "norm" or name.endswith("bias"):
            assert (leaf == (name == "norm")).all()
        else:
            assert abs(float(leaf.std()) * width**0.5 - 1) < 0.2
    layers = jax.eval_shape(lambda: kv.create(config, 3, CAPACITY, jnp.bfloat16)).layers
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    assert kv.size_bytes(config, 3, CAPACITY, jnp.bfloat16) == total


def test_wrong_configs_are_refused():
    with refused("not a multiple of num_kv_heads"):
        dataclasses.replace(BASE, num_kv_heads=3)
    with refused("sliding_windows has 1 entries for 2 layers"):
        dataclasses.replace(BASE, sliding_windows=(4,))
    with refused("from 1 to 2"):
        BASE.truncated(3)
    with refused(r"skips layers \[2\]"):
        LayerPlan.skipping(2, mlp=[2])


def test_a_model_cut_below_its_sliding_windows_has_none():
    config = dataclasses.replace(BASE, sliding_windows=(None, 4))
    assert config.truncated(2) == config
    assert config.truncated(1) == BASE.truncated(1)


@pytest.mark.representatives("1-None-True", "4-100-False", "9-None-False")
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_attention_over_blocks_and_over_the_whole_cache_are_the_same(length, window, merged):
    """Rows of very different lengths; the longest is below and above the share at which a cache is read whole."""
    slots, rng = 4 * kv.BLOCK, np.random.default_rng(3)
    batch, kv_heads, group, hd = 2, 2, 3, 4
    heads = (batch * kv_heads,) if merged else (batch, kv_heads)
    layer = tuple(jnp.asarray(rng.standard_normal((*heads, slots, hd)), jnp.float32) for _ in range(2))
    queries = jnp.asarray(rng.standard_normal((batch, length, kv_heads, group, hd)), jnp.float32)
    attend = jit(kv.attend, static_argnames=("window", "merged"))
    for longest in (length, 200, slots // 2, slots // 2 + 1, 3 * slots // 4 + 1, slots):
        start = jnp.array([0, longest - length])
        positions = start[:, None] + jnp.arange(length)
        seen = kv.visible(positions, jnp.arange(slots)[None, None], window)
        expected = kv.attend_where(queries, layer, seen, merged)
        found = attend(queries, layer, positions, window=window, merged=merged)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("many", [True, False])
def test_products_of_many_heads_are_sums_on_a_cpu(many, contract):
    heads, rng = kv.MANY_HEADS - (not many), np.random.default_rng(4)
    a, b = rng.standard_normal((2, heads, 40, 8)).astype(np.float32)
    a = a[:, :3] if contract else a[:, :3, :1] + np.arange(40, dtype=np.float32)
    product = jax.jit(functools.partial(kv._batched_product, contract=contract))
    np.testing.assert_allclose(product(a, b), a @ (b.swapaxes(1, 2) if contract else b), rtol=1e-4, atol=1e-4)
    assert ("dot_general" in product.lower(a, b).as_text()) is not many


@pytest.mark.parametrize(("batch", "merged"), [(2, True), (2, False), (kv.UNROLLED_ROWS + 1, True)])
def test_a_draft_window_is_a_mask(batch, merged):
    """Texts that are shorter than the window, a little longer, and as long as the cache. Unread slots are huge."""
    slots, length, rng, (sinks, last) = 40, 3, np.random.default_rng(3), (3, 8)
    heads = (batch * 2,) if merged else (batch, 2)
    layer = [rng.standard_normal((*heads, slots, 4)).astype(np.float32) for _ in range(2)]
    queries = jnp.asarray(rng.standard_normal((batch, length, 2, 3, 4)), jnp.float32)
    for ends in ((3, 10), (11, 12), (13, 15), (slots, 30)):
        positions = np.resize(ends, batch)[:, None] - length + np.arange(length)
        behind = positions[..., None] - np.arange(slots)
        seen = (behind >= 0) & ((behind < last) | (np.arange(slots) < sinks))
        expected = kv.attend_where(queries, tuple(layer), jnp.asarray(seen), merged)
        unread = ~seen.any(axis=1).repeat(2, axis=0).reshape(*heads, slots, 1)
        given = tuple(np.where(unread, 1e30, x) for x in layer)
        found = kv.attend(queries, given, jnp.asarray(positions), (sinks, last), merged)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_attention_goes_by_blocks_where_all_scores_would_not_fit_a_processors_cache(monkeypatch):
    def bytes_of(most):
        monkeypatch.setattr(kv, "MOST_SCORES", most)
        layer = (jnp.zeros((1, 2048, 4)), jnp.zeros((1, 2048, 4)))
        attend = functools.partial(kv.attend, window=None, merged=True)
        made = (
            jax.jit(attend).lower(jnp.zeros((1, 64, 1, 2, 4)), layer, jnp.zeros((1, 64), jnp.int32)).compile()
        )
        return made.memory_analysis().temp_size_in_bytes

    assert bytes_of(0) < 64 * 2 * 2048 * 4 < bytes_of(2**30)


@pytest.mark.representatives("tpu-300-False", "gpu-None-True")
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_attention_on_an_accelerator_reads_only_the_blocks_that_a_query_sees(
    monkeypatch, platform, window, tree
):
    """The last of three blocks overlaps the one before. Unread slots are not numbers: a weight of 0 would keep them."""

    def chosen(*given, default, **others):
        return others.get(platform, default)(*given)

    slots, length, width, rng = 5 * kv.BLOCK, 9, 2 * kv.BLOCK, np.random.default_rng(3)
    batch, kv_heads, group, hd = 2, 2, 3, 4
    layer = [rng.standard_normal((batch * kv_heads, slots, hd)).astype(np.float32) for _ in range(2)]
    queries = jnp.asarray(rng.standard_normal((batch, length, kv_heads, group, hd)), jnp.float32)
    monkeypatch.setattr(kv, "SCORES_AT_ONCE", width * batch * length * kv_heads * group)
    for ends in ((9, 200), (width, width + 1), (570, 600), (slots - 1, slots)):
        positions = jnp.array(ends)[:, None] - length + jnp.arange(length)
        seen = kv.visible(positions, jnp.arange(slots)[None, None], window)
        mask = seen & (rng.random((batch, length, slots)) < 0.5) | (positions[..., None] == np.arange(slots))
        mask = mask if tree else seen
        expected = kv.attend_where(queries, layer, mask, merged=True)
        first = 0 if window is None or tree else max(0, ends[0] - length - window + 1) // width * width
        unread = np.r_[:first, min(-(-ends[1] // width) * width, slots) : slots]
        given = [x.copy() for x in layer]
        for x in given:
            x[:, unread] = np.nan
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", chosen)
            found = kv.attend(queries, given, positions, window, True, mask if tree else None)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
def test_a_step_on_a_tpu_reads_as_many_slots_as_its_texts_have(monkeypatch, tree):
    """The first 64 of 1,024 slots, the first 256, or all. Unread slots are not numbers."""
    slots, rng = 8 * kv.BLOCK, np.random.default_rng(3)
    layer = [rng.standard_normal((2, slots, 4)).astype(np.float32) for _ in range(2)]
    queries = jnp.asarray(rng.standard_normal((2, 1, 1, 3, 4)), jnp.float32)
    monkeypatch.setattr(kv, "SHORTEST", 64)
    for live, read in ((1, 64), (64, 64), (65, 256), (256, 256), (257, 1024), (1024, 1024)):
        positions = jnp.array([[0], [live - 1]])
        seen = kv.visible(positions, jnp.arange(slots)[None, None], None)
        expected = kv.attend_where(queries, layer, seen, merged=True)
        given = [np.where(np.arange(slots)[:, None] < read, x, np.nan) for x in layer]
        with monkeypatch.context() as patch:
            patch.setattr(
                jax.lax, "platform_dependent", lambda *given, tpu=None, default, **_: (tpu or default)(*given)
            )
            found = kv.attend(queries, given, positions, None, True, seen if tree else None)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.representatives("cpu-True", "tpu-False")
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_attention_over_a_ring_is_that_over_all_slots(monkeypatch, platform, blocks):
    """Rows in their first lap and in later ones. Stale slots are not numbers: they must not be seen."""

    def chosen(*given, default, **others):
        return others.get(platform, default)(*given)

    slots, size, window, length, rng = 12 * kv.BLOCK, 3 * kv.BLOCK, 300, 9, np.random.default_rng(3)
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    if blocks:
        monkeypatch.setattr(kv, "MOST_SCORES", 0)
        monkeypatch.setattr(kv, "SCORES_AT_ONCE", 2 * kv.BLOCK * 2 * length * 6)
    monkeypatch.setattr(kv, "SHORTEST", 64)
    config = dataclasses.replace(BASE, sliding_windows=(window, None))
    monkeypatch.setattr(kv, "most_places", lambda config: (size, None))
    cache = kv.create(config, 2, slots, jnp.float32)
    layers = [jnp.asarray(rng.standard_normal((2, slots, 2, 6)), jnp.float32) for _ in range(2)]
    merged = [layer.swapaxes(1, 2).reshape(4, slots, 6) for layer in layers]
    queries = jnp.asarray(rng.standard_normal((2, length, 2, 3, 6)), jnp.float32)
    for ends in ((9, 20), (100, size), (size + 1, 1000), (slots, 2 * size)):
        positions = jnp.array(ends)[:, None] - length + jnp.arange(length)
        held = cache.held(0, positions[:, -1])
        place = jnp.where(held < jnp.array(ends)[:, None], held, 0)
        rows = jnp.where((held < jnp.array(ends)[:, None])[..., None, None], 0.0, jnp.nan)
        ring = [
            (jnp.take_along_axis(layer, place[..., None, None], axis=1) + rows)
            .swapaxes(1, 2)
            .reshape(4, size, 6)
            for layer in layers
        ]
        ring[1] = jnp.nan_to_num(ring[1])
        found = kv.attend(queries, tuple(ring), positions, window, True, None, held)
        seen = kv.visible(positions, jnp.arange(slots)[None, None], window)
        np.testing.assert_allclose(found, kv.attend_where(queries, tuple(merged), seen, True), atol=1e-5)


def test_prompts_of_a_capacity_that_is_no_multiple_of_a_chunk():
    """The last chunk then begins earlier: past the last slot it would overwrite others."""
    config, params = CONFIGS["grouped"], _params("grouped")
    texts, length = np.random.default_rng(3).integers(0, BASE.vocab_size, (2, 28)), np.array([27, 13])
    run = jit(functools.partial(run_prompts, config, chunk_size=16))
    cache = kv.create(config, 2, 28, jnp.float32)
    last, similarities, *_ = run(params, texts, length, cache)
    for row in range(2):
        alone = kv.create(config, 1, 32, jnp.float32)
        padded = np.pad(texts[row : row + 1], ((0, 0), (0, 4)))
        expected, same, *_ = run(params, padded, length[row : row + 1], alone)
        np.testing.assert_allclose(last[row], expected[0], atol=1e-5)
        np.testing.assert_allclose(similarities[row], same[0], atol=1e-5)


SAME = {
    "some": {"rows": 5},
    "many": {"rows": 40},
    "batch": {"rows": 2, "batch": 3},
    "blocks": {"rows": 3, "capacity": 512},
    "whole": {"capacity": 512, "start": 400},
    "int8-cache": {"rows": 2, "capacity": 256, "kv_cache_dtype": "int8"},
    "ragged-windows": {
        "rows": 2,
        "batch": 2,
        "capacity": 1024,
        "start": 900,
        "ragged": True,
        "sliding_windows": (20, None) * 3,
    },
    "ragged-draft-window": {
        "rows": 3,
        "batch": 2,
        "capacity": 256,
        "start": 100,
        "ragged": True,
        "draft_window": (2, 1),
        "kv_cache_dtype": "int8",
        "sliding_windows": (None, 20) * 3,
    },
    "tree": {"rows": 4, "tree": True},
    "plan": {"rows": 2, "plan": True},
    "exit": {"layers": range(1, 5), "aux_layers": (5, 1, 3, "final")},
    # An activation between two levels may be rounded to either.
    "int8-activations": {"rows": 3, "weights": lambda *model: rounding(quantise(*model)), "atol": 1e-3},
    "adapter": {"rows": 3, "weights": lambda config, params: adapted(config, params, adapters(params))},
}


def rounding(params):
    """Returns int8 parameters whose products round their inputs."""

    def of(node):
        return with_outliers(node, jnp.arange(node.packed.shape[-1]) * 1.0) if is_int8(node) else node

    def is_int8(node):
        return isinstance(node, Quantised)

    return jax.tree.map(of, params, is_leaf=is_int8)


def adapters(params):
    """Returns adapters of rank 2 for queries, keys and values."""

    def normal(number, *shape):
        return jax.random.normal(jax.random.key(number), shape)

    shapes = [layer["attention"]["qkv"].shape for layer in params["layers"]]
    made = [
        {"qkv_a": normal(number, 3, 2, shape[-1]), "qkv_b": normal(number, *shape[:-1], 2)}
        for number, shape in enumerate(shapes)
    ]
    return {"layers": [{"attention": one, "mlp": {}} for one in made]}


@pytest.mark.parametrize("case", SAME)
def test_layers_in_a_loop_equal_layers_one_after_the_other(case):
    """The hidden states, auxiliary ones, the similarities and the cache from the first slot on that is not stale."""
    given = dict(SAME[case])
    rows, batch, capacity, start = (
        given.pop(name, usual) for name, usual in (("rows", 1), ("batch", 1), ("capacity", 64), ("start", 20))
    )
    layers, aux_layers = given.pop("layers", None), given.pop("aux_layers", ())
    # In a ragged batch, the first row has no text yet.
    begin = jnp.full(batch, start).at[0].multiply(not given.pop("ragged", False))
    plan = jnp.array([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [1, 1]], bool) if given.pop("plan", 0) else None
    tree = Tree.from_parents(Shape((-1, -1, 0)), 3) if given.pop("tree", False) else None
    weights, atol = given.pop("weights", lambda config, params: params), given.pop("atol", 1e-5)
    config = dataclasses.replace(BASE, num_layers=6, max_position_embeddings=1024, **given)
    params = weights(config, llama.init_params(config, jax.random.key(0)))
    cache = kv.create(config, batch, capacity, jnp.float32)
    hidden = jax.random.normal(jax.random.key(1), (batch, start + rows, config.hidden_size))
    feed = jit(llama.run_layers, static_argnums=0)
    for at in range(0, start, 100):
        _, cache = feed(config, params, hidden[:, at : min(at + 100, start)], jnp.full(batch, at), cache)
    results = []
    for looped in (True, False):

        @jit
        def run(params, cache, looped=looped):
            return llama.run_with_aux(
                config, params, hidden[:, start:], begin, cache, aux_layers,
                plan=plan, layers=layers, watch=cosine, tree=tree,
            )  # fmt: skip

        with LOOPED(looped):
            ran = run(params, cache)
        kept = [] if plan is not None else ran.cache.layers
        results.append((ran.hidden, ran.aux_hidden_states, ran.watched, kept))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=atol), *results)
