"""Models in GGUF files: reads their configuration, and their weights dequantised tensor by tensor.

Metadata keys and tensor names are llama.cpp's, in which Mistral models have the architecture `llama`.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.gguf.container import PLAIN, GGUFFile, Tensor, read, token_ids
from jaxspec.io.gguf.ends import end_ids
from jaxspec.io.hf.config_json import MIN_EPSILON, check_context
from jaxspec.io.hf.families import MAX_FACTOR
from jaxspec.io.hf.huggingface import Place, Shardings, assemble, warn_of_surplus
from jaxspec.io.hf.layout import EMBED, HEAD, Source, leaves
from jaxspec.io.hf.rope_json import MAX_THETA
from jaxspec.io.hf.values import MAX_INT, number, whole
from jaxspec.model.config import MAX_LAYERS, LlamaConfig, RopeScaling
from jaxspec.model.llama import Params

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# In this architecture llama.cpp rotates neighbours, not halves, so the rows of q and k are stored in another order.
_INTERLEAVED = "llama"
_WHOLE = {EMBED: "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"
# RoPE frequencies, which follow from the configuration; the names differ between versions of llama.cpp.
_DERIVED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
# Unsupported metadata that changes the computation of a layer.
_FOREIGN = (
    "expert_count",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
# The RoPE scaling parameters of Llama 3.1 to 3.3; a file contains only the resulting factors.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_LENGTHS = [2**n for n in range(4, 21)]
# The most rows of a quantised tensor that are joined to one.
_JOINED = 8
# The joined rows that are dequantised at once, as many as `dequantize` takes.
_PART = 16
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


@brief_errors()
def read_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Returns the configuration of the model in a GGUF file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not GGUF, truncated or damaged, or its model is not supported; one line.
    """
    file = read(path)
    try:
        return _config(file)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path}: {error}") from None


