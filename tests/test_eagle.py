"""EAGLE heads: drafts against a slow reference on published layouts, what a wrong reading would give, and the files."""

from __future__ import annotations

import functools
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec import methods
from jaxspec.drafting.eagle import Eagle
from jaxspec.drafting.tree import Drawn, Dynamic
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import heads, huggingface, torch_file
from jaxspec.methods.trees import grown
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.testing import head_reference as reference
from tests import head_files, tiny
from tests.head_files import (
    LLAMA,
    PROMPTS,
    SOME,
    TARGET,
    TEMPERATURE,
    WIDTH,
    Files,
    Round,
    check_trees,
    layer,
    matrix,
    norm,
    rounds_of,
    with_config,
    with_tensors,
    write,
)

TAPS = (2, 2, 1)


def eagle() -> Files:
    """As yuhuili/EAGLE-*: with a bias, and a copy of the embedding."""
    rng = np.random.default_rng(1)
    tensors = layer(rng, "layers.0", WIDTH) | {"fc.weight": matrix(rng, (WIDTH, 2 * WIDTH))}
    tensors |= {
        "fc.bias": 0.3 * matrix(rng, (WIDTH,)),
        "embed_tokens.weight": np.array(tiny.params(TARGET)["embed"]),
    }
    return {**LLAMA, "bias": True, "rope_theta": 500000.0}, tensors


def eagle3(prefix: str = "midlayer", width: int = WIDTH) -> Files:
    """As yuhuili/EAGLE3-* and SpecForge: no `rope_theta`, a part of the vocabulary."""
    rng = np.random.default_rng(2)
    tensors = layer(rng, prefix, 2 * width, width) | {"fc.weight": matrix(rng, (width, 3 * WIDTH))}
    tensors |= {f"{prefix}.{name}.weight": norm(rng, width) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {"norm.weight": norm(rng, width), "lm_head.weight": 2 * matrix(rng, (len(SOME), width))}
    tensors |= {"d2t": SOME - np.arange(len(SOME)), "t2d": np.isin(np.arange(TARGET.vocab_size), SOME)}
    content = {**LLAMA, "hidden_size": width, "head_dim": 4, "draft_vocab_size": len(SOME)}
    return content | {"architectures": ["LlamaForCausalLMEagle3"]}, tensors


def speculators() -> Files:
    """With everything that its trainer can set, two layers, and all tokens."""
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
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        **flags,
    }, tensors


def vllm() -> Files:
    """Names behind `model.`, a norm for each tap, narrower than its target, with an embedding of its own."""
    content, tensors = eagle3("layers.0", 12)
    rng = np.random.default_rng(4)
    tensors |= {f"fc_norm.{i}.weight": norm(rng, WIDTH) for i in range(3)}
    tensors |= {"embed_tokens.weight": matrix(rng, (TARGET.vocab_size, 12))}
    content |= {"fc_norm": True, "target_hidden_size": WIDTH}
    return content, {
        ("" if name in ("d2t", "t2d") else "model.") + name: one for name, one in tensors.items()
    }


def qwen3() -> Files:
    """A layer of Qwen3, whose queries and keys are normed."""
    content, tensors = eagle3("layers.0")
    rng = np.random.default_rng(6)
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": norm(rng, 4) for name in "qk"}
    return {**content, "model_type": "qwen3", "rms_norm_eps": 1e-5}, tensors


def qkv_bias() -> Files:
    """The layout of published EAGLE heads of Qwen2: a Llama layer with biases only for queries, keys and values."""
    content, tensors = eagle()
    rng = np.random.default_rng(7)
    sizes = {"q": 16, "k": 8, "v": 8}
    biases = {f"layers.0.self_attn.{name}_proj.bias": matrix(rng, (size,)) for name, size in sizes.items()}
    return {**content, "qkv_bias": True}, tensors | biases


def linear(**changes: Any) -> Files:
    """A head whose config has linear scaling and a base, which the authors' code ignores."""
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
}


def plain(layout: str) -> Files:
    """What the reference reads: the Llama config with the flags, and names without vLLM's prefix."""
    content, tensors = LAYOUTS[layout]()
    content = {**content, **content.get("transformer_layer_config", {})}
    return content, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


# Drafts


def drafter(config: Any) -> Eagle:
    return Eagle(TARGET, config, num_draft_tokens=tiny.K)


