"""Compiled programs are kept for the next process, unless somebody says no."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.engine import compilation_cache
from jaxspec.io import huggingface
from tests import caching, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory without a tokenizer, of a config that no other test has compiled for."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    config = dataclasses.replace(tiny.SMALL, max_position_embeddings=384)
    huggingface.save(directory, config, jax.tree.map(np.float32, tiny.params(tiny.SMALL)))
    return directory


def test_load_keeps_what_is_compiled(model, tmp_path):
    """A script run again should wait no longer than a command run again, whatever was compiled before `load`."""
    with caching.user_cache(tmp_path):
        jax.jit(lambda x: x + 1)(1)
        jaxspec.load(model).generate([3, 4], max_new_tokens=2)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
        kept = [path.name.split("-")[0] for path in (tmp_path / "compiled").iterdir()]
    assert {"jit_prefill", "jit_run_rounds"} <= set(kept)


def test_load_can_be_told_not_to(model, tmp_path):
    with caching.user_cache(tmp_path):
        jaxspec.load(model, compilation_cache=False)
        assert jax.config.jax_compilation_cache_dir is None
    with caching.user_cache("off"):
        jaxspec.load(model)
        assert jax.config.jax_compilation_cache_dir is None


def test_settings_of_the_users_own_stay(model, tmp_path):
    with caching.user_cache(tmp_path / "ours"):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        before = jax.config.jax_persistent_cache_min_compile_time_secs
        jaxspec.load(model)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
        assert jax.config.jax_persistent_cache_min_compile_time_secs == before
    assert not (tmp_path / "ours").exists()


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    with caching.user_cache(tmp_path / "file" / "below"):
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None


def test_a_directory_that_is_read_only_is_no_cache(tmp_path, monkeypatch):
    (tmp_path / "compiled").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # read-only, to whomever this runs as
    with caching.user_cache(tmp_path):
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None


def test_who_has_no_home_directory_has_no_cache():
    with caching.user_cache("~nobody-of-this-name/cache"):
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None
