"""Losses at early exits, and what is measured on held-out text, each against a slow twin."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests import refused
from training.losses import base
from training.losses import exits as exit_losses
from training.reports import evaluation

LAYERS = 3
CONFIG = LlamaConfig(
    vocab_size=31,
    hidden_size=8,
    intermediate_size=12,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


@pytest.fixture(scope="module")
def params():
    return llama.init_params(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def batch():
    """Three rows of two documents each, one of them padded, some tokens only read."""
    rng = np.random.default_rng(0)
    shape = (3, 18)
    segments = np.repeat([[1] * 11 + [2] * 7], 3, axis=0)
    segments[2, 16:] = 0
    positions = np.concatenate([np.arange(11), np.arange(7)])[None].repeat(3, axis=0)
    return {
        "tokens": jnp.asarray(rng.integers(0, CONFIG.vocab_size, shape), jnp.int32),
        "segments": jnp.asarray(segments, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "learn": jnp.asarray(rng.random(shape) > 0.1),
    }


def given(at: int = 0, target=None) -> base.Given:
    return base.Given(jnp.int32(at), jax.random.key(0), target)


def loss_at(params, batch, layers: int) -> jax.Array:
    """The plain way: the model cut to its first layers."""
    cut = CONFIG.truncated(layers)
    logits = llama.logits(cut, params, base.layer_outputs(cut, llama.truncate(params, layers), batch)[-1])
    return base.cross_entropy(logits, *base.next_token_targets(batch))


def assert_trees_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.full
def test_soft_is_the_mean_over_exits_and_so_is_its_gradient(params, batch):
    exits = (1, 3)

    def plain(p):
        return sum(loss_at(p, batch, layers) for layers in exits) / len(exits)

    soft = exit_losses.soft_loss(CONFIG, exits)
    got = jax.jit(jax.value_and_grad(lambda p: soft(p, batch, given())[0]))(params)
    assert_trees_close(got, jax.jit(jax.value_and_grad(plain))(params))


@pytest.mark.full
def test_distillation_vanishes_at_the_target_itself_and_only_there(params, batch):
    other = llama.init_params(CONFIG, jax.random.key(2))
    distilled = jax.jit(exit_losses.soft_loss(CONFIG, (LAYERS,), target=CONFIG, distil_weight=1.0))
    assert float(distilled(params, batch, given(target=params))[0]) == pytest.approx(0, abs=1e-4)
    assert float(distilled(params, batch, given(target=other))[0]) > 1
    mixed = jax.jit(exit_losses.soft_loss(CONFIG, (LAYERS,), target=CONFIG, distil_weight=0.25))
    expected = 0.75 * loss_at(params, batch, LAYERS) + 0.25 * distilled(params, batch, given(target=other))[0]
    assert float(mixed(params, batch, given(target=other))[0]) == pytest.approx(float(expected), rel=1e-5)


def test_divergence_is_kullback_leibler():
    rng = np.random.default_rng(1)
    wanted, logits = rng.normal(size=(2, 1, 3, 5))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (wanted, logits))
    mask = np.array([[True, False, True]])
    expected = (p * np.log(p / q)).sum(-1)[mask].sum()
    assert float(base.divergence(wanted, logits, mask)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_bfloat16_products_leave_float32_gradients_close_to_the_exact_ones(params, batch):
    loss = exit_losses.soft_loss(CONFIG, (1, LAYERS))
    (exact, _), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, given())
    rounded = base.in_dtype(loss, jnp.bfloat16)
    (total, _), grads = jax.jit(jax.value_and_grad(rounded, has_aux=True))(params, batch, given())
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert total.dtype == jnp.float32
    assert float(total) == pytest.approx(float(exact), rel=0.02)
    assert float(total) != float(exact)
    size = optax.tree.norm(expected)
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, grads, expected))) < 0.1 * float(size)


# LayerSkip


def test_exit_weights_are_the_papers():
    # Equation 4 at L = 4, scale 0.5: 0, .5·1, .5·3, and 3 + .5·(0 + 1 + 2).
    np.testing.assert_allclose(exit_losses.exit_weights(4, 0.5), [0, 0.5, 1.5, 4.5])
    np.testing.assert_allclose(exit_losses.exit_weights(1, 0.5), [1])


def test_dropout_rates_are_the_papers():
    options = exit_losses.LayerSkipOptions(max_dropout=0.3)
    depth = [np.exp(layer * np.log(2) / 3) - 1 for layer in range(4)]
    for at, over_time in ((0, 0.0), (40, np.exp(40 * np.log(2) / 99) - 1), (99, 1.0)):
        rates = exit_losses.dropout_rates(options, 4, jnp.int32(at), 100)
        np.testing.assert_allclose(rates, 0.3 * over_time * np.array(depth), rtol=1e-5, atol=1e-7)
    constant = dataclasses.replace(options, dropout_over_time="constant")
    np.testing.assert_allclose(
        exit_losses.dropout_rates(constant, 4, jnp.int32(0), 100), 0.3 * np.array(depth), rtol=1e-5
    )


def test_curricula():
    rotational = exit_losses.LayerSkipOptions(rotation=3)
    on = np.array([exit_losses.enabled_exits(rotational, 8, jnp.int32(t), 100) for t in range(6)])
    assert on[:, -1].all()
    assert (on[:3, :-1].sum(0) == 1).all()
    assert np.array_equal(on[:3], on[3:])
    assert on[:, :-1].sum(1).max() == exit_losses.most_exits(rotational, 8)
    gradual = exit_losses.LayerSkipOptions(curriculum="gradual")
    begins = [
        next(t for t in range(101) if exit_losses.enabled_exits(gradual, 4, jnp.int32(t), 100)[layer])
        for layer in range(4)
    ]
    # Layer l from half the run times (L − l) / L on; the last from the start.
    assert begins == [50, 38, 25, 0]


@pytest.mark.representatives("rotational")
@pytest.mark.parametrize("curriculum", ["rotational", "gradual"])
def test_layer_skip_is_the_weighted_sum_over_the_exits_that_are_on(params, batch, curriculum):
    options = exit_losses.LayerSkipOptions(
        max_dropout=0.0, early_exit_scale=0.7, curriculum=curriculum, rotation=2
    )
    steps = 10
    got = jax.jit(
        jax.value_and_grad(lambda p, g: exit_losses.layerskip_loss(CONFIG, options, steps)(p, batch, g)[0])
    )
    for at in (1, 4):
        on = np.asarray(exit_losses.enabled_exits(options, LAYERS, jnp.int32(at), steps))
        weights = np.where(on, exit_losses.exit_weights(LAYERS, 0.7), 0)
        weights /= weights.sum()

        def plain(p, weights=weights):
            return sum(w * loss_at(p, batch, layer + 1) for layer, w in enumerate(weights) if w)

        assert_trees_close(got(params, given(at)), jax.jit(jax.value_and_grad(plain))(params))


def test_a_dropped_layer_is_the_identity_for_its_rows_alone(params, batch):
    keep = [jnp.ones(3, bool)] * LAYERS
    keep[1] = jnp.array([True, False, True])
    got = base.layer_outputs(CONFIG, params, batch, keep=keep)[-1]
    whole = base.layer_outputs(CONFIG, params, batch)[-1]
    without = {**params, "layers": [layer for index, layer in enumerate(params["layers"]) if index != 1]}
    cut = base.layer_outputs(CONFIG.truncated(LAYERS - 1), without, batch)[-1]
    np.testing.assert_allclose(got[::2], whole[::2], atol=1e-5)
    np.testing.assert_allclose(got[1], cut[1], atol=1e-5)


@pytest.mark.full
def test_layers_are_dropped_as_often_as_their_rates_say(params):
    """What the forward pass is told to keep, counted over many rows."""
    options = exit_losses.LayerSkipOptions(max_dropout=0.5, dropout_over_time="constant")
    rates = exit_losses.dropout_rates(options, LAYERS, jnp.int32(0), 10)
    seen = []
    original = exit_losses.layer_outputs

    def record(config, params, batch, remat, keep):
        seen.append(np.array(keep))
        return original(config, params, batch, remat, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_losses, "layer_outputs", record)
        rows = {name: jnp.zeros((4000, 2), jnp.int32) for name in ("tokens", "segments", "positions")}
        rows["learn"] = jnp.ones((4000, 2), bool)
        exit_losses.layerskip_loss(CONFIG, options, 10)(params, rows, given())
    np.testing.assert_allclose(1 - seen[0].mean(axis=1), rates, atol=0.03)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_dropout": 1.0}, "max_dropout is 1.0"),
        ({"rotation": 0}, "rotation is 0"),
        ({"early_exit_scale": -1}, "-1"),
    ],
)
def test_impossible_recipes_are_refused(options, said):
    with refused(said):
        exit_losses.LayerSkipOptions(**options)


# What is measured


def test_held_out_figures_are_those_of_a_slow_count(params, batch):
    exits = (1, 2)
    measure = evaluation.make_measure(CONFIG, "float32", exits, judged=(1, 3))
    other = {**batch, "tokens": (batch["tokens"] * 7 + 3) % CONFIG.vocab_size}
    got = measure(params, {"a": [batch, batch], "b": [other]}, {"a": 3.0, "b": 1.0})
    ahead = evaluation.NUM_DRAFT_TOKENS

    def counted(batch):
        mask = np.asarray(base.next_token_targets(batch)[1])
        chosen = {
            n: np.asarray(jnp.argmax(llama.logits(CONFIG, params, out), -1))
            for n, out in enumerate(base.layer_outputs(CONFIG, params, batch), start=1)
        }
        loss = (loss_at(params, batch, 1) + loss_at(params, batch, 3)) / 2
        figures = {"held_out_loss": float(loss / mask.sum())}
        for n in exits:
            agrees = (chosen[n] == chosen[LAYERS]) & mask
            figures[f"acceptance/{n}"] = agrees.sum() / mask.sum()
            emitted = []
            for row in range(mask.shape[0]):
                for begin in range(mask.shape[1] - ahead + 1):
                    if mask[row, begin : begin + ahead].all():
                        run = agrees[row, begin : begin + ahead]
                        emitted.append(1 + (ahead if run.all() else int(np.argmin(run))))
            figures[f"mean_acceptance_length/{n}"] = np.mean(emitted)
            for number in range(1, ahead + 1):
                figures[f"accepted_token_{number}/{n}"] = np.mean(np.array(emitted) > number)
        return figures

    a, b = counted(batch), counted(other)
    # Else a weight that is not applied would pass.
    assert {"held_out_loss", "acceptance/1"} <= {name for name in a if abs(a[name] - b[name]) > 1e-3}
    for name in a:
        assert got[f"{name}/a"] == pytest.approx(a[name], rel=1e-5), name
        assert got[f"{name}/b"] == pytest.approx(b[name], rel=1e-5), name
        assert got[name] == pytest.approx(0.75 * a[name] + 0.25 * b[name], rel=1e-5), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_held_out_loss_is_that_of_the_written_weights(params, batch, dtype):
    written = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf.astype(dtype)), jnp.float32), params)
    found = [
        evaluation.make_measure(CONFIG, kind)(weights, {"a": [batch]}, {"a": 1.0})["held_out_loss"]
        for kind, weights in ((dtype, params), ("float32", written), ("float32", params))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] != found[2]


def test_a_kind_of_short_texts_has_no_mean_acceptance_length(params, batch):
    length = evaluation.NUM_DRAFT_TOKENS  # one target less than a round
    short = {**batch, "segments": jnp.arange(batch["tokens"].shape[1])[None].repeat(3, axis=0) // length + 1}
    measure = evaluation.make_measure(CONFIG, "float32", (1,))
    got = measure(params, {"short": [short], "long": [batch]}, {"short": 1.0, "long": 1.0})
    assert "acceptance/1/short" in got
    assert "mean_acceptance_length/1/short" not in got
    assert got["mean_acceptance_length/1"] == got["mean_acceptance_length/1/long"] >= 1


def test_acceptance_is_against_the_target_where_one_is_given(params, batch):
    other = llama.init_params(CONFIG, jax.random.key(7))
    own = evaluation.make_measure(CONFIG, "float32", (LAYERS,))(params, {"a": [batch]}, {"a": 1.0})
    assert own[f"acceptance/{LAYERS}"] == pytest.approx(1)
    against = evaluation.make_measure(CONFIG, "float32", (LAYERS,), target=(CONFIG, other))
    assert against(params, {"a": [batch]}, {"a": 1.0})[f"acceptance/{LAYERS}"] < 0.9


def test_the_number_of_pieces(monkeypatch):
    monkeypatch.setattr(base, "_MAX_LOGITS", 40)
    hidden, head = jnp.zeros((3, 18, 1)), {"head": jnp.zeros((10, 1))}
    assert base.pieces(hidden, head) == 6  # at least 5, of 3 positions each
    assert base.pieces(hidden[:, :17], head) == 1  # a prime number of positions
    assert base.pieces(hidden, {"embed": jnp.zeros((2, 1))}) == 1


def test_pieces_of_positions_have_the_sum_of_the_whole(params, batch):
    """The sum and its gradients are those of all positions at once, and no array has the logits of them all."""
    hidden, given = base.layer_outputs(CONFIG, params, batch)[-1], base.head_of(params)
    rows = base.next_token_targets(batch)

    def total(scale, hidden, rows, given):
        return base.cross_entropy(scale * llama.logits(CONFIG, given, hidden), *rows)

    def graded(count):
        summed = functools.partial(base.early_gradient, total, count)
        return jax.value_and_grad(summed, argnums=(0, 1))

    arguments = jnp.float32(1.5), hidden, rows, given
    shape = f"[{hidden.shape[0]},{hidden.shape[1]},{CONFIG.vocab_size}]"
    assert shape in str(jax.make_jaxpr(graded(1))(*arguments))
    assert shape not in str(jax.make_jaxpr(graded(6))(*arguments))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        jax.jit(graded(6))(*arguments),
        jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*arguments),
    )
    plain, divided = (jax.jit(functools.partial(base.early_gradient, total, n))(*arguments) for n in (1, 6))
    assert float(divided) == pytest.approx(float(plain), rel=1e-6)
