"""The head of DSpark: drafts against a slow reference, its files and its method."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads import files as heads
from jaxspec.heads.dspark.drafter import Confidence, DSparkDrafter
from jaxspec.io.methods import vocabulary_file
from jaxspec.methods.base import layers_of
from jaxspec.methods.trees import grown
from jaxspec.stopping import Constant, FixedGamma, ProductBelow
from tests import refused, tiny
from tests.heads import reference
from tests.heads.files import (
    LLAMA,
    SOME,
    TARGET,
    WIDTH,
    Files,
    Round,
    check_refused,
    check_rewritten,
    check_trees,
    furthest,
    matrix,
    rounds_of,
    with_tensors,
    write,
)
from tests.heads.test_dflash import AUX_LAYERS, LEFT
from tests.heads.test_dflash import dflash as head_of_dflash

RANK, SIZE, GAMMA = 3, TARGET.vocab_size, 0.5
LM_HEAD, W2 = "lm_head.weight", "markov_head.markov_w2.weight"
CONFIDENCE = [f"confidence_head.proj.{name}" for name in ("weight", "bias")]
MODEL = TARGET, tiny.params(TARGET)
HEAD = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
HEAD |= {"confidence_head_with_markov": True, "mask_token_id": 6, "block_size": tiny.K}


def deepspec(**own: Any) -> Files:
    """Returns a head in DeepSpec's form, which has copies of the target's embedding and output head."""
    content, tensors = head_of_dflash()
    rng = np.random.default_rng(2)
    tensors |= {f"markov_head.markov_w{number}.weight": 2 * matrix(rng, (SIZE, RANK)) for number in (1, 2)}
    tensors |= {"confidence_head.proj.weight": matrix(rng, (1, WIDTH + RANK))}
    tensors |= {"confidence_head.proj.bias": np.ones(1, np.float32)}
    tensors |= {"embed_tokens.weight": MODEL[1]["embed"], "lm_head.weight": MODEL[1]["head"]}
    tensors = {name: np.asarray(one) for name, one in tensors.items()}
    del content["dflash_config"]
    content |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": LEFT}
    return {**content, **HEAD, **own}, tensors


def speculators(**own: Any) -> Files:
    """Returns the same head in the form of speculators, which lists the layers whose inputs are read."""
    content, tensors = deepspec()
    inner = {name: one for name, one in content.items() if name not in {**HEAD, "target_layer_ids": 0}}
    outer = {**HEAD, "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": AUX_LAYERS}
    outer |= {"transformer_layer_config": inner, "draft_vocab_size": SIZE, "sample_from_anchor": True}
    return {**outer, **own}, {name: one for name, one in tensors.items() if "embed" not in name[:5]}


def some() -> Files:
    """Returns a head of speculators over a part of the vocabulary, with its own output matrix."""
    own, rng = {"d2t": SOME - np.arange(len(SOME))}, np.random.default_rng(3)
    own |= {name: 2 * matrix(rng, (len(SOME), size)) for name, size in ((LM_HEAD, WIDTH), (W2, RANK))}
    return with_tensors(speculators(draft_vocab_size=len(SOME)), **own)


LAYOUTS = {
    "deepspec": deepspec(),
    "speculators": speculators(),
    # The rows of an early file predict their own tokens, so a block drafts one token less.
    "early": speculators(block_size=tiny.K + 1),
    "some": some(),
}
del LAYOUTS["early"][0]["sample_from_anchor"]
# A head that does not predict its acceptance.
WITHOUT = with_tensors(deepspec(enable_confidence_head=False), **dict.fromkeys(CONFIDENCE))
FIRST = {"deepspec": 0, "speculators": 0, "early": 1, "some": 0}


def block(one: Round, files: Files, first: int) -> np.ndarray:
    """Returns what DFlash's reference says of the rows that draft."""
    content = {**LLAMA, **files[0].get("transformer_layer_config", {}), **files[0]}
    content["dflash_config"] = {"mask_token_id": 6}
    true = reference.aux_hidden_states(*MODEL, one.tokens[:-1], AUX_LAYERS)
    masks = tiny.K + first - 1
    return reference.dflash_logits(content, files[1], *MODEL, one.tokens[-1], masks, true)[first:]


