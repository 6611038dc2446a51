"""Stand-ins for models and method files: they determine a program's shapes, and their numbers are arbitrary."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.heads import files as heads
from jaxspec.heads.kinds import known
from jaxspec.io import checkpoint
from jaxspec.io.methods import method_files, vocabulary_file
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.loading import find_model
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.methods import LoadedModel
from jaxspec.methods.resources import LoadedHead
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import spread_config
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.sampling import seed_key

# Replaces the fingerprint of weights that are not read.
UNREAD = "weights-not-read"


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The shape of a model without its weights.

    Attributes:
      name: the model's name in messages.
      config: the architecture.
      trained_for: what it was trained for, such as the exits of a sorted draft.
      bits: bits of quantised weights; None if the weights are not quantised.
    """

    name: str
    config: LlamaConfig
    trained_for: TrainedFor = TrainedFor()
    bits: int | None = None

    def over(self, mesh: Mesh | None) -> ModelShape:
        """Returns the shape sharded over a mesh (None: one device), see `model.sharding.spread_config`."""
        return self if mesh is None else dataclasses.replace(self, config=spread_config(mesh, self.config))

    def params(self, dtype: DTypeLike) -> llama.Params:
        """Returns the parameters as `jax.ShapeDtypeStruct`s."""

        def make() -> llama.Params:
            params = llama.init_params(self.config, seed_key(0), dtype)
            if self.bits is not None:
                params = quantise(self.config, params, self.bits)
            return params

        made: llama.Params = jax.eval_shape(make)
        return made

    def loaded(self, dtype: DTypeLike) -> LoadedModel:
        """Returns the model for a method's `build`; call it only under tracing, where nothing is allocated."""
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.params(dtype))
        return _Unread(self.config, params, self.name, dataclasses.replace(self.trained_for, target=None))


@dataclasses.dataclass(frozen=True)
class _Unread(LoadedModel):
    @functools.cached_property
    def fingerprint(self) -> str:
        return UNREAD


def model_shape(model: str | os.PathLike[str] | None, shape: str | None = None) -> ModelShape:
    """Returns the shape of a model from its config file, or a named shape.

    A named shape also serves as a sorted draft, with exits after a quarter, half and all of its layers.

    Raises:
      ValueError, FileNotFoundError: the model or shape does not exist, or both are given; one line.

    Examples:
      >>> model_shape(None, "8b").trained_for.exits
      (8, 16, 32)
    """
    if shape is not None and model is not None:
        raise ValueError(f"got both model={model!r} and shape={shape!r}; give one of them")
    if shape is not None:
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; give one of {', '.join(SHAPES)}")
        config = SHAPES[shape]
        depth = config.num_layers
        return ModelShape(
            shape, config, TrainedFor(tuple(sorted({max(1, depth // 4), max(1, depth // 2), depth})))
        )
    path = find_model(model)
    config = checkpoint.read_config(path)
    name = os.fspath(model) if model is not None else path.name
    return ModelShape(name, config, checkpoint.read_trained_for(path, config))


def draft_shape(draft: object) -> ModelShape:
    """Returns the shape of a draft model: a named shape, or the shape in a model's config file.

    Raises:
      ValueError, FileNotFoundError: the model does not exist, or it is a loaded model; one line.
    """
    if isinstance(draft, str) and draft in SHAPES:
        return model_shape(None, draft)
    if not isinstance(draft, (str, os.PathLike)):
        raise ValueError("draft is a loaded model; give a directory or the name of a shape")
    return model_shape(draft)


def loaded_head(path: Path, directory: Path, target: LlamaConfig, dtype: DTypeLike) -> LoadedHead:
    """Returns a head for a method's `build`; call it only under tracing, where nothing is allocated.

    Args:
      path: path or hub id of the head. The name of a stand-in from `write_files` in `directory` is its head type.
      directory: the directory of the stand-ins.
      target: shape of the target model.
      dtype: type of the parameters.

    Raises:
      FileNotFoundError, ValueError: the head does not exist, or it does not fit the target; one line.
    """
    if path.is_relative_to(directory):
        config = known()[path.name].usual(target.plain)
    else:
        config = heads.read_head(heads.resolve(path), target.plain).config
    params = jax.tree.map(lambda shape: jnp.zeros(shape, dtype), config.shapes, is_leaf=llama.is_shape)
    rows = getattr(config, "head_size", None)
    if rows is not None and rows < target.vocab_size:
        ids = jnp.zeros(rows, jnp.int32)
        params["vocabulary"] = Vocabulary(params.pop("head", None), ids, target.vocab_size)
    return LoadedHead(config, params, UNREAD)


def write_files(directory: Path, config: LlamaConfig, distribution: str, vocabulary: bool) -> None:
    """Writes stand-ins of the files that methods read beside a model; their numbers are arbitrary.

    Args:
      directory: the directory to write to.
      config: the model's shape.
      distribution: name of the sampling distribution, see `method_files.distribution_name`.
      vocabulary: whether to write a vocabulary ranking.
    """
    for kind in known():
        path = directory / heads.head_name(kind)
        path.parent.mkdir(parents=True)
        path.touch()
    depth = config.num_layers
    every_other = range(depth // 4, depth - 1, 2)
    plan = LayerPlan.skipping(depth, every_other, every_other)
    method_files.write_plan(directory / method_files.PLAN_NAME, UNREAD, plan, {})
    for exit_layer in range(1, depth):
        path = method_files.probe_path(directory, exit_layer, distribution)
        path.parent.mkdir(exist_ok=True)
        direction = np.zeros(config.hidden_size, np.float32)
        method_files.write_probe(
            path, UNREAD, method_files.ProbeFile(direction, 0.0, exit_layer, distribution)
        )
    if vocabulary:
        ranking = vocabulary_file.Ranking((), tuple(range(config.vocab_size)), 0)
        path = directory / vocabulary_file.VOCABULARY_NAME
        vocabulary_file.write_vocabulary(path, UNREAD, config.vocab_size, ranking, {})
