"""The initial model, tokenizer and objective of a training job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from jaxspec.host import files
from jaxspec.io import checkpoint
from jaxspec.io.methods import vocabulary_file
from jaxspec.io.tokenizers import chat
from jaxspec.io.tokenizers import tokenizer as tokenizer_files
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.loading import find_model
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.sampling import seed_key
from training.data import bpe_tokenizer, conversations, sizing
from training.data.sources import Kinds
from training.loop import state_sharding
from training.losses.base import Loss
from training.run_options import SCRATCH, DraftOptions, JobOptions, RunOptions, Written


class Objective(NamedTuple):
    """The loss and the measurements of a job.

    Attributes:
      loss: the loss to minimise.
      exits: layers at which acceptance is measured.
      judged: the best checkpoint has the lowest mean held-out loss of these exits; () for the last layer.
      target: the model that verifies the exits' drafts; None for the model's own last layer.
      target_fingerprint: its fingerprint before quantisation.
      part: int32[N], the tokens among which the model chooses, ascending; None for all.
      distil_weight: weight of the divergence from the target's distribution in the loss.
    """

    loss: Loss
    exits: Sequence[int] = ()
    judged: Sequence[int] = ()
    target: tuple[LlamaConfig, Params] | None = None
    target_fingerprint: str | None = None
    part: np.ndarray | None = None
    distil_weight: float = 0.0

    @property
    def trained_for(self) -> TrainedFor:
        """The record of the objective in the config.json of the model."""
        tokens = () if self.part is None else tuple(self.part.tolist())
        return TrainedFor(tuple(self.judged), tokens, target=self.target_fingerprint)


class Start(NamedTuple):
    """A model before its first step: config, parameters in shards on the mesh, tokenizer."""

    config: LlamaConfig
    params: Params
    words: Tokenizer
    mesh: Mesh


def start_model(options: JobOptions, kinds: Kinds, resumed: bool) -> Start:
    """Loads or creates the model to train. Writes nothing, because the run directory may belong to another run.

    Raises:
      ValueError: the shape is impossible, or the given model does not suit training.
    """
    mesh = state_sharding.make_mesh(options.mesh)
    if options.start != SCRATCH:
        return _given_model(find_model(options.start), options, mesh)
    shape = options.model
    if shape.tokenizer is not None:
        words = bpe_tokenizer.load(shape.tokenizer)
    elif resumed:
        words = bpe_tokenizer.load(options.run_directory)
    else:
        words = bpe_tokenizer.learn(kinds, options.data.weights, shape.vocab_size)
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
        bos_token_id=bpe_tokenizer.BOS_ID,
        eos_token_ids=(bpe_tokenizer.EOS_ID,),
    )
    params = init_params(config, options.seed, state_sharding.model_shardings(mesh, config))
    return Start(config, params, words, mesh)


def _given_model(source: Path, options: JobOptions, mesh: Mesh) -> Start:
    words = bpe_tokenizer.load(source)
    config = checkpoint.read_config(source)
    if options.start_layers is not None:
        config = config.truncated(options.start_layers)
    return Start(config, state_sharding.load_params(mesh, source, config, options.weights), words, mesh)


def init_params(config: LlamaConfig, seed: int, shardings: Params | None = None) -> Params:
    """Draws random float32 parameters. Output projections are scaled down with the depth of the model."""
    params = llama.init_params(config, seed_key(seed), shardings=shardings)
    shrink = (2 * config.num_layers) ** -0.5
    for layer in params["layers"]:
        layer["attention"]["out"] *= shrink
        layer["mlp"]["down"] *= shrink
    return params


def written_dtype(options: JobOptions) -> Written:
    """Returns the dtype of the written weights: the given one, that of the given model, or bfloat16."""
    if options.dtype != "auto" or options.start == SCRATCH:
        return "bfloat16" if options.dtype == "auto" else options.dtype
    stored = checkpoint.stored_dtype(find_model(options.start)).name
    return next((name for name in get_args(Written) if name == stored), "bfloat16")


def generation_defaults(options: JobOptions) -> dict[str, Any]:
    """Returns the sampling defaults of the given model, which the trained one keeps; {} from scratch."""
    return {} if options.start == SCRATCH else checkpoint.generation_defaults(find_model(options.start))


def further_model(options: RunOptions) -> sizing.Further | None:
    """Describes the given model that is trained; None for a model from scratch or a head."""
    if not isinstance(options, JobOptions) or options.start == SCRATCH:
        return None
    config = checkpoint.read_config(find_model(options.start))
    return sizing.Further(config.context_length, state_sharding.make_mesh(options.mesh).shape["data"])


def put_tokenizer(options: JobOptions, kinds: Kinds, words: Tokenizer) -> None:
    """Writes the tokenizer into the run directory, over the files of a failed command."""
    run, given = options.run_directory, options.tokenizer_source
    if not files.written_here() or (given is not None and given.samefile(run)):
        return
    for name in tokenizer_files.FILES:
        (run / name).unlink(missing_ok=True)
    # A model trained on conversations gets the chat template of its training.
    talks = any(document.chat for part in kinds.values() for document in part)
    template = chat_of(options).template if talks else None
    if given is None:
        bpe_tokenizer.save(words, run, options.model.context, template)
        return
    tokenizer_files.copy_files(given, run)
    if template is not None and (options.data.chat_template or chat.stored_template(run) is None):
        files.write_atomic(run / chat.TEMPLATE_FILES[0], template)


def draft_tokens(options: DraftOptions, config: LlamaConfig) -> np.ndarray | None:
    """Reads the tokens among which a draft chooses, int32[N], ascending; None for all.

    Raises:
      FileNotFoundError, ValueError: the ranking cannot be read, or belongs to another vocabulary.
    """
    if options.draft_vocab is None:
        return None
    return vocabulary_file.read_vocabulary(options.draft_vocab, None, config.vocab_size).first()


def chat_of(options: RunOptions) -> conversations.Chat:
    """Chooses the chat template: the given one, that of the given model or tokenizer, or the default."""
    given, template = options.tokenizer_source, options.data.chat_template
    if given is None:
        return conversations.chat_of(None, template)
    with bpe_tokenizer.files_of(given) as directory:
        return conversations.chat_of(directory, template)


def document_marks(config: LlamaConfig, source: Path | None) -> bpe_tokenizer.Marks:
    """Returns the token that begins every document, or None, and the tokens that end texts.

    Args:
      config: contains their ids.
      source: the directory or GGUF file of the model's tokenizer; None for a tokenizer that is learned here.

    Returns:
      BOS is None if the tokenizer adds none, as SmolLM2's: a draft trained with one would see other beginnings of
      texts than in use.

    Raises:
      ValueError: the config has no EOS, or the tokenizer cannot be read.
    """
    if not config.eos_token_ids:
        raise ValueError("the model's config has no EOS token; training ends every document with it")
    bos = config.bos_token_id
    if source is not None and tokenizer_files.load_tokenizer(source).encode("")[:1] != [bos]:
        bos = None
    return bos, config.eos_token_ids
