"""Width growth: the wide model computes what the narrow one does, its copies part in training, and a run resumes."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests import tiny
from tests.training.test_training_run import STORIES, arguments, losses_of, metrics, one_error
from training import layerskip, sft
from training.data import reading
from training.loop import optimizer, step, widening
from training.losses import base

SHAPES = {
    "untied": LlamaConfig(31, 8, 12, 2, num_heads=2, num_kv_heads=2, head_dim=4),
    "tied": LlamaConfig(31, 8, 12, 2, num_heads=2, num_kv_heads=2, head_dim=4, tie_embeddings=True),
    "grouped": LlamaConfig(31, 8, 12, 2, num_heads=6, num_kv_heads=2, head_dim=4),
    "biases": LlamaConfig(
        31, 8, 12, 2, num_heads=4, num_kv_heads=1, head_dim=4, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
}
SHAPES |= {name: tiny.with_block(name, SHAPES["grouped"]) for name in ("gemma", "olmo")}


def drawn(config: LlamaConfig):
    """Parameters all of whose numbers differ: norms and biases too."""
    params = llama.init_params(config, jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [leaf + jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, noisy)


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12))
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "segments": jnp.ones((2, 12), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(12), (2, 12)),
        "learn": jnp.ones((2, 12), bool),
    }


@pytest.mark.full
@pytest.mark.representatives("untied-3", "grouped-2", "gemma-2", "olmo-3")
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_wide_model_computes_what_the_narrow_one_does(shape, factor, batch):
    config = SHAPES[shape]
    params = drawn(config)
    wide, widened = widening.widen(config, params, factor, seed=3)
    assert jax.tree.map(jnp.shape, widened) == llama.param_shapes(wide)
    assert (wide.hidden_size, wide.head_dim, wide.group_size) == (
        8 * factor,
        config.head_dim,
        config.group_size,
    )
    outputs = zip(
        base.layer_outputs(config, params, batch), base.layer_outputs(wide, widened, batch), strict=True
    )
    for narrow_out, wide_out in outputs:
        for copy in jnp.split(wide_out, factor, axis=-1):
            np.testing.assert_allclose(copy, narrow_out, rtol=1e-4, atol=1e-5)
        wanted = llama.logits(config, params, narrow_out)
        np.testing.assert_allclose(llama.logits(wide, widened, wide_out), wanted, rtol=1e-4, atol=2e-5)


def effects(config: LlamaConfig, params) -> dict[str, np.ndarray]:
    """What each copy of a unit does while all copies still carry the same, [2, …]: inputs are added up.

    Without norms: Adam's first step is as large whatever the gradient, and its sign is that of both copies.
    """

    def read(weight):
        return weight.reshape(*weight.shape[:-1], 2, -1).sum(axis=-2)

    layer = params["layers"][0]
    whole = {
        "embed": params["embed"].T,
        "heads": read(layer["attention"]["qkv"]),
        "out": read(layer["attention"]["out"]),
        "units": np.moveaxis(read(layer["mlp"]["gate_up"]), 1, 0),
        "down": read(layer["mlp"]["down"]),
    }
    return {name: np.stack(np.split(np.asarray(one), 2)) for name, one in whole.items()}


@pytest.mark.representatives("tied-adamw")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("shape", ["untied", "tied", "grouped"])
def test_one_step_parts_the_copies(shape, kind, batch):
    config, widened = widening.widen(SHAPES[shape], drawn(SHAPES[shape]), 2, seed=3)
    for first, second in effects(config, widened).values():
        np.testing.assert_allclose(first, second, atol=1e-6)
    rate = 1e-2
    transform = optimizer.make_optimizer(
        optimizer.OptimizerOptions(kind, learning_rate=rate, weight_decay=0, warmup=1), 10
    )
    state = step.init_state(widened, transform)
    for _ in range(2):  # the first step's rate is 0
        state, _ = step.make_step(base.next_token(config), transform, 0)(
            state, {name: array[None] for name, array in batch.items()}
        )
    for name, (first, second) in effects(config, state.params).items():
        assert np.abs(first - second).max() > rate / 20, name


def test_the_shares_follow_from_the_seed():
    config = SHAPES["untied"]
    (_, one), (_, same), (_, other) = (widening.widen(config, drawn(config), 2, seed) for seed in (1, 1, 2))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), one, same)))
    assert not np.array_equal(one["head"], other["head"])


@pytest.mark.full
def test_a_widened_run_resumes_as_it_was(tmp_path, capsys):
    """The wide shape stands in its config; 10 steps at once are 5 and 5; another width is refused."""
    (tmp_path / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    assert sft.main(arguments(tmp_path, "narrow", "--steps", "5")) == 0
    wide = ["--start", str(tmp_path / "narrow"), "--widen", "2", "--exits"]
    narrow_config, wide_config = (tmp_path / name / "config.json" for name in ("narrow", "whole"))
    assert layerskip.main(arguments(tmp_path, "whole", *wide, "--steps", "10")) == 0
    shapes = [json.loads(file.read_text()) for file in (narrow_config, wide_config)]
    assert [one["hidden_size"] for one in shapes] == [16, 32]
    assert [one["num_key_value_heads"] for one in shapes] == [1, 2]
    killed = arguments(tmp_path, "parts", *wide, "--steps", "10")
    assert layerskip.main([*killed, "--minutes", "1e-9"]) == 0
    assert len(metrics(tmp_path, "parts")) == 1
    assert layerskip.main(killed) == 0
    assert losses_of(metrics(tmp_path, "parts"))[1:9] == losses_of(metrics(tmp_path, "whole"))[1:9]
    capsys.readouterr()
    assert layerskip.main([*killed, "--widen", "3"]) == 2
    assert "another model" in one_error(capsys, "training.layerskip")


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--widen", "2"], "--hidden-size"), (["--start", "small", "--widen", "1"], "--widen is 1")],
)
def test_impossible_widths_are_refused(more, said, capsys):
    assert sft.main(["--data", "a", "--run", "r", *more]) == 2
    assert said in one_error(capsys)
