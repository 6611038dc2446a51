"""What a training job begins with: its model, tokenizer and objective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.engine.loading import find_model
from jaxspec.io import checkpoint, files, vocabulary_file
from jaxspec.io import tokenizer as tokenizer_files
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training import induction
from training.data import conversations, tokenizer
from training.data.sources import Kinds
from training.loop import widening
from training.losses.base import Loss
from training.options import SCRATCH, DraftOptions, JobOptions


class Objective(NamedTuple):
    """What a job minimises and measures.

    Attributes:
      loss: to be minimised.
      exits: layers at which acceptance is measured.
      judged: the exits whose mean held-out loss says which checkpoint is best; () for the last layer.
      target: the model that is to accept what the exits draft; None for the model's own last layer.
      extra: what config.json says under `jaxspec`.
      part: int32[N], the tokens among which the model chooses, rising; None for all.
      distil_weight: the share of the target's law in the loss.
    """

    loss: Loss
    exits: Sequence[int] = ()
    judged: Sequence[int] = ()
    target: tuple[LlamaConfig, Params] | None = None
    extra: dict[str, Any] | None = None
    part: np.ndarray | None = None
    distil_weight: float = 0.0


class Start(NamedTuple):
    """A model before its first step: config at full depth, float32 parameters, tokenizer."""

    config: LlamaConfig
    params: Params
    words: Tokenizer


def start_model(options: JobOptions, kinds: Kinds, resumed: bool) -> Start:
    """Loads or makes the model to be trained. Writes nothing: the run directory may turn out to be another run's.

    Raises:
      ValueError: the shape is impossible, or the given model lacks what training needs.
    """
    if options.start != SCRATCH:
        return _given_model(find_model(options.start), options)
    shape = options.model
    if shape.tokenizer is not None:
        words = tokenizer.load(shape.tokenizer)
    elif resumed:
        words = tokenizer.load(options.run_directory)
    else:
        words = tokenizer.learn(kinds, options.data.weights, shape.vocab_size)
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_embeddings=shape.tied,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_ids=(tokenizer.EOS_ID,),
    )
    params = init_params(config, options.seed)
    if shape.induction:
        params = induction.add_circuit(config, params, options.seed)
    return Start(config, llama.truncate(params, shape.stages.layers_at(0)), words)


def _given_model(source: Path, options: JobOptions) -> Start:
    words = tokenizer.load(source)
    config = checkpoint.read_config(source)
    if options.start_layers is not None:
        config = config.truncated(options.start_layers)
    params = checkpoint.load_params(source, config, jnp.float32)
    if options.widen is not None:
        config, params = widening.widen(config, params, options.widen, options.seed)
    return Start(config, params, words)


def init_params(config: LlamaConfig, seed: int) -> Params:
    """Draws random float32 parameters; the products that write into the residual stream shrink with its depth."""
    params = llama.init_params(config, seed_key(seed))
    shrink = (2 * config.num_layers) ** -0.5
    for layer in params["layers"]:
        layer["attention"]["out"] *= shrink
        layer["mlp"]["down"] *= shrink
    return params


def given_tokenizer(options: JobOptions) -> Path | None:
    """The directory or GGUF file whose tokenizer is used; None where one is learned."""
    return options.model.tokenizer if options.start == SCRATCH else find_model(options.start)


def put_tokenizer(options: JobOptions, kinds: Kinds, words: Tokenizer) -> None:
    """Puts the tokenizer's files into the run directory, instead of what a failed command left there."""
    run, given = options.run_directory, given_tokenizer(options)
    if not files.written_here() or (given is not None and given.samefile(run)):
        return
    for name in tokenizer_files.FILES:
        (run / name).unlink(missing_ok=True)
    if given is not None:
        tokenizer_files.copy_files(given, run)
        return
    # A model that learns conversations is used in the form in which it has read them.
    talks = any(document.chat for part in kinds.values() for document in part)
    tokenizer.save(words, run, options.model.context, conversations.CHAT_TEMPLATE if talks else None)


def draft_tokens(options: DraftOptions, config: LlamaConfig) -> np.ndarray | None:
    """Reads the tokens among which a draft chooses, int32[N], rising; None for all.

    Raises:
      FileNotFoundError, ValueError: the ranking cannot be read, or is of another vocabulary.
    """
    if options.draft_vocab is None:
        return None
    return vocabulary_file.read_vocabulary(options.draft_vocab, None, config.vocab_size).first()


def chat_of(options: JobOptions) -> conversations.Chat:
    """Chooses how conversations are written: by the given model's or tokenizer's own template."""
    given = given_tokenizer(options)
    if given is None:
        return conversations.Chat()
    with tokenizer.files_of(given) as directory:
        return conversations.chat_of(directory)


def document_marks(config: LlamaConfig, source: Path | None) -> tokenizer.Marks:
    """Returns the tokens that begin and end every document, (BOS, EOS).

    Args:
      config: names both.
      source: the directory or GGUF file of the model's tokenizer; None for one that is learned here.

    Returns:
      BOS is None where the tokenizer puts none before a text, as SmolLM2's: a draft that is trained with one would
      not know how the texts begin that it drafts.

    Raises:
      ValueError: the config names no EOS, or the tokenizer cannot be read.
    """
    if not config.eos_token_ids:
        raise ValueError("the model's config names no EOS token; training ends every document with it")
    bos = config.bos_token_id
    if source is not None and tokenizer_files.load_tokenizer(source).encode("")[:1] != [bos]:
        bos = None
    return bos, config.eos_token_ids[0]
