"""Fixtures of the tests of heads."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.hf import huggingface
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests import tiny
from tests.heads.files import TARGET
from tests.training.test_training_run import STORIES
from training.data import bpe_tokenizer, packing, reading

DOCUMENTS = ([1, 2, 3, 5, 7, 11, 4, 6, 8, 9, 10], [5, 1, 2], [4, 4, 9, 1, 7], [3, 2, 1, 8, 2, 2, 6, 0])


@pytest.fixture
def model(tmp_path) -> LanguageModel:
    """A target of four layers whose directory is the test's own, so that heads can be put there."""
    config = tiny.engine_config(TARGET)
    return LanguageModel(config, tiny.params(TARGET), tiny.tokenizer(), name="four", directory=tmp_path)


@pytest.fixture(scope="module")
def batch():
    """Four documents in two windows; some tokens are only read."""
    rng = np.random.default_rng(0)
    encoded = [packing.Encoded(np.array(one, np.int32), rng.random(len(one)) < 0.8) for one in DOCUMENTS]
    return packing.pack(encoded, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text and an untrained model of four layers, whose sharp distributions leave much to predict."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    words = bpe_tokenizer.train(STORIES, 300)
    config = LlamaConfig(words.get_vocab_size(), 16, 24, 4, 2, 1, 8, 128, bos_token_id=0, eos_token_ids=(1,))
    huggingface.save(folder, config, llama.init_params(config, jax.random.key(0), scale=2.0), np.float32)
    bpe_tokenizer.save(words, folder, 128)
    return folder


@pytest.fixture(scope="module")
def own_text():
    """Returns the target's greedy texts, packed."""
    config = dataclasses.replace(tiny.engine_config(TARGET), eos_token_ids=())
    model = LanguageModel(config, tiny.params(TARGET), tiny.tokenizer())
    prompts = [[1 + i % 12, (7 * i + 3) % 12] for i in range(24)]
    texts = [one.tokens for one in model.generate(prompts, max_new_tokens=14)]
    encoded = [
        packing.Encoded(np.array([*prompt, *text], np.int32), np.ones(2 + len(text), bool))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return packing.pack(encoded, 32)
