"""Models in GGUF files: every tensor type, architecture and form of name, and invalid files."""

from __future__ import annotations

import dataclasses
import tracemalloc

import gguf
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxspec.io import checkpoint
from jaxspec.io.gguf import gguf as models
from jaxspec.io.gguf.container import BLOCKS, PLAIN, read_gguf
from jaxspec.io.hf import huggingface
from jaxspec.loading.loading import find_model
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.testing import reference
from tests import gguf_files, refused
from tests.families import YARN, family
from tests.gguf_files import write

BASE = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    bos_token_id=1,
    eos_token_ids=(2,),
)
# Rows of whole blocks of every type.
WIDE = dataclasses.replace(BASE, hidden_size=256, intermediate_size=256, num_layers=1, head_dim=64)
LLAMA3 = RopeScaling("llama3", 32.0, original_max_position_embeddings=64)
CONFIGS = {
    "llama": ("llama", BASE),
    "tied": ("llama", dataclasses.replace(BASE, tie_embeddings=True)),
    "multi_head": ("llama", dataclasses.replace(BASE, num_kv_heads=4, rms_norm_eps=1e-6)),
    "head_dim": ("llama", dataclasses.replace(BASE, head_dim=12)),
    "biases": ("llama", dataclasses.replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True)),
    "llama3": ("llama", dataclasses.replace(BASE, head_dim=16, rope_theta=500.0, rope_scaling=LLAMA3)),
    "linear": ("llama", dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 4.0))),
    "several_eos": ("llama", dataclasses.replace(BASE, eos_token_ids=(2, 7, 5), bos_token_id=None)),
    "mistral": ("llama", dataclasses.replace(BASE, model_type="mistral", sliding_windows=(5, 5))),
    "qwen2": ("qwen2", dataclasses.replace(BASE, model_type="qwen2", qkv_bias=True, rope_theta=1e6)),
    "qwen2_tied": (
        "qwen2",
        dataclasses.replace(BASE, model_type="qwen2", qkv_bias=True, tie_embeddings=True, num_kv_heads=1),
    ),
    # 128, the value that transformers assumes for every file.
    "qwen3": ("qwen3", dataclasses.replace(BASE, model_type="qwen3", qk_norm=True, head_dim=128)),
}


# Deep enough for the patterns of windows and of rotation.
DEEP = dataclasses.replace(BASE, num_layers=6, intermediate_size=32, max_position_embeddings=64)
ARCHITECTURES = {
    **{name: name for name in ("exaone", "exaone4", "gemma", "gemma2", "glm4", "granite", "olmo2", "phi3")},
    **{name: name for name in ("seed_oss", "smollm3", "llama", "qwen2", "qwen3")},
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "mistral": "llama",
}
CONFIGS |= {
    f"family-{kind}": (architecture, family(kind, DEEP)) for kind, architecture in ARCHITECTURES.items()
}


def assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "good.gguf", BASE, reference.random_params(BASE, 0))


# Valid files


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_written_is_read(tmp_path, name):
    architecture, config = CONFIGS[name]
    params = reference.random_params(config, 0)
    path = write(tmp_path / "m.gguf", config, params, architecture=architecture)
    assert models.read_config(path) == config
    assert models.stored_dtype(path) == np.float32
    loaded = models.load_params(path, config, jnp.float32)
    if config.norm_offset:
        # Sums with the offset are rounded.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), loaded, params)
    else:
        assert_same(loaded, params)


def test_every_architecture_has_a_test():
    assert {architecture for architecture, _ in CONFIGS.values()} == models.ARCHITECTURES.keys()


