"""Drafts and heads with the target's tokenizer, but padded to another number of rows than the target."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LanguageModel
from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import Parts
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.heads.medusa.network import MedusaConfig
from jaxspec.heads.padding import refitted
from jaxspec.heads.writer import write_head
from jaxspec.io.tensors import Tensors
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights
from jaxspec.sampling import Sampling
from jaxspec.testing.contracts import propose
from tests import refused, tiny

# The number of the tokenizer's tokens, and the number of rows of models with padding.
TOKENS, PADDED = 13, 16
PROMPT, BUDGET = [1, 2, 3], 8


def model(rows: int, config: LlamaConfig = tiny.TARGET, **options) -> LanguageModel:
    """A model whose padding rows are likely tokens, so that a draft with such rows would propose them."""
    params = dict(tiny.params(config))
    more = rows - TOKENS
    if more > 0:
        params["embed"] = jnp.concatenate([params["embed"], params["embed"][:more]])
        params["head"] = jnp.concatenate([params["head"], 2 * params["head"][:more]])
    else:
        params |= {name: params[name][:rows] for name in ("embed", "head")}
    config = dataclasses.replace(config, vocab_size=rows)
    return LanguageModel(config, params, tiny.tokenizer(), name=f"rows{rows}", **options)


MORE, FEWER = (TOKENS, PADDED), (PADDED, TOKENS)
DRAFTS = {
    "draft-exit": {"method": "draft-model", "draft_exit": 1, "stop_rule": "confidence", "gamma": 0.1},
    "s2d": {"method": "s2d"},
    "hybrid": {"method": "hybrid", "second": "draft-model"},
}


def check(lm: LanguageModel, rows: int, **method) -> None:
    """Checks that the text is plain decoding's, and that no token beyond the draft's `rows` is proposed."""
    plain = lm.generate(PROMPT, max_new_tokens=BUDGET, ignore_eos=True).tokens
    assert lm.generate(PROMPT, max_new_tokens=BUDGET, ignore_eos=True, **method).tokens == plain
    drafter, own = lm.drafter(**method)
    distribution = Sampling(jnp.array([1.5]))
    loop = tiny.Loop(Parts(drafter, BlockAcceptor(), distribution), Weights(lm.params, own), lm.config)
    state, _ = loop.begin([PROMPT], BUDGET)
    proposal, _ = propose(loop.parts, loop.weights, state, 50)
    assert proposal.tokens.max() < min(rows, lm.config.vocab_size)
    if proposal.log_probs is not None and method["method"] != "hybrid":  # its lookups draw nothing
        drafted = proposal.log_probs[:, 0, 0]
        assert drafted.shape[-1] == lm.config.vocab_size
        np.testing.assert_allclose(jnp.exp(drafted).sum(axis=-1), 1, rtol=1e-5)
        assert (drafted[:, rows:] == -jnp.inf).all()


@pytest.mark.full
@pytest.mark.representatives("(16, 13)")
@pytest.mark.parametrize("sizes", [MORE, FEWER, (TOKENS, TOKENS - 2)], ids=str)
def test_a_draft_model_with_other_rows(sizes):
    target, rows = sizes
    check(model(target), rows, method="draft-model", draft=model(rows, tiny.SMALL))


@pytest.mark.full
@pytest.mark.representatives("draft-exit")
@pytest.mark.parametrize("name", DRAFTS)
def test_every_method_with_a_draft_takes_one_with_other_rows(name):
    check(model(TOKENS), PADDED, draft=model(PADDED, trained_for=TrainedFor((1, 2))), **DRAFTS[name])


@pytest.mark.full
def test_a_draft_that_is_the_target_but_for_padding_is_accepted_whole():
    target = dataclasses.replace(tiny.TARGET, vocab_size=PADDED)
    params = dict(tiny.params())
    zeros = jnp.zeros((PADDED - TOKENS, target.hidden_size))
    # A padding row of zeros is likelier than most tokens: only the mask of the draft excludes it.
    params |= {name: jnp.concatenate([params[name], zeros]) for name in ("embed", "head")}
    lm = LanguageModel(target, params, tiny.tokenizer())
    text = lm.generate([5], max_new_tokens=9, method="draft-model", draft=model(TOKENS), ignore_eos=True)
    assert text.tokens == lm.generate([5], max_new_tokens=9, ignore_eos=True).tokens
    assert max(text.tokens) < TOKENS
    assert text.statistics.draft_acceptance_rate == 1


def test_a_draft_keeps_its_name_in_files():
    lm, draft = model(TOKENS), model(PADDED)
    fitted = lm.drafts.load(draft)
    assert fitted.fingerprint == draft.fingerprint
    assert fitted is lm.drafts.load(draft)
    assert fitted.until(1).fingerprint == draft.loaded.until(1).fingerprint


HEADS = {
    "eagle": lambda block, rows: EagleConfig(block, ("final",), "eagle", None, rows, True),
    "eagle3": lambda block, rows: EagleConfig(block, (0, 1, 2), "eagle3", block.hidden_size, rows, True),
    "medusa": lambda block, rows: MedusaConfig(block.hidden_size, 2, head_size=rows, own_heads=True),
    "medusa-shared": lambda block, rows: MedusaConfig(block.hidden_size, 2, head_size=rows),
    "hydra": lambda block, rows: HydraConfig(block.hidden_size, rows, 2),
    "kangaroo": lambda block, rows: KangarooConfig(block),
}


def written(name: str, rows: int, directory) -> str:
    block = dataclasses.replace(tiny.TARGET.truncated(1), vocab_size=rows)
    head = HEADS[name](block, rows)
    params = tiny.head_params(head)
    write_head(directory, head, params, "other")
    path = directory / "config.json"
    content = json.loads(path.read_text())
    del content["jaxspec"]["target"]
    path.write_text(json.dumps(content))
    return str(directory)


@pytest.mark.full
@pytest.mark.representatives("eagle3-sizes2", "medusa-shared-sizes4")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("eagle", MORE), ("eagle", FEWER), ("eagle3", FEWER), ("medusa", FEWER), ("medusa-shared", MORE)),
        *(("hydra", MORE), ("hydra", FEWER), ("kangaroo", MORE)),
    ],
)
def test_a_head_with_other_rows(name, sizes, tmp_path):
    target, rows = sizes
    method = name.partition("-")[0]
    own = {"exit_layer": 1} if method == "kangaroo" else {}
    # A Kangaroo head reads the target's head with all its rows.
    read = target if method == "kangaroo" else rows
    check(model(target), read, method=method, draft=written(name, rows, tmp_path), **own)


def test_a_head_with_fewer_rows_than_the_tokenizer_is_refused(tmp_path):
    with refused("a vocabulary of 9 tokens, the target of 16"):
        model(PADDED).drafter("eagle", draft=written("eagle", 9, tmp_path))


def tensors(**shapes: tuple[int, ...]) -> Tensors:
    found = Tensors()
    found |= {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return found


# For each layout: a head's config, the shapes of its tensors with 16 rows, and the tensors with one row per token.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], set[str]]] = {
    "eagle": (
        {"vocab_size": 16},
        {"embed_tokens.weight": (16, 8), "fc.weight": (16, 8)},
        {"embed_tokens.weight"},
    ),
    "eagle with a head": ({"vocab_size": 16}, {"model.lm_head.weight": (16, 8)}, {"model.lm_head.weight"}),
    "eagle3 of a part": (
        {"vocab_size": 16, "draft_vocab_size": 6},
        {"lm_head.weight": (6, 8), "d2t": (6,), "t2d": (16,), "embed_tokens.weight": (16, 8)},
        {"t2d", "embed_tokens.weight"},
    ),
    "speculators": (
        {"transformer_layer_config": {"vocab_size": 16}, "draft_vocab_size": 16},
        {"embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)},
        {"embed_tokens.weight", "lm_head.weight"},
    ),
    "medusa's authors": ({}, {"0.0.linear.weight": (16, 16), "0.1.weight": (16, 16)}, {"0.1.weight"}),
    "medusa in a model": ({}, {"medusa_head.1.1.weight": (16, 8)}, {"medusa_head.1.1.weight"}),
    "vLLM": (
        {"vocab_size": 16},
        {"lm_heads.0.weight": (16, 8), "lm_heads.1.weight": (16, 8)},
        {"lm_heads.0.weight"},
    ),
    "hydra": (
        {},
        {"hydra_lm_head.0.weight": (16, 8), "hydra_lm_head.0.bias": (16,)},
        {"hydra_lm_head.0.bias"},
    ),
    "hydra++": ({}, {"hydra_lm_head.2.1.weight": (16, 8)}, {"hydra_lm_head.2.1.weight"}),
    "dflash": ({"vocab_size": 16}, {"fc.weight": (16, 8), "hidden_norm.weight": (16,)}, set()),
    "dspark": (
        {"vocab_size": 16},
        {
            "markov_head.markov_w1.weight": (16, 4),
            "markov_head.markov_w2.weight": (16, 4),
            "fc.weight": (16, 8),
        },
        {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
    ),
    "kangaroo": ({"vocab_size": 16}, {"layers.0.self_attn.q_proj.weight": (16, 8)}, set()),
}


@pytest.mark.parametrize("size", [13, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_published_layout_is_refitted(name, size):
    content, shapes, by_token = LAYOUTS[name]
    fitted, found, rows = refitted(content, tensors(**shapes), size, num_tokens=13)
    assert rows == min(16, size)
    assert {name for name in by_token if len(found[name]) == size} == by_token
    assert all(len(found[name]) in (shapes[name][0], size) for name in shapes)
    assert all(
        len(found[name]) == shapes[name][0]
        for name in shapes
        if name.endswith(("fc.weight", "linear.weight"))
    )
    if "vocab_size" in content:
        assert fitted["vocab_size"] == size
    if size > 16:
        assert all((found[name][16:] == 0).all() for name in by_token)


def test_a_number_in_place_of_a_matrix_stays_as_it_is():
    content, given = {"vocab_size": 16}, tensors(**{"embed_tokens.weight": (16, 8), "lm_head.weight": ()})
    assert refitted(content, given, 20, num_tokens=13)[1]["lm_head.weight"].shape == ()


@pytest.mark.parametrize(("size", "num_tokens"), [(16, 13), (13, 14), (20, 17)])
def test_what_differs_in_more_than_padding_stays_as_it_is(size, num_tokens):
    content, given = {"vocab_size": 16}, tensors(**{"embed_tokens.weight": (16, 8)})
    assert refitted(content, given, size, num_tokens) == (content, given, size)
