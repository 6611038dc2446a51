"""Heads of Medusa and Hydra: drafts against slow references, files and methods."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.heads import files as heads
from jaxspec.heads.hydra.drafter import HydraDrafter
from jaxspec.heads.medusa.drafter import MedusaDrafter
from jaxspec.io.hf import huggingface
from jaxspec.methods.trees import grown
from jaxspec.programs import memory
from tests import refused, tiny
from tests.heads import reference
from tests.heads.files import (
    LLAMA,
    SOME,
    TARGET,
    WIDTH,
    Files,
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

SIZE = TARGET.vocab_size


def linear(rng: Any, name: str, read: int = WIDTH, width: int = WIDTH) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": matrix(rng, (width, read)),
        f"{name}.bias": 0.3 * rng.standard_normal(width).astype(np.float32),
    }


def medusa(blocks: int = 2, num_heads: int = 5, own: bool = True) -> Files:
    """Returns heads like FasterDecoding/medusa-vicuna-*-v1.3: the config has 2 heads; one block is listed r times."""
    rng = np.random.default_rng(1)
    tensors = {}
    for head in range(num_heads):
        block = linear(rng, "linear")
        tensors |= {f"{head}.{j}.{name}": one for j in range(blocks) for name, one in block.items()}
        if own:
            tensors[f"{head}.{blocks}.weight"] = matrix(rng, (SIZE, WIDTH))
    return {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "x"}, tensors


def hydra(plus: bool, blocks: int = 3, num_heads: int = 4) -> Files:
    """Returns heads like ankner/hydra-vicuna-*: in Hydra++ the Dropouts between the blocks are numbered too."""
    rng = np.random.default_rng(2)
    tensors: dict[str, np.ndarray] = {"input_embed_fn.weight": np.zeros((SIZE, WIDTH), np.float32)}
    for head in range(num_heads):
        places = [2 * j + 1 for j in range(blocks)] if plus else list(range(blocks))
        for part in ("linear", "res_connection"):
            tensors |= linear(rng, f"hydra_mlp.{head}.{places[0]}.{part}", (head + 2) * WIDTH)
        block = linear(rng, "linear")
        tensors |= {f"hydra_mlp.{head}.{j}.{name}": one for j in places[1:] for name, one in block.items()}
        tensors |= linear(rng, f"hydra_lm_head.{head}{'.1' if plus else ''}", WIDTH, SIZE)
    if plus:
        prefix = "prefix_embeding_layer"
        shaped = layer(rng, f"{prefix}.layers.0", WIDTH)
        inner = TARGET.intermediate_size
        shaped |= {
            f"{prefix}.layers.0.mlp.{name}_proj.weight": matrix(rng, shape)
            for name, shape in {
                "gate": (inner, WIDTH),
                "up": (inner, WIDTH),
                "down": (WIDTH, inner),
            }.items()
        }
        shaped |= {
            f"{prefix}.{name}.weight": norm(rng, WIDTH) for name in ("layers.0.input_layernorm", "norm")
        }
        tensors |= shaped | {f"{prefix}.embed_tokens.weight": np.zeros((SIZE, WIDTH), np.float32)}
    content = {"hydra_num_heads": num_heads, "hydra_num_layers": blocks, "grounded_heads": True}
    return content | {"hydra_head_arch": "prefix-mlp" if plus else "mlp", "hidden_state_offset": 0}, tensors


# Drafts

FILES = {
    "medusa": medusa(),
    "version 2": medusa(blocks=1, own=False),
    "hydra": hydra(plus=False),
    "hydra++": hydra(plus=True),
}


def slow_logits(kind: str, tokens: list[int], drafts: list[int]) -> np.ndarray:
    """Returns the slow reference's logits of each draft token, and of the one after `drafts`."""
    target, tensors = (TARGET, tiny.params(TARGET)), FILES[kind][1]
    true = reference.aux_hidden_states(*target, tokens[:-1], ["final"])
    if kind.startswith("hydra"):
        return reference.hydra_logits(tensors, *target, tokens, drafts, true)
    return reference.medusa_logits(tensors, *target, true, len(drafts) + 1)


