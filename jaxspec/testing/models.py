"""Small Llama models with random weights, for exactness checks that take seconds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.tokenizers.chat import quiet_transformers
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.sharding import with_copies
from jaxspec.testing import reference

TARGET = LlamaConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=512,
)
# A draft model with the same vocabulary.
SMALL = dataclasses.replace(TARGET, num_layers=1, intermediate_size=20)
# A target for self-speculation.
DEEP = dataclasses.replace(TARGET, num_layers=3)
K = 3
CAPACITY = 32


@functools.cache
def params(config: LlamaConfig = TARGET, seed: int = 5) -> llama.Params:
    """Returns random parameters on the device, the same for every `config.kv_copies`.

    Models of one seed share embedding and head, so that their drafts are sometimes accepted.

    Examples:
      >>> params()["embed"].shape == (TARGET.vocab_size, TARGET.hidden_size)
      True
    """
    drawn = reference.random_params(config.plain, seed)
    shared = np.random.default_rng(seed).standard_normal((2, config.vocab_size, config.hidden_size))
    scaled = shared.astype(np.float32) * np.array([[[1.0]], [[0.6]]], np.float32)
    drawn |= {name: one for name, one in zip(("embed", "head"), scaled, strict=True) if name in drawn}
    return with_copies(config, jax.tree.map(jnp.asarray, drawn))


# With a tokenizer

EOS = 10
TOKENS = ["<s>", " ", "a", "b", "c", "d", "e", "e ", "ba", "cd", "</s>", "ab", "ab "]
MERGES = [("a", "b"), ("b", "a"), ("c", "d"), ("e", " "), ("ab", " ")]


def engine_config(config: LlamaConfig = TARGET) -> LlamaConfig:
    """Returns the configuration with the end-of-text token of `tokenizer`."""
    return dataclasses.replace(config, eos_token_ids=(EOS,))


def language_model(
    config: LlamaConfig = TARGET, name: str = "tiny", chat_template: str | None = None, **changes: Any
) -> LanguageModel:
    """Returns the model of `params(TARGET)` with a tokenizer of letters and pairs of letters.

    Examples:
      >>> language_model()
      <LanguageModel tiny: 2 layers, 4,336 parameters, float32, on device ...>
    """
    config = dataclasses.replace(engine_config(config), **changes)
    weights = params(TARGET) if config.num_layers == TARGET.num_layers else params(SMALL)
    return LanguageModel(config, weights, tokenizer(chat_template), name=name)


@functools.cache
def tokenizer(chat_template: str | None = None) -> Tokenizer:
    """Returns a tokenizer that merges letters into pairs, so that a text has several possible tokenisations."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, processors

    backend = Backend(models.BPE({token: index for index, token in enumerate(TOKENS)}, MERGES))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    make = quiet_transformers().PreTrainedTokenizerFast
    return Tokenizer(make(tokenizer_object=backend, chat_template=chat_template, **special))
