"""Shared by the readers of all head types: a head in its files, and the check that all its tensors are used."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.host.messages import shown
from jaxspec.io.hf import huggingface
from jaxspec.io.hf.config_json import config_from
from jaxspec.io.hf.huggingface import Place
from jaxspec.io.hf.layout import Source, sources_of
from jaxspec.io.tensors import DTYPES, Tensors
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.head import HeadConfig
from jaxspec.model.llama import Params, is_shape
from jaxspec.model.vocabulary import Vocabulary

# The base of the rotary embedding if a head's authors give none.
USUAL_THETA = 10000.0
# The families whose layers heads have.
_BLOCKS = ("llama", "mistral", "ministral", "qwen2", "qwen3")
# Name, shape and sources of a leaf of a head's parameters.
Entry = tuple[str, tuple[int, ...], list[Source]]


@dataclasses.dataclass(frozen=True)
class Head:
    """A head in its directory.

    Attributes:
      config: its configuration.
      entries: its leaves, in the order of the tree `config.shapes`.
      tensors: its tensors by name; may contain others.
      vocab_size: V of the target.
      ids: int32[V'], the tokens of its own head, in the order of its rows; None for all tokens.
      by_token: the names of tensors with one row for each of `ids`, or for each of the target's tokens.
      target: the fingerprint of the model that it was trained for; None if the head does not record it.
      rows: the head has rows for the target's first `rows` tokens, and the others are padding; None for all tokens.
    """

    config: HeadConfig
    entries: tuple[Entry, ...] = dataclasses.field(repr=False)
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    vocab_size: int
    ids: np.ndarray | None = None
    by_token: Collection[str] = ()
    target: str | None = None
    rows: int | None = None

    def load(self, dtype: DTypeLike, place: Place | None = None) -> Params:
        """Returns the parameters, see the module `network` of the head's type; `place` as in `load_params`."""
        ids = None if self.ids is None else np.sort(self.ids)

        def fetch(source: Source) -> np.ndarray:
            tensor = self.tensors[source.name]
            if self.ids is None or source.name not in self.by_token:
                return tensor
            return tensor[ids if len(tensor) == self.vocab_size else np.argsort(self.ids)]

        tree = jax.tree.structure(self.config.shapes, is_leaf=is_shape)
        placed = huggingface.place_leaves(self.entries, np.dtype(dtype), fetch, place)
        params: Params = jax.tree.unflatten(tree, placed)
        if ids is not None:
            placed_ids = jnp.asarray(ids) if place is None else place("ids", ids)
            params["vocabulary"] = Vocabulary(params.pop("head", None), placed_ids, self.vocab_size)
        return params


def with_rope_of_training(
    directory: Path, block: LlamaConfig, scaling: RopeScaling | None, trainer: str
) -> LlamaConfig:
    """Returns a head's config with the rotary embedding of its training code: the usual base, and this scaling.

    Warns:
      RuntimeWarning: the head's config claims another embedding.
    """
    trained = dataclasses.replace(block, rope_theta=USUAL_THETA, rope_scaling=scaling)
    if trained != block:
        claimed = f"rope_theta {block.rope_theta:g}"
        if block.rope_scaling != scaling and block.rope_scaling is not None:
            claimed += f" and {block.rope_scaling.kind} scaling"
        warnings.warn(
            f"{directory}: config.json claims {claimed}, which {trainer} does not use; the head is read as it was "
            f"trained, with rope_theta {USUAL_THETA:g}",
            RuntimeWarning,
            stacklevel=4,
        )
    return trained


def read_block(content: Mapping[str, Any]) -> LlamaConfig:
    """Returns the configuration of a head's layers, which are those of a Llama, Mistral or Qwen.

    Raises:
      ValueError: they are those of another family, or a value is invalid; one line.
    """
    kind = content.get("model_type", "llama")
    if kind not in _BLOCKS:
        raise ValueError(
            f"model_type {shown(kind)} is not supported for a head; supported: {', '.join(_BLOCKS)}"
        )
    return dataclasses.replace(config_from({**content, "model_type": kind}), tie_embeddings=False)


def leaves_of(shapes: Params) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yields the name (joined by `/`) and shape of each leaf of a tree of shapes, in tree order."""
    flat, _ = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    for path, shape in flat:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), shape


def refuse_left_out(directory: Path, names: Iterable[str], found: Tensors) -> None:
    """Refuses tensors of a head that could not be read."""
    for name in sorted(names):
        raise ValueError(
            f"{directory}: tensor {name} is {found.left_out[name]}; quantised heads are not supported, give one with "
            f"one of {', '.join(DTYPES)}"
        )


def renamed(directory: Path, found: Tensors, plain: Callable[[str], str | None]) -> dict[str, np.ndarray]:
    """Returns the tensors by their plain names, without those for which `plain` returns None."""
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in found.items():
        new = plain(name)
        if new in tensors:
            raise ValueError(f"{directory}: two tensors are {new}, one of them as {name}; leave one")
        if new is not None:
            tensors[new] = tensor
    return tensors


def are_copies(tensors: Mapping[str, np.ndarray], names: Iterable[Sequence[str]]) -> bool:
    """Whether the tensors of each group of names are equal."""
    return all(np.array_equal(tensors[group[0]], tensors[name]) for group in names for name in group[1:])


def llama_sources(block: LlamaConfig, leaf: str, shape: tuple[int, ...], prefix: str = "") -> list[Source]:
    """Returns the sources of a leaf of Llama layers whose tensors have this prefix in place of `model.`."""
    sources = sources_of(block, leaf, shape)
    return [dataclasses.replace(one, name=prefix + one.name.removeprefix("model.")) for one in sources]


def check_sizes(block: LlamaConfig, target: LlamaConfig, what: str) -> None:
    """Refuses a head, called `what`, for another vocabulary or width than the target's."""
    if (block.vocab_size, block.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ValueError(
            f"the {what} is for a model of {block.vocab_size} tokens and width {block.hidden_size}, the target has "
            f"{target.vocab_size} and {target.hidden_size}; {_a(what)} fits the model that it was trained for"
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def checked(
    directory: Path, head: Head, more: Collection[str] = (), hints: Mapping[str, str] | None = None
) -> Head:
    """Returns the head after the check that its tensors are complete and all used; an ignored one would be an error.

    Args:
      directory: the head's directory, for messages.
      head: its config, leaves and tensors. The first axis of a tensor in `by_token` may also have the target's size.
      more: names of tensors that are read elsewhere, or are optional.
      hints: name of a tensor → the config option without which it is not used.

    Raises:
      ValueError: a tensor is missing, of another shape or not used; one line.
    """
    used, tensors = set(more), head.tensors
    for _, _, sources in head.entries:
        for source in sources:
            used.add(source.name)
            if source.name not in tensors:
                raise ValueError(
                    f"{directory}: tensor {source.name} is missing, expected shape {source.shape}"
                )
            shape = tensors[source.name].shape
            other = head.vocab_size if source.name in head.by_token else source.shape[0]
            if shape not in (source.shape, (other, *source.shape[1:])):
                raise ValueError(
                    f"{directory}: tensor {source.name} has shape {shape}, expected {source.shape} by config.json"
                )
    for name in sorted(set(tensors) - used):
        if "rotary_emb" not in name:
            option = (hints or {}).get(name)
            hint = f"; is {option} missing in config.json?" if option else ""
            raise ValueError(
                f"{directory}: tensor {name} has no place in {_a(head.config.kind)} head of this config.json{hint}"
            )
    return head


def check_ids(directory: Path, ids: np.ndarray, size: int, name: str, hint: str = "") -> np.ndarray:
    """Returns the tokens of a head's own vocabulary as int32, checked to be different and in [0, `size`)."""
    if len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f"{directory}: {name} must name {len(ids)} different tokens from 0 to {size - 1}{hint}"
        )
    return np.asarray(ids, np.int32)


def draft_ids(
    directory: Path, rows: int | None, size: int, tensors: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """Returns the tokens of a head's own vocabulary by its `d2t`, the difference of each token and its row.

    Args:
      directory: the head's directory, for messages.
      rows: the number of rows of its output head; None if it has no own.
      size: V of the target.
      tensors: the head's; `d2t` of int64[rows] and `t2d` of bool[V], which marks the same tokens.

    Returns:
      int32[rows], in the order of the rows; None for all tokens.
    """
    own, rows = rows is not None, size if rows is None else rows
    if "d2t" not in tensors:
        if rows != size:
            raise ValueError(
                f"{directory}: tensor d2t is missing: which of {size} tokens the {rows} rows of lm_head are"
            )
        return None
    offsets = tensors["d2t"]
    if offsets.shape != (rows,) or offsets.dtype.kind != "i":
        raise ValueError(
            f"{directory}: tensor d2t is {offsets.dtype}{offsets.shape}, expected int64({rows},)"
        )
    ids = check_ids(directory, np.arange(rows) + offsets, size, "row + d2t", "; is d2t an offset here?")
    known = tensors.get("t2d")
    if known is not None and (
        known.shape != (size,) or not np.array_equal(np.flatnonzero(known), np.sort(ids))
    ):
        raise ValueError(f"{directory}: t2d marks other tokens than row + d2t names; save the head again")
    if not own and offsets.any():
        raise ValueError(
            f"{directory}: d2t changes the order of the tokens; expected zeros: the head has the target's matrix"
        )
    return ids if own else None


def part(config: Any, ids: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns the tensors that name the tokens of the head's rows, int32[V'] in the order of the rows; None for all.

    Raises:
      ValueError: the head has another number of rows.
    """
    size = config.block.vocab_size
    rows = size if ids is None else len(ids)
    if config.head_size not in (None, rows):
        raise ValueError(f"ids are {rows} tokens, the head has {config.head_size} rows; give one of each row")
    if ids is None:
        return {}
    return {"d2t": ids.astype(np.int64) - np.arange(rows), "t2d": np.isin(np.arange(size), ids)}