@pytest.mark.representatives("medusa", "hydra")
@pytest.mark.parametrize("kind", FILES)
def test_drafts_are_those_of_the_slow_reference(kind, tmp_path):
    make = functools.partial(
        HydraDrafter if kind.startswith("hydra") else MedusaDrafter, TARGET, num_draft_tokens=tiny.K
    )
    found = rounds_of(write(tmp_path, FILES[kind]), make)
    assert furthest(found, lambda one: slow_logits(kind, one.tokens, one.drafts[:-1])) < 2e-5
    check_rewritten(tmp_path, FILES[kind])


def without(tensors: dict[str, np.ndarray], *parts: str) -> dict[str, np.ndarray]:
    return {name: one for name, one in tensors.items() if not any(part in name for part in parts)}


# Trees


@pytest.mark.representatives("medusa")
@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_a_tree_is_that_of_the_slow_reference(tmp_path, kind):
    """The tree has the most probable paths by Medusa's independent heads, and by Hydra's heads after each path."""
    made, size = (
        HydraDrafter if kind.startswith("hydra") else MedusaDrafter,
        Dynamic(num_nodes=9, depth=4, width=3),
    )
    make = functools.partial(made, TARGET, num_draft_tokens=4, tree=size)
    check_trees(write(tmp_path, FILES[kind]), make, lambda *given: slow_logits(kind, *given)[-1])


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_trees_are_an_option(model, tmp_path, kind):
    """The depth is at most the number of heads."""
    name, path = kind.removesuffix("++"), str(write(tmp_path / "published", FILES[kind]))
    made, own = model.drafter(name, draft=path, tree="12x3")
    width = 12 if name == "medusa" else 10
    assert (made.tree, made.num_draft_tokens, len(own["heads"])) == (Dynamic(12, 3, width), 3, 3)
    assert model.drafter(name, draft=path)[0].tree is None
    with refused(r"tree is 'large', 6 tokens one after the other; the file has \d heads, give TOKENSx"):
        model.drafter(name, draft=path, tree="large")
    with refused("stop_rule applies to chains only"):
        model.drafter(name, draft=path, tree="12x3", stop_rule="confidence")
    with refused("drawn_tree draws the tokens of a tree; give tree=TOKENSxDEPTH"):
        model.drafter(name, draft=path, drawn_tree=True)


@pytest.mark.full
def test_tokens_of_a_tree_are_drawn_where_texts_are(model, tmp_path):
    """In greedy texts a tree has the most probable tokens, because a tree of draws would be a chain."""
    method = methods.Medusa(draft=str(write(tmp_path, FILES["medusa"])), tree="7x3", drawn_tree=True)
    assert model.drafter(method)[0].tree == Dynamic(7, 3, 7)
    assert model.drafter(method, distributions=("greedy", "temperature-1"))[0].tree == Drawn(grown(7, 3, 10))
    options = {"max_new_tokens": 12, "ignore_eos": True}
    drawn, greedy = model.generate([[3, 4, 5], [3, 4, 5]], method=method, temperature=[1.0, 0.0], **options)
    assert (len(drawn.tokens), greedy.tokens) == (12, model.generate([3, 4, 5], **options).tokens)
    # A greedy row of a tree with three levels has three tokens.
    assert greedy.statistics.num_draft_tokens < drawn.statistics.num_draft_tokens
    assert not drawn.lossy


# Files


def read(directory: Path, files: Files) -> heads.Head:
    return heads.read_head(write(directory, files), TARGET)


def same(one: heads.Head, other: heads.Head) -> None:
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one.load(np.float32), other.load(np.float32))


def test_how_many_there_are_is_told_by_the_tensors(tmp_path):
    """The config has 2; a module that is listed several times is in memory once."""
    found = read(tmp_path / "medusa", medusa())
    assert (found.config.num_heads, found.config.num_layers, found.config.repeated) == (5, 2, True)
    assert len(found.load(np.float32)["heads"][0]["blocks"]) == 1
    config = read(tmp_path / "hydra", hydra(plus=True)).config
    assert (config.num_heads, config.num_layers, config.repeated) == (4, 3, True)
    assert len(config.shapes["heads"][0]["blocks"]) == 2


def test_blocks_that_are_not_one_are_kept_apart(tmp_path):
    content, tensors = medusa(blocks=2, num_heads=1)
    tensors["0.1.linear.bias"] = tensors["0.1.linear.bias"] + 1
    config = read(tmp_path / "medusa", (content, tensors)).config
    assert (config.repeated, len(config.shapes["heads"][0]["blocks"])) == (False, 2)
    content, tensors = hydra(plus=True)
    tensors["hydra_mlp.3.5.linear.weight"] = tensors["hydra_mlp.3.5.linear.weight"] + 1
    config = read(tmp_path / "hydra", (content, tensors)).config
    assert (config.repeated, len(config.shapes["heads"][0]["blocks"])) == (False, 3)


