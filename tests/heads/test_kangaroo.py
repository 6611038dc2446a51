"""Kangaroo's adapter: drafts against a slow reference, its files and its method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxspec.heads import files as heads
from jaxspec.heads.kangaroo.drafter import KangarooDrafter
from tests import refused, tiny
from tests.heads import reference
from tests.heads.files import (
    LLAMA,
    TARGET,
    WIDTH,
    Files,
    Round,
    check_refused,
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


def drafter(config: Any) -> KangarooDrafter:
    return KangarooDrafter(TARGET, config, EXIT, num_draft_tokens=tiny.K)


@pytest.mark.full
def test_drafts_are_those_of_the_slow_reference(tmp_path):
    def logits_of(one: Round) -> np.ndarray:
        text = one.tokens, one.drafts[:-1]
        return reference.kangaroo_logits(*adapter(), TARGET, tiny.params(TARGET), *text, EXIT)

    found = rounds_of(write(tmp_path, adapter()), drafter, TEMPERATURE)
    assert furthest(found, logits_of, TEMPERATURE) < 2e-5


@pytest.mark.parametrize(
    "claimed",
    [{"rope_theta": 500.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}],
    ids=["base", "scaling"],
)
def test_its_rope_is_that_of_the_authors_code_whatever_its_config_claims(tmp_path, claimed):
    usual = heads.read_head(write(tmp_path / "usual", adapter()), TARGET)
    with pytest.warns(
        RuntimeWarning, match="claims rope_theta .* which Kangaroo's training code does not use"
    ):
        claims = heads.read_head(write(tmp_path / "claims", with_config(adapter(), **claimed)), TARGET)
    assert claims.config == usual.config
    own = with_config(adapter(), **claimed, jaxspec={"kind": "kangaroo"})  # made here: follows its config
    assert heads.read_head(write(tmp_path / "own", own), TARGET).config != usual.config


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
    check_refused(tmp_path, BAD[message], message)


# The method


def test_an_adapter_drafts_by_the_name_of_its_method(model, tmp_path):
    content, tensors = adapter()
    path = str(write(tmp_path / "published", (content, tensors)))
    with refused(r"does not say which layers .* give exit_layer=E"):
        model.drafter("kangaroo", draft=path)
    with refused("exit_layer is 4; the model has 4 layers, give 1 to 3"):
        model.drafter("kangaroo", draft=path, exit_layer=4)
    made, _ = model.drafter("kangaroo", draft=path, exit_layer=3)
    assert (made.exit_layer, made.aux_layers, made.num_draft_tokens) == (3, (3,), 6)
    mine = content | {"jaxspec": {"exit_layer": EXIT, "target": model.fingerprint}}
    write(tmp_path / "heads" / "kangaroo", (mine, tensors))
    made, own = model.drafter("kangaroo")
    assert made.exit_layer == EXIT
    assert own.keys() == {"layers", "norm"}
    runs = own, model.params["layers"][:EXIT]
    assert tiny.draft_cost(model, "kangaroo") == pytest.approx(tiny.share_of_step(model, runs, head=True))
