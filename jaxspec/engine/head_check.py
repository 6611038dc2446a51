"""Measures on a short text whether a model accepts the drafts of a head that was trained for another fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.engine.model import Model
from jaxspec.host.user_cache import keep, kept
from jaxspec.methods.resources import FilePath
from jaxspec.protocol import Drafter
from jaxspec.texts.results import Result

_PROMPT = "If Tom has 3 boxes with 12 apples each, how many apples does he have? Explain each step."
_NUM_TOKENS = 64


def first_accepted(
    model: Model,
    generate: Callable[..., Result],
    path: FilePath,
    drafter: Drafter,
    params: Any,
    num_certain: int = 0,
) -> float | None:
    """Returns the share of a head's drafts whose first uncertain token the model accepts in a short greedy text.

    The result is kept in the user's cache, by the model's fingerprint and precision, and the head's files.

    Args:
      model: the model.
      generate: its `LanguageModel.generate`.
      path: the head's directory or hub id.
      drafter: the head's drafter.
      params: its parameters.
      num_certain: the number of draft tokens before that token, which are accepted from a head of any model.

    Returns:
      The share; None for a model without a tokenizer, or on a mesh.
    """
    if model.tokenizer is None or model.mesh is not None:
        return None
    key = [model.fingerprint, model.precision, _files(Path(path))]
    found = kept("heads", key)
    if isinstance(found, float):
        return found
    chat = model.tokenizer.has_chat_template
    result = generate(
        _PROMPT,
        method=(drafter, params),
        chat=chat,
        max_new_tokens=_NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    counts = result.statistics.acceptance_histogram
    share = float(sum(counts[1 + num_certain :]) / max(1, sum(counts)))
    keep("heads", key, share)
    return share


def _files(head: Path) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of the files of a head in a directory; the files of a hub id never change."""
    found = (
        [(path.name, path.stat()) for path in sorted(head.iterdir()) if path.is_file()]
        if head.is_dir()
        else []
    )
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]