def test_copies_that_were_left_out_count(tmp_path):
    content, tensors = medusa(own=False)
    one = {name: tensor for name, tensor in tensors.items() if ".0.linear" in name}
    same(read(tmp_path / "one", (content, one)), read(tmp_path / "all", (content, tensors)))
    content, tensors = hydra(plus=True)
    two = without(tensors, ".5.linear")
    same(read(tmp_path / "two", (content, two)), read(tmp_path / "three", (content, tensors)))


def test_the_place_of_a_matrix_says_behind_how_many_blocks_it_stands(tmp_path):
    """For any value in the config, and for none."""
    content, tensors = medusa(blocks=3)
    once = {
        name: tensor
        for name, tensor in tensors.items()
        if ".1.linear" not in name and ".2.linear" not in name
    }
    for number in (None, 1, 2):
        found = read(tmp_path / str(number), ({**content, "medusa_num_layers": number}, once))
        assert (found.config.num_layers, found.config.repeated) == (3, True)
    found = read(tmp_path / "one", with_config(medusa(blocks=1), medusa_num_layers=3))
    assert found.config.num_layers == 1


def test_heads_beside_a_whole_model_are_those_of_a_file_of_their_own(tmp_path):
    """Medusa-2, whose config does not mention heads."""
    content, tensors = medusa()
    beside = {f"medusa_head.{name}": one for name, one in tensors.items()}
    beside |= {"model.embed_tokens.weight": np.zeros((SIZE, WIDTH), np.float32)}
    beside |= {"lm_head.weight": np.ones((SIZE, WIDTH), np.float32)}
    beside |= layer(np.random.default_rng(0), "model.layers.0", WIDTH)
    same(read(tmp_path / "whole", (dict(LLAMA), beside)), read(tmp_path / "alone", (content, tensors)))


def vllm(**config: Any) -> Files:
    content, tensors = medusa()
    renamed = {}
    for name, one in tensors.items():
        head, number, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{number}.{rest[-1]}" if rest[:-1] else f"lm_heads.{head}.weight"] = one
    content = {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 2, "medusa_fc_bias": True}
    return {
        **content,
        "hidden_size": WIDTH,
        "vocab_size": SIZE,
        "truncated_vocab_size": SIZE,
        **config,
    }, renamed


def test_vllms_layout_is_read(tmp_path):
    content, tensors = vllm()
    theirs = {f"medusa_heads.{name}": one for name, one in tensors.items()}
    same(read(tmp_path / "vllm", (content, theirs)), read(tmp_path / "authors", medusa()))
    bare = read(tmp_path / "bare", (content, without(tensors, "bias"))).config
    assert (bare.bias, bare.own_heads, bare.head_size) == (False, True, SIZE)


@pytest.mark.parametrize("rows", ["whole", "cut"])
def test_a_part_of_the_vocabulary_is_read(tmp_path, rows):
    """`token_map` lists tokens in any order; the matrix may still have a row for every token."""
    content, tensors = vllm(truncated_vocab_size=len(SOME))
    whole = tensors["lm_heads.2.weight"]
    for name in [name for name in tensors if "lm_heads" in name]:
        tensors[name] = tensors[name][SOME] if rows == "cut" else tensors[name]
    own = read(tmp_path, (content, {**tensors, "token_map": SOME})).load(np.float32)
    assert own["vocabulary"].ids.tolist() == sorted(SOME.tolist())
    np.testing.assert_array_equal(own["heads"][2]["head"], whole[np.sort(SOME)])


