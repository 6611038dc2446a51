"""Kangaroo's adapter: drafts against a slow reference, detection of wrong readings, its files and its method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import struct

from jaxspec.heads import files as heads
from jaxspec.heads.kangaroo.drafter import Kangaroo
from tests import tiny
from tests.heads import reference
from tests.heads.files import (
    LLAMA,
    TARGET,
    WIDTH,
    Files,
    Round,
    furthest,
    layer,
    norm,
    rounds_of,
    with_config,
    with_tensors,
    write,
)

EXIT = 2
# High enough that whole drafts are accepted.
TEMPERATURE = 5.0


def adapter() -> Files:
    """Returns an adapter in its authors' form: no MLP; RoPE and ε are those of its own config."""
    rng = np.random.default_rng(1)
    tensors = {name: one for name, one in layer(rng, "layers.0", WIDTH).items() if "self_attn" in name}
    tensors |= {"layers.0.input_layernorm.weight": norm(rng, WIDTH), "norm.weight": norm(rng, WIDTH)}
    return {**LLAMA, "head_dim": 4}, tensors


# Drafts


def drafter(config: Any) -> Kangaroo:
    return Kangaroo(TARGET, config, EXIT, num_draft_tokens=tiny.K)


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[Round]:
    return rounds_of(write(tmp_path_factory.mktemp("kangaroo"), adapter()), drafter, TEMPERATURE)


def off(found: list[Round], files: Files, exit_layer: int = EXIT) -> float:
    def logits_of(one: Round) -> np.ndarray:
        text = one.tokens, one.drafts[:-1]
        return reference.kangaroo_logits(*files, TARGET, tiny.params(TARGET), *text, exit_layer)

    return furthest(found, logits_of, TEMPERATURE)


@pytest.mark.full
def test_drafts_are_those_of_the_slow_reference(said):
    assert off(said, adapter()) < 2e-5


WRONG = {
    "another exit": (adapter(), EXIT + 1),
    "RoPE of the target": (with_config(adapter(), rope_theta=TARGET.rope_theta), EXIT),
    "ε of another config": (with_config(adapter(), rms_norm_eps=0.1), EXIT),
    "the norm of the target": (with_tensors(adapter(), **{"norm.weight": tiny.params(TARGET)["norm"]}), EXIT),
    "no norm of the input": (
        with_tensors(adapter(), **{"layers.0.input_layernorm.weight": np.ones(WIDTH)}),
        EXIT,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_would_be_noticed(said, wrong):
    assert off(said, *WRONG[wrong]) > 1e-3


@pytest.mark.parametrize(
    "claimed",
    [{"rope_theta": 500.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}],
    ids=["base", "scaling"],
)
def test_its_rope_is_that_of_the_authors_code_whatever_its_config_claims(said, tmp_path, claimed):
    usual = heads.read_head(write(tmp_path / "usual", adapter()), TARGET)
    with pytest.warns(
        RuntimeWarning, match="claims rope_theta .* which Kangaroo's training code does not use"
    ):
        claims = heads.read_head(write(tmp_path / "claims", with_config(adapter(), **claimed)), TARGET)
    assert claims.config == usual.config
    assert off(said, with_config(adapter(), **claimed)) > 1e-3
    own = with_config(adapter(), **claimed, jaxspec={"kind": "kangaroo"})  # made here: follows its config
    assert heads.read_head(write(tmp_path / "own", own), TARGET).config != usual.config


@struct.dataclass
class Forgetful(Kangaroo):
    """Keeps only the tokens that it has run itself, so after full acceptance the last draft token is missing."""

    def observe(self, params, state, outcome):
        return super().observe(params, state, outcome)._replace(own=state.own)


@pytest.mark.full
def test_a_last_draft_that_the_adapter_has_not_seen_would_be_noticed(tmp_path):
    found = rounds_of(
        write(tmp_path, adapter()),
        lambda config: Forgetful(TARGET, config, EXIT, num_draft_tokens=tiny.K),
        TEMPERATURE,
    )
    assert off(found, adapter()) > 1e-3


# Files

BAD = {
    "tensor norm.weight is missing": with_tensors(adapter(), **{"norm.weight": None}),
    "input_layernorm.bias has no place in a kangaroo head": with_tensors(
        adapter(), **{"layers.0.input_layernorm.bias": np.ones(WIDTH)}
    ),
    "is for a model of 9 tokens and width 16, the target has 13 and 16": with_config(adapter(), vocab_size=9),
    "exit_layer is 4; expected a whole number from 1 to 3": with_config(adapter(), jaxspec={"exit_layer": 4}),
    "is a whole model": with_tensors(adapter(), **{"layers.0.mlp.up_proj.weight": np.ones((20, WIDTH))}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    with pytest.raises(ValueError, match=message) as error:
        heads.read_head(write(tmp_path, BAD[message]), TARGET)
    assert "\n" not in str(error.value)


@pytest.mark.peers
def test_a_file_of_pytorch_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    content, tensors = adapter()
    directory = write(tmp_path, (content, tensors))
    (directory / "model.safetensors").unlink()
    torch.save({name: torch.tensor(one) for name, one in tensors.items()}, directory / "pytorch_model.bin")
    assert heads.read_head(directory, TARGET).config.kind == "kangaroo"


# The method


def test_an_adapter_drafts_by_the_name_of_its_method(model, tmp_path):
    content, tensors = adapter()
    path = str(write(tmp_path / "published", (content, tensors)))
    with pytest.raises(ValueError, match=r"does not say which layers .* give exit_layer=E"):
        model.drafter("kangaroo", draft=path)
    with pytest.raises(ValueError, match="exit_layer is 4; the model has 4 layers, give 1 to 3"):
        model.drafter("kangaroo", draft=path, exit_layer=4)
    made, _ = model.drafter("kangaroo", draft=path, exit_layer=3)
    assert (made.exit_layer, made.aux_layers, made.num_draft_tokens) == (3, (3,), 6)
    mine = content | {"jaxspec": {"exit_layer": EXIT, "target": model.fingerprint}}
    write(tmp_path / "heads" / "kangaroo", (mine, tensors))
    made, own = model.drafter("kangaroo")
    assert made.exit_layer == EXIT
    assert own.keys() == {"layers", "norm"}
    hybrid, _ = model.drafter("hybrid", second="kangaroo")
    runs = own, model.params["layers"][:EXIT]
    assert tiny.draft_cost(hybrid) == pytest.approx(tiny.share_of_step(model, runs, head=True))
