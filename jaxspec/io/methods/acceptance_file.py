"""The acceptance rates of a head's drafts by its target, which the training of the head measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.methods.method_files import check_model, read_format, write_found

FORMAT = "jaxspec.acceptance/2"
# The file's name beside a head.
NAME = "jaxspec.acceptance.json"
_REMEDY = "python -m training.heads"


def write_acceptance(
    path: str | os.PathLike[str],
    model: str,
    accepted: Mapping[str, Sequence[float]],
    found_by: dict[str, Any],
) -> None:
    """Writes the acceptance by position of each method, by name; `model` is the target's fingerprint."""
    candidates = {name: {"accept": list(shares)} for name, shares in accepted.items()}
    write_found(path, FORMAT, found_by, model=model, candidates=candidates)


@brief_errors()
def read_acceptance(path: str | os.PathLike[str], model: str) -> dict[str, tuple[float, ...]]:
    """Returns the acceptance by position of each method, by name, checked to belong to this model.

    Entry i is the share of the draft tokens at position i that the model accepted, given that it accepted those before.

    Raises:
      ValueError: the file is damaged, or belongs to another model; one line.
    """
    content = read_format(path, FORMAT, "a file of acceptances")
    check_model(path, content.get("model"), model, _REMEDY)
    found = content.get("candidates")
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no candidates; make it with `{_REMEDY}`")
    return {name: _shares(f"{path}: {name}", one) for name, one in found.items()}


def _shares(where: str, content: Any) -> tuple[float, ...]:
    shares = content.get("accept") if isinstance(content, dict) else None
    numbers = isinstance(shares, list) and all(type(one) in (int, float) and 0 <= one <= 1 for one in shares)
    if not shares or not numbers:
        raise ValueError(
            f"{where} has {shown(content)}; expected `accept`, numbers from 0 to 1; make it with `{_REMEDY}`"
        )
    return tuple(map(float, shares))