BAD = {
    "the heads read vectors of width 12, the target's are of 16": (
        {},
        {"0.0.linear.weight": np.ones((12, 12), np.float32)},
    ),
    "tensor lm_heads.0.weight has shape \\(9, 16\\), expected \\(13, 16\\)": with_tensors(
        medusa(), **{"0.2.weight": np.ones((9, WIDTH), np.float32)}
    ),
    "tensor lm_heads.3.weight is missing": with_tensors(medusa(), **{"3.2.weight": None}),
    "tensor blocks.1.layers.1.bias is missing": with_tensors(medusa(), **{"1.1.linear.bias": None}),
    "the file has blocks \\[0, 1\\] of heads \\[0, 1, 2, 3, 4, 999999999\\]; expected all numbers": with_tensors(
        medusa(), **{"999999999.0.linear.weight": np.ones((WIDTH, WIDTH), np.float32)}
    ),
    "the file has 2 blocks a head, and matrices behind \\[2, 3\\]": with_tensors(
        medusa(), **{"3.2.weight": None, "3.3.weight": np.ones((SIZE, WIDTH), np.float32)}
    ),
    "the heads read vectors of width 0": with_tensors(medusa(), **{"0.0.linear.weight": np.ones(())}),
    "token_map is missing: which of 13 tokens the 8 rows": vllm(truncated_vocab_size=8),
    "token_map must name 8 different tokens": with_tensors(
        vllm(truncated_vocab_size=8), token_map=np.full(8, 3)
    ),
    "token_map is int64\\(7,\\), expected int64\\(8,\\)": with_tensors(
        vllm(truncated_vocab_size=8), token_map=SOME[:7]
    ),
    "tensor 0.0.linear.weight is I8; quantised heads are not supported": with_tensors(
        medusa(), **{"0.0.linear.weight": np.ones((WIDTH, WIDTH), np.int8)}
    ),
    "the file has 1 blocks a head, and matrices behind \\[999999999\\]": (
        {},
        {
            "0.0.linear.weight": np.ones((WIDTH, WIDTH), np.float32),
            "0.999999999.weight": np.ones((SIZE, WIDTH), np.float32),
        },
    ),
    "medusa_num_layers is 999999999; expected a whole number from 1 to 10000": with_config(
        medusa(blocks=1, own=False), medusa_num_layers=999999999
    ),
    "num_hidden_layers is 999999999; expected a whole number from 1 to 10000": vllm(
        num_hidden_layers=999999999
    ),
    "num_hidden_layers is 3, and the file has 2 blocks a head; expected all": vllm(num_hidden_layers=3),
    "hydra_num_layers is 999999999; expected a whole number from 1 to 10000": with_config(
        hydra(plus=True, blocks=2), hydra_num_layers=999999999
    ),
    "hydra_num_layers is 4, and the file has one block a head; expected the first and": with_config(
        hydra(plus=False, blocks=1), hydra_num_layers=4
    ),
    "grounded_heads is false": with_config(hydra(plus=False), grounded_heads=False),
    "hidden_state_offset is 5; expected a whole number from 0 to 4": with_config(
        hydra(plus=False), hidden_state_offset=5
    ),
    "hydra_mlp.1.0.res_connection.bias is missing": with_tensors(
        hydra(plus=False), **{"hydra_mlp.1.0.res_connection.bias": None}
    ),
    "prefix_embeding_layer.norm.weight is missing": with_tensors(
        hydra(plus=True), **{"prefix_embeding_layer.norm.weight": None}
    ),
    "hydra_head_arch is 'prefix-mlp', and the file has no prefix_embeding_layer.layers.0": with_config(
        hydra(plus=False), hydra_head_arch="prefix-mlp"
    ),
    "expected heads from 0 on, of as many blocks each": with_tensors(
        hydra(plus=False), **{"hydra_mlp.1.2.linear.weight": None}
    ),
    "hydra_lm_head.9.weight has no place in a hydra head": with_tensors(
        hydra(plus=False), **{"hydra_lm_head.9.weight": np.ones(2, np.float32)}
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    check_refused(tmp_path, BAD[message], message)


@pytest.mark.parametrize("kind", FILES)
def test_heads_are_no_model(tmp_path, kind):
    with refused("these are heads of Medusa or Hydra, no model; they draft with method="):
        huggingface.stored_dtype(write(tmp_path, FILES[kind]))


def test_a_directory_without_tensors_is_no_head(tmp_path):
    (write(tmp_path, medusa()) / "model.safetensors").unlink()
    with refused(r"has no tensors of a head; expected \*.safetensors or one of", FileNotFoundError):
        heads.read_head(tmp_path, TARGET)


def test_an_earlier_stream_is_read_where_the_config_says_so(tmp_path):
    assert read(tmp_path, with_config(hydra(plus=False), hidden_state_offset=1)).config.aux_layers == (3,)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("suffix", [pytest.param("pt", marks=pytest.mark.peers), "safetensors"])
def test_files_with_the_names_that_authors_gave_them_are_read(tmp_path, kind, suffix):
    content, tensors = FILES[kind]
    directory = write(tmp_path / "own", (content, tensors))
    if suffix == "pt":
        torch = pytest.importorskip("torch")
        (directory / "model.safetensors").unlink()
        stored = {name: torch.tensor(one) for name, one in tensors.items()}
        torch.save(stored, directory / f"{kind}_lm_head.pt")
    else:
        (directory / "model.safetensors").rename(directory / f"{kind}_lm_head.safetensors")
    same(heads.read_head(directory, TARGET), read(tmp_path / "other", (content, tensors)))


# The methods


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_as_many_tokens_are_drafted_as_there_are_heads(model, tmp_path, kind):
    path = str(write(tmp_path / "published", FILES[kind]))
    most = {"medusa": 5, "hydra": 4}[kind]
    made, own = model.drafter(kind, draft=path)
    assert (made.num_draft_tokens, len(own["heads"])) == (most, most)
    made, own = model.drafter(kind, draft=path, num_draft_tokens=2, stop_rule="confidence")
    assert (made.num_draft_tokens, len(own["heads"])) == (2, 2)
    with refused(f"num_draft_tokens is 9; the file has {most} heads, give 1 to {most}"):
        model.drafter(kind, draft=path, num_draft_tokens=9)


def test_heads_that_read_the_targets_have_none_of_their_own(model, tmp_path):
    """Version 2, and vLLM's `original_lm_head`, with or without a copy of the target's matrix."""
    path = str(write(tmp_path / "two", medusa(own=False)))
    made, own = model.drafter("medusa", draft=path)
    assert (made.head.head_size, made.head.own_heads) == (None, False)
    assert own.keys() == {"heads"}
    content, tensors = vllm(original_lm_head=True)
    copied = {**without(tensors, "lm_heads"), "lm_heads.0.weight": np.array(model.params["head"])}
    other, _ = model.drafter("medusa", draft=str(write(tmp_path / "copy", (content, copied))))
    assert other.head == made.head
    changed = {**copied, "lm_heads.0.weight": 2 * copied["lm_heads.0.weight"]}
    other, own = model.drafter("medusa", draft=str(write(tmp_path / "changed", (content, changed))))
    assert (other.head.head_size, own["head"].shape) == (SIZE, (SIZE, WIDTH))


@pytest.mark.parametrize(
    ("kind", "files"),
    [("medusa", medusa()), ("medusa", medusa(own=False)), ("hydra", hydra(plus=False))],
    ids=["own", "target's", "hydra"],
)
def test_heads_draft_with_some_of_their_tokens(model, tmp_path, monkeypatch, kind, files):
    left = np.array([2, 4, 5], np.int32)
    for method in (methods.Medusa, methods.Hydra):
        monkeypatch.setattr(method, "vocabulary_ids", lambda *_: left)
    _, own = model.drafter(kind, draft=str(write(tmp_path / "head", files)))
    assert own["vocabulary"].ids.tolist() == left.tolist()
    if "head" not in own["heads"][1]:
        np.testing.assert_array_equal(own["vocabulary"].head, np.asarray(model.params["head"])[left])
        return
    whole = files[1]["1.2.weight" if kind == "medusa" else "hydra_lm_head.1.weight"]
    np.testing.assert_array_equal(own["heads"][1]["head"], whole[left])
    if kind == "hydra":
        np.testing.assert_array_equal(own["heads"][1]["head_bias"], files[1]["hydra_lm_head.1.bias"][left])


def test_heads_that_do_not_fit_are_refused_before_they_are_placed(model, tmp_path, monkeypatch):
    path = str(write(tmp_path / "head", medusa()))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(heads.Head, "load", lambda *_: pytest.fail("it was placed"))
    with refused("the head does not fit: "):
        model.drafter("medusa", draft=path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_draft_costs_all_heads(model, tmp_path, kind):
    path = str(write(tmp_path / "published", FILES[kind]))
    _, own = model.drafter(kind, draft=path)
    shares = not any("head" in one for one in own["heads"])
    expected = tiny.share_of_step(model, own, head=shares)
    assert tiny.draft_cost(model, kind, draft=path) == pytest.approx(expected)
