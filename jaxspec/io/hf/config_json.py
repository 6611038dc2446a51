"""Converts `config.json` and `generation_config.json` of Hugging Face directories to and from `LlamaConfig`.

A missing key has transformers' default for the model type.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec.host.files import no_file, read_json
from jaxspec.host.messages import shown
from jaxspec.io.hf import generation_json
from jaxspec.io.hf.keys import check_keys
from jaxspec.io.hf.values import MAX_INT, flag, number, section, token_ids, whole
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import MAX_LAYERS, LlamaConfig, RopeScaling

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
DEFAULTS["ministral"] = DEFAULTS["mistral"]
DEFAULTS["qwen3"] = DEFAULTS["qwen2"] | {"head_dim": 128}
GENERATION = "generation_config.json"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The values that `layer_types` may contain.
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The smallest ε that is nonzero in float32 and keeps a norm of zeros finite. θ and factors: far above any in use.
MIN_EPSILON, MAX_THETA, MAX_FACTOR = 1e-30, 1e30, 1e6


def read_config(directory: str | Path) -> LlamaConfig:
    """Returns the configuration of a model's directory; EOS ids of `generation_config.json` are added to its own.

    Raises:
      FileNotFoundError: there is no such directory, or no `config.json` in it.
      ValueError: a model type, activation, RoPE type or quantisation is not supported, a key has an invalid value, or a
        key changes the model in a way that is not supported; one line.

    Warns:
      RuntimeWarning: there are keys that models of this type do not use, see `io.hf.keys`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not a directory; give one with config.json and *.safetensors"
        )
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"{no_file(directory / 'config.json')}; give a directory with config.json and *.safetensors"
        )
    content, generation = read_json(directory / "config.json"), _read_generation(directory)
    with errors_of(directory / GENERATION):
        more_eos_ids = token_ids(generation, "eos_token_id")
    with errors_of(directory / "config.json"):
        config = config_from(content, more_eos_ids)
        unused = check_keys(config.model_type, content)
    if unused is not None:
        warnings.warn(f"{directory / 'config.json'}: {unused}", RuntimeWarning, stacklevel=2)
    return config


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Puts the file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_trained_for(directory: str | Path, config: LlamaConfig) -> TrainedFor:
    """Returns what a model was trained for, from its config.json.

    Raises:
      ValueError: the entry does not fit a model of this configuration.
    """
    path = Path(directory) / "config.json"
    content = read_json(path)
    with errors_of(path):
        return TrainedFor.read(section(content, "jaxspec"), config.num_layers, config.vocab_size)


def generation_defaults(directory: str | Path) -> dict[str, Any]:
    """Returns the applied settings of `generation_config.json`, see `generation_json.defaults_of`; {} without the file.

    Raises:
      ValueError: do_sample is not true or false, or a value is invalid; one line.
    """
    directory = Path(directory)
    with errors_of(directory / GENERATION):
        return generation_json.defaults_of(_read_generation(directory))


def unapplied_settings(directory: str | Path) -> list[str]:
    """Returns the keys of `generation_config.json` that would change a text and are not applied."""
    return generation_json.unapplied(_read_generation(Path(directory)))


