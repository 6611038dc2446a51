"""Files that are wrong: whatever they hold, one line says which file and what is wrong with it."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.host import files
from jaxspec.io.hf import huggingface
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.methods import method_files
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.method_files import ProbeFile
from jaxspec.model.config import LlamaConfig
from jaxspec.testing import reference
from tests import refused
from tests.files.test_huggingface import BASE, write_config

NAMES = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size intermediate_size
    max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings attention_bias mlp_bias bos_token_id
    eos_token_id sliding_window use_sliding_window max_window_layers layer_types rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings model_type hidden_act quantization_config jaxspec"""
KEYS = NAMES.split()
ROPE_NAMES = """factor low_freq_factor high_freq_factor original_max_position_embeddings rope_theta attention_factor
    beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor"""
JUNK = (
    *(math.nan, math.inf, -math.inf, 1e308, -1, 0, -1024, 2.5, 1e-60, 2**31, 2**64, 10**400, -(10**400)),
    *("no", "", "1", "x" * 10**5, "\x1b[2J\nevil", None, True, False),
    *([], {}, [[]], [math.inf], [2**40], ["1"], [None], {"a": {}}, {"factor": 1}),
)
# How a message calls a key, where not by its name.
ALIASES = {"rope_scaling": "rope_", "rope_parameters": "rope_", "quantization_config": "quanti"}
FEW = "llama mistral qwen2 qwen3 smollm3 granite olmo3 gemma3_text exaone4 glm4"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (
    LLAMA3,
    {"type": "linear", "factor": 2},
    {"type": "dynamic", "factor": 2},
    {"rope_type": "yarn", "factor": 2},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
)


def sensible(config: LlamaConfig) -> bool:
    """Whether every number of a config is one that a model can be computed with."""
    numbers = [value for value in vars(config).values() if isinstance(value, (int, float))]
    if config.rope_scaling is not None:
        for value in vars(config.rope_scaling).values():
            numbers += [] if isinstance(value, str) else value if isinstance(value, tuple) else [value]
    numbers += [value for value in vars(config.scores).values() if value is not None]
    ids = (config.bos_token_id or 0, *config.eos_token_ids)
    return (
        all(math.isfinite(one) and 0 <= one < 2**31 for one in numbers if one < 2**31 or isinstance(one, int))
        and all(type(token) is int and 0 <= token < 2**31 for token in ids)
        and 0 < float(np.float32(config.rms_norm_eps)) <= 1
        and 1 <= float(np.float32(config.rope_theta)) < math.inf
        and 1 <= config.context_length < 2**31
    )


def refusal(directory: Path) -> str | None:
    """What is said of a config, one line; None if it is taken."""
    try:
        config = huggingface.read_config(directory)
        huggingface.generation_defaults(directory)
        huggingface.read_trained_for(directory, config)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(str(directory))
        assert len(message) < len(str(directory)) + 300
        return message.removeprefix(str(directory))
    assert sensible(config), config
    hash(config)
    return None


@pytest.mark.parametrize("kind", FEW.split())
def test_every_value_of_a_config_is_taken_or_refused_in_a_line_that_names_it(tmp_path, kind):
    """All keys of a Llama, and of the other families RoPE and the keys that they read beyond those of all families."""
    base = {"model_type": kind, "num_key_value_heads": 2}
    keys = {*FAMILIES[kind].keys, *(KEYS if kind == "llama" else ("rope_scaling", "rope_parameters"))}
    for key, value in itertools.product(keys, JUNK):
        said = refusal(write_config(tmp_path, **base | {key: value}))
        assert said is None or ALIASES.get(key, key) in said, (key, value, said)


def test_every_value_of_a_rope_is_taken_or_refused_in_a_line_that_names_it(tmp_path):
    styles = [("rope_scaling", one) for one in ROPES] + [("rope_parameters", LLAMA3)]
    for key, value, (rope, start) in itertools.product(ROPE_NAMES.split(), JUNK, styles):
        said = refusal(write_config(tmp_path, **{rope: start | {key: value}}))
        assert said is None or key in said or "rope" in said, (key, value, said)


def test_several_wrong_values_at_once(tmp_path):
    rng = random.Random(0)
    for _ in range(500):
        keys = rng.sample(KEYS, 4)
        write_config(tmp_path, {"eos_token_id": rng.choice(JUNK)}, **{key: rng.choice(JUNK) for key in keys})
        refusal(tmp_path)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"do_sample": "no"}, "do_sample is 'no'; expected true or false"),
        ({"do_sample": True, "temperature": math.nan}, "temperature is nan; expected a number from 0"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"do_sample": True, "top_k": 2.5}, "top_k is 2.5; expected a whole number from 0"),
        ({"do_sample": True, "top_p": 0}, "top_p is 0; expected a number"),
        ({"do_sample": True, "min_p": 2}, "min_p is 2; expected a number from 0 to 1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'; expected a token id"),
        ({"do_sample": False, "temperature": 0, "top_p": 7}, None),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": None}, None),
    ],
)
def test_what_is_said_of_a_generation_config(tmp_path, generation, message):
    said = refusal(write_config(tmp_path, generation))
    assert said == message or str(said).startswith(f"/generation_config.json: {message}")


# Weights


@pytest.fixture
def saved(tmp_path):
    huggingface.save(tmp_path, BASE, reference.random_params(BASE, 0))
    return tmp_path


def weights_error(directory: Path) -> str:
    with refused(str(directory)) as error:
        huggingface.load_params(directory, BASE, jnp.float32)
    return str(error.value)


@pytest.mark.parametrize("code", ["I8", "U8", "F8_E4M3", "I32"])
def test_quantised_weights_are_called_so(saved, code):
    path = saved / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    change_header(path, lambda header: header[name].update(dtype=code))
    message = weights_error(saved)
    assert (
        f"tensor {name} is {code}; quantised weights are not supported, give a model with one of F64"
        in message
    )
    change_header(path, lambda header: header["model.embed_tokens.weight"].update(dtype=code))
    with refused(f"is {code}; quantised weights"):
        huggingface.stored_dtype(saved)


def change_header(path: Path, change) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


# Files of the methods


def test_a_probe_is_written_as_it_is_seen(tmp_path):
    """The package safetensors writes the memory of a view, which has other numbers."""
    view = np.arange(8, dtype=np.float32)[::2]
    method_files.write_probe(tmp_path / "probe", "model", ProbeFile(view, 0.5, 1, "greedy"))
    found = method_files.read_probe(tmp_path / "probe", "model", 4, 1, "greedy")
    assert (found.v.tolist(), found.b) == (view.tolist(), 0.5)


def test_a_probe_that_is_not_finite(tmp_path):
    path = tmp_path / "probe.safetensors"
    v = np.ones(4, np.float32)
    for bad, b in ((v * np.float32(math.nan), 0.0), (v, math.inf)):
        method_files.write_probe(path, "model", ProbeFile(bad, b, 1, "greedy"))
        with refused("numbers that are not finite; train the probe again"):
            method_files.read_probe(path, "model", 4, 1, "greedy")


def test_a_directory_is_called_one(tmp_path):
    for read in (
        lambda: method_files.read_plan(tmp_path, "model", 2),
        lambda: ASDNumbers.read(tmp_path, "model"),
        lambda: method_files.read_probe(tmp_path, "model", 4, 1, "greedy"),
        lambda: method_files.read_thresholds(tmp_path, "model", "draft", (1, 2)),
        lambda: files.read_text(tmp_path, "`reference` must be a text file"),
    ):
        with refused("is a directory, not a file", FileNotFoundError):
            read()