@pytest.mark.representatives("early")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_slow_reference(layout, tmp_path):
    files = LAYOUTS[layout]
    w1, w2 = (np.float64(files[1][f"markov_head.markov_w{number}.weight"]) for number in (1, 2))

    def logits_of(one: Round) -> np.ndarray:
        before = (one.tokens + one.drafts)[len(one.tokens) - 1 :][: tiny.K]
        bias, ids = np.zeros((tiny.K, SIZE)), np.arange(len(w2)) + files[1].get("d2t", 0)
        bias[:, ids] = w1[before] @ w2.T
        return block(one, files, FIRST[layout]) + bias

    found = rounds_of(
        write(tmp_path, files), functools.partial(DSparkDrafter, TARGET, num_draft_tokens=tiny.K)
    )
    assert furthest(found, logits_of) < 2e-5


@pytest.mark.representatives("both")
@pytest.mark.parametrize("reads", ["both", "hidden"])
def test_a_draft_ends_where_the_predicted_acceptance_says(reads, tmp_path):
    """The predicted logit is a linear function of the normed hidden state and of W₁ of the token before."""
    files = deepspec(confidence_head_with_markov=reads == "both")
    if reads == "hidden":
        files = with_tensors(files, **{"confidence_head.proj.weight": np.ones((1, WIDTH), np.float32)})
    # With the identity as output head, the reference's logits are the normed hidden states.
    bare = with_tensors(files, **{LM_HEAD: np.eye(WIDTH)})
    weight = files[1]["confidence_head.proj.weight"][0]

    def predicted(one: Round) -> np.ndarray:
        read = block(one, bare, 0)
        if reads == "both":
            before = [one.tokens[-1], *one.drafts[:-1]]
            read = np.concatenate([read, files[1]["markov_head.markov_w1.weight"][before]], axis=1)
        return np.cumprod(1 / (1 + np.exp(-(read @ weight + 1))))

    def make(config: Any) -> DSparkDrafter:
        return DSparkDrafter(TARGET, config, ProductBelow(FixedGamma(GAMMA), Confidence()), tiny.K)

    found = rounds_of(write(tmp_path, files), make)
    below = [np.flatnonzero(predicted(one) < GAMMA) for one in found]
    expected = [int(at[0]) + 1 if len(at) else tiny.K for at in below]
    assert [one.count for one in found] == expected
    assert len(set(expected)) > 1


@pytest.mark.representatives("tree0")
@pytest.mark.parametrize("tree", [Dynamic(9, tiny.K, 3), Drawn(grown(7, tiny.K, 3))])
def test_a_tree_is_that_of_the_slow_reference(tmp_path, tree):
    """The logits after a path are those of its row, with the bias of its last token."""
    files = deepspec()
    w1, w2 = (np.float64(files[1][f"markov_head.markov_w{number}.weight"]) for number in (1, 2))

    @functools.cache
    def rows_of(*tokens: int) -> np.ndarray:
        return block(SimpleNamespace(tokens=tokens), files, 0)

    def logits_after(tokens: list[int], path: list[int]) -> np.ndarray:
        return rows_of(*tokens)[len(path)] + w1[[*tokens, *path][-1]] @ w2.T

    make = functools.partial(DSparkDrafter, TARGET, num_draft_tokens=tiny.K, tree=tree)
    check_trees(write(tmp_path, files), make, logits_after)


# Files


def read(directory: Any, files: Files) -> heads.Head:
    return heads.read_head(write(directory, files), TARGET)


def test_both_layouts_are_the_same_head(tmp_path):
    one, other = read(tmp_path / "one", deepspec()), read(tmp_path / "other", speculators())
    assert (one.config, one.config.kind, one.config.longest) == (other.config, "dspark", tiny.K)
    assert (one.config.rank, one.config.confidence, one.config.aux_layers) == (RANK, "both", (1, 3))
    jax.tree.map(np.testing.assert_array_equal, one.load(np.float32), other.load(np.float32))
    assert read(tmp_path / "early", LAYOUTS["early"]).config.first == 1
    assert read(tmp_path / "none", WITHOUT).config.confidence == "none"
    assert read(tmp_path / "some", some()).config.shapes["markov_out"] == (len(SOME), RANK)
    for layout, files in LAYOUTS.items():
        check_rewritten(tmp_path / layout, files)
    # The output before the first layer is the embedding.
    assert read(tmp_path / "low", deepspec(target_layer_ids=[-1, 2])).config.aux_layers == (0, 3)


