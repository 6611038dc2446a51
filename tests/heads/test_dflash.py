"""The head of DFlash: drafts against a slow reference, its files and its method."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.heads import files as heads
from jaxspec.heads.dflash.drafter import DFlashDrafter
from jaxspec.methods.base import MAX_DRAFT_TOKENS
from jaxspec.methods.trees import grown
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
    layer,
    matrix,
    norm,
    rounds_of,
    with_config,
    with_tensors,
    write,
)

QWEN3 = dataclasses.replace(TARGET, qk_norm=True, model_type="qwen3")
TARGETS = {"llama": TARGET, "qwen3": QWEN3}
# The outputs of layers 0 and 2, 0-based, are the inputs of layers 1 and 3.
LEFT, AUX_LAYERS = [0, 2], [1, 3]


def dflash(**own: Any) -> Files:
    """Returns a head in z-lab's form: Qwen3 layers, and a config with the target's keys and `dflash_config`."""
    rng = np.random.default_rng(1)
    tensors = {"fc.weight": matrix(rng, (WIDTH, len(LEFT) * WIDTH))}
    tensors |= {f"{name}.weight": norm(rng, WIDTH) for name in ("hidden_norm", "norm")}
    for number in range(2):
        name = f"layers.{number}"
        tensors |= layer(rng, name, WIDTH)
        tensors |= {f"{name}.input_layernorm.weight": norm(rng, WIDTH)}
        tensors |= {f"{name}.self_attn.{one}_norm.weight": norm(rng, 4) for one in "qk"}
    content = {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
    }
    content |= {"head_dim": 4, "block_size": tiny.K + 2, "num_target_layers": TARGET.num_layers}
    return {**content, "dflash_config": {"mask_token_id": 6, "target_layer_ids": LEFT, **own}}, tensors


def speculators() -> Files:
    """Returns a head like RedHatAI/Qwen3-8B-speculator.dflash: over a part of the vocabulary, with its own keys."""
    content, tensors = dflash()
    rng = np.random.default_rng(2)
    tensors |= {"lm_head.weight": 2 * matrix(rng, (len(SOME), WIDTH))}
    tensors |= {"embed_tokens.weight": np.array(tiny.params(TARGET)["embed"])}
    tensors |= {"d2t": SOME - np.arange(len(SOME)), "t2d": np.isin(np.arange(TARGET.vocab_size), SOME)}
    of_head = ("architectures", "block_size", "dflash_config", "num_target_layers")
    inner = {key: value for key, value in content.items() if key not in of_head}
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": AUX_LAYERS,
        "block_size": content["block_size"],
        "draft_vocab_size": len(SOME),
        "mask_token_id": content["dflash_config"]["mask_token_id"],
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
        "speculators_model_type": "dflash",
        "target_hidden_size": None,
        "transformer_layer_config": inner,
    }, tensors


def deepspec() -> Files:
    """Returns a head like deepseek-ai/dflash_qwen3_*_block7: one of DSpark without a bias, with copies."""
    content, tensors = dflash()
    copies = {"embed_tokens.weight": "embed", "lm_head.weight": "head"}
    tensors |= {name: np.array(tiny.params(TARGET)[leaf]) for name, leaf in copies.items()}
    own = content.pop("dflash_config")
    return content | own | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": tiny.K,
        "enable_confidence_head": False,
        "layer_types": ["full_attention"] * 2,
        "markov_rank": 0,
        "num_anchors": 512,
        "tie_word_embeddings": False,
    }, tensors


def with_windows(files: Files, **more: Any) -> Files:
    """Returns the head with a window of two tokens in its first layer."""
    windows = {"use_sliding_window": True, "sliding_window": 2}
    windows["layer_types"] = ["sliding_attention", "full_attention"]
    content, tensors = files
    if inner := content.get("transformer_layer_config"):
        return {**content, "transformer_layer_config": inner | windows, **more}, tensors
    return {**content, **windows, **more}, tensors


# Drafts


@pytest.mark.representatives("qwen3", "speculators")
@pytest.mark.parametrize(
    ("target", "files", "masks"),
    [
        ("llama", dflash(), tiny.K),
        ("qwen3", dflash(), tiny.K),
        ("llama", speculators(), tiny.K),
        # Its pending token predicts the first draft token, so a block has one mask less.
        ("llama", deepspec(), tiny.K - 1),
    ],
    ids=["llama", "qwen3", "speculators", "deepspec"],
)
def test_drafts_are_those_of_the_slow_reference(target, files, masks, tmp_path):
    model, own = (TARGETS[target], tiny.params(TARGETS[target])), (dflash()[0], files[1])

    def logits_of(one: Round) -> np.ndarray:
        true = reference.aux_hidden_states(*model, one.tokens[:-1], AUX_LAYERS)
        return reference.dflash_logits(*own, *model, one.tokens[-1], masks, true)[-tiny.K :]

    make = functools.partial(DFlashDrafter, TARGETS[target], num_draft_tokens=tiny.K)
    assert furthest(rounds_of(write(tmp_path, files), make, target=TARGETS[target]), logits_of) < 2e-5


@pytest.mark.representatives("anchored-causal", "rows-both")
@pytest.mark.parametrize(
    ("files", "given"),
    [
        (with_windows(speculators()), {"sliding_window_non_causal": False}),
        (with_windows(speculators(), sliding_window_non_causal=True), {"sliding_window_non_causal": True}),
        (with_windows(dflash()), {}),
        (with_windows(dflash(is_causal=False)), {"is_causal": False}),
    ],
    ids=["anchored-causal", "anchored-both", "rows-causal", "rows-both"],
)
def test_a_layer_with_a_window_sees_what_it_saw_in_training(files, given, tmp_path):
    """In speculators the window ends before the block, in the authors' code at each row. Without it drafts differ."""
    model, own = (TARGET, tiny.params(TARGET)), {**dflash()[0], **given}
    windows = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
    found = rounds_of(
        write(tmp_path, files),
        functools.partial(DFlashDrafter, TARGET, num_draft_tokens=tiny.K),
        target=TARGET,
    )

    def logits_of(one: Round, windows: dict[str, Any] = windows) -> np.ndarray:
        true = reference.aux_hidden_states(*model, one.tokens[:-1], AUX_LAYERS)
        head = {**own, **windows}, files[1]
        return reference.dflash_logits(*head, *model, one.tokens[-1], tiny.K, true)[-tiny.K :]

    assert furthest(found, logits_of) < 2e-5
    assert furthest(found, functools.partial(logits_of, windows={})) > 1e-3
    check_rewritten(tmp_path / "again", files)


