"""The keys of rotary embeddings in `config.json`, in both styles: nested (transformers 5) and flat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.hf.families import FULL, MAX_FACTOR, SLIDING, Family
from jaxspec.io.hf.values import number, section, whole
from jaxspec.model.config import LlamaConfig, RopeScaling

# Far above any base in use.
MAX_THETA = 1e30


def read_ropes(family: Family, config: LlamaConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of RoPE, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    # In transformers a non-empty `rope_scaling` has precedence over `rope_parameters`.
    flat, given = section(values, "rope_scaling"), section(values, "rope_parameters")
    nothing: Mapping[str, Any] = {}
    rope, of_windows = flat or given, nothing
    if any(isinstance(value, Mapping) for value in (*flat.values(), *given.values())):
        if not family.window_rope or any(isinstance(value, Mapping) for value in flat.values()):
            raise ValueError(
                "rope_parameters that differ by layer type are not supported; give one set for all"
            )
        rope, of_windows = {**section(given, FULL), **flat}, section(given, SLIDING)
    theta = _theta(rope, values, family.rope_theta)
    dim = int(config.head_dim * _part(rope, values))
    scaling = _read_scaling(family, rope, values, config.max_position_embeddings, dim // 2)
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if dim != config.head_dim:
        if "partial_rotary_factor" not in family.keys:  # transformers ignores it
            raise ValueError(
                f"partial_rotary_factor {dim / config.head_dim:g} is not supported for a {config.model_type}; "
                "supported: 1.0"
            )
        fields["rotary_dim"] = dim
    if family.window_rope:
        if (kind := _kind(of_windows)) != "default":
            raise ValueError(f"rope type {shown(kind)} of {SLIDING} is not supported; supported: default")
        key = "rope_local_base_freq"
        base = _theta(of_windows, values if key in family.keys else {}, family.window_theta or theta, key)
        if any(config.sliding_windows) and (base != theta or scaling is not None):
            fields["window_rope_theta"] = base
    return fields


def _theta(
    rope: Mapping[str, Any], values: Mapping[str, Any], usual: float, key: str = "rope_theta"
) -> float:
    """Returns the base in a set of parameters, or else under a key of the file."""
    if rope.get("rope_theta") is not None:
        return number(rope, "rope_theta", 1, MAX_THETA)
    return number({key: values.get(key, usual)}, key, 1, MAX_THETA)


def _part(rope: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    """Returns the share of the coordinates of a head that are rotated."""
    key = "partial_rotary_factor"
    given = rope.get(key, values.get(key))
    return 1.0 if given is None else number({key: given}, key, 0.01, 1)


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_scaling(
    family: Family, rope: Mapping[str, Any], values: Mapping[str, Any], context: int, count: int
) -> RopeScaling | None:
    """Returns the scaling of `count` rotary frequencies; `context` is `max_position_embeddings`."""
    kind = family.synonyms.get(str(_kind(rope)), _kind(rope))
    if kind == "default":
        return None
    kinds = ("linear", "dynamic", "llama3", "yarn", "longrope")
    if kind not in kinds:
        raise ValueError(f"rope type {shown(kind)} is not supported; supported: default, {', '.join(kinds)}")
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
    needed["longrope"] = ("short_factor", "long_factor")
    for key in needed.get(kind, ("factor",)):
        if rope.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key}, which is missing")
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, number(rope, "factor", 1, MAX_FACTOR))
    key = "original_max_position_embeddings"
    original = next((whole(one, key) for one in (values, rope) if one.get(key) is not None), context)
    factor = (
        max(context / original, 1.0) if rope.get("factor") is None else number(rope, "factor", 1, MAX_FACTOR)
    )
    made = RopeScaling(kind, factor, original_max_position_embeddings=original)
    if kind == "llama3":
        low = number(rope, "low_freq_factor", 1e-6, MAX_FACTOR)
        high = number(rope, "high_freq_factor", 1e-6, MAX_FACTOR)
        if not low < high:
            raise ValueError(
                f"low_freq_factor is {low:g} and high_freq_factor {high:g}; expected a larger high one"
            )
        return dataclasses.replace(made, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        usual = math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        short, long = (_factors(rope, name, count) for name in ("short_factor", "long_factor"))
        made = dataclasses.replace(made, short_factors=short, long_factors=long)
    else:
        made, usual = _yarn(family, rope, made)
    return dataclasses.replace(made, attention_factor=_or(usual, rope, "attention_factor"))


def _yarn(family: Family, rope: Mapping[str, Any], made: RopeScaling) -> tuple[RopeScaling, float]:
    """Returns the parameters of YaRN, and the factor of cosine and sine if none is given."""
    log = 0.1 * math.log(made.factor)
    # As in transformers, both or none.
    parts = [_or(0.0, rope, name) for name in ("mscale", "mscale_all_dim")]
    usual = (parts[0] * log + 1) / (parts[1] * log + 1) if all(parts) else log + 1
    own: dict[str, Any] = (
        {"query_beta": _or(0.0, rope, "llama_4_scaling_beta")} if family.scales_queries else {}
    )
    own |= {name: _or(getattr(made, name), rope, name) for name in ("beta_fast", "beta_slow")}
    return dataclasses.replace(made, truncate=rope.get("truncate") is not False, **own), usual


def _or(usual: float, rope: Mapping[str, Any], key: str) -> float:
    """Returns the positive number under a key; `usual` if it is missing, null or 0."""
    return number(rope, key, 1 / MAX_FACTOR, MAX_FACTOR) if rope.get(key) else usual


def _factors(rope: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    given = rope[key]
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"{key} is no list of {count} numbers; expected one for each frequency")
    return tuple(number({key: one}, key, 1 / MAX_FACTOR, MAX_FACTOR) for one in given)


def ropes_json(family: Family, config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of RoPE."""
    scaling, rope = config.rope_scaling, {"rope_type": "default"}
    if scaling is not None:
        rope = _scaling_json(scaling)
    part = {} if config.rotary_dim is None else {"partial_rotary_factor": config.rotary_dim / config.head_dim}
    whole = {**rope, "rope_theta": config.rope_theta, **part}
    if family.window_rope:
        theta = config.rope_theta if config.window_rope_theta is None else config.window_rope_theta
        return {"rope_parameters": {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": theta}}}
    keys = {"rope_parameters": whole, "rope_theta": config.rope_theta, **part}
    if scaling is not None and scaling.kind == "longrope":
        keys["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return keys | {"rope_scaling": None if scaling is None else whole if part else rope}


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("linear", "dynamic"):
        return rope
    rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        return rope | {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    rope["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        return rope | {
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
        }
    rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return rope | ({"llama_4_scaling_beta": scaling.query_beta} if scaling.query_beta else {})
