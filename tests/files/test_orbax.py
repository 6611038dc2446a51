"""Orbax checkpoints: the same parameters come back, where they were asked to be."""

from __future__ import annotations

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.io import orbax
from jaxspec.model.config import LlamaConfig
from jaxspec.model.sharding import param_shardings
from jaxspec.testing import reference

CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    qkv_bias=True,
    model_type="qwen2",
    eos_token_ids=(2, 3),
)


@pytest.fixture
def saved(tmp_path):
    params = jax.tree.map(jnp.asarray, reference.random_params(CONFIG, 0))
    orbax.save(tmp_path / "model", CONFIG, params)
    return tmp_path / "model", params


def test_round_trip(saved):
    directory, params = saved
    config, restored = orbax.restore(directory)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    _, halved = orbax.restore(directory, dtype=jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), halved, params)


def test_the_first_layers_alone_are_read(saved):
    directory, params = saved
    config, restored = orbax.restore(directory, num_layers=1)
    assert config == CONFIG.truncated(1)
    jax.tree.map(np.testing.assert_array_equal, restored, {**params, "layers": params["layers"][:1]})


def test_restores_to_the_given_sharding(saved):
    directory, params = saved
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config, restored = orbax.restore(directory, shardings=functools.partial(param_shardings, mesh))
    assert config == CONFIG
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding.mesh == mesh
    qkv = restored["layers"][1]["attention"]["qkv"]
    assert qkv.sharding.spec[0] == "model"
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_a_later_save_replaces_the_earlier(saved):
    directory, params = saved
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    orbax.save(directory, CONFIG, doubled)
    jax.tree.map(np.testing.assert_array_equal, orbax.restore(directory)[1], doubled)


def test_bad_input(saved, tmp_path):
    directory, params = saved
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        orbax.restore(tmp_path / "absent")
    narrow = dataclasses.replace(CONFIG, intermediate_size=10)
    orbax.save(tmp_path / "narrow", narrow, jax.tree.map(jnp.asarray, reference.random_params(narrow, 0)))
    shutil.copy(directory / "config.json", tmp_path / "narrow" / "config.json")
    message = r"parameter layers/0/mlp/down has shape \(8, 10\), expected shape \(8, 12\)"
    with pytest.raises(ValueError, match=message) as error:
        orbax.restore(tmp_path / "narrow")
    assert "\n" not in str(error.value)
    orbax.save(directory, CONFIG.truncated(1), {**params, "layers": params["layers"][:1]})
    shutil.copy(tmp_path / "narrow" / "config.json", directory / "config.json")
    with pytest.raises(ValueError, match=r"parameter layers/1/.* is missing"):
        orbax.restore(directory)
    shutil.rmtree(directory / "params" / "d")
    (directory / "params" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="cannot be read") as error:
        orbax.restore(directory)
    assert "\n" not in str(error.value)
    shutil.rmtree(directory / "params")
    with pytest.raises(FileNotFoundError, match="params is missing"):
        orbax.restore(directory)