# Trees


@pytest.mark.representatives("tree0")
@pytest.mark.parametrize("tree", [Dynamic(20, depth=4, width=20), Drawn(grown(9, depth=4, num_ranks=4))])
def test_a_tree_is_that_of_the_slow_reference(tmp_path, tree):
    """Also after rounds of trees, so the head's cache has the keys of the accepted path.

    The trees have the most probable combinations of the positions' tokens, or tokens drawn from each position.
    """
    target = TARGET, tiny.params(TARGET)

    @functools.cache
    def logits_of(*tokens: int) -> np.ndarray:
        true = reference.aux_hidden_states(*target, tokens[:-1], AUX_LAYERS)
        return reference.dflash_logits(*dflash(), *target, tokens[-1], 4, true)

    check_trees(
        write(tmp_path, dflash()),
        functools.partial(DFlashDrafter, TARGET, num_draft_tokens=4, tree=tree),
        lambda tokens, path: logits_of(*tokens)[len(path) + 1],
    )


# Files


def read(directory: Any, files: Files) -> heads.Head:
    return heads.read_head(write(directory, files), TARGET)


@pytest.mark.parametrize(
    ("ids", "num_layers", "aux_layers"),
    [
        ([0, 2], 4, (1, 3)),
        # The last hidden state of transformers, which the authors use, is normalised.
        ([0, 3], 4, (1, "final")),
        # By default the outputs of layers from 1 to L − 3, one for each layer of the head.
        (None, 36, (2, 34)),
    ],
)
def test_auxiliary_layers_are_outputs_of_layers(tmp_path, ids, num_layers, aux_layers):
    target = dataclasses.replace(TARGET, num_layers=num_layers)
    files = dflash(target_layer_ids=ids)
    assert heads.read_head(write(tmp_path, files), target).config.aux_layers == aux_layers