def furthest(found: list[Round], files: Files, taps: Any, change: Any = lambda true: true) -> float:
    """The largest difference between what a head said and the reference's reading, whose features are changed so."""

    def logits_of(one: Round) -> np.ndarray:
        true = change(reference.features(TARGET, tiny.params(TARGET), one.tokens[:-1], taps))
        return reference.draft_logits(*files, TARGET, tiny.params(TARGET), one.tokens, one.drafts[:-1], true)

    return head_files.furthest(found, logits_of)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the head of a layout says, asked once."""

    @functools.cache
    def ask(layout: str) -> list[Round]:
        return rounds_of(write(tmp_path_factory.mktemp(layout), LAYOUTS[layout]()), drafter)

    return ask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_slow_reference(said, layout):
    taps = ("final",) if layout in ("eagle", "qkv_bias") else TAPS
    assert furthest(said(layout), plain(layout), taps) < 2e-5


def read_as(layout: str, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Files:
    """A checkpoint as the reference reads it, with something else in its config or tensors."""
    content, own = plain(layout)
    return {**content, **changes}, {**own, **(tensors or {})}


WRONG = {
    "taps that leave the layers": ("eagle3", plain("eagle3"), tuple(tap - 1 for tap in TAPS)),
    "d2t as tokens": ("eagle3", read_as("eagle3", {"d2t": SOME - 2 * np.arange(len(SOME))}), TAPS),
    "RoPE of the target": ("eagle3", read_as("eagle3", rope_theta=TARGET.rope_theta), TAPS),
    "RoPE of the other kind": ("eagle", read_as("eagle", rope_theta=10000.0), ("final",)),
    "no norm before fc": ("speculators", read_as("speculators", norm_before_fc=False), TAPS),
    "no norm before the residual": ("speculators", read_as("speculators", norm_before_residual=False), TAPS),
    "an output fed back without its norm": ("speculators", read_as("speculators", norm_output=False), TAPS),
    "no norm of each tap": ("vllm", read_as("vllm", fc_norm=False), TAPS),
    "no biases": ("qkv_bias", plain("eagle"), ("final",)),
    "the stream before the final norm": ("eagle", plain("eagle"), (TARGET.num_layers - 1,)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_would_be_noticed(said, wrong):
    layout, files, taps = WRONG[wrong]
    assert furthest(said(layout), files, taps) > 1e-3


def test_a_linear_scaling_has_the_base_of_the_authors_code(tmp_path):
    with pytest.warns(RuntimeWarning, match="claims rope_theta 77, which EAGLE's training code") as caught:
        found = rounds_of(write(tmp_path, linear()), drafter)
    assert "\n" not in str(caught[0].message)
    assert furthest(found, linear(rope_theta=10000.0), TAPS) < 2e-5
    assert furthest(found, linear(), TAPS) > 1e-3


@pytest.mark.parametrize(
    ("files", "base"),
    [
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
    ids=["dynamic", "none", "the usual base", "ours", "transformers 5", "speculators"],
)
def test_the_base_of_a_head(tmp_path, files, base):
    claimed = files[0]["rope_theta"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block = heads.read_head(write(tmp_path, files), TARGET).config.block
    assert block.rope_theta == base
    assert len(caught) == (claimed != base)


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_feature_of_another_position_would_be_noticed(said, layout):
    taps = ("final",) if layout == "eagle" else TAPS

    def ahead(true: np.ndarray) -> np.ndarray:
        return np.concatenate([true[1:], true[-1:]])

    def without_the_first(true: np.ndarray) -> np.ndarray:
        return true * (np.arange(len(true)) > 0)[:, None]

    def zero_at_the_border(true: np.ndarray) -> np.ndarray:
        return true * (np.arange(len(true)) != 7)[:, None]

    for change in (ahead, without_the_first, zero_at_the_border):
        assert furthest(said(layout), plain(layout), taps, change) > 1e-3


@struct.dataclass
class Stale(Eagle):
    """Keeps what it had predicted of accepted drafts, as some servers did."""

    def observe(self, params, state, outcome):
        before = state.own.cache
        after = super().observe(params, state, outcome)
        return after._replace(own=after.own._replace(cache=before))


def test_features_that_are_not_recomputed_would_be_noticed(tmp_path):
    found = rounds_of(
        write(tmp_path, eagle3()), lambda config: Stale(TARGET, config, num_draft_tokens=tiny.K)
    )
    assert furthest(found, plain("eagle3"), TAPS) > 1e-3


# Which layers are tapped


@pytest.mark.parametrize(
    ("given", "taps"),
    [
        ({}, TAPS),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 0]}, (2, 3, 0)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 0]}}, (3, 4, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 0]}, TAPS),
        ({"jaxspec": {"taps": [1, 1, 0]}}, (1, 1, 0)),
    ],
    ids=["usual", "entered", "left", "left, by its first", "ours"],
)
def test_what_tap_ids_mean(tmp_path, given, taps):
    content, tensors = eagle3()
    assert heads.read_head(write(tmp_path, (content | given, tensors)), TARGET).config.taps == taps


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


PICKLED = ["medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("model.safetensors", [["*.safetensors"]]),
        ("pytorch_model.bin", [["*.safetensors"], PICKLED]),
        ("medusa_lm_head.pt", [["*.safetensors"], PICKLED]),
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
    "reads features of width 12, the target's are of 16": with_config(eagle3(), target_hidden_size=12),
    "reads what enters the layers \\(2, 9, 12\\), the target has 4": with_config(
        eagle3(), eagle_aux_hidden_state_layer_ids=[2, 9, 12]
    ),
    "expected a list of layers": with_config(eagle3(), eagle_aux_hidden_state_layer_ids=7),
    "both set": with_config(speculators(), fc_norm=True),
    "model_type 'gemma' is not supported": with_config(eagle3(), model_type="gemma"),
    "is a whole model": with_tensors(eagle(), **{"fc.weight": None}),
    "is no head of EAGLE, DFlash, Kangaroo, Medusa or Hydra": (LLAMA, {"probe.weight": np.ones((2, 2))}),
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
    with pytest.raises(ValueError, match=message) as error:
        heads.read_head(write(tmp_path, BAD[message]), TARGET)
    assert "\n" not in str(error.value)


def test_a_head_is_no_draft_model(tmp_path):
    with pytest.raises(
        ValueError, match="this is an EAGLE head, not a model; it drafts with method='eagle3'"
    ):
        huggingface.stored_dtype(write(tmp_path, eagle3()))


def test_a_tap_is_of_the_layers_that_run():
    cache = kv.create(tiny.TARGET, 1, 8, jnp.float32)
    arguments = (
        tiny.TARGET,
        tiny.params(),
        jnp.zeros((1, 1, tiny.TARGET.hidden_size)),
        jnp.zeros(1, jnp.int32),
        cache,
    )
    with pytest.raises(ValueError, match=r"taps \[0\] are not of the layers that run, 1 to 2"):
        llama.run_tapped(*arguments, (0, 1, "final"), layers=range(1, 2))


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


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("harm",))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps({"fc.weight": Harmful()}), "holds more than tensors \\(builtins.print\\)"),
        (pickle.dumps([1, 2]), "is no file of PyTorch tensors"),
        (b"nothing", "is no file of PyTorch tensors"),
        (None, "is truncated, or no archive"),
    ],
)
def test_nothing_of_a_bin_file_is_run(tmp_path, capsys, pickled, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK")
    if pickled is not None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(ValueError, match=message):
        heads.read_head(tmp_path, TARGET)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("pickled", "compression", "message"),
    [
        # A dict, remembered as number 1,000,000: `pickle` would make room for twice as many.
        (b"\x80\x02}r\x40\x42\x0f\x00.", zipfile.ZIP_STORED, "is no file of PyTorch tensors"),
        (pickle.dumps({}), zipfile.ZIP_DEFLATED, "it is compressed, expected plain bytes"),
    ],
)
def test_a_small_bin_file_takes_little_memory(tmp_path, pickled, compression, message):
    with zipfile.ZipFile(tmp_path / "head.bin", "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(ValueError, match=message):
        torch_file.read(tmp_path / "head.bin")


def test_a_bin_file_of_other_than_tensors_by_name_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    for content in ({"huge": torch.zeros(1).expand(10**6, 10**6)}, {1: torch.zeros(1)}):
        torch.save(content, tmp_path / "head.bin")
        with pytest.raises(ValueError, match="is no file of PyTorch tensors"):
            torch_file.read(tmp_path / "head.bin")


# The methods


@pytest.fixture
def model(tmp_path):
    """A model in a directory of its own."""
    config = tiny.engine_config(TARGET)
    return LanguageModel(config, tiny.params(TARGET), tiny.tokenizer(), name="four", directory=tmp_path)


def test_a_head_drafts_by_its_name(model, tmp_path):
    directory = write(tmp_path / "published", eagle3())
    expected = model.generate([3, 4, 5], max_new_tokens=9, ignore_eos=True).tokens
    found = model.generate(
        [3, 4, 5], method="eagle3", draft=str(directory), max_new_tokens=9, ignore_eos=True
    )
    assert found.tokens == expected
    assert found.statistics.num_draft_tokens > 5


def test_a_head_is_found_beside_its_model(model, tmp_path):
    with pytest.raises(ValueError, match="needs a head, and there is no heads/eagle3/config"):
        model.drafter("eagle3")
    content, tensors = eagle3()
    mine = content | {"jaxspec": {"target": model.fingerprint}}
    write(tmp_path / "heads" / "eagle3", (mine, tensors))
    drafter, params = model.drafter("eagle3", stop_rule="confidence")
    assert (drafter.head.kind, drafter.num_draft_tokens) == ("eagle3", 12)
    assert params["vocabulary"].ids.tolist() == sorted(SOME.tolist())
    other = write(tmp_path / "other", (content | {"jaxspec": {"target": "0123"}}, tensors))
    with pytest.raises(ValueError, match=r"a head of another model \(0123"):
        model.drafter("eagle3", draft=str(other))
    with pytest.raises(ValueError, match="holds a head of eagle3; choose method='eagle3'"):
        model.drafter("eagle", draft=str(other))
    with pytest.raises(FileNotFoundError, match="no directory 'nowhere'"):
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


@pytest.mark.parametrize(
    ("layout", "left"), [("eagle", [2, 4, 5]), ("eagle3", [2, 4, 5]), ("speculators", [2, 4, 5])]
)
def test_a_head_drafts_with_some_of_its_tokens(model, tmp_path, monkeypatch, layout, left):
    monkeypatch.setattr(methods.Eagle, "vocabulary_ids", lambda *_: np.array([2, 4, 5], np.int32))
    monkeypatch.setattr(methods.Eagle3, "vocabulary_ids", lambda *_: np.array([2, 4, 5], np.int32))
    name = "eagle" if layout == "eagle" else "eagle3"
    _, whole = rows_of(model, tmp_path, layout)
    _, params = model.drafter(name, draft=str(tmp_path / layout))
    assert params["vocabulary"].ids.tolist() == left
    np.testing.assert_array_equal(params["vocabulary"].head, whole[left])


def test_a_head_without_any_of_the_tokens_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(methods.Eagle3, "vocabulary_ids", lambda *_: np.array([0, 3, 6], np.int32))
    with pytest.raises(ValueError, match="draft_vocab leaves none of the head's 8 tokens"):
        model.drafter("eagle3", draft=str(write(tmp_path / "head", eagle3())))


def rows_of(model: LanguageModel, tmp_path: Path, layout: str) -> tuple[Path, np.ndarray]:
    """The file of a layout, and the row of the head that draws each token."""
    content, tensors = LAYOUTS[layout]()
    path = write(tmp_path / layout, (content, tensors))
    if layout == "eagle":
        return path, np.asarray(model.params["head"])
    rows = np.zeros((TARGET.vocab_size, WIDTH), np.float32)
    rows[SOME if "d2t" in tensors else np.arange(TARGET.vocab_size)] = tensors["lm_head.weight"]
    return path, rows


# Trees


@pytest.mark.parametrize("tree", [Dynamic(9, depth=4, width=3), Drawn(grown(9, depth=4, num_ranks=4))])
def test_a_tree_is_that_of_the_slow_reference(tmp_path, tree):
    """EAGLE-2's: the most probable paths, by the probabilities of the reference on each; after rounds of trees too.

    Or tokens that are drawn from these.
    """
    files, target = plain("speculators"), (TARGET, tiny.params(TARGET))

    def logits_after(tokens: list[int], path: list[int]) -> np.ndarray:
        true = reference.features(*target, tokens[:-1], TAPS)
        return reference.draft_logits(*files, *target, tokens, path, true)[-1]

    directory = write(tmp_path, speculators())
    check_trees(directory, lambda config: Eagle(TARGET, config, num_draft_tokens=4, tree=tree), logits_after)


def test_trees_are_an_option(tmp_path):
    lm = LanguageModel(TARGET, tiny.params(TARGET), name="tiny")
    directory = write(tmp_path, eagle3())
    drafter, _ = lm.drafter("eagle3", draft=directory, tree="12x3")
    assert (drafter.tree, drafter.num_draft_tokens) == (Dynamic(12, 3, 10), 3)
    assert lm.drafter("eagle3", draft=directory)[0].tree is None
    with pytest.raises(ValueError, match="stop_rule ends chains, and tree asks for a tree"):
        methods.Eagle3(tree="12x3", stop_rule="confidence", gamma=0.5)
    with pytest.raises(
        ValueError, match="which drafts a tree; let it draft a chain"
    ):  # with as many levels as tokens
        lm.drafter("hybrid", second="eagle3", draft=directory, tree="4x4")
    options = {"max_new_tokens": 12, "ignore_eos": True, "temperature": TEMPERATURE, "seed": 3}
    expected = lm.generate(list(PROMPTS[0]), **options)
    found = lm.generate(list(PROMPTS[0]), method="eagle3", draft=directory, tree="12x3", **options)
    assert found.tokens == expected.tokens
