"""The keys of transformers' configuration classes, and the effect of keys of other model types there."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

from jaxspec.io.hf import huggingface  # noqa: E402
from jaxspec.io.hf.config_json import config_from  # noqa: E402
from jaxspec.io.hf.families import FAMILIES  # noqa: E402
from jaxspec.io.hf.keys import GENERATION_KEYS, IGNORED, READ  # noqa: E402
from tests.peers.test_logits import SIZES, SOON, TOKENS, TOLERANCE, ours, theirs  # noqa: E402

pytestmark = pytest.mark.peers

CLASSES = {kind: type(transformers.AutoConfig.for_model(kind)) for kind in FAMILIES}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_of_a_class_is_read_or_changes_nothing(kind):
    fields = {field.name for field in dataclasses.fields(CLASSES[kind])}
    assert len(fields) > 25
    # No family's default makes the attention bidirectional; if a file's does, it is refused.
    known = READ[kind] | IGNORED | GENERATION_KEYS | {"use_bidirectional_attention"}
    assert fields <= known
    assert CLASSES[kind](**SIZES).to_dict().keys() <= known
    generation = set(transformers.GenerationConfig._get_default_generation_params())
    assert generation <= GENERATION_KEYS | IGNORED


@pytest.mark.parametrize("kind", FAMILIES)
def test_missing_keys_mean_what_they_mean_there(kind):
    content = CLASSES[kind](head_dim=128).to_dict()
    assert config_from({"model_type": kind, "head_dim": 128}) == config_from(content)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_key_that_is_ignored_or_warned_of_changes_no_logits_there(tmp_path, kind):
    """All keys are set at once, so that a change by any of them is visible."""
    own = {
        "pretraining_tp": 2,
        "initializer_range": 0.03,
        "is_decoder": True,
        "chunk_size_feed_forward": 3,
        "max_sequence_length": 7,
        "gating": "tanh",
    }
    if kind == "llama":
        own |= {"sliding_window": 3, "layer_types": ["sliding_attention"] * SIZES["num_hidden_layers"]}
    if kind in ("mistral", "ministral", "qwen2"):
        own["attention_bias"] = True
    if kind in ("mistral", "ministral", "qwen2", "qwen3"):
        own["mlp_bias"] = True
    made = CLASSES[kind](**SIZES | own | {"head_dim": 8, **SOON})
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    with pytest.warns(RuntimeWarning, match="do not use"):
        huggingface.read_config(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ours(tmp_path, TOKENS)
    np.testing.assert_allclose(found, theirs(model, TOKENS), atol=TOLERANCE, rtol=0)
