"""Finds, checks and loads the draft models and heads of a target, each once while its files stay the same."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.heads import files as heads
from jaxspec.host import processes
from jaxspec.host.files import identity
from jaxspec.io import checkpoint
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.tokenizers.intersection import Intersection, intersection
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.loading.loading import find_model, find_tokenizer, fit_to_mesh, place_params
from jaxspec.methods.resources import FilePath, LoadedHead, LoadedModel, ModelLike
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.quantisation import Quantised
from jaxspec.model.sharding import put_on_mesh
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.programs import memory

T = TypeVar("T")
# Cache slots that must fit in memory beside a draft's weights.
_CAPACITY = 512
# The least share of the target's tokens that a draft with another tokenizer must have. Llama 2's has 15 % of Llama 3's.
_LEAST_SHARE = 0.05


class Drafts:
    """Loads draft models and heads to the devices of their target, and again if their files have changed.

    Args:
      config: the target's.
      tokenizer: the target's, if it has one.
      dtype: dtype of the drafts' parameters.
      device: the target's device.
      mesh: the target's mesh; None for one device.
      bits: bits of the quantised weights of draft models, as for the target; None for weights of `dtype`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tokenizer: Tokenizer | None,
        dtype: Any,
        device: jax.Device,
        mesh: Mesh | None,
        bits: int | None = None,
    ) -> None:
        self._config, self._tokenizer, self._dtype, self._bits = config, tokenizer, dtype, bits
        self._device, self._mesh = device, mesh
        # By name: the directory or file, its identity, and what was loaded from it.
        self._loaded: dict[str, tuple[Path, Any, LoadedModel]] = {}
        self._heads: dict[str, tuple[Path, Any, LoadedHead]] = {}
        self._fits: dict[int, LoadedModel] = {}

    def load(self, draft: ModelLike) -> LoadedModel:
        """Returns a draft model, loaded and fitted to the target's tokens.

        Args:
          draft: a directory, a .gguf file, a hub id, the name of an embedded model, or a `LanguageModel`.

        Raises:
          FileNotFoundError, ValueError: there is no such model, it shares too few tokens with the target, or it is on
            another device.
        """
        if not isinstance(draft, (str, os.PathLike)):
            return self._check_loaded(draft)
        name = os.fspath(draft)

        def read(directory: Path) -> LoadedModel:
            config = checkpoint.read_config(directory)
            config = dataclasses.replace(config, kv_cache_dtype=self._config.kv_cache_dtype)
            tokenizer = find_tokenizer(directory)
            found = self._intersection(name, config, tokenizer)
            if self._mesh is None:
                memory.check_fits(memory.Texts(config, self._dtype, 1, self._device, self._bits), _CAPACITY)
            else:
                config = fit_to_mesh(self._mesh, config, f"draft {name}", target=False)
            params, sampled = place_params(
                directory, config, self._dtype, self._device, self._mesh, self._bits, tokenizer
            )
            trained_for = checkpoint.read_trained_for(directory, config)
            return self._fitted(LoadedModel(config, params, name, trained_for, sampled), found)

        return _current(self._loaded, name, find_model, read)

    def load_head(self, path: FilePath, target: LoadedModel) -> LoadedHead:
        """Returns a head, loaded and checked to fit the target; on a mesh it is replicated.

        Args:
          path: a directory or a hub id.
          target: the model that verifies.

        Raises:
          FileNotFoundError, ValueError: there is no such head, or it does not fit.
        """

        def read(directory: Path) -> LoadedHead:
            num_tokens = None if self._tokenizer is None else self._tokenizer.vocab_size
            head = heads.read_head(directory, self._config.plain, num_tokens)
            where: Any = self._device
            if self._mesh is None:
                num_weights = sum(math.prod(shape) for _, shape, _ in head.entries)
                memory.check_head_fits(num_weights, self._dtype, self._device)
            else:
                where = NamedSharding(self._mesh, PartitionSpec())

            def place_leaf(leaf: str, host: np.ndarray) -> jax.Array:
                placed: jax.Array = put_on_mesh(host, where)
                return placed

            config: Any = head.config
            with errors_of(directory):
                params = head.load(self._dtype, place_leaf)
            # Published heads often contain copies of the target's embedding and head.
            if "embed" in params and _same(params["embed"], target.params["embed"]):
                config = dataclasses.replace(config, own_embedding=False)
                del params["embed"]
            own = params.get("head")
            if own is not None and _same(own, llama.head(target.config, target.params)):
                config = dataclasses.replace(config, head_size=None)
                del params["head"]
            return LoadedHead(config, params, head.target, head.rows)

        return _current(self._heads, os.fspath(path), heads.resolve, read)

    def quantised(self, target: LoadedModel, bits: int) -> LoadedModel:
        """Returns a copy of the target with weights of 8 or 4 bits, made once.

        Raises:
          ValueError: the copy does not fit in memory.
        """
        if self._mesh is None and not target.has_quantised(bits):
            memory.check_copy_fits(target.config, self._dtype, bits, _CAPACITY, self._device)
        return target.quantised(bits)

    def _check_loaded(self, draft: Any) -> LoadedModel:
        """Returns a model that the user has loaded, fitted to the target's tokens."""
        name = getattr(draft, "name", "given as a model")
        device, mesh = getattr(draft, "device", self._device), getattr(draft, "mesh", self._mesh)
        if mesh != self._mesh or (self._mesh is None and device != self._device):
            raise ValueError(
                f"draft {name} is on {place(device, mesh)}, the target on {place(self._device, self._mesh)}; load both "
                "with the same device or mesh"
            )
        loaded = getattr(draft, "loaded", None)  # of a LanguageModel: it keeps the fingerprint
        if not isinstance(loaded, LoadedModel):
            loaded = LoadedModel(draft.config, draft.params, name)
        if id(loaded) not in self._fits:
            found = self._intersection(name, loaded.config, getattr(draft, "tokenizer", None))
            if found is None:
                return loaded
            # The entry keeps the draft alive, so that no other object can get its id.
            self._fits[id(loaded)] = self._fitted(loaded, found)
        return self._fits[id(loaded)]

    def _fitted(self, draft: LoadedModel, found: Intersection | None) -> LoadedModel:
        """Returns a draft for the target's tokens; None: it has the same."""
        where: Any = self._device if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        return draft if found is None else fitted(draft, found, where)

    def _intersection(
        self, name: str, config: LlamaConfig, tokenizer: Tokenizer | None
    ) -> Intersection | None:
        """Returns the tokens that both a draft and the target have; None if all tokens have the same ids in both.

        Raises:
          ValueError: these are too few, or there is no tokenizer to compare vocabularies of different sizes.
        """
        own, rows, size = self._tokenizer, config.vocab_size, self._config.vocab_size
        if own is not None and tokenizer is not None and not own.same_vocabulary(tokenizer):
            found, num_tokens = intersection(own, tokenizer, size, rows), own.vocab_size
            shared = len(found.shared)
            if shared < _LEAST_SHARE * num_tokens:
                raise ValueError(
                    f"draft {name} has another tokenizer, with {shared} of the target's {num_tokens} tokens; give a "
                    f"draft that has at least {math.ceil(_LEAST_SHARE * num_tokens)} of them ({_LEAST_SHARE:.0%})"
                )
            return found
        if rows == size:
            return None
        if own is None or tokenizer is None:
            raise ValueError(
                f"draft {name} has a vocabulary of {rows} tokens, the target of {size}, and one of them no tokenizer; "
                "give both with their tokenizers"
            )
        # Only padding differs.
        ids = np.arange(size, dtype=np.int32)
        return Intersection(np.stack([ids[:rows]] * 2, axis=1), np.minimum(ids, rows - 1))


