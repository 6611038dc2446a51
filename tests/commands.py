"""What the tests of commands share: a tiny model in a directory, and how a command is called in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxspec.cli import main
from jaxspec.io import huggingface
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
    """A byte-level BPE as GPT-2's and Llama 3's, made from texts: a token may be any piece of a character."""
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
    """A byte-level BPE with its settings."""
    write_byte_level(directory)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def write_tiny(tmp_path_factory, config: LlamaConfig = CONFIG) -> Path:
    """Makes a directory with a model and a tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny", config)
    write_tokenizer(directory)
    return directory


def called(capsys, *arguments: object) -> tuple[int, str, str]:
    """Runs `jaxspec` in this process; returns status, standard output and standard error."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def one_error(run, *arguments: object) -> str:
    """The error of a wrong use: one line, and nothing else."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"jaxspec: error: [^\n]+\n", err), err
    return err