def _config(file: GGUFFile) -> LlamaConfig:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {shown(architecture)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    own = _Keys(file.metadata, architecture)
    for name in _FOREIGN:
        if own.get(name, 0):
            raise ValueError(f"{architecture}.{name} is {shown(own.get(name))}, which is not supported")
    heads, hidden = own.size("attention.head_count"), own.size("embedding_length")
    layers, embed = own.size("block_count", most=MAX_LAYERS), file.tensors.get(_WHOLE[EMBED])
    if embed is None:
        raise ValueError(f"tensor {_WHOLE[EMBED]} is missing")
    head_dim = own.size("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"heads of {head_dim} numbers are odd; rotary embeddings need even ones")
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.size(name, head_dim) != head_dim:
            raise ValueError(
                f"{architecture}.{name} is {shown(own.get(name))} beside heads of {head_dim}; supported: equal ones"
            )
    window = own.get("attention.sliding_window")
    biased = {name for name in ("attn_q", "attn_output", "ffn_down") if f"blk.0.{name}.bias" in file.tensors}
    ids = token_ids(file)
    config = LlamaConfig(
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        intermediate_size=own.size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=own.size("attention.head_count_kv", heads, most=heads),
        head_dim=head_dim,
        max_position_embeddings=own.size("context_length"),
        rms_norm_eps=own.number("attention.layer_norm_rms_epsilon", MIN_EPSILON, 1),
        rope_theta=_theta(own),
        rope_scaling=_rope_scaling(own, file.tensors.get(_ROPE_FACTORS), head_dim),
        tie_embeddings=_WHOLE[HEAD] not in file.tensors,
        qkv_bias=architecture == "qwen2" or "attn_q" in biased,
        output_bias="attn_output" in biased,
        mlp_bias="ffn_down" in biased,
        qk_norm=architecture == "qwen3",
        sliding_windows=(own.size("attention.sliding_window"),) * layers if window else (),
        bos_token_id=ids.get("bos"),
        eos_token_ids=end_ids(file),
        model_type="mistral" if window and architecture == "llama" else architecture,
    )
    check_context(config, f"{architecture}.context_length")
    return config


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata, self._prefix = metadata, architecture

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value; an array of equal numbers, one per layer, is treated as that number."""
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ValueError(f"{self._prefix}.{name} differs by layer, which is not supported")
            value = value[0].item()
        return value

    def size(self, name: str, default: int | None = None, most: int = MAX_INT) -> int:
        return whole(self._given(name, default), f"{self._prefix}.{name}", 1, most)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """Returns a float32 as the shortest decimal that rounds to it: 1e-05, not 9.99999974738e-06."""
        given = number(self._given(name, default), f"{self._prefix}.{name}", least, most)
        return float(str(np.float32(given)))

    def _given(self, name: str, default: Any) -> dict[str, Any]:
        key, value = f"{self._prefix}.{name}", self.get(name, default)
        if value is None:
            raise ValueError(f"{key} is missing")
        return {key: value}


def _theta(own: _Keys) -> float:
    return own.number("rope.freq_base", 1, MAX_THETA, 10000.0)


def _rope_scaling(own: _Keys, factors: Tensor | None, head_dim: int) -> RopeScaling | None:
    kind = own.get("rope.scaling.type")
    # llama.cpp treats a factor of 0 as no scaling.
    given = (own.number(name, 0, MAX_FACTOR, 0) for name in ("rope.scaling.factor", "rope.scale_linear"))
    factor = next(filter(None, given), 1.0)
    if kind is None:
        kind = "none" if factor == 1 else "linear"
    if kind not in ("none", "linear"):
        raise ValueError(
            f"RoPE scaling {shown(kind)} is not supported; supported: none, linear, that of Llama 3"
        )
    if factors is not None:
        if kind != "none":
            raise ValueError(f"RoPE scaling {kind!r} together with {_ROPE_FACTORS} is not supported")
        return _llama3(np.ravel(_values(factors)), _theta(own), head_dim)
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1 else None


def _llama3(factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling | None:
    """Returns the scaling whose frequencies are the unscaled ones divided by `factors`; None if all are 1."""
    if len(factors) != head_dim // 2:
        raise ValueError(f"{_ROPE_FACTORS} has {len(factors)} factors, expected {head_dim // 2}")
    wrong = ~((factors > 0) & (factors <= MAX_FACTOR))
    if wrong.any():
        raise ValueError(
            f"{_ROPE_FACTORS} has the factor {factors[wrong.argmax()]}, expected one above 0 and at most {MAX_FACTOR:g}"
        )
    factor = float(str(factors.max(initial=1.0)))
    if np.all(factors == 1):
        return None
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    for length in _LLAMA3_LENGTHS:
        # The same formula as in `model.rope`.
        keep = length * plain / (2 * np.pi) - _LLAMA3_LOW
        keep = np.clip(keep / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        if np.allclose(1 / factors, (1 - keep) / factor + keep, rtol=1e-4, atol=0):
            return RopeScaling("llama3", factor, _LLAMA3_LOW, _LLAMA3_HIGH, length)
    raise ValueError(f"the factors of {_ROPE_FACTORS} are not those of Llama 3, which alone are supported")


def stored_dtype(path: str | os.PathLike[str]) -> np.dtype:
    """Returns the dtype of a file's embedding, or float32 if the embedding is quantised.

    Raises:
      ValueError: as in `read_config`.
    """
    embed = read(path).tensors.get(_WHOLE[EMBED])
    if embed is None:
        raise ValueError(f"{path}: tensor {_WHOLE[EMBED]} is missing")
    stored: np.dtype = _DTYPES.get(embed.kind, _DTYPES["F32"])
    return stored


@brief_errors()
def load_params(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    dtype: DTypeLike,
    place: Place | Shardings | None = None,
) -> Params:
    """Returns the parameters of a model, dequantised tensor by tensor; see `huggingface.load_params`.

    Raises:
      ValueError: a tensor is missing, has another shape, or has no place in the model; one line.
    """
    file = read(path)
    _check(file, config)
    interleaved = file.metadata["general.architecture"] == _INTERLEAVED

    def fetch(source: Source) -> np.ndarray:
        return _values(file.tensors[_stored_name(source.name)])

    return assemble(config, np.dtype(dtype), fetch, place, interleaved)


def _check(file: GGUFFile, config: LlamaConfig) -> None:
    """Refuses weights that do not fit `config`, before any of them is read."""
    used = set()
    for _, _, sources in leaves(config):
        for source in sources:
            name = _stored_name(source.name)
            used.add(name)
            if name not in file.tensors:
                raise ValueError(f"{file.path}: tensor {name} is missing, expected shape {source.shape}")
            if file.tensors[name].shape != source.shape:
                raise ValueError(
                    f"{file.path}: tensor {name} has shape {file.tensors[name].shape}, expected "
                    f"{source.shape} by its metadata"
                )
    # `config` may have only the first of the model's layers.
    surplus, num_layers = [], _config(file).num_layers
    for name in sorted(set(file.tensors) - used):
        layer = re.match(r"blk\.(\d+)\.", name)
        if _DERIVED.fullmatch(name):
            continue
        if layer is None or int(layer[1]) < config.num_layers:
            raise ValueError(
                f"{file.path}: tensor {name} has no place in a {config.model_type} of its metadata"
            )
        if int(layer[1]) >= num_layers:
            surplus.append(name)
    warn_of_surplus(file.path, surplus, f"block_count is {num_layers}")


def _stored_name(name: str) -> str:
    """Returns llama.cpp's name of a tensor, given its name in `io.hf.layout`."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_PARTS[part]}.{suffix}"


def _values(tensor: Tensor) -> np.ndarray:
    """Returns a tensor's numbers: float32 if it is quantised, otherwise a view of the file."""
    if tensor.kind in PLAIN:
        return tensor.stored.view(_DTYPES[tensor.kind])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # `dequantize` takes 16 rows at a time, which is slow for short rows, so that rows are joined.
    rows = math.prod(tensor.shape[:-1])
    joined = tensor.stored.reshape(rows // math.gcd(rows, _JOINED), -1)
    values = np.empty((len(joined), math.prod(tensor.shape) // len(joined)), np.float32)
    # It also holds its result twice, so that it gets a part of the rows.
    for begin in range(0, len(joined), _PART):
        part = slice(begin, begin + _PART)
        values[part] = dequantize(joined[part], GGMLQuantizationType[tensor.kind])
    return values.reshape(tensor.shape)
