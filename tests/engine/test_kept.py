"""Programs and what method `auto` has learnt are kept for the next process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxspec.choosing.beliefs import Counts
from jaxspec.choosing.policy import Times
from jaxspec.engine import compilation_cache
from jaxspec.engine.executables import Executables
from jaxspec.engine.stored_programs import Key
from jaxspec.host import user_cache
from jaxspec.io.methods import auto_file
from jaxspec.methods import registry
from tests import caching, tiny


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


TIMES = Times({("off", 1): 20.0, ("ngram", 4): 1.5}, 0.5, 700.0, programs={"ngram 0123": 40.0})
COUNTS = {"ngram": Counts(np.array([[9.0, 1.0], [3.5, 6.0]]), np.array([[10.0, 0.0], [9.0, 1.0]]))}


def test_what_was_learnt_is_read_again(tmp_path):
    path, key = tmp_path / "auto" / "model.json", {"model": "abc"}
    disturbed = ("suffix", 1)
    given = dataclasses.replace(TIMES, ratios=TIMES.ratios | {disturbed: 3.0}, disturbed={disturbed})
    auto_file.write(path, key, given, COUNTS)
    times, counts = auto_file.read(path, key)
    assert times == TIMES
    assert counts["ngram"].accept.tolist() == COUNTS["ngram"].accept.tolist()
    assert counts["ngram"].draft.tolist() == COUNTS["ngram"].draft.tolist()
    assert "date" in json.loads(path.read_text(encoding="utf-8"))
    assert auto_file.read(path, {"model": "another"}) is None
    names = [f"ngram {number}" for number in range(2000)]  # of a server that has run for long
    auto_file.write(path, key, dataclasses.replace(TIMES, programs=dict.fromkeys(names, 1.0)), COUNTS)
    times, _ = auto_file.read(path, key)
    assert list(times.programs) == names[-500:]


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {"format": "jaxspec.auto/0"},
        {"ratios": [["off", 1, "fast"]]},
        {"ratios": [["off", 0, 1.0]]},
        {"prefill_ms": -1},
        {"ratios": [["off", 1, 0.0]]},
        {"counts": {"ngram": {"accept": [[1, 2]], "draft": [[1, 2], [1, 2]]}}},
        {"counts": {"ngram": {"accept": [[1, 2, 3]], "draft": [[1, 2]]}}},
        {"counts": {"ngram": {"accept": [], "draft": []}}},
        {"counts": {"ngram": {"accept": [[-1, 2]], "draft": [[1, 2]]}}},
        {"programs": {"ngram": None}},
    ],
)
def test_a_damaged_file_is_no_file(tmp_path, changes):
    path = tmp_path / "model.json"
    auto_file.write(path, {}, TIMES, COUNTS)
    content = path.read_text(encoding="utf-8")
    path.write_text(content[:-40] if changes is None else json.dumps(json.loads(content) | changes))
    assert auto_file.read(path, {}) is None


def test_the_next_process_begins_with_what_an_earlier_one_learnt(kept):
    """Greedy texts of the tiny model repeat themselves."""
    compiled, names = [], []
    for _ in range(2):
        lm = tiny.language_model()
        lm._alternatives.known.times.missed_ms["ngram"] = 1e9  # so that a short text makes its programs
        for _ in range(3):
            result = lm.generate(
                [7, 1, 7, 1], method="auto", among="ngram", max_new_tokens=90, ignore_eos=True, explain=True
            )
            assert result.tokens == tiny.greedy((7, 1, 7, 1), 90)
            lm.executables.wait()
            names.append({one.name for one in result.expected if one.ready})
        compiled.append(lm.executables.num_compilations)
        assert lm._alternatives.known.counts["ngram"].accept[0, 0] > 0
        assert [name.split()[0] for name in lm._alternatives.known.times.programs] == ["ngram"]
    assert compiled[0] > 0
    assert compiled[1] == 0
    assert "ngram" in names[-1]
    assert tiny.language_model()._alternatives.known.counts["ngram"].accept[0, 0] > 0
    (path,) = kept.glob("auto/*.json")
    path.write_text("{", encoding="utf-8")
    assert not tiny.language_model()._alternatives.known.counts


def test_the_default_is_auto_and_its_text_plain_decodings(lm, monkeypatch):
    code = "from jaxspec.methods import registry; print(registry.DEFAULT)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "auto\n"
    monkeypatch.setattr(registry, "DEFAULT", "auto")
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        text = lm.generate([7, 1, 7, 1], max_new_tokens=20, **options)
        plain = lm.generate([7, 1, 7, 1], max_new_tokens=20, method="autoregressive", **options)
        assert text.tokens == plain.tokens
        assert text.drafted_by.startswith("auto: ")
        assert plain.drafted_by == "autoregressive"
