"""Hugging Face directories: configs of both styles, weights in and out, and every kind of bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tracemalloc
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from jaxspec.heads import files as heads
from jaxspec.host import files
from jaxspec.host.messages import brief_errors
from jaxspec.io import tensors
from jaxspec.io.embedded import EMBEDDED, embedded_model, embedded_names
from jaxspec.io.hf import config_json, huggingface, peft
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.layout import leaves
from jaxspec.loading.loading import find_model
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.llama import num_params
from jaxspec.model.sharding import with_copies
from jaxspec.testing import reference
from tests import refused
from tests.families import CHANGES, family

BASE = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_ids=(2,),
)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=32)
CONFIGS = {
    "llama": BASE,
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "biases": dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama3": dataclasses.replace(BASE, rope_scaling=LLAMA3, rope_theta=5e5, eos_token_ids=(2, 5, 3)),
    "linear": dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 4.0), bos_token_id=None),
    "dynamic": dataclasses.replace(BASE, rope_scaling=RopeScaling("dynamic", 2.0), eos_token_ids=()),
    "head_dim": dataclasses.replace(BASE, head_dim=6),
    "mistral": dataclasses.replace(BASE, model_type="mistral", sliding_windows=(4, 4, 4)),
    "mistral_full": dataclasses.replace(BASE, model_type="mistral"),
    "ministral": dataclasses.replace(BASE, model_type="ministral", sliding_windows=(4, None, 4)),
    "ministral_full": dataclasses.replace(BASE, model_type="ministral"),
    "qwen2": dataclasses.replace(BASE, model_type="qwen2", qkv_bias=True, sliding_windows=(None, 4, 4)),
    "qwen3": dataclasses.replace(BASE, model_type="qwen3", qk_norm=True, sliding_windows=(None, 4, 4)),
    "qwen3_biases": dataclasses.replace(
        BASE,
        model_type="qwen3",
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
        head_dim=6,
        tie_embeddings=True,
    ),
    "qwen2_full": dataclasses.replace(BASE, model_type="qwen2", qkv_bias=True, bos_token_id=None),
    **{f"family-{kind}": family(kind, BASE) for kind in CHANGES},
}


def write_config(directory: Path, generation: dict | None = None, **keys) -> Path:
    content = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 3}
    (directory / "config.json").write_text(json.dumps(content | keys))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path, name):
    config = CONFIGS[name]
    params = reference.random_params(config, 0)
    huggingface.save(tmp_path, config, params)
    assert huggingface.read_config(tmp_path) == config
    assert huggingface.stored_dtype(tmp_path) == np.float32
    assert_same(huggingface.load_params(tmp_path, config, jnp.float32), params)
    # Shard by shard, as on a mesh.
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shards = {name: where for name, _, _ in leaves(config)}
    assert_same(huggingface.load_params(tmp_path, config, jnp.float32, shards), params)
    assert not list(tmp_path.glob(".*"))


def test_every_family_has_a_round_trip():
    assert CHANGES.keys() == FAMILIES.keys()


def test_tensors_are_those_of_hugging_face(tmp_path):
    """Query head h of Hugging Face is member h % G of key/value head h // G."""
    config = CONFIGS["biases"]
    params = reference.random_params(config, 0)
    huggingface.save(tmp_path, config, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 3 + 3 * (9 + 7)
    for layer in range(config.num_layers):
        attention, mlp = params["layers"][layer]["attention"], params["layers"][layer]["mlp"]
        fused = attention["qkv"].reshape(2, 4, 2, 8)
        for head in range(config.num_heads):
            name = f"model.layers.{layer}.self_attn.q_proj.weight"
            np.testing.assert_array_equal(stored[name][2 * head : 2 * head + 2], fused[head // 2, head % 2])
        for head in range(config.num_kv_heads):
            for letter, member in (("k", 2), ("v", 3)):
                name = f"model.layers.{layer}.self_attn.{letter}_proj.weight"
                np.testing.assert_array_equal(stored[name][2 * head : 2 * head + 2], fused[head, member])
        up = stored[f"model.layers.{layer}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(up, mlp["gate_up"][1])


@pytest.mark.parametrize("limit", [1, 700])
def test_shards(tmp_path, limit):
    params = reference.random_params(BASE, 0)
    huggingface.save(tmp_path, BASE, params)  # leaves a single file, which must not outlive the shards
    other = reference.random_params(BASE, 1)
    huggingface.save(tmp_path, BASE, other, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == 4 * num_params(BASE)
    for shard in shards:
        stored = load_file(shard)
        assert sum(tensor.nbytes for tensor in stored.values()) <= limit or len(stored) == 1
    assert_same(huggingface.load_params(tmp_path, BASE, jnp.float32), other)
    huggingface.save(tmp_path, BASE, params)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_same(huggingface.load_params(tmp_path, BASE, jnp.float32), params)
    (tmp_path / "model.safetensors").unlink()
    huggingface.save(tmp_path, BASE, params, max_shard_bytes=limit)
    shards[1].unlink()
    with refused("is missing, though"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("asked", [np.float32, ml_dtypes.bfloat16])
def test_dtypes(tmp_path, stored, asked):
    params = reference.random_params(BASE, 0)
    huggingface.save(tmp_path, BASE, params, dtype=stored)
    assert huggingface.stored_dtype(tmp_path) == stored
    loaded = huggingface.load_params(tmp_path, BASE, asked, place=lambda _, host: host)
    assert_same(loaded, jax.tree.map(lambda leaf: leaf.astype(stored).astype(asked), params))


def test_a_shard_is_read_without_its_leaf(tmp_path):
    """Every part of every leaf, along each axis; with shared and with copied key/value heads."""
    for kv_heads, copies in ((2, 1), (2, 2), (4, 1)):
        config = dataclasses.replace(CONFIGS["biases"], num_kv_heads=kv_heads)
        params = reference.random_params(config, 0)
        huggingface.save(tmp_path, config, params)
        config = dataclasses.replace(config, kv_copies=copies)
        whole = jax.tree.leaves(with_copies(config, params))
        found = huggingface.open_tensors(tmp_path)
        for leaf, (_, shape, sources) in zip(whole, huggingface.leaves(config), strict=True):
            parts = [(source, found[source.name]) for source in sources]
            for axis, size in enumerate(shape):
                for begin in range(size):
                    index = [slice(None)] * len(shape)
                    index[axis] = slice(begin, begin + 3)
                    shard = huggingface._shard(shape, np.dtype(np.float32), parts, tuple(index))
                    np.testing.assert_array_equal(shard, leaf[tuple(index)])


def test_the_host_never_holds_the_model_twice(tmp_path):
    """Whatever is placed is let go here, so the peak is that of one leaf, not of the model."""
    config = dataclasses.replace(BASE, hidden_size=256, intermediate_size=512, num_layers=8, vocab_size=500)
    params = reference.random_params(config, 0)
    huggingface.save(tmp_path, config, params)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for work in (
        lambda: huggingface.load_params(tmp_path, config, np.float32, lambda _, host: np.zeros(())),
        lambda: huggingface.save(tmp_path, config, params),
    ):
        work()  # imports and caches
        tracemalloc.start()
        work()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * largest < total / 4


def test_fewer_layers_are_read_alone(tmp_path):
    params = reference.random_params(BASE, 0)
    huggingface.save(tmp_path, BASE, params)
    short = huggingface.load_params(tmp_path, BASE.truncated(2), jnp.float32)
    assert_same(short, {**params, "layers": params["layers"][:2]})


def test_generation_config(tmp_path):
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": [3, 2, 9]}
    write_config(tmp_path, said, eos_token_id=2)
    assert huggingface.read_config(tmp_path).eos_token_ids == (2, 3, 9)
    assert huggingface.generation_defaults(tmp_path) == {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    huggingface.save(tmp_path, BASE, reference.random_params(BASE, 0), generation={"top_p": 0.5})
    assert huggingface.generation_defaults(tmp_path) == {"top_p": 0.5}
    (tmp_path / "generation_config.json").unlink()
    assert huggingface.generation_defaults(tmp_path) == {}


def test_rope_styles(tmp_path):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 32}

    def read(**keys):
        config = huggingface.read_config(write_config(tmp_path, **keys))
        return config.rope_theta, config.rope_scaling

    assert read() == (10000.0, None)
    assert read(rope_theta=5e5, rope_scaling=None) == (5e5, None)
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}) == (7.0, None)
    assert read(rope_scaling={"type": "linear", "factor": 2}) == (10000.0, RopeScaling("linear", 2.0))
    assert read(rope_theta=3.0, rope_scaling={"rope_type": "dynamic", "factor": 2.5}) == (
        3.0, RopeScaling("dynamic", 2.5),
    )  # fmt: skip
    assert read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}) == (5e5, LLAMA3)
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}) == (5e5, LLAMA3)


