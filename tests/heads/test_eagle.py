"""EAGLE heads: drafts against a slow reference on published layouts, the files and the methods."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.heads import files as heads
from jaxspec.heads.eagle.drafter import EagleDrafter
from jaxspec.heads.method import HeadMethod
from jaxspec.io.hf import huggingface
from jaxspec.methods.trees import grown
from jaxspec.model import cache as kv
from jaxspec.model import llama
from tests import refused, tiny
from tests.heads import reference, test_dflash, test_dspark, test_medusa
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

AUX_LAYERS = (2, 2, 1)


def eagle() -> Files:
    """Returns a head like yuhuili/EAGLE-*: with a bias, and a copy of the embedding."""
    rng = np.random.default_rng(1)
    tensors = layer(rng, "layers.0", WIDTH) | {"fc.weight": matrix(rng, (WIDTH, 2 * WIDTH))}
    tensors |= {
        "fc.bias": 0.3 * matrix(rng, (WIDTH,)),
        "embed_tokens.weight": np.array(tiny.params(TARGET)["embed"]),
    }
    return {**LLAMA, "bias": True, "rope_theta": 500000.0}, tensors


def eagle3(prefix: str = "midlayer", width: int = WIDTH) -> Files:
    """Returns a head like yuhuili/EAGLE3-* and SpecForge: no `rope_theta`, a part of the vocabulary."""
    rng = np.random.default_rng(2)
    tensors = layer(rng, prefix, 2 * width, width) | {"fc.weight": matrix(rng, (width, 3 * WIDTH))}
    tensors |= {f"{prefix}.{name}.weight": norm(rng, width) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {"norm.weight": norm(rng, width), "lm_head.weight": 2 * matrix(rng, (len(SOME), width))}
    tensors |= {"d2t": SOME - np.arange(len(SOME)), "t2d": np.isin(np.arange(TARGET.vocab_size), SOME)}
    content = {**LLAMA, "hidden_size": width, "head_dim": 4, "draft_vocab_size": len(SOME)}
    return content | {"architectures": ["LlamaForCausalLMEagle3"]}, tensors


def speculators() -> Files:
    """Returns a head with all options of its trainer, two layers, and the whole vocabulary."""
    _, tensors = eagle3("layers.0")
    rng = np.random.default_rng(3)
    tensors |= layer(rng, "layers.1", WIDTH) | {"layers.1.input_layernorm.weight": norm(rng, WIDTH)}
    tensors |= {
        "input_norm.weight": norm(rng, 3 * WIDTH),
        "lm_head.weight": matrix(rng, (TARGET.vocab_size, WIDTH)),
    }
    del tensors["d2t"], tensors["t2d"]
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LLAMA, "num_hidden_layers": 2, "rope_theta": 77.0},
        "draft_vocab_size": TARGET.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        **flags,
    }, tensors


def vllm() -> Files:
    """Returns a narrow head with names after `model.`, a norm per auxiliary layer and its own embedding."""
    content, tensors = eagle3("layers.0", 12)
    rng = np.random.default_rng(4)
    tensors |= {f"fc_norm.{i}.weight": norm(rng, WIDTH) for i in range(3)}
    tensors |= {"embed_tokens.weight": matrix(rng, (TARGET.vocab_size, 12))}
    content |= {"fc_norm": True, "target_hidden_size": WIDTH}
    return content, {
        ("" if name in ("d2t", "t2d") else "model.") + name: one for name, one in tensors.items()
    }


def qwen3() -> Files:
    """Returns a head of one Qwen3 layer, with norms of queries and keys."""
    content, tensors = eagle3("layers.0")
    rng = np.random.default_rng(6)
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": norm(rng, 4) for name in "qk"}
    return {**content, "model_type": "qwen3", "rms_norm_eps": 1e-5}, tensors


def qkv_bias() -> Files:
    """Returns a head like the published ones for Qwen2: a Llama layer with biases for queries, keys and values only."""
    content, tensors = eagle()
    rng = np.random.default_rng(7)
    sizes = {"q": 16, "k": 8, "v": 8}
    biases = {f"layers.0.self_attn.{name}_proj.bias": matrix(rng, (size,)) for name, size in sizes.items()}
    return {**content, "qkv_bias": True}, tensors | biases


def redhat() -> Files:
    """Returns a head like RedHatAI/*-speculator.eagle3 for Llama and Qwen3: a Llama layer and no auxiliary layers."""
    _, tensors = eagle3("layers.0")
    tensors |= {"embed_tokens.weight": np.array(tiny.params(TARGET)["embed"])}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": len(SOME),
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {**LLAMA, "head_dim": 4, "hidden_act": "silu", "rope_theta": 1000000.0},
    }, tensors


def angelslim() -> Files:
    """Returns a head like AngelSlim/Qwen3-*_eagle3 and Tengyunw/qwen3_8b_eagle3: a Llama layer with keys of a Qwen3."""
    content, tensors = eagle3()
    of_qwen3 = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
    return content | of_qwen3 | {"rope_scaling": None, "rope_theta": 1000000.0}, tensors


def deepspec() -> Files:
    """Returns a head like deepseek-ai/eagle3_qwen3_*_ttt7: a Qwen3 layer over the whole vocabulary."""
    content, tensors = qwen3()
    rng = np.random.default_rng(8)
    del tensors["d2t"], tensors["t2d"], content["draft_vocab_size"]
    shape = TARGET.vocab_size, WIDTH
    tensors |= {f"{name}.weight": matrix(rng, shape) for name in ("embed_tokens", "lm_head")}
    tensors |= {"fc.weight": matrix(rng, (WIDTH, 2 * WIDTH))}
    return content | {
        "architectures": ["Qwen3Eagle3Model"],
        "attention_bias": False,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_target_layers": TARGET.num_layers,
        "step_loss_decay": 0.8,
        "target_layer_ids": [0, 2],
        "target_model_name_or_path": "Qwen/Qwen3-8B",
        "tie_word_embeddings": False,
        "ttt_length": 7,
    }, tensors


def peagle() -> Files:
    """Returns a head like RedHatAI/Qwen3-8B-speculator.peagle: two layers, an embedding and a mask of its own."""
    content, tensors = redhat()
    rng = np.random.default_rng(9)
    tensors |= layer(rng, "layers.1", WIDTH) | {"layers.1.input_layernorm.weight": norm(rng, WIDTH)}
    tensors |= {"embed_tokens.weight": matrix(rng, (TARGET.vocab_size, WIDTH))}
    tensors |= {"mask_hidden": rng.standard_normal((1, 1, 3 * WIDTH)).astype(np.float32)}
    inner = content["transformer_layer_config"] | {"num_hidden_layers": 2}
    return content | {
        "architectures": ["PEagleSpeculator"],
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "embed_requires_grad": True,
        "mask_token_id": 12,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_model_type": "peagle",
        "transformer_layer_config": inner,
    }, tensors


def linear(**changes: Any) -> Files:
    """Returns a head whose config has linear scaling and a base, which the authors' code ignores."""
    content, tensors = eagle3()
    return {
        **content,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_theta": 77.0,
    } | changes, tensors


LAYOUTS = {
    "eagle": eagle,
    "eagle3": eagle3,
    "speculators": speculators,
    "vllm": vllm,
    "qwen3": qwen3,
    "qkv_bias": qkv_bias,
    "redhat": redhat,
    "angelslim": angelslim,
    "deepspec": deepspec,
    "peagle": peagle,
}
# The auxiliary layers of a layout, if they are not `AUX_LAYERS`.
OTHER_LAYERS: dict[str, tuple[Any, ...]] = {"eagle": ("final",), "qkv_bias": ("final",), "deepspec": (1, 3)}


def plain(layout: str) -> Files:
    """Returns the reference's form: the Llama config with the flags, and names without vLLM's prefix."""
    content, tensors = LAYOUTS[layout]()
    content = {**content, **content.get("transformer_layer_config", {})}
    return content, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


# Drafts


def drafter(config: Any) -> EagleDrafter:
    return EagleDrafter(TARGET, config, num_draft_tokens=tiny.K)


@pytest.mark.representatives("eagle", "vllm", "deepspec", "peagle")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_slow_reference(layout, tmp_path):
    target, files = (TARGET, tiny.params(TARGET)), plain(layout)
    aux_layers = OTHER_LAYERS.get(layout, AUX_LAYERS)

    def logits_of(one: Round) -> np.ndarray:
        true = reference.aux_hidden_states(*target, one.tokens[:-1], aux_layers)
        return reference.draft_logits(*files, *target, one.tokens, one.drafts[:-1], true)

    assert furthest(rounds_of(write(tmp_path, LAYOUTS[layout]()), drafter), logits_of) < 2e-5
    check_rewritten(tmp_path, LAYOUTS[layout]())


@pytest.mark.parametrize(
    ("files", "base"),
    [
        (linear(), 10000.0),
        (linear(rope_scaling={"type": "dynamic", "factor": 2.0}), 10000.0),
        (linear(rope_scaling=None), 77.0),
        (linear(rope_theta=10000.0), 10000.0),
        # A head trained by this project, or by code that reads the config as transformers does.
        (linear(jaxspec={"kind": "eagle3"}), 77.0),
        (
            linear(rope_scaling=None, rope_parameters={"type": "linear", "factor": 4.0, "rope_theta": 77.0}),
            77.0,
        ),
        (linear(transformer_layer_config=linear()[0]), 77.0),
    ],
    ids=["linear", "dynamic", "none", "the usual base", "ours", "transformers 5", "speculators"],
)
def test_the_base_of_a_head(tmp_path, files, base):
    claimed = files[0]["rope_theta"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block = heads.read_head(write(tmp_path, files), TARGET).config.block
    assert block.rope_theta == base
    assert len(caught) == (claimed != base)
    for one in caught:
        assert re.search("claims rope_theta 77, which EAGLE's training code [^\n]*$", str(one.message))


# The layers whose hidden states are read


@pytest.mark.parametrize(
    ("given", "aux_layers"),
    [
        ({}, AUX_LAYERS),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 0]}, (2, 3, 0)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 0]}}, (3, 4, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 0]}, AUX_LAYERS),
        ({"jaxspec": {"taps": [1, 1, 0]}}, (1, 1, 0)),
    ],
    ids=["usual", "entered", "left", "left, by its first", "ours"],
)
def test_what_aux_layer_ids_mean(tmp_path, given, aux_layers):
    content, tensors = eagle3()
    assert (
        heads.read_head(write(tmp_path, (content | given, tensors)), TARGET).config.aux_layers == aux_layers
    )


def test_a_window_of_a_head_is_read(tmp_path):
    content, tensors = speculators()
    inner = content["transformer_layer_config"]
    inner |= {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    block = heads.read_head(write(tmp_path, (content, tensors)), TARGET).config.block
    assert (block.window(0), block.window(1)) == (7, None)


# Files


ADAPTER, SAFE, PICKLED = ["adapter/*"], ["*.safetensors"], ["*_lm_head.pt", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("model.safetensors", [ADAPTER, SAFE]),
        ("pytorch_model.bin", [ADAPTER, SAFE, PICKLED]),
        ("medusa_lm_head.pt", [ADAPTER, SAFE, PICKLED]),
    ],
)
def test_a_head_of_the_hub_is_fetched_without_what_is_not_needed(tmp_path, monkeypatch, name, fetched):
    import huggingface_hub

    asked = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        assert repository == "owner/head"
        asked.append(allow_patterns)
        for file in ("config.json", name):
            if any(Path(file).match(pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert heads.resolve("owner/head") == tmp_path
    assert asked == [["*.json", *patterns] for patterns in fetched]
    assert (tmp_path / name).exists()


BAD = {
    "row \\+ d2t must name 8 different tokens": with_tensors(eagle3(), d2t=SOME),
    "t2d marks other tokens": with_tensors(eagle3(), t2d=np.ones(13, bool)),
    "tensor d2t is missing": with_tensors(eagle3(), d2t=None),
    "tensor lm_head.weight has shape \\(8, 16\\), expected \\(9, 16\\)": with_config(
        eagle3(), draft_vocab_size=9
    ),
    "tensor norm.weight is missing": with_tensors(eagle3(), **{"norm.weight": None}),
    "input_norm.weight has no place .*; is norm_before_fc missing": with_config(
        speculators(), norm_before_fc=None
    ),
    "transformer.input_layernorm.weight|layers.0.input_layernorm.weight has no place": with_tensors(
        eagle(), **{"transformer.input_layernorm.weight": np.ones(WIDTH)}
    ),
    "no place in an eagle head": with_tensors(eagle(), **{"hidden_norm.weight": np.ones(WIDTH)}),
    "vocabulary of 9 tokens, the target of 13": with_config(eagle3(), vocab_size=9),
    "reads auxiliary hidden states of width 12, the target's are of 16": with_config(
        eagle3(), target_hidden_size=12
    ),
    "reads the inputs of the layers \\(2, 9, 12\\), the target has 4": with_config(
        eagle3(), eagle_aux_hidden_state_layer_ids=[2, 9, 12]
    ),
    "expected a list of layers": with_config(eagle3(), eagle_aux_hidden_state_layer_ids=7),
    "both set": with_config(speculators(), fc_norm=True),
    "mask_hidden has no place .*; is mask_token_id missing": with_config(peagle(), mask_token_id=None),
    "tensor mask_hidden is missing": with_tensors(peagle(), mask_hidden=None),
    "mask_token_id is 13; expected a whole number from 0 to 12": with_config(peagle(), mask_token_id=13),
    "model_type 'gemma' is not supported": with_config(eagle3(), model_type="gemma"),
    "is a whole model": with_tensors(eagle(), **{"fc.weight": None}),
    "; the known types are dspark, dflash, eagle3, eagle, kangaroo, hydra, medusa": (
        LLAMA,
        {"probe.weight": np.ones((2, 2))},
    ),
    "tensor fc.weight is I8; quantised heads are not supported": with_tensors(
        eagle3(), **{"fc.weight": np.ones((WIDTH, 3 * WIDTH), np.int8)}
    ),
    "two tensors are fc.weight, one of them as model.fc.weight": with_tensors(
        eagle3(), **{"model.fc.weight": np.ones((WIDTH, 3 * WIDTH), np.float32)}
    ),
    "jaxspec.target is 3": with_config(eagle3(), jaxspec={"target": 3}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    check_refused(tmp_path, BAD[message], message)


def test_a_head_is_no_draft_model(tmp_path):
    with refused("this is an EAGLE head, not a model; it drafts with method='eagle3'"):
        huggingface.stored_dtype(write(tmp_path, eagle3()))


def test_a_aux_layer_is_of_the_layers_that_run():
    cache = kv.create(tiny.TARGET, 1, 8, jnp.float32)
    arguments = (
        tiny.TARGET,
        tiny.params(),
        jnp.zeros((1, 1, tiny.TARGET.hidden_size)),
        jnp.zeros(1, jnp.int32),
        cache,
    )
    with refused(r"auxiliary layers \[0\] are outside the layers that run; give numbers from 1 to 2"):
        llama.run_with_aux(*arguments, (0, 1, "final"), layers=range(1, 2))


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_bin_file_is_read_as_safetensors_are(tmp_path, layout):
    torch = pytest.importorskip("torch")
    content, tensors = LAYOUTS[layout]()
    stored = {name: torch.nn.Parameter(torch.tensor(one), False) for name, one in tensors.items()}
    stored["fc.weight"] = torch.tensor(tensors["fc.weight"].T.copy()).T  # strides of its own
    (tmp_path / "bin").mkdir()
    torch.save(stored, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text(json.dumps(content))
    found = heads.read_head(tmp_path / "bin", TARGET)
    other = heads.read_head(write(tmp_path / "safe", (content, tensors)), TARGET)
    assert found.config == other.config
    jax.tree.map(np.testing.assert_array_equal, found.load(np.float32), other.load(np.float32))


def test_speculators_names_for_eagle_are_read(tmp_path):
    content, tensors = eagle()
    renamed = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in tensors.items()
    }
    theirs = {"speculators_model_type": "eagle", "layernorms": False, "transformer_layer_config": content}
    found = heads.read_head(write(tmp_path / "theirs", (theirs, renamed)), TARGET)
    other = heads.read_head(write(tmp_path / "plain", (content, tensors)), TARGET)
    assert found.config == other.config
    jax.tree.map(np.testing.assert_array_equal, found.load(np.float32), other.load(np.float32))


# The methods


def test_a_head_is_found_beside_its_model(model, tmp_path):
    with refused("needs a head, and there is no heads/eagle3/config"):
        model.drafter("eagle3")
    content, tensors = eagle3()
    mine = content | {"jaxspec": {"target": model.fingerprint}}
    write(tmp_path / "heads" / "eagle3", (mine, tensors))
    drafter, params = model.drafter("eagle3", stop_rule="confidence")
    assert (drafter.head.kind, drafter.num_draft_tokens) == ("eagle3", 12)
    assert params["vocabulary"].ids.tolist() == sorted(SOME.tolist())
    other = write(tmp_path / "other", (content | {"jaxspec": {"target": "0123"}}, tensors))
    with pytest.warns(RuntimeWarning, match=r"a head of another model or quantisation \(0123, this one is"):
        model.drafter("eagle3", draft=str(other))
    with refused("holds a head of eagle3; choose method='eagle3'"):
        model.drafter("eagle", draft=str(other))
    with refused("no directory 'nowhere'", FileNotFoundError):
        model.drafter("eagle", draft="nowhere")


def test_copies_of_the_targets_matrices_are_not_kept(model, tmp_path):
    content, tensors = eagle()
    tensors["lm_head.weight"] = np.array(model.params["head"])
    drafter, params = model.drafter("eagle", draft=str(write(tmp_path / "a", (content, tensors))))
    assert (drafter.head.own_embedding, drafter.head.head_size) == (False, None)
    assert params.keys() == {"fc", "fc_bias", "layers"}
    tensors |= {name: tensors[name] * 2 for name in ("embed_tokens.weight", "lm_head.weight")}
    drafter, params = model.drafter("eagle", draft=str(write(tmp_path / "b", (content, tensors))))
    assert (drafter.head.own_embedding, drafter.head.head_size) == (True, TARGET.vocab_size)
    assert params.keys() == {"fc", "fc_bias", "layers", "embed", "head"}


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_head_drafts_with_some_of_its_tokens(model, tmp_path, monkeypatch, layout):
    left = np.array([2, 4, 5], np.int32)
    for method in (methods.Eagle, methods.Eagle3):
        monkeypatch.setattr(method, "vocabulary_ids", lambda *_: left)
    content, tensors = LAYOUTS[layout]()
    _, params = model.drafter(layout, draft=str(write(tmp_path / "head", (content, tensors))))
    assert params["vocabulary"].ids.tolist() == left.tolist()
    own = tensors.get("lm_head.weight")
    rows = (
        np.asarray(model.params["head"])[left] if own is None else own[[SOME.tolist().index(i) for i in left]]
    )
    np.testing.assert_array_equal(params["vocabulary"].head, rows)


def test_a_head_without_any_of_the_tokens_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(methods.Eagle3, "vocabulary_ids", lambda *_: np.array([0, 3, 6], np.int32))
    with refused("draft_vocab leaves none of the head's 8 tokens"):
        model.drafter("eagle3", draft=str(write(tmp_path / "head", eagle3())))


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "medusa"])
def test_a_list_of_as_many_tokens_but_others_is_refused(model, tmp_path, monkeypatch, kind):
    """The shapes of another head's list would fit. The head's own list, in any order, is the head as it is."""
    made = {"eagle3": eagle3, "dflash": test_dflash.speculators, "dspark": test_dspark.some}
    content, tensors = made.get(kind, lambda: test_medusa.vllm(truncated_vocab_size=len(SOME)))()
    tensors |= {"token_map": SOME} if kind == "medusa" else {}
    path = str(write(tmp_path / "head", (content, tensors)))
    own = np.sort(np.asarray(model.drafter(kind, draft=path)[1]["vocabulary"].ids))
    others = np.setdiff1d(np.arange(TARGET.vocab_size), own)
    chosen = own
    monkeypatch.setattr(HeadMethod, "vocabulary_ids", lambda *_: chosen)
    assert model.drafter(kind, draft=path)[1]["vocabulary"].ids.tolist() == own.tolist()
    chosen = np.sort(np.append(own[2:], others[:2]))
    with refused(
        f"draft_vocab has {len(own)} tokens, as many as the head, and 2 of them have no row in it; give"
    ):
        model.drafter(kind, draft=path)
    chosen = np.sort(np.append(own, others[:1]))
    assert model.drafter(kind, draft=path)[1]["vocabulary"].ids.tolist() == own.tolist()


# Trees


@pytest.mark.full
@pytest.mark.representatives("speculators-tree0", "peagle-tree2")
@pytest.mark.parametrize(
    ("layout", "tree"),
    [
        ("speculators", Dynamic(9, depth=4, width=3)),
        ("speculators", Drawn(grown(9, depth=4, num_ranks=4))),
        ("peagle", Dynamic(9, depth=4, width=3)),
    ],
)
def test_a_tree_is_that_of_the_slow_reference(tmp_path, layout, tree):
    """EAGLE-2's tree has the most probable paths by the reference's probabilities, also after rounds of trees.

    A drawn tree has tokens drawn from these probabilities. That of P-EAGLE has the most probable combinations.
    """
    files, target = plain(layout), (TARGET, tiny.params(TARGET))

    @functools.cache
    def true(*tokens: int) -> np.ndarray:
        return reference.aux_hidden_states(*target, tokens, AUX_LAYERS)

    def logits_after(tokens: list[int], path: list[int]) -> np.ndarray:
        return reference.draft_logits(*files, *target, tokens, path, true(*tokens[:-1]))[-1]

    make = functools.partial(EagleDrafter, TARGET, num_draft_tokens=4, tree=tree)
    check_trees(write(tmp_path, LAYOUTS[layout]()), make, logits_after)


def test_trees_and_passes_of_masks_are_options_with_costs(model, tmp_path):
    draft, masks = str(write(tmp_path / "head", eagle3())), str(write(tmp_path / "masks", peagle()))
    drafter, _ = model.drafter("eagle3", draft=draft, tree="12x3")
    assert (drafter.tree, drafter.num_draft_tokens) == (Dynamic(12, 3, 10), 3)
    assert model.drafter("eagle3", draft=draft)[0].tree is None
    with refused("stop_rule applies to chains only"):
        methods.Eagle3(tree="12x3", stop_rule="confidence", gamma=0.5)

    # A level runs ten nodes; a pass of P-EAGLE has K rows.
    made = [methods.Eagle3(draft=draft, tree="12x3"), methods.Eagle3(draft=draft)]
    costs = [
        one.cost(model.loaded, *model.drafter(one))
        for one in (*made, methods.Eagle3(draft=masks, num_draft_tokens=4))
    ]
    assert [(one.once, one.rows) for one in costs] == [(False, 10), (False, 1), (True, 4)]