BAD = {
    "markov_head_type is 'gated'; heads of DFlash with it are not supported": deepspec(
        markov_head_type="gated"
    ),
    "logit_scale is 0.5; heads": speculators(logit_scale=0.5),
    "tensor d2t is missing": with_tensors(some(), d2t=None),
    "the outputs of the layers \\[0, 4\\], the target has layers 0 to 3": speculators(
        aux_hidden_state_layer_ids=[1, 5]
    ),
    "confidence_head.proj.weight has shape \\(1, 19\\), expected \\(1, 16\\)": deepspec(
        confidence_head_with_markov=False
    ),
    "confidence_head.proj.bias has no place in a dspark head": deepspec(enable_confidence_head=False),
    "confidence_head.proj.weight has shape \\(1, 19\\), expected \\(1, 20\\)": deepspec(markov_rank=4),
    "markov_head.markov_w2.weight is missing": with_tensors(
        deepspec(), **{"markov_head.markov_w2.weight": None}
    ),
    "mask_token_id is missing": deepspec(mask_token_id=None),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    check_refused(tmp_path, BAD[message], message)


# The method


def put_beside(model: LanguageModel, files: Files) -> None:
    mine = {**files[0], "jaxspec": {"target": model.fingerprint}}
    write(model.directory / "heads" / "dspark", (mine, files[1]))


@pytest.mark.parametrize("predicts", [True, False])
def test_auto_drafts_as_far_as_the_block_and_ends_by_the_predicted_acceptance(model, predicts):
    put_beside(model, deepspec() if predicts else WITHOUT)
    for options in ({}, {"among": "dspark"}, {"num_draft_tokens": 2}):
        made = model.drafter("auto", **options)[0].candidates[0]
        assert isinstance(made, DSparkDrafter)
        assert made.num_draft_tokens == options.get("num_draft_tokens", tiny.K)
        assert isinstance(made.rule, ProductBelow if predicts else Constant)


def test_a_bias_costs_what_each_token_reads(model):
    """The rank changes the cost of a draft by one product of the bias for each token, and no absorbing."""
    method, costs = methods.DSpark(), []
    put_beside(model, deepspec())
    made, own = model.drafter(method)
    for rank in (RANK, 0):
        few = {**own, **{name: own[name][:, :rank] for name in ("markov_in", "markov_out")}}
        costs.append(method.cost(model.loaded, made, few))
    more = tiny.K * layers_of(own["markov_out"], model.loaded)
    assert costs[0] == dataclasses.replace(costs[1], layers=pytest.approx(costs[1].layers + more))


def test_a_head_drafts_by_the_name_of_its_method(tmp_path, model):
    put_beside(model, deepspec())
    made, own = model.drafter("dspark")
    assert (made.num_draft_tokens, made.aux_layers) == (tiny.K, (1, 3))
    assert {"markov_in", "markov_out", "confidence"} < own.keys()
    with refused(r"blocks of 3 tokens, give 1 to 3"):
        model.drafter("dspark", num_draft_tokens=4)
    path, ranking = tmp_path / "some.json", vocabulary_file.Ranking((0, 1), tuple(range(2, 9)), 9, SIZE)
    ranking.write(path, model.fingerprint, {})
    assert model.drafter("dspark", draft_vocab=str(path))[1]["markov_out"].shape == (9, RANK)
    few = str(write(tmp_path / "few", some()))
    assert model.drafter("dspark", draft=few, draft_vocab=str(path))[1]["markov_out"].shape == (6, RANK)
    bare = str(write(tmp_path / "bare", WITHOUT))
    with refused("'probe' needs a head that predicts the acceptance"):
        model.drafter("dspark", draft=bare, stop_rule="probe")
