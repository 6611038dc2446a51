"""Damaged and malicious files end with one line, in bounded time and memory; nothing in them is run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.console.errors import Guard
from jaxspec.heads import torch_file
from jaxspec.io import checkpoint
from jaxspec.io.hf import huggingface
from jaxspec.io.tokenizers.tokenizer import load_tokenizer
from tests import refused
from tests.commands import CONFIG, write_model
from tests.hostile_files import (
    ALL_BAD,
    GOOD,
    KINDS,
    POINTER,
    archive,
    by_name,
    tensor,
    text,
    verdict,
    windows,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bad_file_ends_in_one_line_that_names_it(tmp_path, kind):
    name, cases, _ = KINDS[kind]
    for case, content in cases().items():
        (tmp_path / name).write_bytes(content)
        try:
            said = verdict(kind, tmp_path / name)
        except Exception as error:
            raise AssertionError(f"{kind}, {case}: {type(error).__name__}: {str(error)[:500]}") from error
        assert said or kind not in ALL_BAD or case in GOOD.get(kind, ()), (kind, case)


def test_a_message_is_one_line_of_300_characters_whatever_it_contains(capsys):
    def run() -> int:
        raise ValueError("x" * 1000 + "\n\x1b[2J " + "y " * 1000 + "; give another")

    assert Guard("jaxspec")(run) == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert said.isprintable()
    assert len(said) == 300
    assert said.startswith("jaxspec: error: xxx")
    assert said.endswith("; give another")


def test_a_dictionary_of_a_module_is_read(tmp_path):
    """PyTorch stores `_metadata` as an attribute of the dictionary; it is left out."""
    state = b"}(" + text("_metadata") + b"}(" + text("") + b"}" + text("version") + b"K\x01suub"
    pickled = b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(" + text("w") + tensor() + b"u" + state + b"."
    path = tmp_path / "head.bin"
    path.write_bytes(archive(pickled, {"0": np.arange(4, dtype="<f4").tobytes()}))
    np.testing.assert_array_equal(torch_file.read_torch(path)["w"], [0, 1, 2, 3])
    path.write_bytes(archive(by_name(tensor()), {"0": bytes(16)}))
    assert list(torch_file.read_torch(path)) == ["w"]


# Directories that are almost checkpoints


@pytest.fixture
def saved(tmp_path):
    return write_model(tmp_path / "model")


def rename(directory, change, more=None):
    """Renames the tensors of a model; a tensor is removed if `change` returns None."""
    path = directory / "model.safetensors"
    found = {change(name): tensor for name, tensor in load_file(path).items() if change(name) is not None}
    save_file(found | (more or {}), path)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "a.b."])
def test_a_prefix_that_all_names_share_is_removed(saved, prefix):
    plain = huggingface.load_params(saved, CONFIG, np.float32)
    rename(saved, lambda name: prefix + name)
    found = huggingface.load_params(saved, CONFIG, np.float32)
    np.testing.assert_array_equal(found["embed"], plain["embed"])
    assert huggingface.stored_dtype(saved) == np.float32


@pytest.mark.parametrize("part", ["_orig_mod.", "_fsdp_wrapped_module."])
def test_the_names_of_wrappers_are_removed(saved, part):
    rename(saved, lambda name: name.replace("layers.0.", f"layers.0.{part}"))
    huggingface.load_params(saved, CONFIG, np.float32)


def test_a_base_model_has_no_head(saved):
    rename(saved, lambda name: None if name == "lm_head.weight" else name.removeprefix("model."))
    with refused(r"lm_head\.weight is missing"):
        huggingface.load_params(saved, CONFIG, np.float32)


@pytest.mark.parametrize("name", ["score.weight", "classifier.weight", "qa_outputs.bias"])
def test_a_classifier_is_called_one(saved, name):
    rename(saved, lambda one: None if one == "lm_head.weight" else one, {name: np.zeros((2, 16), np.float32)})
    with refused(rf"is a classifier, .*it has {name}"):
        huggingface.load_params(saved, CONFIG, np.float32)


def test_an_adapter_is_called_one(tmp_path):
    content = {"peft_type": "LORA", "base_model_name_or_path": "a/b" + "x\n" * 10_000}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "adapter_model.safetensors")
    with refused("is a LoRA adapter for the model 'a/b") as error:
        checkpoint.resolve(tmp_path)
    assert len(str(error.value)) <= 300


def test_a_folder_of_the_cache_is_its_snapshot(tmp_path):
    folder = tmp_path / "models--a--b"
    for commit in ("1", "2"):
        write_model(folder / "snapshots" / commit)
        for place in (folder, folder / "snapshots"):
            if commit == "1":
                assert checkpoint.resolve(place) == folder / "snapshots" / "1"
            else:
                with refused(r"2 snapshots; give one of them, such as .*snapshots/1"):
                    checkpoint.resolve(place)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("2")
    assert checkpoint.resolve(folder) == folder / "snapshots" / "2"
    with refused(r"a cache of the hub with 1 models; .* such as a/b"):
        checkpoint.resolve(tmp_path)
    (folder / "empty" / "snapshots").mkdir(parents=True)
    with refused("without any snapshot"):
        checkpoint.resolve(folder / "empty")


def test_a_pointer_in_place_of_a_vocabulary_is_called_so(tmp_path):
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_bytes(POINTER)
        with refused(rf"{name} is a pointer of Git LFS"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_or_a_link_to_nothing_is_called_so(saved, name):
    (saved / name).write_bytes(POINTER)
    with refused(rf"{name} is a pointer of Git LFS"):
        huggingface.load_params(saved, huggingface.read_config(saved), np.float32)
    (saved / name).unlink()
    (saved / name).symlink_to("absent")
    with refused(rf"{name} is a link to a file that is missing", (ValueError, FileNotFoundError)):
        huggingface.load_params(saved, huggingface.read_config(saved), np.float32)


def test_weights_of_other_formats_are_named(saved):
    with refused(r"is a file; give the directory .*model\?\), or", FileNotFoundError):
        checkpoint.resolve(saved / "model.safetensors")
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with refused(r"has no \*.safetensors weights, only pytorch_model.bin; convert"):
        huggingface.load_params(saved, CONFIG, np.float32)


def test_a_damaged_cache_of_windows_is_made_again(tmp_path):
    from training.data import packing

    file = tmp_path / "tokens.npz"
    file.write_bytes(b"damaged")
    made = {part: {"a": windows()} for part in ("training", "held_out")}
    with pytest.warns(RuntimeWarning, match=r"tokens\.npz is damaged, and is made again"):
        packing.cached(file, "key", lambda: made)
    assert set(packing.stored(file)[0]) == {"training", "held_out"}
