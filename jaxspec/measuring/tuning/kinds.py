"""Kinds of prompts by their vectors: groups of similar prompts, and a few centres for each kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# As in KNN-SSD (Song et al. 2025).
MOST_CENTRES = 10
# The groups of prompts that come without kinds.
_GROUPS = 4
_ROUNDS = 50


def k_means(vectors: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `count` centres float32[C, D] of vectors [P, D], and the centre of each, int[P].

    Examples:
      >>> k_means(np.array([[0.0], [9.0], [1.0]]), 2)[0].tolist()
      [[0.5], [9.0]]
    """
    # Every first centre is the vector farthest from those before: equal vectors share one.
    rng = np.random.default_rng(seed)
    centres = vectors[[rng.integers(len(vectors))]].astype(np.float64)
    while len(centres) < count and (far := _distances(vectors, centres).min(axis=1)).max() > 0:
        centres = np.concatenate([centres, vectors[[far.argmax()]]])
    for _ in range(_ROUNDS):
        labels = _distances(vectors, centres).argmin(axis=1)
        centres = np.stack([vectors[labels == one].mean(axis=0) for one in np.unique(labels)])
    return centres.astype(np.float32), _distances(vectors, centres).argmin(axis=1)


def groups(kinds: Sequence[str], vectors: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the indices of the prompts of each kind; prompts of a single kind are grouped by their vectors [P, D]."""
    if len(set(kinds)) == 1:
        kinds = [f"group {label + 1}" for label in k_means(vectors, _GROUPS)[1]]
    return {kind: np.flatnonzero(np.asarray(kinds) == kind) for kind in dict.fromkeys(kinds)}


def _distances(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Returns the squared distances, float64[P, C]."""
    distances: np.ndarray = ((vectors[:, None].astype(np.float64) - centres) ** 2).sum(axis=2)
    return distances
