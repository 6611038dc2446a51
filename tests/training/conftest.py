"""Fixtures of the tests of training."""

from __future__ import annotations

import jax
import pytest

from jaxspec.model import llama
from tests.training.test_training_run import CONFIG, STORIES
from training.data import bpe_tokenizer, reading


@pytest.fixture(scope="module")
def params():
    return llama.init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def words():
    return bpe_tokenizer.train(STORIES, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of a text, for runs."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    return folder