@pytest.mark.parametrize("kind", PLAIN + BLOCKS)
def test_tensor_types(tmp_path, kind):
    """Every leaf equals `gguf`'s dequantised tensor in Hugging Face's order."""
    params = reference.random_params(WIDE, 0)
    path = write(tmp_path / "m.gguf", WIDE, params, kind=kind)
    expected = {}
    for name, values in gguf_files.hugging_face_tensors(WIDE, params).items():
        expected[name] = values
        if values.ndim == 2 and kind != "F32":
            heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            stored = gguf_files.neighbours(values, heads) if heads else values
            stored = gguf.quants.dequantize(gguf_files.pack(stored, kind), GGMLQuantizationType[kind])
            expected[name] = stored
            if heads:  # row 2 i + h of a head is its row i + h · hd/2
                expected[name] = stored.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
            if kind not in gguf_files.K_SCALES:
                assert 0 < np.abs(expected[name] - values).max() < 0.5
    loaded = gguf_files.hugging_face_tensors(WIDE, models.load_params(path, WIDE, jnp.float32))
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)
    half = models.load_params(path, WIDE, jnp.bfloat16)
    assert_same(
        half, jax.tree.map(lambda a: a.astype(jnp.bfloat16), models.load_params(path, WIDE, np.float32))
    )


def test_layers_beyond_the_metadatas_are_named_in_one_line(tmp_path, recwarn):
    params = reference.random_params(BASE, 0)
    path = write(tmp_path / "m.gguf", BASE, params)
    models.load_params(path, dataclasses.replace(BASE, num_layers=1), jnp.float32)
    assert not recwarn.list
    path = write(tmp_path / "n.gguf", BASE, params, extra={"blk.5.attn_norm.weight": np.ones(32, np.float32)})
    with pytest.warns(
        RuntimeWarning, match=r"blk\.5\.attn_norm\.weight not used: block_count is 2"
    ) as warned:
        models.load_params(path, BASE, jnp.float32)
    assert len(warned) == 1


# As llama.cpp's quantiser replaces a type of blocks of 256 if rows are no multiple of 256.
FALLBACKS = {
    "TQ1_0": "Q4_0",
    "IQ3_S": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


@pytest.mark.parametrize("kind", [*dict.fromkeys(FALLBACKS.values()), "F16"])
def test_rows_that_are_no_multiple_of_256_have_another_type(tmp_path, kind):
    """The weights of SmolLM2-135M and Qwen2.5-0.5B, in files of any name."""
    config = dataclasses.replace(WIDE, hidden_size=96, intermediate_size=160)
    path = write(tmp_path / "m.gguf", config, reference.random_params(config, 0), kind=kind)
    loaded = gguf_files.hugging_face_tensors(config, models.load_params(path, config, jnp.float32))
    for name, rows in (("mlp.down_proj", (96, 160)), ("mlp.up_proj", (160, 96))):
        stored = read_gguf(path).tensors[gguf_files.stored_name(f"model.layers.0.{name}.weight")]
        values = gguf.quants.dequantize(np.asarray(stored.stored), GGMLQuantizationType[kind]).reshape(rows)
        assert stored.kind == kind
        np.testing.assert_array_equal(loaded[f"model.layers.0.{name}.weight"], values)


def test_stored_dtype(tmp_path):
    """The stored dtype is one that contains the weights without loss."""
    params = reference.random_params(WIDE, 0)
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "float32"), ("Q6_K", "float32")):
        path = write(tmp_path / f"{kind}.gguf", WIDE, params, kind=kind)
        assert models.stored_dtype(path) == np.dtype(dtype)


def test_only_the_first_layers_are_read(good):
    params = reference.random_params(BASE, 0)
    cut = models.load_params(good, BASE.truncated(1), jnp.float32)
    assert len(cut["layers"]) == 1
    assert_same(cut["layers"][0], params["layers"][0])


def test_a_few_leaves_at_a_time(tmp_path):
    """The host never holds the whole model: leaves are freed after their transfer."""
    config = dataclasses.replace(WIDE, num_layers=24)
    params = reference.random_params(config, 0)
    path = write(tmp_path / "m.gguf", config, params, kind="Q4_0")

    def load():
        models.load_params(path, config, jnp.float32, lambda leaf, host: jnp.zeros(()))

    load()  # imports, and compiles zeros
    tracemalloc.start()
    load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 4


# Names of files


