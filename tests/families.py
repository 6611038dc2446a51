"""A small model of each family."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jaxspec.model.config import LlamaConfig, RopeScaling, Scores

YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16, attention_factor=1 + 0.1 * math.log(4))
_WINDOWED: dict[str, Any] = {"sliding_windows": (4, 4, None)}
_POST: dict[str, Any] = {"norm_placement": "post", "qk_norm": True}
_OLMO = _POST | {"qk_norm_over_heads": True}
_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "tie_embeddings": True, "activation": "gelu_tanh"}
_GEMMA2 = _GEMMA | {"norm_placement": "sandwich"}
# The keys in which each family differs from Llama. Values by layer are repeated.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "exaone": {},
    "internlm3": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "iquestcoder": {},
    "seed_oss": {"qkv_bias": True},
    "mistral": {"sliding_windows": (4,)},
    "ministral": {"sliding_windows": (4, None)},
    "ministral3": {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.0, query_beta=0.25)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"rotated": (True, True, True, False), "tie_embeddings": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logit_multiplier": 0.25,
        "scores": Scores(0.125),
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"sliding_windows": (4, 4, 4, None), "rope_scaling": YARN, "window_rope_theta": 10000.0},
    "phi3": {
        "rotary_dim": 4,
        "rope_scaling": RopeScaling(
            "longrope",
            4.0,
            original_max_position_embeddings=16,
            attention_factor=1.25,
            short_factors=(1.0, 1.5),
            long_factors=(2.0, 4.0),
        ),
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA2 | {"sliding_windows": (4, None), "scores": Scores(8**-0.5, 50.0), "logit_cap": 30.0},
    "gemma3_text": _GEMMA2
    | {
        "qk_norm": True,
        "sliding_windows": (4, 4, 4, 4, 4, None),
        "scores": Scores(8**-0.5),
        "rope_theta": 1000000.0,
        "rope_scaling": RopeScaling("linear", 8.0),
        "window_rope_theta": 10000.0,
    },
    "exaone4": _POST | _WINDOWED | {"rotated": (True, True, False)},
    "glm4": {"norm_placement": "sandwich", "qkv_bias": True, "rotary_dim": 4},
}


def family(model_type: str, base: LlamaConfig) -> LlamaConfig:
    """Returns a configuration of the family, with heads of 8 numbers and the sizes of `base`."""
    changes = CHANGES[model_type] | {"model_type": model_type, "head_dim": 8}
    for name in {"sliding_windows", "rotated"} & changes.keys():
        changes[name] = tuple(itertools.islice(itertools.cycle(changes[name]), base.num_layers))
    if changes.get("rotated", (False,)) == (True,) * base.num_layers:
        changes["rotated"] = ()
    if "norm_offset" in changes:
        changes["embedding_multiplier"] = math.sqrt(base.hidden_size)
    return dataclasses.replace(base, **changes)
