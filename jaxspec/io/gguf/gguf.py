"""Models in GGUF files: reads their configuration, and their weights dequantised tensor by tensor.

Metadata keys and tensor names are llama.cpp's (`conversion/` and `src/models/` of ggml-org/llama.cpp). An architecture
is one record, and the rest is that of the family in `io.hf.families`: the metadata are translated to the keys of
`config.json`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.gguf.container import PLAIN, GGUFFile, Tensor, read_gguf, token_ids
from jaxspec.io.gguf.ends import end_ids
from jaxspec.io.hf.config_json import MIN_EPSILON, config_from, errors_of
from jaxspec.io.hf.families import FAMILIES, FULL, MAX_FACTOR, SLIDING, Family
from jaxspec.io.hf.huggingface import Place, Shardings, assemble, warn_of_surplus
from jaxspec.io.hf.layout import Layout, Source, leaves
from jaxspec.io.hf.rope_json import MAX_THETA
from jaxspec.io.hf.values import MAX_INT, number, whole
from jaxspec.model.config import MAX_LAYERS, LlamaConfig
from jaxspec.model.llama import Params


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
      model_type: of the family in `io.hf.families`.
      interleaved: whether llama.cpp rotates neighbours, not halves (`llama_model_rope_type`).
      windowed: the model type of a file with a window, if it is another one.
      window: the window of a file that names none.
      wide: the number of layers of the size whose scale of attention is (D ÷ H)^-½, not hd^-½: that of the 27B model.
      names: names of tensors that differ from `_NAMES`.
    """

    model_type: str
    interleaved: bool = False
    windowed: str | None = None
    window: int | None = None
    wide: int | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The names and the order of the tensors."""
        return Layout("blk.{}.", {**_NAMES, **self.names}, self.interleaved)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", interleaved=True, windowed="mistral"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "exaone": Architecture("exaone"),
    "exaone4": Architecture("exaone4"),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", window=4096, wide=46),
    "gemma3": Architecture("gemma3_text", wide=62),
    "glm4": Architecture("glm4", interleaved=True),
    "granite": Architecture("granite", interleaved=True),
    "mistral3": Architecture("ministral3", interleaved=True),
    "olmo2": Architecture("olmo2", windowed="olmo3"),
    "phi3": Architecture("phi3"),
    "seed_oss": Architecture("seed_oss", names={"mlp/norm": "post_attention_norm"}),
    "smollm3": Architecture("smollm3", interleaved=True),
}
_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention/norm": "attn_norm",
    "attention/post_norm": "post_attention_norm",
    "mlp/norm": "ffn_norm",
    "mlp/post_norm": "post_ffw_norm",
    **{f"attention/{name}": f"attn_{name}" for name in ("q_norm", "k_norm")},
    **{name: f"attn_{name}" for name in ("q", "k", "v", "qkv")},
    "attention/out": "attn_output",
    **{name: f"ffn_{name}" for name in ("gate", "up")},
    "gate_up": "ffn_up",
    "mlp/down": "ffn_down",
}
_EMBED, _HEAD = (f"{_NAMES[name]}.weight" for name in ("embed", "head"))
_ROPE_FACTORS = "rope_freqs.weight"
_LENGTH, _THETA = "context_length", ("rope.freq_base", 1, MAX_THETA)
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# RoPE frequencies, which are part of the configuration; the names differ between versions of llama.cpp.
_DERIVED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
# Metadata that changes the computation, and the key of `config.json` under which some families have it. llama.cpp
# treats 0 as none.
_SPECIAL = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    **dict.fromkeys(("expert_count", "attention.clamp_kqv", "attention.max_alibi_bias"), ""),
}
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
    file = read_gguf(path)
    try:
        return _config(file)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path}: {error}") from None


def _config(file: GGUFFile) -> LlamaConfig:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {shown(name)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    own, of = _Keys(file.metadata, name), ARCHITECTURES[name]
    heads, hidden = own.size("attention.head_count"), own.size("embedding_length")
    layers, embed = own.size("block_count", most=MAX_LAYERS), file.tensors.get(_EMBED)
    if embed is None:
        raise ValueError(f"tensor {_EMBED} is missing")
    head_dim = own.size("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"heads of {head_dim} numbers are odd; rotary embeddings need even ones")
    slides = own.get("attention.sliding_window", of.window)
    window = own.size("attention.sliding_window", of.window) if slides else None
    kind = of.windowed if window and of.windowed else of.model_type
    family = FAMILIES[kind]
    for key in ("attention.value_length", "rope.dimension_count"):
        part = key.startswith("rope") and "partial_rotary_factor" in family.keys
        if not part and own.size(key, head_dim) != head_dim:
            raise ValueError(
                f"{name}.{key} is {shown(own.get(key))} beside heads of {head_dim}; supported: equal ones"
            )
    config = config_from(
        {
            "model_type": kind,
            "vocab_size": embed.shape[0],
            "hidden_size": hidden,
            "intermediate_size": own.size("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": own.size("attention.head_count_kv", heads, most=heads),
            "head_dim": head_dim,
            "max_position_embeddings": own.size(_LENGTH),
            "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon", MIN_EPSILON, 1),
            "tie_word_embeddings": _HEAD not in file.tensors,
            "attention_multiplier": head_dim**-0.5,
            "query_pre_attn_scalar": hidden // heads if layers == of.wide else head_dim,
            **_special(own, family),
            **_windows(own, window, layers),
            **_rope(own, family, file.tensors, head_dim),
            **dict.fromkeys(("attention_bias", "mlp_bias"), False),
        }
    )
    biases = {
        part: f"blk.0.{_NAMES[part]}.bias" in file.tensors
        for part in ("q", "qkv", "attention/out", "mlp/down")
    }
    ids = token_ids(file)
    return dataclasses.replace(
        config,
        qkv_bias=config.qkv_bias or biases["q"] or biases["qkv"],
        output_bias=biases["attention/out"],
        mlp_bias=biases["mlp/down"],
        bos_token_id=ids.get("bos"),
        eos_token_ids=end_ids(file),
    )


def _special(own: _Keys, family: Family) -> dict[str, Any]:
    """Returns the values of `_SPECIAL` by their keys in `config.json`."""
    found = {}
    for name, key in _SPECIAL.items():
        if own.get(name, 0):
            found[key] = (
                own.number(name, 1 / MAX_FACTOR, MAX_FACTOR) if key in family.keys else own.refuse(name)
            )
    if "residual_multiplier" in family.keys and own.get("rope.scaling.finetuned") is False:
        own.refuse("rope.scaling.finetuned")  # a Granite without RoPE
    return found


def _windows(own: _Keys, window: int | None, layers: int) -> dict[str, Any]:
    """Returns the keys of windows; without a pattern in the file, layers have windows as is usual in the family."""
    name = "attention.sliding_window_pattern"
    pattern, types = own.values.get(name), None
    if window is None:
        types = [FULL] * layers
    elif isinstance(pattern, np.ndarray):
        types = [SLIDING if slides else FULL for slides in pattern]
    elif pattern is not None:
        every = whole({name: pattern}, name, 0)
        types = [SLIDING if not every or layer % every < every - 1 else FULL for layer in range(layers)]
    keys = {"sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 0}
    return keys if types is None else keys | {"layer_types": types}


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.prefix = f"{architecture}."
        self.values = {key.removeprefix(self.prefix): value for key, value in metadata.items()}

    def refuse(self, name: str) -> NoReturn:
        raise ValueError(f"{self.prefix}{name} is {shown(self.get(name))}, which is not supported")

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value; an array of equal numbers, one per layer, is treated as that number."""
        value = self.values.get(name, default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ValueError(f"{self.prefix}{name} differs by layer, which is not supported")
            value = value[0].item()
        return value

    def size(self, name: str, default: int | None = None, most: int = MAX_INT) -> int:
        return whole(self._given(name, default), f"{self.prefix}{name}", 1, most)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """Returns a float32 as the shortest decimal that rounds to it: 1e-05, not 9.99999974738e-06."""
        given = number(self._given(name, default), f"{self.prefix}{name}", least, most)
        return float(str(np.float32(given)))

    def _given(self, name: str, default: Any) -> dict[str, Any]:
        key, value = f"{self.prefix}{name}", self.get(name, default)
        if value is None:
            raise ValueError(f"{key} is missing")
        return {key: value}


def _rope(own: _Keys, family: Family, tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Any]:
    """Returns the keys of RoPE."""
    rotated, theta = own.size("rope.dimension_count", head_dim, head_dim), own.number(*_THETA, 10000.0)
    scaling = _scaling(own, tensors, theta, rotated)
    beta, kind = own.number("attention.temperature_scale", 0, MAX_FACTOR, 0), scaling.get("rope_type")
    of_windows = own.number("rope.freq_base_swa", 1, MAX_THETA, family.window_theta or theta)
    for name, wrong in {
        "attention.temperature_scale": beta and not (family.scales_queries and kind == "yarn"),
        "rope.freq_base_swa": of_windows != theta and not family.window_rope,
        "rope.scaling.attn_factor": own.get("rope.scaling.attn_factor", 1) not in (0, 1)
        and kind != "longrope",
        "rope.scaling.yarn_ext_factor": own.get("rope.scaling.yarn_ext_factor", 1) != 1,
    }.items():
        if wrong:
            own.refuse(name)
    rope = {
        "rope_theta": theta,
        "partial_rotary_factor": rotated / head_dim,
        "llama_4_scaling_beta": beta,
        **scaling,
    }
    original = {
        "original_max_position_embeddings": own.size(
            "rope.scaling.original_context_length", own.size(_LENGTH)
        )
    }
    parameters = {FULL: rope, SLIDING: {"rope_theta": of_windows}} if family.window_rope else rope
    return {"rope_parameters": parameters, **(original if kind in ("yarn", "longrope") else {})}


def _scaling(own: _Keys, tensors: Mapping[str, Tensor], theta: float, rotated: int) -> dict[str, Any]:
    """Returns the scaling of the frequencies, with the keys of `config.json`."""
    # llama.cpp treats a factor of 0 as no scaling.
    given = (own.number(name, 0, MAX_FACTOR, 0) for name in ("rope.scaling.factor", "rope.scale_linear"))
    factor, kind = next(filter(None, given), 1.0), own.get("rope.scaling.type")
    if kind is None:
        kind = "longrope" if _LONG in tensors else "none" if factor == 1 else "linear"
    if kind not in ("none", "linear", "yarn", "longrope") or (
        kind == "longrope" and not {_SHORT, _LONG} <= tensors.keys()
    ):
        raise ValueError(
            f"RoPE scaling {shown(kind)} is not supported; supported: none, linear, yarn, that of Llama 3, "
            f"longrope with {_SHORT} and {_LONG}"
        )
    if _ROPE_FACTORS in tensors:
        if kind != "none":
            raise ValueError(f"RoPE scaling {kind!r} together with {_ROPE_FACTORS} is not supported")
        return _llama3(np.ravel(_values(tensors[_ROPE_FACTORS])), theta, rotated)
    names: dict[str, str] = {}
    scaling: dict[str, Any] = {"factor": factor}
    if kind == "longrope":
        names = {"attn_factor": "attention_factor"}
        lists = {"short_factor": tensors[_SHORT], "long_factor": tensors[_LONG]}
        scaling = {key: [float(str(one)) for one in _values(tensor).ravel()] for key, tensor in lists.items()}
    elif kind == "yarn":
        names = {"yarn_attn_factor": "attention_factor", "yarn_log_multiplier": "mscale_all_dim"}
        names |= {f"yarn_{name}": name for name in ("beta_fast", "beta_slow")}
        scaling["mscale"] = 1.0
    elif kind == "none" or factor == 1:
        return {}
    numbers = {key: own.number(f"rope.scaling.{name}", 0, MAX_FACTOR, 0) for name, key in names.items()}
    return {"rope_type": kind, **scaling, **numbers}


def _llama3(factors: np.ndarray, theta: float, rotated: int) -> dict[str, Any]:
    """Returns the scaling whose frequencies are the unscaled ones divided by `factors`; {} if all are 1."""
    if len(factors) != rotated // 2:
        raise ValueError(f"{_ROPE_FACTORS} has {len(factors)} factors, expected {rotated // 2}")
    wrong = ~((factors > 0) & (factors <= MAX_FACTOR))
    if wrong.any():
        raise ValueError(
            f"{_ROPE_FACTORS} has the factor {factors[wrong.argmax()]}, expected one above 0 and at most {MAX_FACTOR:g}"
        )
    factor = float(str(factors.max(initial=1.0)))
    if np.all(factors == 1):
        return {}
    plain = 1.0 / theta ** (np.arange(0, rotated, 2) / rotated)
    for length in _LLAMA3_LENGTHS:
        # The same formula as in `model.rope`.
        keep = length * plain / (2 * np.pi) - _LLAMA3_LOW
        keep = np.clip(keep / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        if np.allclose(1 / factors, (1 - keep) / factor + keep, rtol=1e-4, atol=0):
            bounds = {"low_freq_factor": _LLAMA3_LOW, "high_freq_factor": _LLAMA3_HIGH}
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": length,
                **bounds,
            }
    raise ValueError(f"the factors of {_ROPE_FACTORS} are not those of Llama 3, which alone are supported")


def stored_dtype(path: str | os.PathLike[str]) -> np.dtype:
    """Returns the dtype of a file's embedding, or float32 if the embedding is quantised.

    Raises:
      ValueError: as in `read_config`.
    """
    embed = read_gguf(path).tensors.get(_EMBED)
    if embed is None:
        raise ValueError(f"{path}: tensor {_EMBED} is missing")
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
    file = read_gguf(path)
    layout = ARCHITECTURES[file.metadata["general.architecture"]].layout
    _check(file, config, layout)

    def fetch(source: Source) -> np.ndarray:
        values = _values(file.tensors[source.name])
        # llama.cpp's conversion adds the offset to the weights.
        of_norm = config.norm_offset and source.name.endswith("norm.weight")
        return values - np.float32(config.norm_offset) if of_norm else values

    with errors_of(file.path):
        return assemble(config, np.dtype(dtype), fetch, place, layout)


def _check(file: GGUFFile, config: LlamaConfig, layout: Layout) -> None:
    """Refuses weights that do not fit `config`, before any of them is read."""
    used = {_SHORT, _LONG} if config.rope_scaling is not None and config.rope_scaling.short_factors else set()
    for _, _, sources in leaves(config, layout):
        for source in sources:
            name = source.name
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