def fitted(draft: LoadedModel, found: Intersection, where: Any) -> LoadedModel:
    """Returns a draft for the tokens of a target, of which it proposes those that both have.

    Args:
      draft: the draft.
      found: the tokens that both have.
      where: the device or sharding of the tables.
    """
    ids, rows = found.shared.T
    head, size = llama.head(draft.config, draft.params), len(found.fed)
    if not np.array_equal(rows, np.arange(draft.config.vocab_size)):
        head = jax.jit(lambda head, rows: head[rows])(head, rows)
    # It is recorded in the draft's own tokens.
    trained = ids[np.isin(rows, draft.trained_for.draft_vocab)]
    return dataclasses.replace(
        draft,
        config=dataclasses.replace(draft.config, vocab_size=size),
        params={
            **draft.params,
            "embed_rows": put_on_mesh(found.fed, where),
            "vocabulary": Vocabulary(head, put_on_mesh(ids, where), size),
        },
        trained_for=dataclasses.replace(draft.trained_for, draft_vocab=tuple(trained.tolist())),
        fitted_from=draft,
    )


def _current(
    loaded: dict[str, tuple[Path, Any, T]], name: str, find: Callable[[str], Path], read: Callable[[Path], T]
) -> T:
    """Returns what is loaded by a name, which is found and read again if its files have changed.

    Several processes must hold the same weights, and may not see a change at the same time.
    """
    if name not in loaded or not (processes.several() or identity(loaded[name][0]) == loaded[name][1]):
        loaded.pop(name, None)  # its memory may be needed
        path = find(name)
        status = identity(path)  # before the reading: files that change meanwhile are read again
        loaded[name] = path, status, read(path)
    return loaded[name][2]


def _same(own: jax.Array, target: jax.Array | Quantised) -> bool:
    """Whether a head's matrix is a copy of its target's; False if the target's is quantised."""
    return not isinstance(target, Quantised) and bool(jnp.array_equal(own, target))


def place(device: jax.Device, mesh: Mesh | None) -> str:
    """Returns the location of a model, for a message."""
    return f"device {device}" if mesh is None else f"a mesh of {dict(mesh.shape)}"
