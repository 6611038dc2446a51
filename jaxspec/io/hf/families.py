"""The families of models, by the `model_type` of their `config.json`: their differences from Llama.

A family is one record: the keys of its file, their defaults in transformers, the fields of `LlamaConfig` that they set,
and the names and places of its tensors. The network knows no family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.hf.values import flag, number, whole
from jaxspec.model.config import MAX_LAYERS, LlamaConfig, Scores

Values = Mapping[str, Any]
# The values that `layer_types` may contain.
SLIDING, FULL = "sliding_attention", "full_attention"
# Far above any factor, multiplier or cap in use.
MAX_FACTOR = 1e6


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences between a family and Llama.

    Attributes:
      architecture: the class in transformers.
      defaults: the values of missing keys in transformers, beyond `COMMON`.
      keys: the keys that the family reads beyond those of all families.
      read: returns fields of `LlamaConfig` for the values of `config.json`.
      write: returns the keys for a configuration. The writer reads them again, so that they need not be checked here.
      rope_theta: the base if the file has none.
      window_rope: whether layers with a window have a base of their own, and no scaling.
      window_theta: their base if the file has none; None for that of the others.
      activation: the key of the gate's activation.
      scales_queries: whether queries are scaled by position, see `RopeScaling.query_beta`.
      aliases: other names of keys.
      synonyms: other names of activations and of RoPE types.
      names: names of tensors within a layer, by leaf, if they are not Llama's.
      fused: the matrices that are stored together, `qkv` and `gate_up`.
      interleaved: whether rotated pairs are neighbours in the rows of queries and keys, see `layout.Layout`.
      renamed: patterns of the names of tensors in older files, and their replacements.
    """

    architecture: str
    defaults: Values
    keys: frozenset[str] = frozenset()
    read: Callable[[Values], dict[str, Any]] = lambda values: {}
    write: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {}
    rope_theta: float = 10000.0
    window_rope: bool = False
    window_theta: float | None = None
    activation: str = "hidden_act"
    scales_queries: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: frozenset[str] = frozenset()
    interleaved: bool = False
    renamed: tuple[tuple[str, str], ...] = ()


COMMON: Values = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _usual(
    vocabulary: int, inner: int, length: int, bos: int | None, eos: Any, **others: Any
) -> dict[str, Any]:
    """Returns defaults: sizes of vocabulary, MLP and context, and the tokens around a text."""
    sizes = {"vocab_size": vocabulary, "intermediate_size": inner, "max_position_embeddings": length}
    return {**COMMON, **sizes, "bos_token_id": bos, "eos_token_id": eos, **others}


def _pattern(values: Values, full: Callable[[int], bool]) -> list[str]:
    """Returns the `layer_types` of a file, or of a pattern: whether each layer, from 0, is full."""
    count = whole(values, "num_hidden_layers", most=MAX_LAYERS)
    types = values.get("layer_types")
    if types is None:
        return [FULL if full(layer) else SLIDING for layer in range(count)]
    if not isinstance(types, list) or len(types) != count or any(one not in (SLIDING, FULL) for one in types):
        raise ValueError(f"layer_types must name {FULL} or {SLIDING} for each of {count} layers")
    return types


def _windows(values: Values, types: Sequence[str], needed: str = "sliding_window") -> tuple[int | None, ...]:
    """Returns `LlamaConfig.sliding_windows` for `layer_types`; `needed` names the keys of a window."""
    if SLIDING not in types:
        return ()
    if values.get("sliding_window") is None:
        raise ValueError(
            f"layer_types has {SLIDING}, which needs {needed}; give the window's length in tokens"
        )
    return tuple(whole(values, "sliding_window") if one == SLIDING else None for one in types)


