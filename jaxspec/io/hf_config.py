"""`config.json` and `generation_config.json` of Hugging Face directories, to and from `LlamaConfig`.

Missing keys mean what transformers takes them to mean for each model type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.io.files import read_json
from jaxspec.model.config import LlamaConfig, RopeScaling

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
    "qwen2": _COMMON
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "sliding_window": 4096,
    },
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p")


def read_config(directory: str | Path) -> LlamaConfig:
    """The configuration of a model's directory; EOS ids of `generation_config.json` are added to its own.

    Raises:
      FileNotFoundError: there is no such directory, or no `config.json` in it.
      ValueError: a model type, activation, RoPE type or quantisation that is not supported, or a key that
        makes no sense; one line.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not a directory; give one with config.json and *.safetensors"
        )
    path = directory / "config.json"
    try:
        return _config_from(read_json(path), _read_generation(directory))
    except (ValueError, TypeError, AttributeError) as error:
        reason = str(error)
        raise ValueError(reason if str(path) in reason else f"{path}: {reason}") from None


def read_exits(directory: str | Path, num_layers: int) -> tuple[int, ...]:
    """The exits a model was trained for, in layers run, rising; () where its config names none.

    Raises:
      ValueError: they are no rising list of depths of this model.
    """
    path = Path(directory) / "config.json"
    own = read_json(path).get("jaxspec", {})
    if not isinstance(own, Mapping):
        raise ValueError(f'{path} has {own!r} under jaxspec; expected an object such as {{"exits": [2, 4]}}')
    if "exits" not in own:
        return ()
    try:
        return check_exits(own["exits"] or None, num_layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_exits(exits: Any, num_layers: int) -> tuple[int, ...]:
    """A list of exits, in layers run, as a tuple; it may be empty.

    Raises:
      ValueError: it is no rising list of depths of a model of `num_layers` layers.
    """
    listed: list[Any] = list(exits) if isinstance(exits, (list, tuple)) else [None]
    whole = all(type(n) is int and 1 <= n <= num_layers for n in listed)
    if not whole or listed != sorted(set(listed)):
        raise ValueError(f"the exits are {exits}; expected a rising list of layers from 1 to {num_layers}")
    return tuple(listed)


def generation_defaults(directory: str | Path) -> dict[str, Any]:
    """What `generation_config.json` says of do_sample, temperature, top_k, top_p, min_p; {} where nothing."""
    content = _read_generation(Path(directory))
    return {key: content[key] for key in _GENERATION_KEYS if content.get(key) is not None}


def _read_generation(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _config_from(content: Mapping[str, Any], generation: Mapping[str, Any]) -> LlamaConfig:
    kind = content.get("model_type")
    if kind not in DEFAULTS:
        raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(DEFAULTS)}")
    values = {**DEFAULTS[kind], **content}
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act {values['hidden_act']!r} is not supported; supported: silu")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantised weights ({method}) are not supported; give the unquantised model")
    hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        values["head_dim"] = hidden // heads
    if _size(values, "head_dim") % 2:
        raise ValueError(f"head_dim {values['head_dim']} is odd; rotary embeddings need an even one")
    theta, scaling = _read_rope(values)
    attention_bias = kind == "llama" and bool(values.get("attention_bias", False))
    return LlamaConfig(
        vocab_size=_size(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(values, "intermediate_size"),
        num_layers=_size(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(values, "num_key_value_heads"),
        head_dim=_size(values, "head_dim"),
        max_position_embeddings=_size(values, "max_position_embeddings"),
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=attention_bias or kind == "qwen2",
        output_bias=attention_bias,
        mlp_bias=kind == "llama" and bool(values.get("mlp_bias", False)),
        sliding_windows=_read_windows(kind, values),
        bos_token_id=_first(values["bos_token_id"]),
        eos_token_ids=_union(values["eos_token_id"], generation.get("eos_token_id")),
        model_type=kind,
    )


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, expected a whole number above 0")
    return value


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    # In transformers a non-empty `rope_scaling` wins over `rope_parameters`.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters that differ by layer type are not supported; give one set for all")
    theta = rope.get("rope_theta")
    theta = float(values.get("rope_theta", 10000.0) if theta is None else theta)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3")
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in needed:
        if rope.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key}, which is missing")
    factor = float(rope["factor"])
    if kind != "llama3":
        return theta, RopeScaling(kind, factor)
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return theta, RopeScaling(
        kind,
        factor,
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(original or values["max_position_embeddings"]),
    )


def _read_windows(kind: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers, window = values["num_hidden_layers"], values.get("sliding_window")
    if kind == "llama" or window is None:
        return ()
    if kind == "mistral":
        return (_size(values, "sliding_window"),) * layers
    if not values.get("use_sliding_window", False):
        return ()
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    if "sliding_attention" not in types:
        return ()
    return tuple(_size(values, "sliding_window") if name == "sliding_attention" else None for name in types)


def _union(*given: int | list[int] | None) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in given:
        for token in [] if value is None else value if isinstance(value, list) else [value]:
            ids[int(token)] = None
    return tuple(ids)


def _first(value: int | list[int] | None) -> int | None:
    return next(iter(_union(value)), None)


def config_json(config: LlamaConfig, dtype_name: str) -> dict[str, Any]:
    """What `config.json` says of a model whose weights are stored as `dtype_name`.

    Both styles of RoPE keys are written: transformers 5 reads `rope_parameters`, older ones the others.

    Raises:
      ValueError: `config.model_type` has no way to say what the configuration asks for.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    eos = list(config.eos_token_ids)
    content = {
        "architectures": [ARCHITECTURES.get(config.model_type)],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }
    return content | _flags_json(config)


def _flags_json(config: LlamaConfig) -> dict[str, Any]:
    """The keys that only one model type has; refuses what the type cannot express."""
    kind = config.model_type
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    windows = config.sliding_windows
    sizes = {window for window in windows if window is not None}
    if kind == "llama" and config.qkv_bias == config.output_bias and not sizes:
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "mistral" and not any(biases) and len(set(windows)) <= 1:
        return {"sliding_window": next(iter(sizes), None)}
    if kind == "qwen2" and biases == (True, False, False) and len(sizes) <= 1:
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return {
            "use_sliding_window": bool(sizes),
            "sliding_window": next(iter(sizes), None),
            "layer_types": types or ["full_attention"] * config.num_layers,
        }
    if kind not in ARCHITECTURES:
        raise ValueError(f"cannot save model_type {kind!r}; choose one of {', '.join(ARCHITECTURES)}")
    raise ValueError(
        f"a {kind} config.json cannot say qkv_bias {biases[0]}, output_bias {biases[1]}, mlp_bias {biases[2]}, "
        f"sliding windows {sorted(sizes) or None}; choose another model_type"
    )


def generation_json(config: LlamaConfig, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `generation_config.json` says: BOS, EOS and, where given, the sampling defaults."""
    eos = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        **(defaults or {}),
    }
