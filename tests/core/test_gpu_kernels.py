"""The kernels of `model.gpu_kernels`, emulated on this machine, against float64 and against XLA's programs."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import gpu_kernels, llama, rope
from jaxspec.model.config import LlamaConfig, Scores
from jaxspec.model.lora import Adapted
from jaxspec.model.numerics import (
    ATTENTION,
    INTERPRETED,
    KERNELS,
    PRODUCTS,
    SUMMED,
    normed_linear,
    stream_dtype,
)
from jaxspec.model.quantisation import quantised, with_outliers
from jaxspec.programs import compiler_options, executables, kernel_check, stored_programs
from tests import tiny

EPS = 1e-5
EVERY = frozenset({PRODUCTS, ATTENTION, INTERPRETED})
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float32, "int8": jnp.bfloat16}  # weights: x


def drawn(rng, dtype, *shape):
    return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)


def weight_of(rng, kind: str, *shape):
    """A weight, its scale or None, and its float64 values."""
    if kind != "int8":
        weight = drawn(rng, kind, *shape)
        return weight, None, np.asarray(weight, np.float64)
    held = quantised(drawn(rng, "bfloat16", *shape))
    return (
        held.packed,
        held.scale,
        np.asarray(held.packed, np.float64) * np.asarray(held.scale, np.float64)[..., None],
    )


def product_of(x, whole, bias, norm, residual, gated):
    x = np.asarray(x, np.float64)
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * np.asarray(norm, np.float64)
    y = np.einsum("ri,...ni->...rn", x, whole)
    if bias is not None:
        y = y + np.asarray(bias, np.float64)[..., None, :]
    y = y[0] / (1 + np.exp(-y[0])) * y[1] if gated else y
    return y if residual is None else y + np.asarray(residual, np.float64)


# Rows, output and input channels. The sizes are no multiples of those of a program.
SIZES = [(1, 1300, 72), (2, 50, 5000), (4, 70, 136), (5, 50, 300), (9, 70, 72), (16, 33, 600)]


# More rows in float32 are left to XLA.
PRODUCTS_OF = [
    pytest.param(*size, kind, id=f"{size[0]}-{kind}", marks=[pytest.mark.full] * (kind != "bfloat16"))
    for size in SIZES
    for kind, dtype in DTYPES.items()
    if dtype != jnp.float32 or size[0] <= gpu_kernels.FEW_ROWS
]


@pytest.mark.parametrize("before_and_after", ["norm, gate", "bias, residual"])
@pytest.mark.parametrize(("rows", "channels", "size", "kind"), PRODUCTS_OF)
def test_a_product_of_a_few_rows(rows, channels, size, kind, before_and_after):
    rng = np.random.default_rng(rows)
    gated, added = "gate" in before_and_after, "residual" in before_and_after
    x = jnp.asarray(rng.normal(size=(rows, size)), DTYPES[kind])
    shape = (2, channels) if gated else (channels,)
    weight, scale, whole = weight_of(rng, kind, *shape, size)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, size), jnp.bfloat16) if gated else None
    bias, residual = (drawn(rng, jnp.bfloat16, n, channels) if added else None for n in (1, rows))
    more = {"eps": EPS, "gated": gated, "out_dtype": jnp.float32, "interpret": True}
    found = gpu_kernels.product(x, weight, scale, bias, norm, residual, **more)
    wanted = product_of(x, whole, None if bias is None else bias[0], norm, residual, gated)
    error = np.sqrt(np.mean((found - wanted) ** 2)) / np.std(wanted)
    # With tensor cores, a product with the norm's weight is rounded to bfloat16.
    assert error < (5e-3 if gated and rows > gpu_kernels.FEW_ROWS else 2e-6)


def test_a_row_that_is_not_finite_spoils_no_other():
    rng = np.random.default_rng(0)
    weight, norm = drawn(rng, jnp.bfloat16, 40, 64), jnp.ones(64, jnp.bfloat16)
    for rows in (3, 5):
        x = jnp.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16).at[1, 7].set(jnp.nan)
        found = gpu_kernels.product(x, weight, norm=norm, eps=EPS, out_dtype=jnp.float32, interpret=True)
        assert (jnp.isfinite(found).all(axis=1) == (jnp.arange(rows) != 1)).all()


def uses_a_kernel(weight, rows: int = 1, dtype=jnp.bfloat16, kernels=EVERY, **more) -> bool:
    with KERNELS(kernels):
        trace = jax.make_jaxpr(lambda x: normed_linear(x, None, EPS, weight, **more))
        return "pallas_call" in str(trace(jnp.ones((1, rows, 48), dtype)))


def test_where_xla_computes_a_product():
    plain, half = jnp.ones((64, 48), jnp.bfloat16), jnp.ones((64, 48), jnp.float16)
    for weight in plain, quantised(plain):
        assert uses_a_kernel(weight)
        assert uses_a_kernel(weight, gpu_kernels.MOST_ROWS)
        assert not uses_a_kernel(weight, gpu_kernels.MOST_ROWS + 1)
        assert not uses_a_kernel(weight, exact=True)
        assert not uses_a_kernel(weight, kernels=frozenset({SUMMED}))
    low = jnp.ones((1, 1, 48), jnp.bfloat16), jnp.ones((64, 1), jnp.bfloat16)
    adapted = Adapted(plain, *low, jnp.ones(1, bool), 0, (64,), 1.0)
    rounded = with_outliers(quantised(plain), jnp.ones(48))
    for weight in adapted, rounded, quantised(plain, 4), plain.astype(jnp.float32):
        assert not uses_a_kernel(weight)
    assert uses_a_kernel(half, gpu_kernels.FEW_ROWS, jnp.float32)
    assert not uses_a_kernel(half, gpu_kernels.FEW_ROWS + 1, jnp.float32)


def attention_of(qkv, starts, keys, values, window):
    """The attention of tokens that follow starts[b] slots, in float64, with rotated keys in the slots."""
    batch, length, kv_heads, group, size = qkv.shape
    mixed = np.zeros((batch, length, kv_heads, group - 2, size))
    angles = (starts[:, None] + np.arange(length))[..., None] * 10_000.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = (turn(angles)[:, :, None, None] for turn in (np.cos, np.sin))
    one, other = np.split(np.asarray(qkv[..., :-1, :], np.float64), 2, axis=-1)
    turned = np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    for b, head in np.ndindex(batch, kv_heads):
        past = (np.asarray(x, np.float64)[b * kv_heads + head, : starts[b]] for x in (keys, values))
        new = turned[b, :, head, -1], np.asarray(qkv[b, :, head, -1], np.float64)
        k, v = (np.concatenate(both) for both in zip(past, new, strict=True))
        for t in range(length):
            end = starts[b] + t + 1
            begin = 0 if window is None else max(end - window, 0)
            scores = np.exp(turned[b, t, head, :-1] @ k[begin:end].T / size**0.5)
            mixed[b, t, head] = scores / scores.sum(axis=1, keepdims=True) @ v[begin:end]
    return mixed


# Tokens, live slots of each row, key/value heads, queries of each, channels, window.
CHAINS = [
    (1, (300,), 2, 4, 64, None),
    (2, (0, 200), 1, 1, 32, 150),
    (5, (130, 0, 64), 2, 3, 32, None),
    (9, (191, 5), 1, 2, 64, 40),
    (16, (63, 384), 1, 8, 32, None),
]


@pytest.mark.parametrize(
    "chain",
    [*CHAINS[:2], *(pytest.param(one, marks=pytest.mark.full) for one in CHAINS[2:])],
    ids=[str(tokens) for tokens, *_ in CHAINS],
)
@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "float16"], ids=["bfloat16", "float16"]
)
def test_attention_to_the_live_slots(chain, dtype):
    """Rows of different lengths; other slots, which are not finite, are not read. The write is that of XLA."""
    length, starts, kv_heads, group, size, window = chain
    rng, starts, slots = np.random.default_rng(length), np.array(starts), 400
    config = LlamaConfig(2, 2, 2, 1, kv_heads * group, kv_heads, size)
    qkv = jnp.asarray(rng.normal(size=(len(starts), length, kv_heads, group + 2, size)), stream_dtype(dtype))
    layer = rng.normal(size=(2, len(starts), kv_heads, slots, size))
    for row, start in enumerate(starts):
        layer[:, row, :, start:] = np.nan
    layer = tuple(jnp.asarray(x.reshape(-1, slots, size), dtype) for x in layer)
    places = jnp.asarray(starts)[:, None] + jnp.arange(length)
    tables = rope.tables(config, config.layer_type(0), places, jnp.zeros(len(starts), jnp.int32))
    attend = llama.Cached(jnp.asarray(starts), places, window, merged=True)
    arguments = config, {}, qkv, tables, attend
    with KERNELS(EVERY):
        mixed, written = llama.attended(*arguments, layer)
    wanted = attention_of(qkv, starts, *layer, window)
    assert np.sqrt(np.mean((mixed - wanted) ** 2) / np.mean(wanted**2)) < jnp.finfo(dtype).eps
    for buffer, expected in zip(written, llama.attended(*arguments, layer)[1], strict=True):
        np.testing.assert_array_equal(buffer.astype(jnp.float32), expected.astype(jnp.float32))


def test_a_token_that_is_not_finite_spoils_who_sees_it():
    """Its value is stored as 0 and its key as NaN, as `cache.write` does."""
    config = LlamaConfig(2, 2, 2, 1, 1, 1, 32)
    qkv = jnp.ones((1, 3, 1, 3, 32), jnp.bfloat16).at[0, 1, 0, 2, 5].set(jnp.inf)
    start, layer = jnp.array([4]), (jnp.ones((1, 64, 32), jnp.bfloat16),) * 2
    tables = rope.tables(
        config, config.layer_type(0), start[:, None] + jnp.arange(3), jnp.zeros(1, jnp.int32)
    )
    mixed, (keys, values) = gpu_kernels.attention(qkv, tables[:2], start, layer, interpret=True)
    assert jnp.isfinite(mixed).all(axis=(0, 2, 3, 4)).tolist() == [True, False, False]
    assert jnp.argwhere(~jnp.isfinite(keys)).tolist() == [[0, 5, 5]]
    assert values[0, 5, 5] == 0
    assert jnp.isfinite(values).all()


def test_where_xla_computes_attention():
    """Trees, exact texts, the layout of a mesh, many tokens, other sizes of a head, other dtypes, and other devices."""

    def uses(
        length=1, group=4, size=64, dtype=jnp.bfloat16, kernels=EVERY, merged=True, turned=None, **more
    ) -> bool:
        slots = jnp.arange(length)[None]
        attend = llama.Cached(jnp.zeros(1, jnp.int32), slots, None, merged, **more)
        layer = (jnp.zeros((1, 128, size), dtype),) * 2
        with KERNELS(kernels):
            qkv, half = (
                jnp.zeros((1, length, 1, group + 2, size), dtype),
                jnp.zeros((1, length, turned or size // 2)),
            )
            return attend.has_kernel(qkv, rope.Tables(half, half), layer)

    assert uses()
    assert uses(16, 8)
    assert not uses(17)
    assert not uses(16, 9)
    assert not uses(size=80)
    assert not uses(dtype=jnp.float32)
    assert not uses(merged=False)
    assert not uses(seen=jnp.ones((1, 1, 128), bool))
    assert not uses(places=jnp.arange(128)[None])
    assert not uses(scores=Scores(cap=50.0))
    assert not uses(turned=16)
    assert not uses(kernels=frozenset({PRODUCTS}))


@pytest.mark.full
@pytest.mark.parametrize(("name", "int8"), [(PRODUCTS, False), (PRODUCTS, True), (ATTENTION, False)])
def test_the_check_passes_the_kernels(name, int8):
    own, xlas = kernel_check.errors(name, jnp.bfloat16, int8, frozenset({INTERPRETED}))
    assert 1e-3 < own <= kernel_check.MARGIN * xlas < 1e-2


def device(platform: str = "gpu", capability: str = "9.0", kind: str = "a card"):
    return types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind)


def leaf_on(*devices, dtype="bfloat16"):
    return types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=devices), dtype=dtype)


def test_the_kernels_of_a_device(monkeypatch):
    """Those that passed, if the program is of one CUDA device with bfloat16 products."""
    asked = []
    monkeypatch.setattr(kernel_check, "passed", lambda *given: asked.append(given) or frozenset({"passed"}))
    card = device()
    assert compiler_options.kernels([leaf_on(card)]) == {"passed"}
    assert compiler_options.kernels([quantised(jnp.ones((2, 2), jnp.bfloat16)), 0]) == frozenset()  # a CPU
    monkeypatch.setenv("JAXSPEC_KERNELS", "off")
    assert compiler_options.kernels([leaf_on(card)]) == frozenset()
    monkeypatch.delenv("JAXSPEC_KERNELS")
    for where in (device("gpu", "gfx90a"), device("tpu", ""), device("cpu", "")):
        assert compiler_options.kernels([leaf_on(where)]) == frozenset()
    assert compiler_options.kernels([leaf_on(card, device())]) == frozenset()  # a mesh
    assert compiler_options.kernels([leaf_on(card, dtype="float32")]) == frozenset()
    assert compiler_options.kernels([leaf_on(device(capability="7.5"))]) == {SUMMED}
    assert asked == [(card, "bfloat16", False)]


@pytest.mark.parametrize(
    ("own", "used"), [(0.010, True), (0.0104, True), (0.011, False), (float("nan"), False), (None, False)]
)
def test_a_verdict_holds_for_the_process(own, used, monkeypatch, caplog):
    """Also if the kernels cannot be compiled; there is one line of the log."""
    calls = []

    def errors(*given):
        calls.append(given)
        if own is None:
            raise NotImplementedError("no such operation\nmore lines")
        return own, 0.01

    monkeypatch.setattr(kernel_check, "errors", errors)
    monkeypatch.setattr(kernel_check, "_is_attached", lambda device: True)
    monkeypatch.setattr(kernel_check, "_VERDICTS", {})
    monkeypatch.setattr(kernel_check.jax, "default_device", lambda device: contextlib.nullcontext())
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert (PRODUCTS in kernel_check.passed(device(), "bfloat16", False)) == used
    assert calls == [(name, "bfloat16", False) for name in kernel_check.CHECKS]
    (line, *_) = (record.getMessage() for record in caplog.records if PRODUCTS in record.getMessage())
    assert ("are used" in line) == used
    assert len(caplog.records) == len(kernel_check.CHECKS)
    kernel_check.passed(device(), "bfloat16", True)
    kernel_check.passed(device(kind="another card"), "bfloat16", False)
    assert len(calls) == 3 * len(kernel_check.CHECKS)


def test_a_device_that_is_not_attached_uses_every_kernel():
    assert kernel_check.passed(device(), "bfloat16", False) == kernel_check.CHECKS.keys()


def test_a_stored_program_depends_on_the_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(stored_programs, "_directory", lambda: tmp_path)
    paths = set()
    for names in frozenset(), frozenset({PRODUCTS}), frozenset({SUMMED}):
        monkeypatch.setattr(stored_programs, "kernels", lambda args, names=names: names)
        paths.add(stored_programs.Key(jax.jit(jnp.sin), (jnp.ones(1),), {}).path)
    assert len(paths) == 3


def test_a_program_that_is_not_compiled_with_kernels_is_compiled_without(monkeypatch, caplog):
    def used(x):
        if KERNELS.value:
            raise NotImplementedError("no such operation\nmore lines")
        return x + 1

    monkeypatch.setattr(executables, "kernels", lambda args: EVERY)
    assert executables.Executables().call(jax.jit(used), jnp.ones(())) == 2
    (line,) = caplog.messages
    assert line == "used is compiled without the kernels of jaxspec: no such operation"


@pytest.mark.full
def test_greedy_texts_are_those_of_xla(monkeypatch):
    """On a model in bfloat16, with rounds of one row and of four."""
    texts = []
    for kernels in frozenset(), EVERY:
        monkeypatch.setattr(executables, "kernels", lambda args, kernels=kernels: kernels)
        config = tiny.engine_config(dataclasses.replace(tiny.TARGET, head_dim=32))
        halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params(config))
        model = LanguageModel(config, halves, tiny.tokenizer(), name="tiny")
        made = model.generate("e ba ba", max_new_tokens=12, method="ngram", num_draft_tokens=tiny.K)
        texts.append(made.tokens)
    assert texts[0] == texts[1]