def test_options_and_names_stand_where_trainers_put_them(tmp_path):
    content, tensors = dflash()
    own = content.pop("dflash_config")
    behind = {f"model.{name}": one for name, one in tensors.items()}
    content = {**content, **own, "model_type": "llama", "is_causal": False, "output_multiplier": 1.0}
    one, other = read(tmp_path / "one", (content, behind)), read(tmp_path / "other", dflash())
    assert one.config == other.config
    assert (one.config.block_size, one.config.mask_id) == (tiny.K + 2, 6)
    jax.tree.map(np.testing.assert_array_equal, one.load(np.float32), other.load(np.float32))
    for name, files in {"own": dflash(), "speculators": speculators(), "deepspec": deepspec()}.items():
        check_rewritten(tmp_path / name, files)
    with refused("last layer is read, but not written"):
        check_rewritten(tmp_path / "final", dflash(target_layer_ids=[0, TARGET.num_layers - 1]))


BAD = {
    "tensor norm.weight is missing": with_tensors(dflash(), **{"norm.weight": None}),
    "layers.1.self_attn.k_norm.weight is missing": with_tensors(
        dflash(), **{"layers.1.self_attn.k_norm.weight": None}
    ),
    "tensor fc.weight has shape \\(16, 32\\), expected \\(16, 48\\)": dflash(target_layer_ids=[0, 1, 2]),
    "lm_head.weight has no place in a dflash head": with_tensors(
        dflash(), **{"lm_head.weight": np.ones((13, WIDTH))}
    ),
    "attention_conv.base_kernel has no place": with_tensors(
        dflash(), **{"layers.0.attention_conv.base_kernel": np.ones((2, 2, WIDTH))}
    ),
    "is for a model of 9 tokens and width 16, the target has 13 and 16": with_config(dflash(), vocab_size=9),
    "mask_token_id is 13; expected a whole number from 0 to 12": dflash(mask_token_id=13),
    "mask_token_id is missing": dflash(mask_token_id=None),
    "block_size is missing": with_config(dflash(), block_size=None),
    "block_size is 1; expected a whole number from 2": with_config(dflash(), block_size=1),
    "target_layer_ids is 3; expected a list of layers": dflash(target_layer_ids=3),
    "the outputs of the layers \\[0, 4\\], the target has layers 0 to 3": dflash(target_layer_ids=[0, 4]),
    "the outputs of the layers \\[4, 4, 4, 4, 4, 4, ...\\], the target": dflash(target_layer_ids=[4] * 99),
    "is_causal is True; heads of DFlash with it are not supported": dflash(is_causal=True),
    "final_logit_softcapping is 30.0; heads": dflash(final_logit_softcapping=30.0),
    "attention_mode is 'mla'; heads": dflash(attention_mode="mla"),
    "causal_head is True; heads of DFlash": dflash(causal_head=True),
    "jetspec_config is .*; heads of DFlash": with_config(dflash(), jetspec_config={"tree_width": 8}),
    "projector_type is 'domino'; heads of DFlash": with_config(speculators(), projector_type="domino"),
    # deepseek-ai/dflash_qwen3_*_block7
    "markov_rank is of heads of DSpark, whose tensors": with_config(dflash(), markov_rank=256),
    "aux_hidden_state_layer_ids is None; expected a list": with_config(
        speculators(), aux_hidden_state_layer_ids=None
    ),
    "tensor d2t is missing": with_tensors(speculators(), d2t=None),
    "tensor lm_head.weight is missing": with_tensors(speculators(), **{"lm_head.weight": None}),
    "layer_types has sliding_attention, which needs sliding_window and use_sliding_window": with_config(
        dflash(), layer_types=["sliding_attention"] * 2
    ),
    "layer_types has sliding_attention; heads of DeepSpec with it": with_windows(deepspec()),
    "sliding_window_non_causal is 'no'; expected true or false": with_windows(
        speculators(), sliding_window_non_causal="no"
    ),
    "use_swa is True; heads of DFlash with it are not supported": dflash(use_swa=True),
    "causal is True; heads of DFlash": dflash(causal=True),
    "shift_label is True; heads of DFlash": with_config(speculators(), shift_label=True),
    "fc.weight is I8; quantised heads are not supported": with_tensors(
        dflash(), **{"fc.weight": np.ones((WIDTH, 2 * WIDTH), np.int8)}
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    check_refused(tmp_path, BAD[message], message)


# The method


@pytest.fixture
def with_head(model):
    """Returns a model with a head beside it."""
    content, tensors = dflash()
    mine = content | {"jaxspec": {"target": model.fingerprint}}
    write(model.directory / "heads" / "dflash", (mine, tensors))
    return model


def test_a_head_drafts_by_the_name_of_its_method(with_head):
    made, own = with_head.drafter("dflash")
    assert (made.num_draft_tokens, made.aux_layers) == (tiny.K + 1, (1, 3))
    assert own.keys() == {"fc", "hidden_norm", "layers", "norm"}
    for options in ({"num_draft_tokens": 5}, {"tree": "9x5"}):
        with refused(r"the head was trained for blocks of 5 tokens, give .*1 to 4"):
            with_head.drafter("dflash", **options)
    pass_cost = tiny.share_of_step(with_head, own, head="head" not in own)
    assert tiny.draft_cost(with_head, "dflash") == pytest.approx(pass_cost)
    # A file's block size is limited to the largest draft that a user can request.
    path = write(with_head.directory / "long", with_config(dflash(), block_size=10**9))
    assert with_head.drafter("dflash", draft=str(path))[0].num_draft_tokens == MAX_DRAFT_TOKENS


def test_a_tree_is_an_option(with_head):
    """A tree of N tokens has N candidates at each position, and takes one pass as a chain does."""
    made, own = with_head.drafter("dflash", tree="12x3")
    assert (made.tree, made.num_draft_tokens) == (Dynamic(12, 3, 12), 3)
    assert (made.reach, made.verify_widths) == (13, (13,))
    drawn = methods.DFlash(tree="12x3", drawn_tree=True)
    assert with_head.drafter(drawn, distributions=("temperature-1",))[0].tree == Drawn(grown(12, 3, 10))
    cost = drawn.cost(with_head.loaded, made, own)
    chain = methods.DFlash(num_draft_tokens=3)
    assert cost == chain.cost(with_head.loaded, with_head.drafter(chain)[0], own)
    assert (cost.once, cost.rows) == (True, 4)
    chosen, _ = with_head.drafter("auto", among="dflash", tree="12x3")
    assert (chosen.drafts_trees, chosen.candidates[0].num_nodes) == (True, 12)


def test_a_head_of_speculators_over_all_tokens_has_the_targets_head(tmp_path):
    content, tensors = with_config(speculators(), draft_vocab_size=TARGET.vocab_size)
    del tensors["d2t"], tensors["t2d"], tensors["lm_head.weight"]
    found = read(tmp_path / "own", (content, tensors))
    assert found.config == read(tmp_path / "authors", dflash()).config
    assert found.load(np.float32).keys() == {"fc", "hidden_norm", "layers", "norm"}
    # A map of all tokens has no effect, unless it reorders the rows.
    tensors["d2t"] = np.zeros(TARGET.vocab_size, np.int64)
    assert read(tmp_path / "map", (content, tensors)).ids is None
    tensors["d2t"][[1, 2]] = 1, -1
    with refused("d2t changes the order of the tokens"):
        read(tmp_path / "order", (content, tensors))
