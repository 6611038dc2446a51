"""Converts `config.json` and `generation_config.json` of Hugging Face directories to and from `LlamaConfig`.

A missing key has transformers' default for the model type.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jaxspec.host.files import no_file, read_json
from jaxspec.host.messages import shown
from jaxspec.io.hf import generation_json
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.keys import check_keys
from jaxspec.io.hf.rope_json import read_ropes, ropes_json
from jaxspec.io.hf.values import MAX_INT, flag, number, section, token_ids, whole
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import MAX_LAYERS, LlamaConfig

GENERATION = "generation_config.json"
ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",  # two names of one function
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The smallest ε that is nonzero in float32 and keeps a norm of zeros finite.
MIN_EPSILON = 1e-30
# Families that a message names.
_MOST_NAMED = 6


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
    if not isinstance(kind, str) or kind not in FAMILIES:
        some = ", ".join([*FAMILIES][:_MOST_NAMED])
        raise ValueError(
            f"model_type {shown(kind)} is not supported; supported: {some} and {len(FAMILIES) - _MOST_NAMED} others, "
            "which README names"
        )
    if kind == "mistral" and content.get("layer_types") is not None:
        kind = "ministral"  # as in transformers, where all layers of a Mistral have the same type
    family = FAMILIES[kind]
    values = {**family.defaults, **{family.aliases.get(key, key): value for key, value in content.items()}}
    activation = str(values[family.activation])
    activation = family.synonyms.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{family.activation} {shown(values[family.activation])} is not supported; supported: "
            f"{', '.join(ACTIVATIONS)}"
        )
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
        tie_embeddings=flag(values, "tie_word_embeddings"),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys((*token_ids(values, "eos_token_id"), *more_eos_ids))),
        model_type=kind,
        activation=ACTIVATIONS[activation],
        **family.read(values),
    )
    config = dataclasses.replace(config, **read_ropes(family, config, values))
    check_context(config, "max_position_embeddings")
    return config


def check_context(config: LlamaConfig, key: str) -> None:
    """Refuses a context too long for an index; `key` is the file's key for the length before RoPE scaling."""
    if config.context_length > MAX_INT:
        raise ValueError(
            f"{key} {config.max_position_embeddings} and the rope factor make a context of more than {MAX_INT} tokens"
        )


def config_json(
    config: LlamaConfig, dtype_name: str, trained_for: TrainedFor = TrainedFor()
) -> dict[str, Any]:
    """Returns the content of `config.json` for a model with weights of `dtype_name`.

    Both styles of RoPE keys are written: transformers 5 reads `rope_parameters`, older versions the others.

    Raises:
      ValueError: `config.model_type` cannot express the configuration, or `trained_for` does not fit this model.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"cannot save model_type {config.model_type!r}; choose one of {', '.join(FAMILIES)}")
    eos = list(config.eos_token_ids)
    content = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.activation: next(key for key, one in ACTIVATIONS.items() if one == config.activation),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": None,  # a family's own may be outside this vocabulary
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }
    content |= ropes_json(family, config) | family.write(config)
    names = {given: name for name, given in family.aliases.items()}
    content = {names.get(key, key): value for key, value in content.items()}
    _check_written(config, content)
    about = trained_for.checked(config.num_layers, config.vocab_size).content()
    return content | ({"jaxspec": about} if about else {})


def _check_written(config: LlamaConfig, content: Mapping[str, Any]) -> None:
    """Refuses a configuration that its `model_type` cannot express: what is read again differs."""
    again, plain = config_from(content), dataclasses.replace(config.plain, kv_cache_dtype="auto")
    for field in dataclasses.fields(config):
        value, found = getattr(plain, field.name), getattr(again, field.name)
        same = (
            math.isclose(value, found, rel_tol=1e-12)
            if type(value) is type(found) is float
            else value == found
        )
        if not same:
            raise ValueError(
                f"a {config.model_type} config.json cannot express {field.name} {shown(value)}; choose another "
                "model_type"
            )


def generation_config_json(config: LlamaConfig, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: BOS, EOS and the sampling defaults, if given."""
    eos = list(config.eos_token_ids)
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        **(defaults or {}),
    }