def test_defaults_of_each_model_type(tmp_path):
    """What transformers assumes where a key is missing."""
    llama = huggingface.read_config(write_config(tmp_path))
    sizes = llama.num_kv_heads, llama.head_dim, llama.vocab_size, llama.intermediate_size
    assert sizes == (4, 2, 32000, 11008)
    assert (llama.bos_token_id, llama.eos_token_ids, llama.rms_norm_eps) == (1, (2,), 1e-6)
    assert (llama.tie_embeddings, llama.sliding_windows, llama.max_position_embeddings) == (False, (), 2048)
    heads = {"num_attention_heads": 16, "hidden_size": 64}
    mistral = huggingface.read_config(write_config(tmp_path, model_type="mistral", **heads))
    assert (mistral.num_kv_heads, mistral.sliding_windows) == (8, (4096,) * 3)
    qwen2 = huggingface.read_config(
        write_config(tmp_path, model_type="qwen2", num_key_value_heads=None, head_dim=None)
    )
    assert (qwen2.num_kv_heads, qwen2.qkv_bias, qwen2.output_bias) == (4, True, False)
    assert (qwen2.bos_token_id, qwen2.eos_token_ids, qwen2.sliding_windows) == (None, (), ())
    qwen3 = huggingface.read_config(write_config(tmp_path, model_type="qwen3", num_key_value_heads=2))
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.output_bias) == (128, True, False, False)


