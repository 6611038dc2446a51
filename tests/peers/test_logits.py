"""Logits against transformers, both ways: its directories loaded here, ours loaded there."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

from jaxspec.io.hf import huggingface  # noqa: E402
from jaxspec.io.tokenizers.tokenizer import has_tokenizer, load_tokenizer  # noqa: E402
from jaxspec.model import cache, llama  # noqa: E402
from tests.data import MODELS  # noqa: E402

pytestmark = pytest.mark.peers

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "rope_theta": 100.0,
}
PLAIN = ("rope_type", "rope_theta", "factor", "short_factor", "long_factor", "partial_rotary_factor")
# Tokens within the small vocabulary, where a family's own are not.
SOON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "llama": ("Llama", {}),
    "multi_head": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "multi_query": ("Llama", {"num_key_value_heads": 1}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("Llama", {"head_dim": 12}),
    "several_eos": ("Llama", {"eos_token_id": [2, 7], "bos_token_id": None}),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "dynamic": (
        "Llama",
        {
            "max_position_embeddings": 10,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "ministral": ("Ministral", {"sliding_window": 5, "head_dim": 8}),
    "ministral_alternating": ("Ministral", {"sliding_window": 5, "head_dim": 10, "layer_types": TYPES}),
    "ministral_full": ("Ministral", {"head_dim": 8, "layer_types": ["full_attention"] * 3}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_biases": ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "exaone": ("Exaone", {"num_key_value_heads": 2}),
    "internlm3": ("InternLM3", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 12}),
    "seed_oss": ("SeedOss", {"head_dim": 12, "mlp_bias": True}),
    "seed_oss_output": ("SeedOss", {"head_dim": 12, "attention_bias": False, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0, **SOON}),
    "smollm3_windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 5, **SOON},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "olmo2": ("Olmo2", SOON),
    "olmo2_biases": ("Olmo2", {"attention_bias": True, **SOON}),
    "olmo3": ("Olmo3", {"sliding_window": 5, "layer_types": TYPES, **SOON}),
    "olmo3_yarn": ("Olmo3", {"sliding_window": 5, "layer_types": TYPES, "rope_scaling": YARN, **SOON}),
    "phi3": ("Phi3", SOON),
    "phi3_window": ("Phi3", {"sliding_window": 5, "partial_rotary_factor": 0.5, **SOON}),
    "phi3_short": ("Phi3", {"original_max_position_embeddings": 30, "rope_scaling": LONGROPE, **SOON}),
    "phi3_long": ("Phi3", {"original_max_position_embeddings": 20, "rope_scaling": LONGROPE, **SOON}),
    "gemma": ("Gemma", {"head_dim": 12, **SOON}),
    "gemma2": ("Gemma2", {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, **CAPS, **SOON}),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 12, "sliding_window": 5, "layer_types": TYPES, "query_pre_attn_scalar": 20, **SOON},
    ),
    "gemma3_linear": (
        "Gemma3Text",
        {
            "head_dim": 12,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            **SOON,
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": TYPES, "head_dim": 8}),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "head_dim": 8, "layer_types": TYPES[:1] * 3}),
    "glm4": ("Glm4", {"head_dim": 12, "eos_token_id": [3, 4], **SOON}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 12, "rope_parameters": {**YARN, "mscale": 1.0, "llama_4_scaling_beta": 0.3}, **SOON},
    ),
    "yarn": ("Llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0}}),
    "yarn_scales": ("Qwen2", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    "qwen2_tied": (
        "Qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))


def ours(directory: Path, tokens: np.ndarray) -> np.ndarray:
    config = huggingface.read_config(directory)
    params = huggingface.load_params(directory, config, jnp.float32)
    rows, length = tokens.shape
    empty = cache.create(config, rows, length, jnp.float32)
    empty = empty.replace(rope_length=jnp.full(rows, length, jnp.int32))
    run = jax.jit(llama.forward, static_argnums=0)
    return np.asarray(run(config, params, jnp.asarray(tokens), jnp.zeros(rows, jnp.int32), empty)[0])


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def from_directory(directory: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_random_models(tmp_path, name):
    family, flags = FAMILIES[name]
    made = getattr(transformers, f"{family}Config")(**SIZES | flags)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    expected = theirs(model, TOKENS)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(ours(tmp_path / "theirs", TOKENS), expected, atol=TOLERANCE, rtol=0)

    config = huggingface.read_config(tmp_path / "theirs")
    params = huggingface.load_params(tmp_path / "theirs", config, jnp.float32)
    huggingface.save(tmp_path / "ours", config, params)
    assert huggingface.read_config(tmp_path / "ours") == config
    again = from_directory(tmp_path / "ours")
    np.testing.assert_array_equal(theirs(again, TOKENS), expected)
    for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings"):
        assert getattr(again.config, key) == getattr(made, key), key
    # Parameters that have defaults are written.
    theirs_, ours_ = (one.rope_parameters for one in (made, again.config))
    assert all(ours_[key] == value for key, value in theirs_.items() if key in ours_ and key in PLAIN)


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path):
    """transformers' own `AutoConfig` reads it as one."""
    own = {"sliding_window": 5, "head_dim": 8, "layer_types": TYPES}
    model = transformers.MinistralForCausalLM(transformers.MinistralConfig(**SIZES | own))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"ministral"', '"mistral"'))
    again = from_directory(tmp_path)
    assert type(again) is transformers.MinistralForCausalLM
    np.testing.assert_allclose(ours(tmp_path, TOKENS), theirs(again, TOKENS), atol=TOLERANCE, rtol=0)


def test_theirs_in_shards(tmp_path):
    torch.manual_seed(0)
    made = transformers.LlamaConfig(**SIZES)
    made._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(made)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    expected = theirs(model, TOKENS)
    np.testing.assert_allclose(ours(tmp_path / "theirs", TOKENS), expected, atol=TOLERANCE, rtol=0)
    config = huggingface.read_config(tmp_path / "theirs")
    params = huggingface.load_params(tmp_path / "theirs", config, jnp.float32)
    huggingface.save(tmp_path / "ours", config, params, max_shard_bytes=20_000)
    np.testing.assert_array_equal(theirs(from_directory(tmp_path / "ours"), TOKENS), expected)


@pytest.mark.parametrize("name", ["stories260K", "llama2xs", "random_bf16"])
def test_real_models(name):
    if not (MODELS / name).is_dir():
        pytest.skip("the shared data is not here")
    model = from_directory(MODELS / name)
    tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (1, 200))
    if has_tokenizer(MODELS / name):
        # A story: on random tokens llama2xs is so ill-conditioned that transformers itself, in float32, is
        # 5e-4 from a float64 forward pass.
        story = (MODELS.parent / "text" / "tinystories.txt").read_text(encoding="utf-8")[:2000]
        tokens = np.asarray(load_tokenizer(MODELS / name).encode(story))[None, :200]
    expected = theirs(model, tokens)
    np.testing.assert_allclose(ours(MODELS / name, tokens), expected, atol=TOLERANCE, rtol=0)
