"""With an `exact` config, the numbers of a row depend on its own text alone, bit for bit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine import exactness
from jaxspec.methods import LoadedModel
from jaxspec.model import cache as kv
from jaxspec.model import calibration, llama, lora
from jaxspec.model.lora import Adapted
from jaxspec.model.numerics import linear, rms_norm
from jaxspec.model.quantisation import quantise, quantised, with_outliers
from jaxspec.model.tree import Shape, Tree
from jaxspec.programs.executables import Executables
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.testing.contracts import BUDGETS, PROMPTS
from jaxspec.verification import log_probs_of
from tests import refused, tiny, xla

FORMS = ("float32", "bfloat16", "int8", "int8 weights", "bfloat16, int8 weights")
# Queries that share keys alone and in groups, norms of heads, and a window.
CONFIG = dataclasses.replace(
    tiny.TARGET, exact=True, num_kv_heads=4, sliding_windows=(None, 9), tie_embeddings=True
)
QWEN = dataclasses.replace(CONFIG, num_kv_heads=2, qk_norm=True, qkv_bias=True)
RNG = np.random.default_rng(8)
LENGTH = kv.BLOCK + 2
TEXTS = jnp.asarray(RNG.integers(0, CONFIG.vocab_size, (3, LENGTH)), jnp.int32)


def in_form(config, params, form):
    """Returns parameters in one of `FORMS`."""
    dtype = jnp.bfloat16 if form.startswith("bfloat16") else jnp.float32
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    if "adapter" in form:
        return lora.adapted(config, params, tiny.adapter(config, dtype))
    if "int8" not in form:
        return params
    small = quantise(config, params)
    return calibration.calibrated(config, small, jnp.arange(6)) if form == "int8" else small


def with_cache(config, form):
    """Returns a configuration with the cache of a form."""
    return dataclasses.replace(config, kv_cache_dtype="int8") if form == "8-bit cache" else config


# As users compile.
jit = functools.partial(jax.jit, compiler_options=xla.USUAL)


@functools.partial(jit, static_argnums=0)
def step(config, params, tokens, start, cache, tree=None):
    hidden, cache = llama.run_layers(
        config, params, llama.embed(config, params, tokens), start, cache, tree=tree
    )
    return llama.logits(config, params, hidden), cache


def fed(config, params, texts, sizes, capacity=256):
    """Returns the logits of texts that are fed in parts of these sizes, and the cache."""
    cache, at, found = kv.create(config, len(texts), capacity, params["embed"].dtype), 0, []
    for size in sizes:
        logits, cache = step(
            config, params, texts[:, at : at + size], jnp.full(len(texts), at, jnp.int32), cache
        )
        found.append(np.asarray(logits))
        at += size
    return np.concatenate(found, axis=1), cache


@pytest.mark.representatives("float32")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "8-bit cache"])
def test_logits_do_not_depend_on_the_pass(form):
    """A text alone, token by token, against other numbers of rows, places, neighbours and capacities."""
    check_passes(CONFIG, form, ([3, 5, 22], 32, 1), ([30], 256, 3))


@pytest.mark.full
@pytest.mark.representatives("bfloat16, adapter")  # the history of int8 weights is tested below
@pytest.mark.parametrize("form", [*FORMS, "float32, adapter", "bfloat16, adapter"])
def test_logits_of_qwen3_do_not_depend_on_the_pass(form):
    check_passes(QWEN, form, ([2] * 15, 64, 1), ([3, 5, 8, 14], 32, 3), ([30], 512, 3))


def check_passes(config, form, *passes):
    config, few = with_cache(config, form), TEXTS[:, :30]
    params = in_form(config, tiny.params(config), form)
    alone, _ = fed(config, params, few[:1], [1] * 30, 32)
    for sizes, capacity, batch in passes:
        found, _ = fed(config, params, jnp.roll(few, -1, axis=0)[-batch:], sizes, capacity)
        np.testing.assert_array_equal(found[-1:], alone)


@pytest.mark.full
@pytest.mark.representatives("gemma-bfloat16", "olmo-float32", "granite-float32")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8 weights"])
@pytest.mark.parametrize("block", ["gemma", "olmo", "granite"])
def test_logits_of_other_blocks_do_not_depend_on_the_pass(block, form):
    config = dataclasses.replace(tiny.with_block(block, tiny.TARGET), exact=True)
    check_passes(config, form, ([2] * 15, 64, 1), ([3, 5, 8, 14], 32, 3), ([30], 256, 3))


@pytest.mark.representatives("float32")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "8-bit cache"])
def test_logits_and_caches_do_not_depend_on_the_history(form):
    check_history(CONFIG, form, (1, 9))


@pytest.mark.full
@pytest.mark.representatives("bfloat16, int8 weights")
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_caches_of_qwen3_do_not_depend_on_the_history(form):
    check_history(QWEN, form, (1, 2, 5, 25))


def check_history(config, form, widths):
    """Texts beside each other, in passes of these widths and in trees, against each text alone, token by token.

    As in rounds with drafts, a text accepts a part of a pass or of a path through its tree, and the other tokens are
    wrong. Between passes the texts change places. At the end the longest has more tokens than a block of attention.
    """
    config, rng = with_cache(config, form), np.random.default_rng(3)
    params = in_form(config, tiny.params(config), form)
    expected, caches = zip(
        *(fed(config, params, TEXTS[row : row + 1], [1] * LENGTH) for row in range(3)), strict=True
    )
    shape = Shape((-1, -1, 0, 1, 3, 2, 3, 4, 4))
    tree, paths = Tree.from_parents(shape, shape.depth), ([0, 2, 4, 5, 8], [0, 1, 3, 6])
    cache, ends = kv.create(config, 3, 256, params["embed"].dtype), np.zeros(3, np.int32)
    while ends[2] < LENGTH:
        order = rng.permutation(3)
        width = rng.choice([0, *widths])
        tokens = rng.integers(0, config.vocab_size, (3, width or 1 + shape.num_nodes)).astype(np.int32)
        rows = [np.arange(width) if width else paths[rng.integers(2)] for _ in order]
        # The texts grow at different speeds.
        counts = [min(rng.integers(len(of) + 1), 2 * text + 1) for of, text in zip(rows, order, strict=True)]
        counts = np.minimum(counts, LENGTH - ends[order])
        for place, (text, of, count) in enumerate(zip(order, rows, counts, strict=True)):
            tokens[place, of[:count]] = TEXTS[text, ends[text] : ends[text] + count]
        start = jnp.asarray(ends[order])
        logits, cache = step(
            config, params, tokens, start, placed(cache, order), tree if width == 0 else None
        )
        for place, (text, of, count) in enumerate(zip(order, rows, counts, strict=True)):
            same = expected[text][0, ends[text] : ends[text] + count]
            np.testing.assert_array_equal(logits[place, of[:count]], same)
        if width == 0:
            moved = [np.pad(of, (0, 5 - len(of))) for of in rows]
            cache = kv.move(cache, start, jnp.asarray(moved), tokens.shape[1])
        ends[order] += counts
        cache = placed(cache, np.argsort(order))
    for text, end in enumerate(ends):
        leaves = (jax.tree.leaves(of.layers) for of in (kv.take_row(cache, text, 256), caches[text]))
        for found, alone in zip(*leaves, strict=True):
            np.testing.assert_array_equal(found[:, :end], alone[:, :end])


def placed(cache, order):
    """Returns a cache with its rows in another order."""
    layers = jax.tree.map(
        lambda leaf: leaf.reshape(len(order), -1, *leaf.shape[1:])[order].reshape(leaf.shape), cache.layers
    )
    return dataclasses.replace(cache, layers=layers)


@pytest.mark.representatives("float32")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_a_path_of_a_tree_has_the_numbers_of_a_text(form):
    """Its rows, with gaps between their slots, some of them beyond the end of a block; and its cache after `move`."""
    path, shape = (1, 3, 4, 7), Shape((-1, -1, 0, 1, 3, 2, 3, 4, 4))
    rows, before = [0, *(1 + node for node in path)], kv.BLOCK - 3
    params = in_form(CONFIG, tiny.params(CONFIG), form)
    alone, cache = fed(CONFIG, params, TEXTS[:1], [25] * 5 + [1] * 5)
    tokens = RNG.integers(0, CONFIG.vocab_size, (3, 1 + shape.num_nodes)).astype(np.int32)
    tokens[2, rows] = TEXTS[0, before:]
    _, started = fed(CONFIG, params, jnp.roll(TEXTS[:, :before], -1, axis=0), [25] * 5)
    tree, start = Tree.from_parents(shape, shape.depth), jnp.full(3, before, jnp.int32)
    logits, found = step(CONFIG, params, jnp.asarray(tokens), start, started, tree)
    np.testing.assert_array_equal(logits[2, rows], alone[0, before:])
    moved = kv.take_row(kv.move(found, start, jnp.asarray([rows] * 3), len(tokens[0])), 2, 256)
    for one, other in zip(*(jax.tree.leaves(of.layers) for of in (moved, cache)), strict=True):
        np.testing.assert_array_equal(one[:, :LENGTH], other[:, :LENGTH])


@pytest.mark.representatives("float32")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_a_product_does_not_depend_on_the_place_of_a_row(form):
    """Rows in another order, beside others, in passes of other widths; with sizes of which XLA has several kernels."""
    for inputs, outputs in ((16, 24), (192, 520), (9000, 40)):
        weight = jnp.asarray(RNG.standard_normal((outputs, inputs)), jnp.float32)
        x = jnp.asarray(RNG.standard_normal((40, inputs)), jnp.float32)
        if form == "int8":
            weight = with_outliers(quantised(weight), jnp.abs(x).max(axis=0))
        elif form == "bfloat16":
            x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
        product = jit(functools.partial(linear, exact=True, out_dtype=jnp.float32))
        norm = jit(lambda x: rms_norm(x, jnp.ones(x.shape[-1], x.dtype), 1e-5, exact=True))
        for function in (functools.partial(product, weight=weight), norm):
            whole = np.asarray(function(x))
            for width in (1, 3, 8, 9, 33):
                some = RNG.permutation(40)[:width]
                np.testing.assert_array_equal(function(x[some]), whole[some])


@pytest.mark.parametrize("form", FORMS)
def test_adapters_do_not_change_the_other_rows(form):
    """Beside a residual stream: an int8 product and this sum would round once, and twice with adapters."""
    of = jnp.bfloat16 if form.startswith("bfloat16") else jnp.float32
    x, stream, weight, a, b = (
        jnp.asarray(RNG.standard_normal(shape), of)
        for shape in ((1, 8, 160), (1, 8, 160), (160, 160), (1, 4, 160), (160, 4))
    )
    if "int8" in form:
        weight = quantised(weight)
        weight = with_outliers(weight, jnp.abs(x).max(axis=(0, 1))) if form == "int8" else weight

    @jit
    def added(x, stream, weight):
        return stream + linear(x, weight, exact=True)

    adapted = Adapted(weight, a, b, jnp.arange(8) > 0, 0, (160,), 1.0)
    np.testing.assert_array_equal(added(x, stream, adapted)[:, 0], added(x, stream, weight)[:, 0])


def test_an_int8_embedding_is_rounded_before_the_first_sum():
    """The product with its scale and the sum would round once, in programs where they are fused."""
    table = quantised(jnp.asarray(RNG.standard_normal((50, 160)), jnp.float32))
    tokens, write = jnp.arange(24).reshape(2, 12), jnp.asarray(RNG.standard_normal((2, 12, 160)), jnp.float32)
    found = jit(lambda table, write: llama.embed(tiny.TARGET, {"embed": table}, tokens) + write)(table, write)
    rows = np.asarray(table.packed, np.float32) * np.asarray(table.scale)[:, None]
    np.testing.assert_array_equal(found, rows[np.asarray(tokens)] + np.asarray(write))


def test_log_probabilities_do_not_depend_on_the_pass():
    """In a loop, where XLA would fuse the sum of a softmax with the logits."""
    weight = jnp.asarray(RNG.standard_normal((1024, 320)) / 8, jnp.float32)

    @jit
    def greedy(x):
        def body(carry):
            number, x, _ = carry
            logits = linear(x, weight, exact=True)
            best = jnp.argmax(logits, axis=-1, keepdims=True)
            return number + 1, x, log_probs_of(logits, best, exact=True)[..., 0]

        carry = (jnp.int32(0), x, jnp.zeros(x.shape[:2]))
        return jax.lax.while_loop(lambda carry: carry[0] < 1, body, carry)[2]

    x = jnp.asarray(RNG.standard_normal((16, 9, 320)), jnp.float32)
    whole = np.asarray(greedy(x))
    for row, expected in enumerate(whole):
        for width in (1, 2):
            np.testing.assert_array_equal(greedy(x[row : row + 1, :width])[0], expected[:width])


def loop_in(form, drafter):
    config = dataclasses.replace(tiny.config_of(drafter), exact=True)
    made = tiny.loop(tiny.Combination(drafter, "-", "greedy"), Greedy(), config)
    own = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if form == "bfloat16" and leaf.dtype == jnp.float32 else leaf,
        made.weights.drafter,
    )
    return dataclasses.replace(made, weights=Weights(in_form(config, made.weights.target, form), own))


def texts_and_bits(loop, prompts, budgets):
    """Returns the tokens that each row generates and their log-probabilities, with those of the likeliest tokens."""
    begun, first = loop.begin(prompts, budgets, log_probs=True)
    state, rest = loop.go_on(begun, log_probs=True)
    numbers = [
        [*first.log_probs[row, : first.count[row]].tolist(), *rest.log_probs[row, :count].tolist()]
        for row, count in enumerate(np.asarray(rest.count))
    ]
    return list(zip(tiny.generated(state, prompts), numbers, strict=True))


def check_method(form, drafter):
    """A batch of five rows and single rows, against plain decoding of single rows."""
    loop, plain = loop_in(form, drafter), loop_in(form, "autoregressive")
    plain = dataclasses.replace(plain, config=loop.config, weights=Weights(loop.weights.target))
    prompts, budgets = (*PROMPTS, *PROMPTS[:2]), (*BUDGETS, *BUDGETS[1:])
    expected = [
        texts_and_bits(plain, [prompt], [budget])[0] for prompt, budget in zip(prompts, budgets, strict=True)
    ]
    assert texts_and_bits(loop, prompts, budgets) == expected
    assert texts_and_bits(loop, prompts[:1], budgets[:1]) == expected[:1]


@pytest.mark.full
@pytest.mark.representatives("token-recycling-float32", "layerskip-bfloat16", "eagle-tree-int8")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
def test_every_method_writes_the_bits_of_plain_decoding(form, drafter):
    check_method(form, drafter)


@pytest.mark.full
def test_the_check_of_the_machine_fails_if_rows_depend_on_each_other(monkeypatch):
    model = LoadedModel(tiny.TARGET, tiny.params(), "tiny").exact
    assert exactness.is_exact(model, Executables())
    jax.clear_caches()
    sums = kv.sums
    monkeypatch.setattr(kv, "sums", lambda x: sums(x) * (1 + 1e-6 * x.shape[-2]))
    assert not exactness.is_exact(model, Executables())
    jax.clear_caches()
    lm = tiny.language_model()
    with refused("exact is not possible for tiny in float32 on this processor"):
        lm.generate("ab", exact=True)
    jax.clear_caches()


def test_copies_of_the_weights_are_made_once():
    """For texts that are exact and for those that are not."""
    model = LoadedModel(tiny.TARGET, tiny.params(), "tiny")
    copy = model.exact.quantised(4)
    assert copy.config.exact
    assert model.exact.has_quantised(4)
    assert model.has_quantised(4)
    assert copy.params is model.quantised(4).params
    assert not model.quantised(4).config.exact
    cut = model.exact.until(1)
    assert cut.config == dataclasses.replace(tiny.TARGET.truncated(1), exact=True)
    assert cut.params is model.until(1).params
    ids = np.arange(4, dtype=np.int32)
    assert model.exact.vocabulary(ids) is model.vocabulary(ids)


def test_refusals():
    lm = tiny.language_model()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), lm.params)
    for params, mesh, said in (
        (half, None, "tiny is in float16 on cpu"),
        (lm.params, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",)), "on a mesh"),
    ):
        made = type(lm)(lm.config, params, name="tiny", mesh=mesh)
        with refused(rf"exact needs one CPU device .*{said}.*; leave exact out"):
            made.generate([1, 2], exact=True)
    drafter, _ = tiny.drafter_of("layerskip", config=lm.config)
    with refused(
        r"LayerSkipDrafter runs the model with a config that is not exact; make it with lm\.loaded\.exact\.config"
    ):
        lm.generate("ab", exact=True, method=drafter)
    with refused("exact is 'no'"):
        lm.generate("ab", exact="no")


def test_a_draft_model_of_the_targets_shape_is_not_refused():
    lm, same = tiny.language_model(), tiny.language_model()
    given = {"max_new_tokens": 6, "exact": True}
    assert (
        lm.generate([1, 2], method="draft-model", draft=same, **given).tokens
        == lm.generate([1, 2], **given).tokens
    )
