"""The kernels of `model.gpu_kernels`, emulated on this machine, against float64 and against XLA's programs."""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import gpu_kernels
from jaxspec.model.lora import Adapted
from jaxspec.model.numerics import INTERPRETED, KERNELS, PRODUCTS, SUMMED, normed_linear
from jaxspec.model.quantisation import quantised, with_outliers
from jaxspec.programs import compiler_options, executables, kernel_check, stored_programs
from tests import tiny

EPS = 1e-5
EVERY = frozenset({PRODUCTS, INTERPRETED})
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


@pytest.mark.parametrize("before_and_after", ["norm, gate", "bias, residual"])
@pytest.mark.parametrize(
    "kind", ["bfloat16", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("float16", "int8"))]
)
@pytest.mark.parametrize(("rows", "channels", "size"), SIZES, ids=[str(rows) for rows, *_ in SIZES])
def test_a_product_of_a_few_rows(rows, channels, size, kind, before_and_after):
    if DTYPES[kind] == jnp.float32 and rows > gpu_kernels.FEW_ROWS:
        pytest.skip("XLA's product is used")
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


@pytest.mark.full
@pytest.mark.parametrize("int8", [False, True])
def test_the_check_passes_the_kernels(int8):
    own, xlas = kernel_check.errors(PRODUCTS, jnp.bfloat16, int8, frozenset({INTERPRETED}))
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
        halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params())
        model = LanguageModel(tiny.engine_config(), halves, tiny.tokenizer(), name="tiny")
        made = model.generate("e ba ba", max_new_tokens=12, method="ngram", num_draft_tokens=tiny.K)
        texts.append(made.tokens)
    assert texts[0] == texts[1]