def _types_of(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of windows for a configuration."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    found = [window for window in windows if window is not None]
    types = [FULL if window is None else SLIDING for window in windows]
    return {"sliding_window": found[0] if found else None, "layer_types": types}


def _every(count: int) -> Callable[[int], bool]:
    return lambda layer: (layer + 1) % count == 0


def _biases(values: Values, mlp: bool = True) -> dict[str, Any]:
    both = flag(values, "attention_bias")
    return {"qkv_bias": both, "output_bias": both, "mlp_bias": mlp and flag(values, "mlp_bias")}


def _written_biases(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _one_window(values: Values) -> dict[str, Any]:
    window, count = values.get("sliding_window"), whole(values, "num_hidden_layers", most=MAX_LAYERS)
    return {"sliding_windows": () if window is None else (whole(values, "sliding_window"),) * count}


def _written_window(config: LlamaConfig) -> dict[str, Any]:
    return {"sliding_window": config.window(0)}


def _ministral(values: Values) -> dict[str, Any]:
    types = _pattern(values, lambda _: values.get("sliding_window") is None)
    return {"sliding_windows": _windows(values, types)}


def _written_ministral(config: LlamaConfig) -> dict[str, Any]:
    keys = _types_of(config)
    # transformers refuses a Ministral without a window, even if no layer has one.
    return {**keys, "sliding_window": keys["sliding_window"] or config.max_position_embeddings}


# The keys without which a Qwen has no window.
_BOTH = "sliding_window and use_sliding_window"


def _qwen(values: Values) -> dict[str, Any]:
    slides = values.get("sliding_window") is not None and flag(values, "use_sliding_window")
    first = whole({"max_window_layers": 28, **values}, "max_window_layers", 0) if slides else 0
    types = _pattern(values, lambda layer: not slides or layer < first)
    given = values if slides else {}
    return {"sliding_windows": _windows(given, types, _BOTH)}


def _written_qwen(config: LlamaConfig) -> dict[str, Any]:
    return {"use_sliding_window": bool(config.sliding_windows), **_types_of(config)}


def _smollm3(values: Values) -> dict[str, Any]:
    count = whole(values, "num_hidden_layers", most=MAX_LAYERS)
    interval = whole(values, "no_rope_layer_interval")
    rotated = values.get("no_rope_layers")  # 1 for layers with RoPE
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count or any(one not in (0, 1) for one in rotated):
        raise ValueError(f"no_rope_layers must have a 0 or a 1 for each of {count} layers")
    slides = flag(values, "use_sliding_window") and values.get("sliding_window") is not None
    types = _pattern(values, lambda layer: not slides or bool(rotated[layer]))
    return {
        **_biases(values),
        "rotated": () if all(rotated) else tuple(map(bool, rotated)),
        "sliding_windows": _windows(values if slides else {}, types, _BOTH),
    }


def _written_smollm3(config: LlamaConfig) -> dict[str, Any]:
    rotated = config.rotated or (True,) * config.num_layers
    return _written_biases(config) | _written_qwen(config) | {"no_rope_layers": list(map(int, rotated))}


def _granite(values: Values) -> dict[str, Any]:
    factors = {
        key: number(values, key, 1 / MAX_FACTOR, MAX_FACTOR)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    }
    return {
        **_biases(values),
        "embedding_multiplier": factors["embedding_multiplier"],
        "residual_multiplier": factors["residual_multiplier"],
        "logit_multiplier": 1 / factors["logits_scaling"],
        "scores": Scores(factors["attention_multiplier"]),
    }


def _written_granite(config: LlamaConfig) -> dict[str, Any]:
    return _written_biases(config) | {
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": 1 / config.logit_multiplier,
        "attention_multiplier": config.scores.scale,
    }


def _olmo2(values: Values) -> dict[str, Any]:
    # The sum of a bias is before the norm of queries and keys.
    own = {"norm_placement": "post", "qk_norm": True, "qk_norm_over_heads": True}
    return _biases(values, mlp=False) | own


def _olmo3(values: Values) -> dict[str, Any]:
    return _olmo2(values) | {"sliding_windows": _windows(values, _pattern(values, _every(4)))}


def _exaone4(values: Values) -> dict[str, Any]:
    pattern, slides = values.get("sliding_window_pattern"), values.get("sliding_window") is not None
    if isinstance(pattern, str):
        letters, count = pattern, whole(values, "num_hidden_layers", most=MAX_LAYERS)
        if not letters or set(letters) - {"L", "G"}:
            raise ValueError(
                f"sliding_window_pattern is {shown(pattern)}; expected a number or letters L and G"
            )
        full = lambda layer: letters[layer % len(letters)] == "G" or layer == count - 1  # noqa: E731
    else:
        full = _every(whole(values, "sliding_window_pattern") if pattern else 1)
    types = _pattern(values, full if slides else lambda _: True)
    windows = _windows(values, types)
    return {
        "norm_placement": "post",
        "qk_norm": True,
        "sliding_windows": windows,
        # Layers that see the whole text do not rotate, if there are windows.
        "rotated": () if not slides or FULL not in types else tuple(one == SLIDING for one in types),
    }


def _written_exaone4(config: LlamaConfig) -> dict[str, Any]:
    keys = _types_of(config)
    if config.rotated and keys["sliding_window"] is None:
        keys["sliding_window"] = config.max_position_embeddings  # a window that no layer has
    return keys | {"sliding_window_pattern": None}


def _gemma(values: Values) -> dict[str, Any]:
    # transformers keeps √D in the dtype of the weights, as `llama.embed` does.
    width = math.sqrt(whole(values, "hidden_size"))
    both = flag(values, "attention_bias")
    return {"norm_offset": 1.0, "embedding_multiplier": width, "qkv_bias": both, "output_bias": both}


def _gemma2(values: Values, every: int = 2) -> dict[str, Any]:
    caps = {
        key: None if values.get(key) is None else number(values, key, 1 / MAX_FACTOR, MAX_FACTOR)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    scale = number(values, "query_pre_attn_scalar", 1 / MAX_FACTOR, MAX_FACTOR) ** -0.5
    return _gemma(values) | {
        "norm_placement": "sandwich",
        "scores": Scores(scale, caps["attn_logit_softcapping"]),
        "logit_cap": caps["final_logit_softcapping"],
        "sliding_windows": _windows(values, _pattern(values, _every(every))),
    }


def _gemma3(values: Values) -> dict[str, Any]:
    every = whole({"sliding_window_pattern": 6, **values}, "sliding_window_pattern")
    own = _gemma2(values, every)
    # transformers reads the cap of attention, and does not apply it.
    return own | {"qk_norm": True, "scores": Scores(own["scores"].scale)}


def _written_gemma2(config: LlamaConfig) -> dict[str, Any]:
    scalar = (config.scores.scale or config.head_dim**-0.5) ** -2
    return _types_of(config) | {
        "attention_bias": config.qkv_bias,
        # A whole number, as in published files.
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
        "attn_logit_softcapping": config.scores.cap,
        "final_logit_softcapping": config.logit_cap,
    }


_WINDOWS = _words("sliding_window layer_types")
# Published files name code of their own, which transformers has replaced.
_REMOTE = frozenset({"auto_map"})
_BIASES = _words("attention_bias mlp_bias")
_CAPS = _words("attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar attention_bias")
_QWEN_WINDOWS = _WINDOWS | _words("use_sliding_window max_window_layers")
_LLAMA = Family(
    "LlamaForCausalLM",
    _usual(32000, 11008, 2048, 1, 2, num_key_value_heads=None),
    _BIASES,
    _biases,
    _written_biases,
)
_MISTRAL = _usual(32000, 14336, 131072, 1, 2, num_key_value_heads=8, sliding_window=4096)
_QWEN2 = _usual(151936, 22016, 32768, None, None, sliding_window=4096)
_OLMO = _usual(50304, 11008, 2048, None, 50279, num_key_value_heads=None, rms_norm_eps=1e-5)
_GEMMA = _usual(
    256000, 24576, 8192, 2, 1, hidden_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
)  # fmt: skip
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_CAPLESS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "exaone": dataclasses.replace(
        _LLAMA,
        defaults=_usual(102400, 14336, 4096, 1, 361, num_key_value_heads=8, rms_norm_eps=1e-5),
        rope_theta=500_000.0,
        aliases={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        keys=_BIASES | _REMOTE,
        renamed=(
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"(?<=\.)attn\.attention\.out_proj\.", "self_attn.o_proj."),
            (r"(?<=\.)attn\.attention\.", "self_attn."),
            (r"(?<=\.)ln_1\.", "input_layernorm."),
            (r"(?<=\.)ln_2\.", "post_attention_layernorm."),
            (r"(?<=\.)mlp\.c_fc_0\.", "mlp.gate_proj."),
            (r"(?<=\.)mlp\.c_fc_1\.", "mlp.up_proj."),
            (r"(?<=\.)mlp\.c_proj\.", "mlp.down_proj."),
        ),
    ),
    "internlm3": dataclasses.replace(
        _LLAMA,
        defaults=_usual(128512, 10240, 32768, 1, 2, num_hidden_layers=48, num_key_value_heads=2, head_dim=128)
        | {"rms_norm_eps": 1e-5},
        keys=_BIASES | _REMOTE,
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "iquestcoder": dataclasses.replace(
        _LLAMA,
        defaults=_usual(76800, 27648, 131072, 1, 2, hidden_size=5120, num_hidden_layers=80, head_dim=128)
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _usual(155136, 27648, 524288, 0, 2, num_hidden_layers=64, num_attention_heads=80, head_dim=128)
        | {"num_key_value_heads": 8, "attention_bias": True},
        _BIASES | {"attention_out_bias"},
        lambda values: _biases(values) | {"output_bias": flag(values, "attention_out_bias")},
        lambda config: _written_biases(config) | {"attention_out_bias": config.output_bias},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _MISTRAL,
        _WINDOWS,
        _one_window,
        _written_window,
    ),
    "ministral": Family("MinistralForCausalLM", _MISTRAL, _WINDOWS, _ministral, _written_ministral),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        _usual(131072, 14336, 262144, 1, 2, num_hidden_layers=34, num_key_value_heads=8, head_dim=128)
        | {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        frozenset({"sliding_window"}),
        _one_window,
        _written_window,
        scales_queries=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN2,
        _QWEN_WINDOWS,
        lambda values: _qwen(values) | {"qkv_bias": True},
        _written_qwen,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN2, "head_dim": 128},
        _QWEN_WINDOWS | {"attention_bias"},
        lambda values: _qwen(values) | _biases(values, mlp=False) | {"qk_norm": True},
        lambda config: _written_qwen(config) | {"attention_bias": config.qkv_bias},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _usual(128256, 11008, 32768, 128000, 128001, hidden_size=2048, num_hidden_layers=36)
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"no_rope_layer_interval": 4},
        _BIASES | _QWEN_WINDOWS | _words("no_rope_layers no_rope_layer_interval"),
        _smollm3,
        _written_smollm3,
        rope_theta=2_000_000.0,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        _usual(32000, 11008, 2048, 1, 2, num_key_value_heads=None, embedding_multiplier=1.0)
        | {"residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0},
        _BIASES | _words("embedding_multiplier residual_multiplier attention_multiplier logits_scaling"),
        _granite,
        _written_granite,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _OLMO,
        frozenset({"attention_bias"}),
        _olmo2,
        lambda config: {"attention_bias": config.qkv_bias},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**_OLMO, "sliding_window": 4096},
        _WINDOWS | {"attention_bias"},
        _olmo3,
        lambda config: _types_of(config) | {"attention_bias": config.qkv_bias},
        rope_theta=500_000.0,
        window_rope=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _usual(32064, 8192, 4096, 1, 32000, hidden_size=3072, num_key_value_heads=None, rms_norm_eps=1e-5)
        | {"original_max_position_embeddings": 4096},
        _REMOTE | _words("sliding_window partial_rotary_factor full_attn_mod interpolate_factor"),
        _one_window,
        _written_window,
        synonyms={"su": "longrope", "yarn": "longrope"},
        fused=frozenset({"qkv", "gate_up"}),
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA,
        _words("attention_bias hidden_activation"),  # of which transformers reads `hidden_act` only
        _gemma,
        lambda config: {"attention_bias": config.qkv_bias},
        synonyms={"gelu": "gelu_pytorch_tanh"},  # of published files
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA2,
        _WINDOWS | _CAPS,
        _gemma2,
        _written_gemma2,
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA2, **_CAPLESS, "vocab_size": 262208, "max_position_embeddings": 131072},
        _WINDOWS | _CAPS | {"sliding_window_pattern", "rope_local_base_freq"},
        _gemma3,
        _written_gemma2,
        rope_theta=1_000_000.0,
        window_rope=True,
        window_theta=10_000.0,
        activation="hidden_activation",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _usual(102400, 16384, 2048, 0, 2, rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4),
        _WINDOWS | {"sliding_window_pattern"},
        _exaone4,
        _written_exaone4,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _usual(151552, 13696, 131072, None, [151329, 151336, 151338], num_hidden_layers=40, head_dim=128)
        | {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}
        | {"attention_bias": True},
        _words("attention_bias partial_rotary_factor"),
        lambda values: {"norm_placement": "sandwich", "qkv_bias": flag(values, "attention_bias")},
        lambda config: {"attention_bias": config.qkv_bias},
        names={
            "attention/post_norm": "post_self_attn_layernorm",
            "mlp/norm": "post_attention_layernorm",
            "mlp/post_norm": "post_mlp_layernorm",
        },
        fused=frozenset({"gate_up"}),
        interleaved=True,
    ),
}
