"""Writes GGUF files of small models in the form of llama.cpp's conversion."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from jaxspec.io.hf.layout import leaves
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

# Byte offsets of the float16 scales in a block; `gguf` has no quantiser for these types.
K_SCALES = {"IQ4_NL": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# The architectures whose rows of queries and keys llama.cpp's conversion permutes.
PERMUTED = ("llama", "granite", "mistral3", "smollm3")
_NUMBERS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}


@functools.cache
def _names(architecture: str) -> gguf.TensorNameMap:
    """Returns llama.cpp's own table of names."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, 64)


def stored_name(name: str, architecture: str = "llama") -> str:
    """Returns llama.cpp's name of a Hugging Face tensor."""
    found = _names(architecture).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def hugging_face_tensors(config: LlamaConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns every tensor, float32, by its Hugging Face name."""
    found: dict[str, np.ndarray] = {}
    for array, (_, _, sources) in zip(jax.tree.leaves(params), leaves(config), strict=True):
        for source in sources:
            tensor = found.setdefault(source.name, np.empty(source.shape, np.float32))
            part = source.part(tensor)
            values = np.asarray(array, np.float32).reshape(source.split)[source.index]
            part[...] = values.reshape(part.shape)
    return found


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of q or k in llama.cpp's order for Llama: the two members of a rotated pair side by side."""
    dim = rows.shape[0] // heads
    order = [
        h * dim + half * (dim // 2) + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return rows[order]


def tensors(config: LlamaConfig, params: Params, architecture: str) -> dict[str, np.ndarray]:
    """Returns every tensor, float32, by llama.cpp's name and in its order."""
    found = {}
    for name, values in hugging_face_tensors(config, params).items():
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            values = neighbours(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        found[stored_name(name, architecture)] = values
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        found["rope_freqs.weight"] = rope_factors(config)
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        found["rope_factors_short.weight"] = np.float32(config.rope_scaling.short_factors)
        found["rope_factors_long.weight"] = np.float32(config.rope_scaling.long_factors)
    return found


def rope_factors(config: LlamaConfig) -> np.ndarray:
    """Returns llama.cpp's form of Llama 3's RoPE scaling: one factor per pair, float32."""
    scaling = config.rope_scaling
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope_theta ** (i / config.head_dim)
        original = scaling.original_max_position_embeddings
        if wavelength < original / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > original / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = original / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.float32(factors)


def metadata(config: LlamaConfig, architecture: str) -> dict[str, Any]:
    """Returns the metadata of a model, without its tokenizer."""
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim or config.head_dim,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    if any(config.sliding_windows):
        values["attention.sliding_window"] = next(filter(None, config.sliding_windows))
    values |= _own_metadata(config, architecture)
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    named |= {"general.name": "tiny", "general.file_type": 0}
    if config.bos_token_id is not None:
        named["tokenizer.ggml.bos_token_id"] = config.bos_token_id
    for name, index in zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False):
        named[f"tokenizer.ggml.{name}_token_id"] = index
    return named


def _own_metadata(config: LlamaConfig, architecture: str) -> dict[str, Any]:
    """Returns the metadata that `conversion/` of llama.cpp writes for some architectures only."""
    scaling, values = config.rope_scaling, {}
    if scaling is not None and scaling.kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
    if scaling is not None and scaling.kind == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }
    if architecture == "phi3":
        values |= {"rope.scaling.attn_factor": scaling.attention_factor if scaling else None}
    elif architecture == "mistral3":
        values |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": scaling.query_beta}
    elif architecture == "granite":
        values |= {
            "attention.scale": config.scores.scale,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": 1 / config.logit_multiplier,
        }
    elif architecture == "gemma2":
        caps = {"attn": config.scores.cap, "final": config.logit_cap}
        values |= {f"{name}_logit_softcapping": cap for name, cap in caps.items()}
    elif architecture in ("olmo2", "exaone4") and any(config.sliding_windows):
        values["attention.sliding_window_pattern"] = [window is not None for window in config.sliding_windows]
    if config.window_rope_theta is not None:
        values["rope.freq_base_swa"] = config.window_rope_theta
    return values


def pack(values: np.ndarray, kind: str) -> np.ndarray:
    """Returns a tensor's bytes in type `kind`; random bytes of its shape if `gguf` cannot quantise to it."""
    if kind in K_SCALES:
        return random_blocks(values.shape, kind)
    if kind == "F16":
        return values.astype(np.float16)
    return gguf.quants.quantize(values, GGMLQuantizationType[kind])


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Returns random bytes of a tensor of `shape`, with scales that give weights of the usual size."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(math.prod(shape))
    blocks = rng.integers(0, 256, (math.prod(shape) // block, size), np.uint8)
    largest = 4e-5 if kind == "Q6_K" else 1e-3  # its inner scales reach 128, the others' 64
    for at in K_SCALES[kind]:
        scales = rng.uniform(largest / 8, largest, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path,
    config: LlamaConfig,
    params: Params,
    *,
    kind: str | Callable[[str], str] = "F32",
    architecture: str = "llama",
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Writes a model; vectors are stored in float32.

    Args:
      path: the file.
      config: of the model.
      params: of the model.
      kind: the name of the tensors' type, or a type for each tensor name.
      architecture: llama.cpp's name of the architecture.
      changes: metadata that replaces the default; None omits a key.
      extra: tensors that replace the default, by llama.cpp's name; None omits one.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata(config, architecture) | dict(changes or {})).items():
        if isinstance(value, (list, tuple)):
            writer.add_array(key, list(value))
        elif value is not None:
            writer.add_key_value(key, value, _NUMBERS[type(value)])
    for name, values in (tensors(config, params, architecture) | dict(extra or {})).items():
        if values is None:
            continue
        chosen = kind if isinstance(kind, str) else kind(name)
        if values.ndim == 1 or chosen == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, pack(values, chosen), raw_dtype=GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Tokenizers

TEXTS = [
    "Once upon a time, there was a tiny bear who couldn't sleep.",
    "def f(x):\n    return [x + 12345, 2024]  # twice\n\n\tpass\r\n",
    "Ünïcödé — “quotes” 日本語 Ελληνικά русский\u00a0x",
    "emoji 🎉🎉 👩‍👩‍👧 ✓ e\u0301",
    " leading and trailing  ",
    "I'LL say: it's 3.14159, isn't it? 1,000,000 times!!!",
    "",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": " And  in words? 🎉"},
]


@functools.cache
def byte_level(pre: str) -> Mapping[str, Any]:
    """Returns metadata of a byte-level BPE learned from `TEXTS`, with special tokens and a user token `<think>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, "<think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    types = [3] * len(SPECIAL) + [4] + [1] * (len(tokens) - len(SPECIAL) - 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


@functools.cache
def sentencepiece() -> Mapping[str, Any]:
    """Returns metadata of a SentencePiece BPE like Llama 2's: pieces of `TEXTS`, frequent and short ones first."""
    counts: dict[str, int] = {}
    for text in TEXTS:
        for word in ("▁" + text.replace(" ", "▁")).split("\n"):
            for length in range(1, 6):
                for at in range(len(word) - length + 1):
                    piece = word[at : at + length]
                    if "▁" not in piece[1:] or not piece.strip("▁"):
                        counts[piece] = counts.get(piece, 0) + 1
    pieces = sorted((p for p in counts if counts[p] > 1), key=lambda p: (-counts[p] * len(p), p))[:400]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}" + CHAT_TEMPLATE,
    }
