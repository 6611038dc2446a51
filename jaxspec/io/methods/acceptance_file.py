"""The file of `jaxspec tune --method auto`: the acceptance rates of each method's drafts by a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxspec.costs.expectations import Expectation
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.methods.method_files import check_model, read_format, write_found
from jaxspec.io.records import record

FORMAT = "jaxspec.acceptance/2"
# The file's name beside a model.
NAME = "jaxspec.acceptance.json"
_REMEDY = "jaxspec tune --method auto"


def write_acceptance(
    path: str | os.PathLike[str], model: str, expected: Mapping[str, Expectation], found_by: dict[str, Any]
) -> None:
    """Writes the expected acceptance of each candidate, by name; `model` is the model's fingerprint."""
    candidates = {name: dataclasses.asdict(one) for name, one in expected.items()}
    write_found(path, FORMAT, found_by, model=model, candidates=candidates)


@brief_errors()
def read_acceptance(path: str | os.PathLike[str], model: str) -> dict[str, Expectation]:
    """Returns the expected acceptance of each candidate, by name, checked to belong to this model.

    Raises:
      FileNotFoundError, ValueError: the file is missing, damaged or of another model; one line with the remedy.
    """
    content = read_format(path, FORMAT, "a file of acceptances")
    check_model(path, content.get("model"), model, _REMEDY)
    found = content.get("candidates")
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no candidates; make it with `{_REMEDY}`")
    return {name: _parsed(f"{path}: {name}", one) for name, one in found.items()}


def _parsed(where: str, content: Any) -> Expectation:
    with contextlib.suppress(ValueError):
        found = record(Expectation, content, where)
        shares = *found.accept, *found.draft
        if found.strength > 0 and found.accept and found.draft and all(0 <= share <= 1 for share in shares):
            return found
    raise ValueError(
        f"{where} has {shown(content)}; expected `accept` and `draft`, numbers from 0 to 1, and `strength`, one above "
        f"0; make it with `{_REMEDY}`"
    )