def _read_generation(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION
    return read_json(path) if path.is_file() else {}


def config_from(content: Mapping[str, Any], more_eos_ids: Sequence[int] = ()) -> LlamaConfig:
    """Returns the configuration for the keys of a `config.json`; see `read_config`.

    Raises:
      ValueError: as in `read_config`.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(f"model_type {shown(kind)} is not supported; supported: {', '.join(DEFAULTS)}")
    if kind == "mistral" and content.get("layer_types") is not None:
        kind = "ministral"  # as in transformers, where all layers of a Mistral have the same type
    values = {**DEFAULTS[kind], **content}
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act {shown(values['hidden_act'])} is not supported; supported: silu")
    if quantised := section(values, "quantization_config"):
        method = quantised.get("quant_method", "unknown")
        raise ValueError(
            f"quantised weights ({str(method)[:20]}) are not supported; give the unquantised model"
        )
    hidden, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        values["head_dim"] = hidden // heads
    if whole(values, "head_dim") % 2:
        raise ValueError(f"head_dim {values['head_dim']} is odd; rotary embeddings need an even one")
    theta, scaling = _read_rope(values)
    attention_bias = kind in ("llama", "qwen3") and flag(values, "attention_bias")
    config = LlamaConfig(
        vocab_size=whole(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(values, "intermediate_size"),
        num_layers=whole(values, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=whole(values, "num_key_value_heads", most=heads),
        head_dim=values["head_dim"],
        max_position_embeddings=whole(values, "max_position_embeddings"),
        rms_norm_eps=number(values, "rms_norm_eps", MIN_EPSILON, 1),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=flag(values, "tie_word_embeddings"),
        qkv_bias=attention_bias or kind == "qwen2",
        output_bias=attention_bias,
        mlp_bias=kind == "llama" and flag(values, "mlp_bias"),
        qk_norm=kind == "qwen3",
        sliding_windows=read_windows(kind, values),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys((*token_ids(values, "eos_token_id"), *more_eos_ids))),
        model_type=kind,
    )
    check_context(config, "max_position_embeddings")
    return config


def check_context(config: LlamaConfig, key: str) -> None:
    """Refuses a context too long for an index; `key` is the file's key for the length before RoPE scaling."""
    if config.context_length > MAX_INT:
        raise ValueError(
            f"{key} {config.max_position_embeddings} and the rope factor make a context of more than {MAX_INT} tokens"
        )


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    # In transformers a non-empty `rope_scaling` has precedence over `rope_parameters`.
    rope = section(values, "rope_scaling") or section(values, "rope_parameters")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope_parameters that differ by layer type are not supported; give one set for all")
    given = values.get("rope_theta", 10000.0) if rope.get("rope_theta") is None else rope["rope_theta"]
    theta = number({"rope_theta": given}, "rope_theta", 1, MAX_THETA)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {shown(partial)} is not supported; supported: 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise ValueError(
            f"rope type {shown(kind)} is not supported; supported: default, linear, dynamic, llama3"
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in needed:
        if rope.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key}, which is missing")
    factor = number(rope, "factor", 1, MAX_FACTOR)
    if kind != "llama3":
        return theta, RopeScaling(kind, factor)
    low = number(rope, "low_freq_factor", 1e-6, MAX_FACTOR)
    high = number(rope, "high_freq_factor", 1e-6, MAX_FACTOR)
    if not low < high:
        raise ValueError(
            f"low_freq_factor is {low:g} and high_freq_factor {high:g}; expected a larger high one"
        )
    key = "original_max_position_embeddings"
    original = next((one for one in (values, rope) if one.get(key) is not None), None)
    if original is None:
        key, original = "max_position_embeddings", values
    return theta, RopeScaling(kind, factor, low, high, whole(original, key))


def read_windows(kind: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the attention window of each layer of a model of type `kind`, see `LlamaConfig.sliding_windows`."""
    layers, window = whole(values, "num_hidden_layers", most=MAX_LAYERS), values.get("sliding_window")
    if kind == "llama":
        return ()
    qwen = kind not in ("mistral", "ministral")
    slides = window is not None and (not qwen or flag(values, "use_sliding_window"))
    types = values.get("layer_types")
    if types is None:
        first = whole({"max_window_layers": 28, **values}, "max_window_layers", 0) if qwen and slides else 0
        types = [_SLIDING if slides and layer >= first else _FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(t not in (_SLIDING, _FULL) for t in types):
        raise ValueError(f"layer_types must name {_FULL} or {_SLIDING} for each of {layers} layers")
    if _SLIDING not in types:
        return ()
    if not slides:
        needed = "sliding_window and use_sliding_window" if qwen else "sliding_window"
        raise ValueError(
            f"layer_types has {_SLIDING}, which needs {needed}; give the window's length in tokens"
        )
    return tuple(whole(values, "sliding_window") if name == _SLIDING else None for name in types)


def config_json(
    config: LlamaConfig, dtype_name: str, trained_for: TrainedFor = TrainedFor()
) -> dict[str, Any]:
    """Returns the content of `config.json` for a model with weights of `dtype_name`.

    Both styles of RoPE keys are written: transformers 5 reads `rope_parameters`, older versions the others.

    Raises:
      ValueError: `config.model_type` cannot express the configuration, or `trained_for` does not fit this model.
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
    about = trained_for.checked(config.num_layers, config.vocab_size).content()
    own = {"jaxspec": about} if about else {}
    return content | _flags_json(config) | own


def _flags_json(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of the model type; refuses a configuration that the type cannot express."""
    kind = config.model_type
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    windows = config.sliding_windows
    sizes = {window for window in windows if window is not None}
    if config.qk_norm != (kind == "qwen3"):
        raise ValueError(
            f"a {kind} config.json cannot express qk_norm {config.qk_norm}; choose another model_type"
        )
    if kind == "llama" and config.qkv_bias == config.output_bias and not sizes:
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "mistral" and not any(biases) and len(set(windows)) <= 1:
        return {"sliding_window": next(iter(sizes), None)}
    types = [_FULL if window is None else _SLIDING for window in windows] or [_FULL] * config.num_layers
    if kind == "ministral" and not any(biases) and len(sizes) <= 1:
        # transformers refuses a Ministral without a window, even if no layer has one.
        return {"sliding_window": next(iter(sizes), config.max_position_embeddings), "layer_types": types}
    own: dict[str, Any] = {"attention_bias": config.qkv_bias} if kind == "qwen3" else {}
    usual = (
        biases == (True, False, False) if kind == "qwen2" else biases in ((True, True, False), (False,) * 3)
    )
    if kind in ("qwen2", "qwen3") and usual and len(sizes) <= 1:
        return own | {
            "use_sliding_window": bool(sizes),
            "sliding_window": next(iter(sizes), None),
            "layer_types": types,
        }
    if kind not in ARCHITECTURES:
        raise ValueError(f"cannot save model_type {kind!r}; choose one of {', '.join(ARCHITECTURES)}")
    raise ValueError(
        f"a {kind} config.json cannot express qkv_bias {biases[0]}, output_bias {biases[1]}, mlp_bias {biases[2]}, "
        f"sliding windows {sorted(sizes) or None}; choose another model_type"
    )


def generation_config_json(config: LlamaConfig, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: BOS, EOS and the sampling defaults, if given."""
    eos = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        **(defaults or {}),
    }