def test_names(tmp_path, good):
    assert checkpoint.resolve(str(good)) == good
    assert find_model(good) == good
    assert find_model(tmp_path) == good  # the only one of its directory
    other = write(tmp_path / "other.gguf", BASE, reference.random_params(BASE, 1))
    with refused(r"2 GGUF files.*good\.gguf, other\.gguf"):
        checkpoint.resolve(tmp_path)
    huggingface.save(tmp_path, BASE, reference.random_params(BASE, 2))
    assert checkpoint.resolve(tmp_path) == tmp_path  # safetensors come first
    assert checkpoint.directory_of(other) == checkpoint.directory_of(tmp_path) == tmp_path
    nameless = good.rename(tmp_path / "blob")  # names in hub caches
    assert checkpoint.resolve(nameless) == nameless
    with refused(r"no file .*absent\.gguf", FileNotFoundError):
        checkpoint.resolve(tmp_path / "absent.gguf")


def test_names_of_the_hub(tmp_path, good, monkeypatch):
    files = ["README.md", "good.gguf"]
    asked = []

    def fetch(repository, name):
        asked.append((repository, name))
        if name not in files:
            raise ConnectionError("404\nnot there")
        return str(good)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: files)
    assert checkpoint.resolve("owner/model:good.gguf") == good
    assert checkpoint.resolve("owner/model") == good
    assert asked == [("owner/model", "good.gguf")] * 2
    with refused(r"owner/model:absent\.gguf.*404", FileNotFoundError):
        checkpoint.resolve("owner/model:absent.gguf")
    files.append("q4.gguf")
    with refused(r"2 GGUF files.*owner/model:good\.gguf"):
        checkpoint.resolve("owner/model")
    files.clear()
    with refused("did not give a model of that name", FileNotFoundError):
        checkpoint.resolve("owner/model")


# Invalid files


def number(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind]


@pytest.mark.parametrize(
    ("changes", "extra", "match"),
    [
        ({"general.architecture": "gemma4"}, {}, "architecture 'gemma4' is not supported; supported:"),
        ({"llama.expert_count": 8}, {}, r"llama\.expert_count is 8, which is not supported"),
        ({"llama.block_count": None}, {}, r"llama\.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "rms_epsilon is missing"),
        ({"llama.embedding_length": 0}, {}, r"embedding_length is 0; expected a whole number from 1"),
        ({"llama.embedding_length": "x"}, {}, r"embedding_length is 'x'; expected a whole number from 1"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, "head_count_kv differs by layer"),
        ({"llama.attention.head_count_kv": 3}, {}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"llama.rope.dimension_count": 4}, {}, r"rope\.dimension_count is 4 beside heads of 8"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "RoPE scaling 'longrope' is not supported"),
        ({}, {"rope_factors_short.weight": np.ones(4)}, r"rope_factors_short\.weight has no place"),
        ({"llama.attention.scale": 0.5}, {}, r"llama\.attention\.scale is 0\.5, which is not supported"),
        (
            {"llama.attention.temperature_scale": 0.5},
            {},
            r"temperature_scale is 0\.5, which is not supported",
        ),
        ({"llama.rope.freq_base_swa": 20.0}, {}, r"rope\.freq_base_swa is 20\.0, which is not supported"),
        ({"llama.rope.scaling.attn_factor": 2.0}, {}, r"attn_factor is 2\.0, which is not supported"),
        ({}, {"rope_freqs.weight": np.float32([1, 2, 3, 4])}, "not those of Llama 3"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, {}, "eos_token_id is '</s>', expected a whole number"),
        ({"split.count": 3}, {}, "one part of 3; put them together"),
        (
            {},
            {"blk.1.ffn_up.weight": None},
            r"tensor blk\.1\.ffn_up\.weight is missing, expected shape \(64, 32\)",
        ),
        ({}, {"token_embd.weight": None}, r"tensor token_embd\.weight is missing"),
        ({}, {"blk.0.attn_q.weight": np.zeros((16, 32))}, r"shape \(16, 32\), expected \(32, 32\)"),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(8)}, r"blk\.0\.attn_q_norm\.weight has no place"),
    ],
)
def test_models_that_are_not_supported(tmp_path, changes, extra, match):
    path = write(tmp_path / "m.gguf", BASE, reference.random_params(BASE, 0), changes=changes, extra=extra)
    with refused(match) as error:
        models.load_params(path, models.read_config(path), jnp.float32)
    assert str(error.value).count(str(path)) == 1


