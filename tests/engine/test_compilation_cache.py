"""Compiled programs are kept for the next process, unless somebody says no."""

from __future__ import annotations

import dataclasses
import errno
import os
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import path as jax_path

import jaxspec
from jaxspec.io.hf import huggingface
from jaxspec.programs import compilation_cache
from tests import caching, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory without a tokenizer, of a config that no other test has compiled for."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    config = dataclasses.replace(tiny.SMALL, max_position_embeddings=384)
    huggingface.save(directory, config, jax.tree.map(np.float32, tiny.params(tiny.SMALL)))
    return directory


@pytest.mark.full
def test_load_keeps_what_is_compiled(model, tmp_path):
    """A script run again should wait no longer than a command run again, whatever was compiled before `load`."""
    with caching.user_cache(tmp_path):
        jax.jit(lambda x: x + 1)(1)
        jaxspec.load(model).generate([3, 4], max_new_tokens=2)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
        kept = [path.name.split("-")[0] for path in (tmp_path / "programs").glob("*/*")]
    assert {"prefill", "run_rounds"} <= set(kept)


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


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with caching.user_cache(tmp_path / "file" / "below"):
        with pytest.warns(
            RuntimeWarning, match=r"below/compiled cannot be written \(Not a directory\); each start"
        ):
            compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None


def test_a_directory_that_is_read_only_is_no_cache(tmp_path, monkeypatch):
    (tmp_path / "compiled").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # read-only, to whomever this runs as
    with caching.user_cache(tmp_path):
        with pytest.warns(RuntimeWarning, match=r"cannot be written \(Permission"):
            compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None


def test_who_has_no_home_directory_has_no_cache():
    with caching.user_cache("~nobody-of-this-name/cache"):
        compilation_cache.enable()
        assert jax.config.jax_compilation_cache_dir is None


def _flipped(entry):
    at = len(entry) // 2
    return entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :]


DAMAGES = {
    "cut in half": lambda entry: entry[: len(entry) // 2],
    "without its last byte": lambda entry: entry[:-1],
    "empty": lambda entry: b"",
    "of zeros": lambda entry: bytes(len(entry)),
    "with a bit flipped": _flipped,
    "of something else": lambda entry: zlib.compress(b"\0\0\0\1no program"),
    "of half a program": lambda entry: zlib.compress(zlib.decompress(entry)[:-1000]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entry(damage, tmp_path):
    """The entry is removed once, one line names the directory, and the next start reads the entry written here."""
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))

    def started():
        jax.clear_caches()
        hits.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for shape in (2, 3):
                assert jax.jit(lambda x: 3 * jnp.cumsum(x))(np.ones(shape)).tolist()[0] == 3
        return [str(warning.message) for warning in said], sum(hits)

    with caching.user_cache(tmp_path):
        compilation_cache.enable()
        directory = tmp_path / "compiled"
        assert started() == ([], 0)
        entries = sorted(directory.glob("*-cache"))
        for entry in entries:
            entry.write_bytes(damage(entry.read_bytes()))
        said, found = started()
        assert found == 0
        assert said == [
            f"the compile cache {directory} had damaged entries, which are removed; their programs are compiled again"
        ]
        assert started() == ([], len(entries))


def test_full_disk(tmp_path, monkeypatch):
    """A partly written entry is removed, and one line reports that the disk is full."""

    def write(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with caching.user_cache(tmp_path), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compilation_cache.enable()
        monkeypatch.setattr(jax_path.Path, "write_bytes", write)
        jax.clear_caches()
        for shape in (2, 3):
            jax.jit(lambda x: 5 * jnp.cumsum(x))(np.ones(shape))
        assert not list((tmp_path / "compiled").iterdir())
    assert [str(warning.message) for warning in said] == [
        f"the compile cache {tmp_path / 'compiled'} cannot be written (No space left on device); the next start "
        "compiles again"
    ]
