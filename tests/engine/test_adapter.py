"""A model with a LoRA adapter computes what the merged model computes, by every method, and says what it cannot do."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxspec
from jaxspec.io.hf import huggingface, peft
from jaxspec.loading import int8
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.quantisation import is_quantised
from jaxspec.programs import memory
from jaxspec.testing import reference
from tests import caching, refused, tiny, xla
from tests.commands import PROMPT, called, one_error, write_tiny
from tests.engine.test_ready_weights import settled

TOKENS = jnp.asarray([[3, 5, 8, 1, 9, 2, 7]], jnp.int32)
QWEN = dataclasses.replace(tiny.TARGET, model_type="qwen2", qkv_bias=True, tie_embeddings=True)
MODELS = {"llama": tiny.TARGET, "qwen2, tied": QWEN}
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
# By adapter: the projections, the layers, and changes of the configuration.
ADAPTERS: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, Any]]] = {
    "all": ((*ATTENTION, *MLP), (0, 1), {}),
    "q and v, rslora": (("q", "v"), (0, 1), {"use_rslora": True}),
    "one layer, patterns": (
        ("k", "o", "up"),
        (1,),
        {"rank_pattern": {"k_proj": 2, "layers.0.*": 7}, "alpha_pattern": {r"mlp\.up_proj": 5, "^o_proj": 9}},
    ),
}


def module_of(projection: str) -> str:
    return f"{'self_attn' if projection in ATTENTION else 'mlp'}.{projection}_proj"


def write_adapter(directory: Path, base: Path, kind: str = "all", scale: float = 0.3, **changes: Any) -> Path:
    """Writes an adapter as PEFT does, and the merged model beside it in `merged`, in the precision of float64."""
    projections, layers, content = ADAPTERS[kind]
    content = {"peft_type": "LORA", "r": 3, "lora_alpha": 4, "init_lora_weights": True} | content | changes
    rng, tensors = np.random.default_rng(2), {}
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    for layer in layers:
        for one in projections:
            name = f"model.layers.{layer}.{module_of(one)}"
            outputs, inputs = weights[f"{name}.weight"].shape
            rank = 2 if one == "k" and "rank_pattern" in content else content["r"]
            alpha = 5 if one == "up" and "alpha_pattern" in content else content["lora_alpha"]
            a, b = (
                (scale * rng.standard_normal(of)).astype(np.float32)
                for of in ((rank, inputs), (outputs, rank))
            )
            tensors |= {f"base_model.model.{name}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
            factor = alpha / (rank**0.5 if content.get("use_rslora") else rank)
            merged = weights[f"{name}.weight"] + factor * (b.astype(np.float64) @ a)
            weights[f"{name}.weight"] = merged.astype(np.float32)
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "merged").mkdir()
    for path in base.iterdir():
        shutil.copy(path, directory / "merged")
    safetensors.numpy.save_file(weights, directory / "merged" / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns a function of the directory of a model in `MODELS`."""

    def written(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        huggingface.save(directory, MODELS[name], reference.random_params(MODELS[name], 3))
        return directory

    found = {name: written(name) for name in MODELS}
    return found.__getitem__


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """The adapter of all matrices of the first model, with the merged model."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "all", base("llama"))


def load(model: Path, **options: Any) -> jaxspec.LanguageModel:
    return jaxspec.load(model, compilation_cache=False, **options)


def logits(lm: jaxspec.LanguageModel) -> np.ndarray:
    params = lm.params
    cache = kv.create(lm.config, 1, 16, params["embed"].dtype)
    step = jax.jit(llama.forward, static_argnums=0, compiler_options=xla.USUAL)
    return np.asarray(step(lm.config, params, TOKENS, jnp.zeros(1, jnp.int32), cache)[0])


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference relative to the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama", "all"), ("llama", "one layer, patterns"), ("qwen2, tied", "q and v, rslora")],
)
def test_logits_are_those_of_the_merged_model(base, tmp_path, model, kind):
    directory = write_adapter(tmp_path / "adapter", base(model), kind)
    expected = logits(load(directory / "merged"))
    assert off(logits(load(base(model), adapter=directory)), expected) < 1e-5
    assert off(logits(load(base(model))), expected) > 0.01


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_logits_in_half_precision_are_near(base, adapter, dtype, most):
    assert (
        off(logits(load(base("llama"), adapter=adapter, dtype=dtype)), logits(load(adapter / "merged")))
        < most
    )


@pytest.mark.full
@pytest.mark.parametrize("faster", [True, False])
def test_int8_weights_are_the_models_alone(base, adapter, tmp_path, monkeypatch, faster):
    """The stored weights are those of the model without the adapter, whichever of the two was loaded first."""
    monkeypatch.setattr(int8, "is_faster", lambda: faster)
    monkeypatch.setattr(int8, "warn_if_slower", lambda device: None)
    expected = load(base("llama"), weights="int8")
    with caching.user_cache(tmp_path / "cache"):
        made = jaxspec.load(base("llama"), adapter=adapter, weights="int8")
        settled()
        assert len([*(tmp_path / "cache" / "weights").iterdir()]) == 1
        again, plain = (jaxspec.load(base("llama"), adapter=one, weights="int8") for one in (adapter, None))
    jax.tree.map(np.testing.assert_array_equal, plain.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, made.params)
    assert off(logits(made), logits(load(adapter / "merged"))) < 0.05
    operands = "weights and activations" if faster else "weights"
    assert made.precision == f"float32, int8 {operands}, adapter of rank 3"
    assert (made.weights, plain.fingerprint == expected.fingerprint) == ("int8", True)


def test_an_adapter_is_another_model_of_the_same_shape(base, adapter):
    plain, lm, half = (
        load(base("llama"), **options)
        for options in ({}, {"adapter": adapter}, {"adapter": adapter, "dtype": "bfloat16"})
    )
    assert lm.fingerprint not in (plain.fingerprint, load(adapter / "merged").fingerprint)
    assert (
        lm.fingerprint == half.fingerprint == load(base("llama"), adapter=adapter, weights="int8").fingerprint
    )
    assert lm.loaded.until(1).fingerprint != plain.loaded.until(1).fingerprint
    assert "float32, adapter of rank 3" in repr(lm)
    # A draft by the model's own rounded weights has the matrices in int8 and the adapter as it is.
    rounded = jax.tree.leaves(lm.loaded.quantised(8).params, is_leaf=is_quantised)
    assert sum(map(is_quantised, rounded)) == 4 * lm.config.num_layers + 1


METHODS: dict[str, dict[str, Any]] = {
    "quantised": {},
    "layerskip": {"exit_layer": 1},
    "draft-verify": {"skip_mlp": (1,)},
    "token-recycling": {},
}


@pytest.mark.full
@pytest.mark.representatives("quantised")
@pytest.mark.parametrize("method", METHODS)
def test_methods_write_the_merged_models_text(base, adapter, method):
    texts = []
    for given in ({"adapter": adapter}, {}):
        lm = load(base("llama") if given else adapter / "merged", **given)
        options = {"method": method, **METHODS[method]} if given else {"method": "autoregressive"}
        texts.append(lm.generate([3, 5, 8], max_new_tokens=24, ignore_eos=True, **options))
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].statistics.num_accepted_tokens > 0


def test_memory_is_asked_for_the_adapter_too(base, adapter, monkeypatch):
    """An adapter is checked to fit before the weights are read."""
    plain, lm = load(base("llama")), load(base("llama"), adapter=adapter)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(one.params)) for one in (plain, lm)]
    asked = []
    check = memory.check_fits

    def checked(texts: memory.Texts, capacity: int) -> None:
        asked.append(texts.adapter_bytes)
        check(texts, capacity)

    monkeypatch.setattr(memory, "check_fits", checked)
    load(base("llama"), adapter=adapter)
    assert asked == [sizes[1] - sizes[0]]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with refused("the model does not fit: weights "):
        load(base("llama"), adapter=adapter)


def test_wrong_adapters_are_refused_in_one_line(base, adapter, tmp_path):
    def without(name: str):
        return lambda found: {one: leaf for one, leaf in found.items() if name not in one}

    def with_one(name: str, shape: tuple[int, ...] = (13, 16), of: type = np.float32):
        return lambda found: {**found, f"base_model.model.{name}": np.zeros(shape, of)}

    q = "model.layers.0.self_attn.q_proj"
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"use_dora": True}, dict, "use_dora is True; adapters with it are not supported"),
        ({"peft_type": "IA3"}, dict, "peft_type is 'IA3'; adapters with it"),
        ({"init_lora_weights": "pissa_niter_4"}, dict, "init_lora_weights is 'pissa_niter_4'; adapters"),
        ({"modules_to_save": ["lm_head"]}, dict, r"modules_to_save is \['lm_head'\]; adapters with it"),
        ({"r": None}, dict, "r is None; expected a whole number from 1"),
        ({"r": 4}, dict, r"tensor .*o_proj.lora_A.weight is \(3, 16\), expected shape \(4, 16\)"),
        ({"lora_alpha": "4"}, dict, "lora_alpha is '4'; expected a number"),
        ({"rank_pattern": {"(": 3}}, dict, "rank_pattern has a wrong regular expression"),
        ({}, without("lora_B"), "lora_B.weight is missing, expected shape"),
        ({}, without("lora"), "adapter_model.safetensors has no tensors"),
        ({}, with_one("lm_head.weight"), "tensor base_model.model.lm_head.weight has no place among"),
        ({}, with_one("lm_head.lora_A.weight", (3, 16)), "lm_head.lora_B.weight is missing"),
        ({}, with_one(f"{q}.lora_magnitude_vector"), "lora_magnitude_vector has no place"),
        ({}, with_one(f"{q}.bias", (16,)), "q_proj.bias has no place"),
        (
            {},
            with_one("model.layers.2.self_attn.q_proj.lora_A.weight"),
            "has no place .* matrices in 2 layers",
        ),
        ({}, with_one(f"{q}.lora_A.weight", (3, 16), np.int8), "q_proj.lora_A.weight is I8, expected"),
    ]
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "a/b"}
    found = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    for changes, change, says in cases:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
        safetensors.numpy.save_file(change(found), tmp_path / "adapter_model.safetensors")
        with refused(says) as error:
            peft.read_adapter(tmp_path, tiny.TARGET)
        assert str(error.value).startswith(f"{tmp_path}: ")
        assert "; its model is 'a/b', with which peft's merge_and_unload()" in str(error.value)
    (tmp_path / "adapter_model.safetensors").unlink()
    with refused(r"has no adapter_model.safetensors; give the directory of an", FileNotFoundError):
        peft.read_adapter(tmp_path, tiny.TARGET)
    with refused(r"nowhere has no adapter_config.json; give the directory of an", FileNotFoundError):
        peft.read_adapter("nowhere", tiny.TARGET)


def test_an_adapter_of_the_hub_is_fetched(adapter, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *given, **more: fetched.append((given, more)) or str(adapter),
    )
    assert len(peft.read_adapter("owner/name", tiny.TARGET)["layers"]) == 2
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert fetched == [(("owner/name",), {"allow_patterns": files})]


@pytest.mark.full
def test_commands_take_an_adapter(tmp_path_factory, tmp_path, capsys):
    model = write_tiny(tmp_path_factory)
    directory = write_adapter(tmp_path / "adapter", model, "q and v, rslora", scale=1.0)
    texts = [
        called(capsys, "generate", PROMPT, "--max-new-tokens", 8, "--json", *given)
        for given in (
            ("--model", model, "--adapter", directory, "--method", "quantised"),
            ("--model", directory / "merged"),
        )
    ]
    assert [status for status, *_ in texts] == [0, 0]
    found = [json.loads(out)["tokens"] for _, out, _ in texts]
    assert found[0] == found[1]

    def run(*arguments: object) -> tuple[int, str, str]:
        return called(capsys, *arguments)

    shutil.rmtree(directory / "merged")
    says = one_error(run, "generate", PROMPT, "--model", directory)
    assert re.search("not a model; give that model, and this directory as its adapter", says)