def test_sliding_windows(tmp_path):
    def read(kind, **keys):
        config = write_config(tmp_path, model_type=kind, num_key_value_heads=2, **keys)
        return huggingface.read_config(config).sliding_windows

    with pytest.warns(RuntimeWarning, match="do not use sliding_window"):
        assert read("llama", sliding_window=4) == ()
    assert read("mistral", sliding_window=4) == (4, 4, 4)
    assert read("mistral", sliding_window=None) == ()
    assert read("qwen2", sliding_window=4, max_window_layers=1) == ()
    assert read("qwen2", sliding_window=4, use_sliding_window=True) == ()
    assert read("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1) == (None, 4, 4)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read("qwen2", sliding_window=4, use_sliding_window=True, layer_types=types) == (4, None, 4)
    assert read("ministral", sliding_window=4) == (4, 4, 4)
    assert read("ministral", sliding_window=None) == ()
    for kind in ("mistral", "ministral"):
        assert read(kind, sliding_window=4, layer_types=types) == (4, None, 4)
        assert read(kind, sliding_window=4, layer_types=["full_attention"] * 3) == ()
        assert read(kind, sliding_window=4, layer_types=None) == (4, 4, 4)


# Keys of models with layers of several types; with `num_key_value_heads`, which a family's default does not fit.
WINDOWED = {"num_key_value_heads": 2, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
NEEDS = "layer_types has sliding_attention, which needs sliding_window"


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4}}, "rope type 'su' is not supported; supported:"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for a llama"),
        (WINDOWED | {"model_type": "smollm3"}, f"{NEEDS} and use_sliding_window"),
        (WINDOWED | {"model_type": "qwen3"}, f"{NEEDS} and use_sliding_window"),
        (WINDOWED | {"model_type": "ministral", "sliding_window": None}, NEEDS),
        (
            WINDOWED | {"model_type": "mistral", "layer_types": ["chunked_attention"] * 3},
            "for each of 3 layers",
        ),
        (WINDOWED | {"model_type": "mistral", "layer_types": ["full_attention"]}, "must name full_attention"),
        (WINDOWED | {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads"),
        ({"num_attention_heads": 3}, "not a multiple of num_attention_heads"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
    ],
)
def test_bad_configs(tmp_path, keys, match):
    with refused(match) as error:
        huggingface.read_config(write_config(tmp_path, **keys))
    assert "config.json" in str(error.value)


def test_no_model_there(tmp_path):
    for name in (tmp_path / "absent", "./absent", "~/absent-model", "absent", "a/b/c", "", "x//y"):
        with refused("no directory", FileNotFoundError):
            huggingface.resolve(name)
    (tmp_path / "file").write_text("")
    with refused("is a file", FileNotFoundError):
        huggingface.resolve(tmp_path / "file")
    assert huggingface.resolve(str(tmp_path)) == tmp_path
    with refused(r"config\.json does not exist", FileNotFoundError):
        huggingface.read_config(tmp_path)
    with refused("is not a directory", FileNotFoundError):
        huggingface.read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with refused("is not valid JSON"):
        huggingface.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with refused("holds a JSON list"):
        huggingface.read_config(tmp_path)


def test_embedded_models_have_names(tmp_path, monkeypatch):
    """A directory of the same name comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_model(None) == embedded_model()
    assert find_model(EMBEDDED) == embedded_model(EMBEDDED)
    with refused("no directory 'absent'", FileNotFoundError):
        find_model("absent")
    with refused("no model 'absent' comes with this installation", FileNotFoundError):
        embedded_model("absent")
    for typo in ("Large", "lage"):
        with refused(r"large, small, sorted, smollm2 \(perhaps you meant large\)", FileNotFoundError):
            find_model(typo)
    assert embedded_names()[0] == EMBEDDED
    (tmp_path / EMBEDDED).mkdir()
    assert find_model(EMBEDDED).resolve() == tmp_path / EMBEDDED


def test_hub_ids(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    config = {"model_type": "gpt2"}

    def download(name, allow_patterns, ignore_patterns=()):
        asked.setdefault("calls", []).append(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps(config))
        asked.update(name=name, allow=allow_patterns)
        if name == "owner/gone":
            raise ConnectionError("no route\nto the hub")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["config.json", "model.bin"])
    monkeypatch.chdir(tmp_path)
    with refused("gpt2"):  # before any weights are fetched
        huggingface.resolve("owner/model-1.5B")
    assert asked["calls"] == [["config.json"]]
    config.update(config_json.config_json(BASE, "float32"))
    assert huggingface.resolve("owner/model-1.5B") == tmp_path
    assert asked["name"] == "owner/model-1.5B"
    assert not any("bin" in pattern for pattern in asked["allow"])
    with refused(r"owner/gone.*no route", FileNotFoundError):
        huggingface.resolve("owner/gone")


@pytest.mark.parametrize(
    ("kind", "offline", "remedy"),
    [
        ("GatedRepoError", False, r"accept the licence at https://\S+/owner/model, then run `hf auth"),
        ("RepositoryNotFoundError", False, r"private or does not exist; check it, or run `hf auth login`$"),
        ("LocalEntryNotFoundError", False, r"no connection \(no route\), and it is not in the cache; "),
        ("LocalEntryNotFoundError", True, r"HF_HUB_OFFLINE is set, and it is not in the cache; .*online$"),
        ("OfflineModeIsEnabled", True, r"HF_HUB_OFFLINE is set, and it is not in the cache; .*online$"),
        ("RemoteEntryNotFoundError", False, r"there is no such file; https://\S+/owner/model/tree/main has"),
    ],
)
def test_an_error_of_the_hub_says_what_to_do(monkeypatch, kind, offline, remedy):
    """In a whole line: no part of it is left out."""
    from huggingface_hub import constants, errors

    cls = getattr(errors, kind)
    error = cls.__new__(cls)  # some need the response of a server
    error.args = ("Got: no route\nPlease check your connection",)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    hub = huggingface.on_hub("owner/model:file.gguf")
    with refused(remedy, FileNotFoundError) as caught, brief_errors(), hub:
        raise error
    assert "…" not in str(caught.value)


SHARDS = [f"model-0000{index}-of-00005.safetensors" for index in range(1, 6)]
INDEX = {"weight_map": {f"model.{name}": name for name in SHARDS}}
# The files of a model, head or adapter in the cache, and those that are missing.
CACHED = {
    "a model's configuration": (["config.json"], "model.safetensors is"),
    "an index and some shards": (
        ["config.json", "model.safetensors.index.json", *SHARDS[1:4]],
        f"{SHARDS[0]}, {SHARDS[4]} are",
    ),
    "an index": (["config.json", "model.safetensors.index.json"], f"{', '.join(SHARDS[:3])} and 2 more are"),
    "a tokenizer": (["tokenizer.json"], "config.json, model.safetensors are"),
    "nothing": (None, "it is"),
}


@pytest.mark.parametrize("name", CACHED)
def test_what_the_cache_lacks_is_named_without_the_hub(name, tmp_path, monkeypatch):
    files, missing = CACHED[name]
    repository = in_cache(tmp_path, monkeypatch, files)
    with refused(r"^no directory owner/model", FileNotFoundError) as error, brief_errors():
        huggingface.resolve("owner/model")
    assert f"HF_HUB_OFFLINE is set, and {missing} not in the cache; give a directory, or go" in str(
        error.value
    )
    if files is None:
        return
    found = repository / "snapshots" / COMMIT
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(found))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def fail(*_):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    with refused("no connection", FileNotFoundError) as error, brief_errors():
        huggingface.resolve("owner/model")
    assert f"no connection (no route), and {missing} not in the cache" in str(error.value)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_: files)
    with contextlib.suppress(ValueError, FileNotFoundError):  # the hub has no more
        huggingface.open_tensors(huggingface.resolve("owner/model"))


def test_files_that_the_hub_s_client_misses_are_named(tmp_path, monkeypatch):
    """Version 2 stores the names of all files of a repository."""
    repository = in_cache(tmp_path, monkeypatch, ["config.json"])
    for names, missing in (
        (["tokenizer.json"], "tokenizer.json is"),
        ([*SHARDS, "tokenizer.json"], f"{', '.join(SHARDS[:3])} and 3 more are"),
    ):
        entries = {name: {"size": 2, "blob_id": "0" * 40} for name in ["config.json", *names]}
        content = {"format_version": 1, "files": entries}
        (repository / "trees").mkdir(exist_ok=True)
        (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps(content))
        huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE.clear()
        with refused("HF_HUB_OFFLINE is set", FileNotFoundError) as error, brief_errors():
            huggingface.resolve("owner/model")
        assert f"and {missing} not in the cache" in str(error.value)


def test_a_head_and_an_adapter_without_weights_in_the_cache(tmp_path, monkeypatch):
    in_cache(tmp_path, monkeypatch, ["config.json", "adapter_config.json"])
    for use, file in (
        (heads.resolve, r"\*\.safetensors"),
        (lambda name: peft.read_adapter(name, BASE), r"adapter_model\.safetensors"),
    ):
        with refused(f"HF_HUB_OFFLINE is set, and {file} is not", FileNotFoundError):
            use("owner/model")


def test_a_gguf_file_in_the_cache_is_found_without_the_hub(tmp_path, monkeypatch):
    repository = in_cache(tmp_path, monkeypatch, ["small.gguf"])
    assert huggingface.resolve("owner/model").resolve() == repository / "snapshots" / COMMIT / "small.gguf"


COMMIT = "0" * 40


def in_cache(directory, monkeypatch, files) -> Path:
    """Makes a repository with files, or none, in the cache of the hub's client, in offline mode."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = directory / "models--owner--model"
    if files is not None:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        for file in files:
            path = repository / "snapshots" / COMMIT / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
            if file == "config.json":
                write_config(path.parent)
            elif file.endswith("index.json"):
                path.write_text(json.dumps(INDEX))
    return repository


def _saved(directory: Path) -> dict[str, np.ndarray]:
    huggingface.save(directory, BASE, reference.random_params(BASE, 0))
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_missing_tensor(tmp_path, name):
    stored = _saved(tmp_path)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with refused(f"tensor {name} is missing"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)


def test_no_embedding_and_no_index(tmp_path):
    stored = _saved(tmp_path)
    del stored["model.embed_tokens.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with refused(r"embed_tokens\.weight is missing"):
        huggingface.stored_dtype(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with refused("have other names"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with refused("has no weight_map"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)


def test_wrong_shape(tmp_path):
    stored = _saved(tmp_path)
    stored["model.layers.2.self_attn.k_proj.weight"] = np.zeros((4, 7), np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    with refused(r"layers\.2\.self_attn\.k_proj.*\(4, 7\), expected \(4, 8\)"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("model.layers.7.mlp.up_proj.weight",), r"tensor model\.layers\.7\.mlp\.up_proj\.weight not used"),
        (("model.layers.7.b.weight", "lm_head.bias"), r"tensor lm_head\.bias and 1 more not used"),
        (("model.norm.bias",), r"tensor model\.norm\.bias not used: config\.json has \d layers"),
    ],
)
def test_tensors_that_the_config_denies_are_named_in_one_line(tmp_path, recwarn, more, named):
    """Layers beyond the config's, and biases; but not the layers that the caller leaves out."""
    stored = _saved(tmp_path)
    huggingface.load_params(tmp_path, dataclasses.replace(BASE, num_layers=1), jnp.float32)
    assert not recwarn.list
    save_file(stored | {name: np.ones(3, np.float32) for name in more}, tmp_path / "model.safetensors")
    with pytest.warns(RuntimeWarning, match=named) as warned:
        huggingface.load_params(tmp_path, BASE, jnp.float32)
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)


def test_more_tensors_than_needed(tmp_path):
    stored = _saved(tmp_path)
    params = huggingface.load_params(tmp_path, BASE, jnp.float32)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(1, np.float32)
    stored["model.layers.0.counter"] = np.zeros(1, np.int64)
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(huggingface.load_params(tmp_path, BASE, jnp.float32), params)
    tied = CONFIGS["tied"]
    with refused(r"lm_head\.weight differs from the embedding"):
        huggingface.load_params(tmp_path, tied, jnp.float32)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    assert "head" not in huggingface.load_params(tmp_path, tied, jnp.float32)
    stored["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    with refused(r"q_proj\.bias has no place"):
        huggingface.load_params(tmp_path, BASE, jnp.float32)


def test_choices_of_layers_that_a_cut_or_a_dtype_leaves_without_use(tmp_path):
    """A cut model whose layers have no window, an EXAONE without one, and a cache in int8, which no file has."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    for kind in ("gemma3_text", "olmo3", "exaone4"):
        own = {"num_key_value_heads": 2, "sliding_window": 4, "layer_types": layers}
        config = huggingface.read_config(write_config(tmp_path, model_type=kind, head_dim=2, **own))
        assert config.truncated(1).window_rope_theta is None
        config_json.config_json(config.truncated(1), "float32")
    own = {"num_key_value_heads": 2, "sliding_window": 4, "layer_types": ["full_attention"] * 3}
    whole = huggingface.read_config(write_config(tmp_path, model_type="exaone4", **own))
    assert whole.rotated == (False,) * 3
    config_json.config_json(dataclasses.replace(BASE, kv_cache_dtype="int8"), "float32")


def test_what_cannot_be_saved(tmp_path):
    params = reference.random_params(BASE, 0)
    odd = dataclasses.replace(BASE, qkv_bias=True)
    with refused(r"a llama config\.json cannot express output_bias False"):
        huggingface.save(tmp_path, odd, reference.random_params(odd, 0))
    normed = dataclasses.replace(BASE, qk_norm=True)
    with refused(r"a llama config\.json cannot express qk_norm True"):
        huggingface.save(tmp_path, normed, reference.random_params(normed, 0))
    for bad in ({"sliding_windows": (4, 4, 4)}, {"model_type": "gpt2"}, {"model_type": "qwen2"}):
        with refused("cannot"):
            huggingface.save(tmp_path, dataclasses.replace(BASE, **bad), params)
    with refused("other leaves"):
        huggingface.save(tmp_path, CONFIGS["tied"], params)
    with refused(r"parameter embed has shape \(11, 8\), expected \(12, 8\)"):
        huggingface.save(tmp_path, dataclasses.replace(BASE, vocab_size=12), params)
    with refused("cannot save weights as int8"):
        huggingface.save(tmp_path, BASE, params, dtype=np.int8)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    files.write_atomic(path, "old")

    def fail():
        with files.atomic(path) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    files.write_atomic(path, b"new")
    assert path.read_text() == "new"


def test_written_files_open_with_the_safetensors_package(tmp_path):
    arrays = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.float32)}
    tensors.write_tensors(
        tmp_path / "x", {k: v.shape for k, v in arrays.items()}, arrays.get, np.dtype(np.float32)
    )
    assert_same(load_file(tmp_path / "x"), arrays)
    assert_same(dict(tensors.read_tensors(tmp_path / "x")), arrays)
    with refused(r"a is float32\(2, 3\), expected float32\(3, 2\)"):
        tensors.write_tensors(tmp_path / "x", {"a": (3, 2)}, arrays.get, np.dtype(np.float32))
    assert_same(dict(tensors.read_tensors(tmp_path / "x")), arrays)
