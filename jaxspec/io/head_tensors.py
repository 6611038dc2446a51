"""What the readers of all kinds of heads share: a head in its files, and the check that nothing is left over."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.io import huggingface
from jaxspec.io.hf_layout import Source
from jaxspec.io.huggingface import Place
from jaxspec.io.tensors import DTYPES, Tensors
from jaxspec.model.config import LlamaConfig, RopeScaling
from jaxspec.model.heads import AnyHead
from jaxspec.model.llama import Params, is_shape
from jaxspec.model.vocabulary import Vocabulary

# The base of the rotary embedding if a head's authors give none.
USUAL_THETA = 10000.0
# Name, shape and sources of a leaf of a head's parameters.
Entry = tuple[str, tuple[int, ...], list[Source]]


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as it lies in a directory.

    Attributes:
      config: what it is made of.
      entries: its leaves, in the order of the tree `config.shapes`.
      tensors: by name; more than these, perhaps.
      vocab_size: V of the target.
      ids: int32[V'], the tokens of its own head, in the order of its rows; None for all.
      by_token: the tensors that have a row for each of `ids`, or for each of the target's tokens.
      target: the fingerprint of the model that it was trained for; None if the head does not record it.
      rows: the number of the target's tokens, from the first, that it has rows for; the others are padding. None for
        all.
    """

    config: AnyHead
    entries: tuple[Entry, ...] = dataclasses.field(repr=False)
    tensors: Mapping[str, np.ndarray] = dataclasses.field(repr=False)
    vocab_size: int
    ids: np.ndarray | None = None
    by_token: Collection[str] = ()
    target: str | None = None
    rows: int | None = None

    def load(self, dtype: DTypeLike, place: Place | None = None) -> Params:
        """The head's parameters, see `model.eagle` and its siblings; `place` as of `huggingface.load_params`."""
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


def leaves_of(shapes: Params) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Name, joined by `/`, and shape of every leaf of a tree of shapes, in its order."""
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
    """Tensors by their plain names, without those that have none."""
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in found.items():
        new = plain(name)
        if new in tensors:
            raise ValueError(f"{directory}: two tensors are {new}, one of them as {name}; leave one")
        if new is not None:
            tensors[new] = tensor
    return tensors


def are_copies(tensors: Mapping[str, np.ndarray], names: Iterable[Sequence[str]]) -> bool:
    """Whether the tensors of each group of names are one and the same."""
    return all(np.array_equal(tensors[group[0]], tensors[name]) for group in names for name in group[1:])


def check_tensors(
    directory: Path,
    kind: str,
    entries: Iterable[Entry],
    tensors: Mapping[str, np.ndarray],
    more: Collection[str] = (),
    hints: Mapping[str, str] | None = None,
    others: Mapping[str, int] | None = None,
) -> None:
    """Refuses tensors that are not those of a head: one that is left out would change what it computes.

    Args:
      directory: where they lie, for messages.
      kind: of the head.
      entries: its leaves.
      tensors: what was found.
      more: names that are read elsewhere, or may be there.
      hints: of a name without a place, the option of the config that would give it one.
      others: of a name, what its first axis may be as well.
    """
    used = set(more)
    for _, _, sources in entries:
        for source in sources:
            used.add(source.name)
            if source.name not in tensors:
                raise ValueError(
                    f"{directory}: tensor {source.name} is missing, expected shape {source.shape}"
                )
            shape = tensors[source.name].shape
            other = (others or {}).get(source.name, source.shape[0])
            if shape not in (source.shape, (other, *source.shape[1:])):
                raise ValueError(
                    f"{directory}: tensor {source.name} has shape {shape}, expected {source.shape} by config.json"
                )
    for name in sorted(set(tensors) - used):
        if "rotary_emb" not in name:
            option = (hints or {}).get(name)
            hint = f"; is {option} missing in config.json?" if option else ""
            article = "an" if kind[0] in "aeiou" else "a"
            raise ValueError(
                f"{directory}: tensor {name} has no place in {article} {kind} head of this config.json{hint}"
            )


def check_ids(directory: Path, ids: np.ndarray, size: int, name: str, hint: str = "") -> np.ndarray:
    """The tokens of a head's own vocabulary as int32, checked to be different tokens of the target's `size`."""
    if len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f"{directory}: {name} must name {len(ids)} different tokens from 0 to {size - 1}{hint}"
        )
    return np.asarray(ids, np.int32)
