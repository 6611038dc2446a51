"""Every key of a config.json is read, ignored because it changes nothing, named in a warning, or refused."""

from __future__ import annotations

import json
import warnings

import pytest

from jaxspec.io.hf import huggingface
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.keys import GENERATION_KEYS, IGNORED, READ, REFUSED, check_keys
from tests import refused

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 9,
}
# Published configs, without the keys for sizes and tokens.
PUBLISHED = {
    "llama-2": (
        "llama",
        {"pretraining_tp": 1, "torch_dtype": "float16", "max_length": 4096, "pad_token_id": 0},
    ),
    "llama-3.2": (
        "llama",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "vicuna": (
        "llama",
        {"max_sequence_length": 2048, "_name_or_path": "x", "temperature": 0.9, "top_p": 0.6},
    ),
    "smollm2": (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "mistral": ("mistral", {"sliding_window": 4096, "use_cache": True, "initializer_range": 0.02}),
    "ministral": ("mistral", {"sliding_window": 32768, "head_dim": 2, "unsloth_fixed": True}),
    "qwen2.5": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "use_mrope": False},
    ),
    "qwen3": (
        "qwen3",
        {"attention_bias": False, "layer_types": ["full_attention"] * 2, "use_sliding_window": False},
    ),
    "llama-of-qwen": (
        "llama",
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 9, "auto_map": None},
    ),
    "windows-of-none": ("llama", {"layer_types": ["full_attention"] * 2, "sliding_window": None}),
}


def read(directory, kind, **keys):
    (directory / "config.json").write_text(json.dumps(SIZES | {"model_type": kind} | keys))
    return huggingface.read_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_without_a_warning(tmp_path, name):
    kind, keys = PUBLISHED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path, kind, **keys).model_type == kind


@pytest.mark.parametrize(
    ("kind", "keys", "named"),
    [
        ("llama", {"gating": "tanh"}, "llama models do not use gating; the text"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
        ("llama", {"sliding_window": 4}, "sliding_window"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mistral", {"attention_bias": True}, "mistral models do not use attention_bias"),
        ("mistral", {"mlp_bias": True, "use_sliding_window": True}, "mlp_bias, use_sliding_window"),
        ("ministral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_theta": 9.0, "beta_fast": 2.0}}, "rope_parameters.beta_fast"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 0.7}}, "rope_parameters.mscale"),
        ("llama", {f"key{i}": i + 1 for i in range(40)}, "key0, key1, key2, key3, key4 and 35 more;"),
        ("llama", {"n" * 9000 + "\n": 1}, "n" * 20 + "...;"),
    ],
)  # fmt: skip
def test_keys_that_a_model_type_does_not_use_are_named_in_one_line(tmp_path, kind, keys, named):
    with pytest.warns(RuntimeWarning) as caught:
        read(tmp_path, kind, **keys)
    (line,) = [str(one.message) for one in caught]
    assert named in line
    assert "\n" not in line
    assert len(line.removeprefix(str(tmp_path))) < 300


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind in FAMILIES for key in REFUSED if key not in READ[kind]]
)
def test_keys_that_make_another_model_are_refused_unless_they_change_nothing(key, kind):
    for off in (None, False, *REFUSED[key]):
        assert check_keys(kind, {key: off}) is None
    with refused(f"^{key} is 0.37; models of {kind} with it are not supported"):
        check_keys(kind, {key: 0.37})


def test_a_refused_key_is_one_line_with_the_file(tmp_path):
    with refused(r"config\.json: logit_scale is \[0, 1, 2, 3, 4, 5, \.\.\.\]; ") as error:
        read(tmp_path, "llama", logit_scale=list(range(10_000)))
    assert len(str(error.value).removeprefix(str(tmp_path))) < 300


def test_each_key_has_one_place():
    for kind, keys in READ.items():
        # A key that some families read is refused for the others.
        places = [keys, IGNORED, GENERATION_KEYS, REFUSED.keys() - keys]
        assert sum(map(len, places)) == len(frozenset().union(*places)), kind
    assert READ.keys() == FAMILIES.keys()
    assert all(family.defaults.keys() <= READ[kind] for kind, family in FAMILIES.items())


def test_swish_is_silu(tmp_path):
    assert read(tmp_path, "llama", hidden_act="swish") == read(tmp_path, "llama", hidden_act="silu")
