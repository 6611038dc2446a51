"""Texts whose caches are kept for texts that begin with the same tokens."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.decoding import Caches
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.sharding import fetched
from jaxspec.protocol import Drafter, kinds_of

# Fewer tokens than this are fed again: a copy of their caches takes about as long.
MIN_TOKENS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Owner:
    """A drafter with caches of its own, which only an equal drafter can use.

    Attributes:
      static: its classes and its structure.
      numbers: the values of its leaves.
      params: its parameters, which are compared by identity.
    """

    static: Any
    numbers: tuple[bytes, ...]
    params: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Owner)
            and (self.static, self.numbers, len(self.params))
            == (other.static, other.numbers, len(other.params))
            and all(mine is theirs for mine, theirs in zip(self.params, other.params, strict=True))
        )

    @classmethod
    def of_drafter(cls, drafter: Drafter, params: Any) -> Owner | None:
        """Returns the owner of the caches of a drafter with these parameters; None if it has no caches."""
        if type(drafter).absorbed is Drafter.absorbed:
            return None
        leaves, structure = jax.tree.flatten(drafter)
        numbers = tuple(np.asarray(leaf).tobytes() for leaf in fetched(leaves))
        return cls((kinds_of(drafter), structure), numbers, tuple(jax.tree.leaves(params)))


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The tokens of a text, and the caches that hold all of them but the last.

    Attributes:
      tokens: int32[n], on the host.
      caches: the caches, of one row.
      kept: whether a store keeps them. They are then copied into a row, and otherwise used up by the session that
        continues from them.
      owner: the drafter of `caches.absorbed`; None without one, or if it is known to be the session's.
    """

    tokens: np.ndarray
    caches: Caches
    kept: bool = False
    owner: Owner | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the caches."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.caches))

    def without_drafter(self) -> Prefix:
        """Returns the same text for another method, which cannot use the drafter's caches."""
        return dataclasses.replace(self, caches=Caches(self.caches.cache), owner=None)

    def start(self, prompt: Sequence[int], drafter: Drafter, config: LlamaConfig) -> int:
        """Returns the position from which a prompt has to be fed; 0 if the caches are of no use.

        The last common token is fed again. If it is the text's last one, no cache holds it; otherwise the drafter's
        caches may hold its hidden states together with another next token.

        Args:
          prompt: the token ids of the new text.
          drafter: the drafter with which it begins.
          config: the target.
        """
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches)):
            return 0  # a call that used them up was interrupted
        if drafter.aux_layers and self.caches.absorbed is None:
            return 0  # the head needs hidden states of all tokens
        limit = config.rope_limit
        if limit is not None and max(len(prompt), len(self.tokens)) > limit:
            return 0  # rotations depend on the length of the prompt, for each text another one
        return max(self.shared(prompt) - 1, 0)

    def shared(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Returns with how many tokens of this text another one begins; 0 if it cannot continue after them.

        A layer with a window may have dropped what the next token sees.
        """
        common, held = num_common(tokens, self.tokens), len(self.tokens) - 1
        caches = jax.tree.leaves(self.caches, is_leaf=lambda node: isinstance(node, KVCache))
        continue_ = (node.continues(held, common - 1) for node in caches if isinstance(node, KVCache))
        return common if all(continue_) else 0


class PrefixStore:
    """Keeps the caches of texts, up to a number of bytes; the least recently used ones are dropped first.

    Args:
      max_bytes: the most bytes of all caches.
      min_tokens: the least number of tokens for which caches are kept or copied.

    Examples:
      >>> store = PrefixStore(max_bytes=2**20)
      >>> len(store), store.num_bytes
      (0, 0)
    """

    def __init__(self, max_bytes: int, min_tokens: int = MIN_TOKENS) -> None:
        self.max_bytes, self.min_tokens = max_bytes, min_tokens
        # The least recently used first.
        self._prefixes: list[Prefix] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all caches that are kept."""
        return sum(prefix.num_bytes for prefix in self._prefixes)

    def clear(self) -> None:
        """Drops all caches."""
        with self._lock:
            self._prefixes = []

    def find(
        self, prompt: Sequence[int], drafter: Drafter, owner: Owner | None, config: LlamaConfig
    ) -> tuple[Prefix | None, int]:
        """Returns the kept text that spares a prompt the most work, and the position from which it has to be fed.

        Caches of the same drafter come first, because those of the target alone leave the drafter's to be filled. The
        result is (None, 0) if no kept text has enough of the prompt's tokens.

        Args:
          prompt, drafter, config: as in `Prefix.start`.
          owner: the owner of the drafter's caches.
        """
        best, key = None, (False, self.min_tokens - 1)
        with self._lock:
            for at, prefix in enumerate(self._prefixes):
                own = prefix if prefix.owner == owner else prefix.without_drafter()
                start = own.start(prompt, drafter, config)
                if start >= self.min_tokens and (own.owner == owner, start) > key:
                    best, key = (at, own), (own.owner == owner, start)
            if best is None:
                return None, 0
            at, own = best
            self._prefixes.append(self._prefixes.pop(at))
        return own, key[1]

    def wants(self, tokens: Sequence[int] | np.ndarray, owner: Owner | None, num_bytes: int) -> bool:
        """Returns whether a text has enough tokens that are not kept, and its caches, of `num_bytes`, may be kept."""
        with self._lock:
            kept = [one.shared(tokens) for one in self._prefixes if owner is None or one.owner == owner]
        return num_bytes <= self.max_bytes and len(tokens) - 1 - max(kept, default=0) >= self.min_tokens

    def add(self, prefix: Prefix) -> None:
        """Keeps a text in place of those that it begins with, and drops others if there are too many bytes."""
        with self._lock:
            self._prefixes = [
                one
                for one in self._prefixes
                if not (
                    one.owner in (None, prefix.owner) and prefix.shared(one.tokens) >= len(one.tokens) - 1
                )
            ]
            self._prefixes.append(dataclasses.replace(prefix, kept=True))
            while self._prefixes and self.num_bytes > self.max_bytes:
                del self._prefixes[0]


def num_common(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Returns the number of tokens with which both texts begin.

    Examples:
      >>> num_common([1, 2, 3, 4], [1, 2, 5])
      2
    """
    size = min(len(first), len(second))
    differs = np.flatnonzero(np.asarray(first[:size]) != np.asarray(second[:size]))
    return int(differs[0]) if len(differs) else size


def shared_beginning(
    prompts: Sequence[Sequence[int]], held: Sequence[int], min_tokens: int
) -> tuple[int, int] | None:
    """Returns a prompt, by its index, and the number of its first tokens that at least one other prompt shares.

    They are the most tokens that neither of the two has in caches; None if there are fewer than `min_tokens` for all
    pairs of prompts.

    Args:
      prompts: token ids.
      held: for each prompt, the number of its first tokens that caches hold.

    Examples:
      >>> shared_beginning([[1, 2, 3], [1, 2, 4], [1, 5, 6]], held=[0, 0, 0], min_tokens=2)
      (0, 2)
    """
    best, most = None, min_tokens - 1
    for first in range(len(prompts)):
        for second in range(first + 1, len(prompts)):
            size = num_common(prompts[first], prompts[second])
            if (new := size - max(held[first], held[second])) > most:
                best, most = (first, size), new
    return best
