"""Weights that were made from a model's files are mapped by the next process, and made again after any change."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import threading

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.loading import int8, loading, ready_weights
from tests import caching, gguf_files, tiny

PROMPT = [3, 4, 5]


def settled() -> None:
    """Waits until the weights are written."""
    for thread in threading.enumerate():
        if thread.name == "jaxspec-weights":
            thread.join()


@pytest.fixture
def model(tmp_path):
    """A GGUF file, with a cache of its own."""
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, tiny.SMALL, tiny.params(tiny.SMALL))
    with caching.user_cache(tmp_path / "cache"):
        yield path


@pytest.fixture
def makes(monkeypatch):
    """The models whose weights were made from their files."""
    made = []
    read = loading.checkpoint.load_params
    monkeypatch.setattr(
        loading.checkpoint, "load_params", lambda *given: made.append(given[0]) or read(*given)
    )
    return made


@pytest.mark.parametrize(("weights", "faster"), [(None, True), ("int8", True), ("int8", False)])
def test_the_next_process_maps_the_same_weights(model, makes, monkeypatch, weights, faster):
    monkeypatch.setattr(int8, "is_faster", lambda: faster)
    monkeypatch.setattr(int8, "warn_if_slower", lambda device: None)
    first = jaxspec.load(model, weights=weights)
    settled()
    second = jaxspec.load(model, weights=weights)
    assert len(makes) == 1
    assert jax.tree.structure(first.params) == jax.tree.structure(second.params)
    for one, other in zip(*map(jax.tree.leaves, (first.params, second.params)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert first.fingerprint == second.fingerprint
    texts = [lm.generate(PROMPT, method="autoregressive", max_new_tokens=4).tokens for lm in (first, second)]
    assert texts[0] == texts[1]
    assert jaxspec.load(model, weights="int8" if weights is None else None).weights != second.weights


def test_another_file_of_the_same_name_is_read(model, makes):
    jaxspec.load(model)
    settled()
    gguf_files.write(model, tiny.SMALL, jax.tree.map(lambda leaf: 2 * leaf, tiny.params(tiny.SMALL)))
    changed = jaxspec.load(model)
    assert len(makes) == 2
    settled()
    os.utime(model, ns=(1, 1))
    jaxspec.load(model)
    assert len(makes) == 3
    settled()
    gguf_files.write(model, tiny.SMALL, tiny.params(tiny.SMALL))
    os.utime(model, ns=(1, 1))  # such as a copy that keeps times
    jaxspec.load(model)
    assert len(makes) == 4
    largest = np.abs(np.asarray(changed.params["embed"])).max()
    assert largest == pytest.approx(2 * np.abs(np.asarray(tiny.params(tiny.SMALL)["embed"])).max(), rel=0.02)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content[:60] + b"?" + content[61:]]
)
def test_a_damaged_file_is_made_and_kept_again(model, makes, tmp_path, damage):
    jaxspec.load(model)
    settled()
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(damage(content))
    jaxspec.load(model)
    settled()
    assert len(makes) == 2
    assert kept.read_bytes() == content


def test_a_file_of_classes_that_are_gone_is_made_again(model, makes, tmp_path):
    jaxspec.load(model)
    settled()
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    header = pickle.dumps(ready_weights.ReadyWeights).replace(b"ReadyWeights", b"ReadyMatters")
    kept.write_bytes(hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header)
    jaxspec.load(model)
    assert len(makes) == 2


def test_a_cache_that_cannot_be_written_is_read(model, makes, monkeypatch):
    jaxspec.load(model)
    settled()

    def refuse(*given, **more):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    jaxspec.load(model)
    assert len(makes) == 1
    jaxspec.load(model, dtype="bfloat16")
    settled()
    assert len(makes) == 2


def test_a_file_that_another_process_replaces_is_read_whole(model, tmp_path, monkeypatch):
    first = jaxspec.load(model)
    settled()
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    (tmp_path / "other").write_bytes(bytes(kept.stat().st_size))
    loads = pickle.loads

    def replace_and_load(header):
        if (tmp_path / "other").exists():
            os.replace(tmp_path / "other", kept)
        return loads(header)

    monkeypatch.setattr(ready_weights.pickle, "loads", replace_and_load)
    second = jaxspec.load(model)
    assert not (tmp_path / "other").exists()
    np.testing.assert_array_equal(first.params["embed"], second.params["embed"])


def test_the_files_that_were_used_least_recently_give_way(model, tmp_path, monkeypatch):
    jaxspec.load(model)
    settled()
    (first,) = (tmp_path / "cache" / "weights").iterdir()
    (first.parent / "older").write_bytes(bytes(100))
    os.utime(first.parent / "older", (1, 1))
    disk = shutil.disk_usage(tmp_path)
    budget = 2 * first.stat().st_size + 50
    free = budget / ready_weights._SHARE - first.stat().st_size - 100
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=free))
    jaxspec.load(shutil.copy(model, tmp_path / "more.gguf"))
    settled()
    assert first.exists()
    assert len(list(first.parent.iterdir())) == 2
    os.utime(first, (1, 1))
    jaxspec.load(shutil.copy(model, tmp_path / "most.gguf"))
    settled()
    assert not first.exists()
    assert len(list(first.parent.iterdir())) == 2


def test_without_room_or_a_cache_nothing_is_kept(model, makes, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.loading.ready_weights._SHARE", 0)
    jaxspec.load(model)
    settled()
    assert not list((tmp_path / "cache" / "weights").iterdir())
    with caching.user_cache("off"):
        jaxspec.load(model)
    assert len(makes) == 2
