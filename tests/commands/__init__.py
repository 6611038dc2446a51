"""Shared parts of the tests of commands: a tiny model in a directory, and calls of a command in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxspec.cli import main
from jaxspec.io.hf import huggingface
from jaxspec.model.config import LlamaConfig
from jaxspec.testing import reference

PROMPT = "Once upon a time"
CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_ids=(1,),
)


def write_model(directory: Path, config: LlamaConfig = CONFIG, seed: int = 1) -> Path:
    huggingface.save(directory, config, jax.tree.map(np.float32, reference.random_params(config, seed)))
    return directory


def write_byte_level(directory: Path, texts: Sequence[str] = (PROMPT,)) -> None:
    """Writes a byte-level BPE like GPT-2's and Llama 3's, learned from texts; a token can be part of a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*texts] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(directory / "tokenizer.json"))


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level BPE and its settings."""
    write_byte_level(directory)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def write_tiny(tmp_path_factory, config: LlamaConfig = CONFIG) -> Path:
    """Writes a directory with a model and a tokenizer, and returns it."""
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny", config)
    write_tokenizer(directory)
    return directory


def called(capsys, *arguments: object, main: Callable[[list[str]], int] = main) -> tuple[int, str, str]:
    """Runs `jaxspec`, or another command, in this process; returns exit status, standard output and standard error."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def one_error(run, *arguments: object) -> str:
    """Returns the error message of a wrong call, which must be one line and the only output."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"jaxspec: error: [^\n]+\n", err), err
    return err
