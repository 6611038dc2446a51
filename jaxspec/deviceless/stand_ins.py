"""Models without weights, and files that a method needs: what shapes a program, with numbers that mean nothing."""

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

from jaxspec.bench.profile import SHAPES
from jaxspec.engine.loading import find_model
from jaxspec.io import checkpoint, heads, method_files, vocabulary_file
from jaxspec.methods import LoadedModel
from jaxspec.methods.resources import LoadedHead
from jaxspec.model import dflash, llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.dflash import DFlashConfig
from jaxspec.model.eagle import HeadConfig, usual_taps
from jaxspec.model.heads import AnyHead
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.medusa import MedusaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantised import quantise
from jaxspec.model.sharding import spread_config
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.sampling import seed_key

# In place of the fingerprint of weights that nobody read.
UNREAD = "weights-not-read"
# Tokens of published EAGLE-3 heads.
USUAL_HEAD = 32_000


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A model of which only the shape is known.

    Attributes:
      name: what messages call it.
      config: the architecture.
      exits: that a sorted draft was trained for, in layers run.
      bits: of quantised weights; None where they are of the dtype.
    """

    name: str
    config: LlamaConfig
    exits: tuple[int, ...] = ()
    bits: int | None = None

    def over(self, mesh: Mesh | None) -> ModelShape:
        """The shape as a mesh holds it, see `model.sharding.spread_config`; None for one device."""
        return self if mesh is None else dataclasses.replace(self, config=spread_config(mesh, self.config))

    def params(self, dtype: DTypeLike) -> llama.Params:
        """Its parameters as `jax.ShapeDtypeStruct`s."""

        def make() -> llama.Params:
            params = llama.init_params(self.config, seed_key(0), dtype)
            if self.bits is not None:
                params = quantise(self.config, params, self.bits)
            return params

        made: llama.Params = jax.eval_shape(make)
        return made

    def loaded(self, dtype: DTypeLike) -> LoadedModel:
        """The model as a method's `build` takes it, to be called while JAX traces: nothing is allocated there."""
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.params(dtype))
        return _Unread(self.config, params, self.name, self.exits)


@dataclasses.dataclass(frozen=True)
class _Unread(LoadedModel):
    @functools.cached_property
    def fingerprint(self) -> str:
        return UNREAD


def model_shape(model: str | os.PathLike[str] | None, shape: str | None = None) -> ModelShape:
    """The shape of a model: of its files, of which the config is read, or one of a usual name.

    A usual shape stands for a sorted draft too, with exits at a quarter, at half and at the end of its layers.

    Raises:
      ValueError, FileNotFoundError: there is none, or both are given; one line.

    Examples:
      >>> model_shape(None, "8b").exits
      (8, 16, 32)
    """
    if shape is not None and model is not None:
        raise ValueError(f"got both model={model!r} and shape={shape!r}; give one of them")
    if shape is not None:
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; give one of {', '.join(SHAPES)}")
        config = SHAPES[shape]
        depth = config.num_layers
        return ModelShape(shape, config, tuple(sorted({max(1, depth // 4), max(1, depth // 2), depth})))
    path = find_model(model)
    config = checkpoint.read_config(path)
    name = os.fspath(model) if model is not None else path.name
    return ModelShape(name, config, checkpoint.read_exits(path, config.num_layers))


def draft_shape(draft: object) -> ModelShape:
    """The shape of a draft: a usual one by its name, or that of a model's files.

    Raises:
      ValueError, FileNotFoundError: there is none; one line.
    """
    if isinstance(draft, str) and draft in SHAPES:
        return model_shape(None, draft)
    if not isinstance(draft, (str, os.PathLike)):
        raise ValueError("draft is a loaded model; give a directory or the name of a shape")
    return model_shape(draft)


def loaded_head(path: Path, directory: Path, target: LlamaConfig, dtype: DTypeLike) -> LoadedHead:
    """A head as a method's `build` takes it, to be called while JAX traces: nothing is allocated there.

    Args:
      path: where it lies, or the hub id of one; of a stand-in that `write_files` put into `directory` only its kind
        counts.
      directory: of the stand-ins.
      target: the model that verifies.
      dtype: of the parameters.

    Raises:
      FileNotFoundError, ValueError: there is none, or it does not fit; one line.
    """
    config = _usual_head(path.name, target.plain) if path.is_relative_to(directory) else None
    if config is None:
        config = heads.read_head(heads.resolve(path), target.plain).config
    params = jax.tree.map(lambda shape: jnp.zeros(shape, dtype), config.shapes, is_leaf=llama.is_shape)
    rows = getattr(config, "head_size", None)
    if rows is not None and rows < target.vocab_size:
        ids = jnp.zeros(rows, jnp.int32)
        params["vocabulary"] = Vocabulary(params.pop("head", None), ids, target.vocab_size)
    return LoadedHead(config, params, UNREAD)


def _usual_head(kind: str, target: LlamaConfig) -> AnyHead:
    """A head as published ones are; of EAGLE-3 over 32,000 tokens at most."""
    block, width, size = target.truncated(1), target.hidden_size, target.vocab_size
    if kind == "kangaroo":
        return KangarooConfig(block, min(2, target.num_layers - 1))
    if kind == "medusa":
        return MedusaConfig(width, num_heads=5, head_size=size, own_heads=True)
    if kind == "hydra":
        return HydraConfig(width, size, num_heads=4, num_layers=4, prefix=block)
    if kind == "dflash":
        layers = dataclasses.replace(block, num_layers=5, sliding_windows=(), qk_norm=True)
        return DFlashConfig(layers, _within(dflash.usual_taps(target.num_layers, 5), target), 16, mask_id=0)
    if kind == "eagle":
        return HeadConfig(block)
    taps = _within(usual_taps(target.num_layers), target)
    return HeadConfig(block, taps, "eagle3", head_size=min(USUAL_HEAD, size))


def _within(taps: tuple[int, ...], target: LlamaConfig) -> tuple[int, ...]:
    """Taps of a target that may have fewer layers than heads are made for."""
    return tuple(min(max(tap, 0), target.num_layers) for tap in taps)


def write_files(directory: Path, config: LlamaConfig, law: str, vocabulary: bool) -> None:
    """Writes the files that methods look for beside a model: their shapes count, not their numbers.

    Args:
      directory: where.
      config: of the model.
      law: of the texts, see `method_files.law_name`.
      vocabulary: whether a ranking of its tokens is among them.
    """
    for kind in ("dflash", "eagle", "eagle3", "kangaroo", "medusa", "hydra"):
        path = directory / heads.head_name(kind)
        path.parent.mkdir(parents=True)
        path.touch()
    depth = config.num_layers
    every_other = range(depth // 4, depth - 1, 2)
    plan = LayerPlan.skipping(depth, every_other, every_other)
    method_files.write_plan(directory / method_files.PLAN_NAME, UNREAD, plan, {})
    for exit_layer in range(1, depth):
        path = method_files.probe_path(directory, exit_layer, law)
        path.parent.mkdir(exist_ok=True)
        direction = np.zeros(config.hidden_size, np.float32)
        method_files.write_probe(path, UNREAD, method_files.ProbeFile(direction, 0.0, exit_layer, law))
    if vocabulary:
        ranking = vocabulary_file.Ranking((), tuple(range(config.vocab_size)), 0)
        path = directory / vocabulary_file.VOCABULARY_NAME
        vocabulary_file.write_vocabulary(path, UNREAD, config.vocab_size, ranking, {})