def test_a_granite_without_rope_is_refused(tmp_path):
    config, changes = family("granite", BASE), {"granite.rope.scaling.finetuned": False}
    params = reference.random_params(config, 0)
    path = write(tmp_path / "m.gguf", config, params, architecture="granite", changes=changes)
    with refused(r"granite\.rope\.scaling\.finetuned is False, which is not supported"):
        models.read_config(path)


def test_patterns_of_windows(tmp_path):
    """A number of layers after the last of which all tokens are seen, a list, and none, for which a family has one."""
    config = family("gemma2", dataclasses.replace(BASE, num_layers=4))
    params = reference.random_params(config, 0)
    for pattern, expected in (
        (3, (4, 4, None, 4)),
        (0, (4,) * 4),
        (1, ()),
        ([True, False, False, True], (4, None, None, 4)),
        (None, (4, None, 4, None)),
    ):
        changes = {"gemma2.attention.sliding_window_pattern": pattern}
        path = write(tmp_path / "m.gguf", config, params, architecture="gemma2", changes=changes)
        assert models.read_config(path).sliding_windows == expected
    # llama.cpp's default, and its sign of none.
    for window, expected in ((None, (4096, None) * 2), (0, ())):
        changes = {"gemma2.attention.sliding_window": window}
        path = write(tmp_path / "m.gguf", config, params, architecture="gemma2", changes=changes)
        assert models.read_config(path).sliding_windows == expected


def test_the_largest_gemma_has_another_scale_of_attention(tmp_path):
    for kind, architecture, layers in (("gemma2", "gemma2", 46), ("gemma3_text", "gemma3", 62)):
        config = family(kind, dataclasses.replace(BASE, num_layers=layers, num_heads=2, num_kv_heads=1))
        path = write(
            tmp_path / "m.gguf", config, reference.random_params(config, 0), architecture=architecture
        )
        assert models.read_config(path).scores.scale == 16**-0.5


def test_yarn(tmp_path):
    config = dataclasses.replace(BASE, rope_scaling=YARN)
    params = reference.random_params(config, 0)
    for changes, attention in (
        ({}, YARN.attention_factor),
        ({"llama.rope.scaling.yarn_attn_factor": 1.5}, 1.5),
        ({"llama.rope.scaling.yarn_log_multiplier": 1.0}, 1.0),
    ):
        path = write(tmp_path / "m.gguf", config, params, changes=changes)
        scaling = dataclasses.replace(YARN, attention_factor=attention)
        assert models.read_config(path) == dataclasses.replace(config, rope_scaling=scaling)


def test_tensor_types_that_are_not_supported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = np.zeros((48, gguf.GGML_QUANT_SIZES[number("IQ4_XS")][1]), np.uint8)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=number("IQ4_XS"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused(r"token_embd\.weight has type IQ4_XS.*supported: F32, .*Q6_K"):
        models.read_config(tmp_path / "m.gguf")


@pytest.mark.full
def test_truncated_and_damaged_files(good, tmp_path):
    """A file that is cut anywhere, or has any changed byte in its header, gives an error of one line or a model."""
    content = good.read_bytes()
    header = content.index(b"blk.0.") + 200
    damaged = tmp_path / "damaged.gguf"

    def attempt(changed: bytes) -> str:
        """Returns the error message of a file, or "" if it is read."""
        damaged.write_bytes(changed)
        try:
            config = models.read_config(damaged)
            if config == BASE:
                models.load_params(damaged, config, jnp.float32, lambda leaf, host: jnp.zeros(()))
        except ValueError as error:
            return str(error)
        return ""

    def lines(text: str) -> int:
        return len(text.splitlines())

    for end in [*range(0, header, 37), header + 1000, len(content) // 2, len(content) - 1]:
        assert lines(attempt(content[:end])) == 1, end
    for at in range(4, header, 11):
        assert lines(attempt(content[:at] + bytes([content[at] ^ 0xA5]) + content[at + 1 :])) <= 1, at
    assert attempt(content) == ""
