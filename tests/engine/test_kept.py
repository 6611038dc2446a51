"""Programs are kept for the next process."""

from __future__ import annotations

import os
import re
import threading

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxspec.host import progress, user_cache
from jaxspec.methods import registry
from jaxspec.programs import compilation_cache, stored_programs
from jaxspec.programs.executables import Executables
from jaxspec.programs.stored_programs import Key
from tests import caching, python


@jax.jit
def doubled(numbers):
    return {"twice": 2 * numbers}


@flax.struct.dataclass
class Foreign:
    number: jax.Array


@pytest.fixture
def kept(tmp_path):
    with caching.user_cache(tmp_path):
        compilation_cache.enable()
        yield tmp_path


def test_a_program_is_compiled_once_for_all_processes(kept):
    for compiled in (1, 0):
        executables = Executables()  # as in a new process
        assert executables.shapes(doubled, jnp.ones(3)) == {"twice": jax.ShapeDtypeStruct((3,), np.float32)}
        assert executables.call(doubled, jnp.ones(3))["twice"].tolist() == [2, 2, 2]
        assert executables.num_compilations == compiled
    assert [path.name.split("-")[0] for path in kept.glob("programs/*/*")] == ["doubled"]
    assert not list(kept.glob("compiled/jit_doubled*"))


def test_the_first_programs_of_a_process_load_ahead_in_the_next(kept, monkeypatch):
    """In the background; the call of the program takes what was loaded, and loads nothing itself."""
    loaded, real = [], stored_programs._loaded

    def recorded(path, device):
        loaded.append(threading.current_thread().name)
        return real(path, device)

    monkeypatch.setattr(stored_programs, "_loaded", recorded)
    for ahead in (0, 1):
        monkeypatch.setattr(stored_programs, "_first", [])
        stored_programs.load_ahead(["a model"], jax.local_devices()[0])
        assert len(stored_programs._ahead) == ahead
        assert Executables().call(doubled, jnp.ones(6))["twice"].tolist() == [2] * 6
        assert not stored_programs._ahead
    assert loaded == ["MainThread", "jaxspec-load"]


def test_what_is_waited_for_is_said(kept, monkeypatch, caplog):
    said = []
    monkeypatch.setattr(progress.Progress, "__call__", lambda self, what: said.append(what))
    caplog.set_level("INFO", "jaxspec.programs.executables")
    for _ in range(2):
        Executables().call(doubled, jnp.ones(5))
    assert said == ["compiling doubled, once for this model, kept on disk", "loading doubled"]
    assert re.fullmatch(r"compiled doubled, once for this model, kept on disk: \d+ s", caplog.messages[0])
    with caching.user_cache("off"):
        Executables().call(doubled, jnp.ones(5))
    assert said[2:] == ["compiling doubled"]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "damage", [lambda content: content[:100], lambda content: b"", lambda content: content[:-1] + b"?"]
)
def test_a_damaged_program_is_compiled_and_stored_again(kept, damage):
    assert Executables().call(doubled, jnp.ones(2))["twice"].tolist() == [2, 2]
    (path,) = kept.glob("programs/*/*")
    path.write_bytes(damage(path.read_bytes()))
    for compiled in (1, 0):
        executables = Executables()
        assert executables.call(doubled, jnp.ones(2))["twice"].tolist() == [2, 2]
        assert executables.num_compilations == compiled


def test_programs_that_are_not_used_make_room(kept, monkeypatch):
    """A client that asks for ever new programs does not fill the disk."""
    sizes = {}

    def path_of(size):
        return Key(doubled, (jnp.ones(size),), {}).path

    def used(size):
        Executables().call(doubled, jnp.ones(size))
        sizes[size] = path_of(size).stat().st_size
        os.utime(path_of(size), (len(sizes), len(sizes)))  # a disk may keep only the seconds

    for size in (2, 3, 4):
        used(size)
    other = kept / "programs" / "of another version" / "program"
    other.parent.mkdir()
    other.write_bytes(bytes(100))
    os.utime(other, (0, 0))
    Executables().call(doubled, jnp.ones(2))  # reads it
    monkeypatch.setattr(user_cache, "MAX_BYTES", sizes[2] + sizes[4] + max(sizes.values()) + 99)
    used(5)
    assert [size for size in (2, 3, 4, 5) if path_of(size).exists()] == [2, 4, 5]
    assert not other.exists()


def test_the_cache_of_jax_has_a_limit_too(kept, monkeypatch):
    def compiled(size):
        jax.clear_caches()
        return jax.jit(lambda x: 7 * jnp.cumsum(x))(np.ones(size))

    def entries():
        return set((kept / "compiled").glob("*-cache"))

    compiled(2)
    first = entries()
    compiled(3)
    second = entries() - first
    for number, path in enumerate([*first, *second]):
        os.utime(path, (number, number))
    compiled(2)
    size = sum(path.stat().st_size for path in entries())
    monkeypatch.setattr(user_cache, "MAX_BYTES", size + min(path.stat().st_size for path in second) // 2)
    compiled(4)
    assert first < entries()
    assert second - entries()
    jax.config.update(
        "jax_compilation_cache_dir", str(kept / "compiled" / ".." / "compiled")
    )  # the user's own
    jax_cache.reset_cache()
    monkeypatch.setattr(user_cache, "MAX_BYTES", 0)
    before = entries()
    compiled(5)
    assert before < entries()


def test_a_program_belongs_to_its_settings_and_versions(kept):
    found = Key(doubled, (jnp.ones(3),), {}).path
    assert found is not None
    with jax.default_matmul_precision("highest"):
        assert Key(doubled, (jnp.ones(3),), {}).path != found
    assert Key(doubled, (jnp.ones(4),), {}).path != found
    assert Key(doubled, (jnp.ones(3),), {"length": 2}).path != found


def test_a_program_with_code_of_others_is_left_to_jax(kept):
    """Their source is not part of the key."""
    assert Key(doubled, (Foreign(jnp.ones(3)),), {}).path is None
    assert Key(doubled, (jnp.ones(3),), {"made": object()}).path is None


def test_without_a_cache_nothing_is_stored():
    with caching.user_cache("off"):
        assert Key(doubled, (jnp.ones(3),), {}).path is None


def test_the_default_is_auto_and_its_text_plain_decodings(lm, monkeypatch):
    code = "from jaxspec.methods import registry; print(registry.DEFAULT)"
    assert python("-c", code).stdout == "auto\n"
    monkeypatch.setattr(registry, "DEFAULT", "auto")
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        text = lm.generate([7, 1, 7, 1], max_new_tokens=20, **options)
        plain = lm.generate([7, 1, 7, 1], max_new_tokens=20, method="autoregressive", **options)
        assert text.tokens == plain.tokens
        assert text.drafted_by.startswith("auto: ")
        assert plain.drafted_by == "autoregressive"
