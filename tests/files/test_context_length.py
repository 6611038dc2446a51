"""The context of published models: the RoPE keys of their config.json in each style, and of their GGUF files."""

from __future__ import annotations

import json

import pytest

from jaxspec.io.gguf import gguf
from jaxspec.io.hf import huggingface
from jaxspec.testing import reference
from tests.files.test_gguf import ARCHITECTURES
from tests.gguf_files import write

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def linear(factor):
    return {"type": "linear", "factor": factor}


def dynamic(factor):
    return {"rope_type": "dynamic", "factor": factor}


def yarn(factor, original):
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def llama3(factor):
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **bounds}


def longrope(name):
    return {"type": name, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


# The model type, `max_position_embeddings`, `rope_scaling`, and the context by the model's card.
PUBLISHED = {
    "Llama 2": ("llama", 4096, None, 4096),
    "Llama 3.1": ("llama", 131072, llama3(8.0), 131072),
    "Llama 3.2": ("llama", 131072, llama3(32.0), 131072),
    "Vicuna 1.5 16k": ("llama", 4096, linear(4.0), 16384),
    "LongChat 1.5 32k": ("llama", 4096, linear(8.0), 32768),
    "YaRN Llama 2 64k": ("llama", 65536, yarn(16.0, 4096) | {"finetuned": True}, 65536),
    "YaRN without a factor": ("llama", 49152, yarn(None, 16000), 49152),
    "InternLM3": ("internlm3", 32768, dynamic(6.0), 196608),
    "Qwen 2.5": ("qwen2", 32768, None, 32768),
    "Qwen 2.5 with the YaRN of its card": ("qwen2", 32768, yarn(4.0, 32768), 131072),
    "Qwen 3": ("qwen3", 40960, None, 40960),
    "Qwen 3 with the YaRN of its card": ("qwen3", 40960, yarn(4.0, 32768), 131072),
    "Qwen 3, half of it": ("qwen3", 40960, yarn(2.0, 32768), 65536),
    "Qwen 2.5 with YaRN in a longer file": ("qwen2", 131072, yarn(4.0, 32768), 131072),
    "SmolLM3": ("smollm3", 65536, None, 65536),
    "SmolLM3 with the YaRN of its card": ("smollm3", 65536, yarn(2.0, 65536), 131072),
    "Mistral 0.3": ("mistral", 32768, None, 32768),
    "Ministral 3": ("ministral3", 262144, yarn(16.0, 16384), 262144),
    "Phi 3 128k": ("phi3", 131072, longrope("su"), 131072),
    "Phi 4 mini": ("phi3", 131072, longrope("longrope"), 131072),
    "Gemma 2": ("gemma2", 8192, None, 8192),
    "Gemma 3 1B": ("gemma3_text", 32768, None, 32768),
    "Gemma 3 4B": ("gemma3_text", 131072, linear(8.0), 131072),
    "OLMo 2": ("olmo2", 4096, None, 4096),
    "OLMo 3": ("olmo3", 65536, yarn(8.0, 8192) | {"attention_factor": 1.2079441541679836}, 65536),
    "EXAONE 3.5": ("exaone", 32768, llama3(8.0), 32768),
    "EXAONE 4 1.2B": ("exaone4", 65536, llama3(16.0), 65536),
    "Granite 3.3": ("granite", 131072, None, 131072),
    "GLM 4 with the YaRN of its card": ("glm4", 32768, yarn(4.0, 32768), 131072),
    "Seed OSS": ("seed_oss", 524288, {"rope_type": "default"}, 524288),
}


@pytest.mark.filterwarnings("ignore:.*do not use")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_context(name, tmp_path):
    kind, positions, scaling, context = PUBLISHED[name]
    base = SIZES | {"model_type": kind, "max_position_embeddings": positions, "rope_theta": 10000.0}
    if kind == "phi3":
        base["original_max_position_embeddings"] = 4096
    styles = [{"rope_scaling": scaling}, {"rope_parameters": {"rope_theta": 10000.0, **(scaling or {})}}]
    if kind in ("gemma3_text", "olmo3"):
        full = {"rope_theta": 10000.0, "rope_type": "default", **(scaling or {})}
        alone = {"rope_theta": 10000.0, "rope_type": "default"}
        styles.append({"rope_parameters": {"full_attention": full, "sliding_attention": alone}})
    configs = []
    for style in styles:
        (tmp_path / "config.json").write_text(json.dumps(base | style))
        configs.append(huggingface.read_config(tmp_path))
    if kind in ARCHITECTURES and (scaling or {}).get("rope_type") != "dynamic":
        # A model's file without the keys of its family that GGUF files do not have.
        path, params = tmp_path / "model.gguf", reference.random_params(configs[0], 0)
        write(path, configs[0], params, architecture=ARCHITECTURES[kind])
        configs.append(gguf.read_config(path))
    assert [config.context_length for config in configs] == [context] * len(configs)
