"""Finds the files of a model's methods (plans, thresholds, probes), and reads references."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.host.files import identity
from jaxspec.io.user_data import has_user_data, home, model_data
from jaxspec.methods.base import Lookup, Method
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    import jax


def directories(target: LoadedModel, resources: Resources) -> list[Path]:
    """Returns the directories of a model's method files in search order.

    The first is the directory that commands write to, so that the newest file is used. A model made in memory has none.
    """
    beside = resources.directory
    if beside is None:
        return []
    # Avoids the slow fingerprint if the user has no such files.
    if not has_user_data():
        return [beside]
    own = model_data(target.fingerprint)
    return [beside, own] if home(beside, target.name, target.fingerprint) == beside else [own, beside]


def file_of(
    named: str | os.PathLike[str] | None, target: LoadedModel, resources: Resources, name: str
) -> Path | None:
    """Returns the file given by the user, or the first of this name in `directories`.

    If none exists, returns its path in the model's directory; None for a model made in memory.
    """
    if named is not None:
        return Path(named)
    if resources.directory is None:
        return None
    paths = (directory / name for directory in directories(target, resources))
    return next((path for path in paths if os.path.isfile(path)), resources.directory / name)


def found(
    named: str | os.PathLike[str] | None, target: LoadedModel, resources: Resources, name: str
) -> Path | None:
    """Returns the file given by the user, or the first of this name in `directories`, or None."""
    path = file_of(named, target, resources, name)
    return path if named is not None or (path is not None and path.is_file()) else None


def files_of(method: Method, target: LoadedModel, resources: Resources) -> tuple[Any, ...]:
    """Returns the identity of the files that a method may read: those that its options name, and those of the model."""
    from jaxspec.heads.files import HEADS_NAME
    from jaxspec.io.methods.method_files import ASD_NAME, PLAN_NAME, PROBES_NAME, THRESHOLDS_NAME
    from jaxspec.io.methods.vocabulary_file import VOCABULARY_NAME

    options = [
        one for value in method.given.values() for one in (value if type(value) is tuple else (value,))
    ]
    named = [
        files_of(one, target, resources) if isinstance(one, Method) else identity(one)
        for one in options
        if isinstance(one, (str, os.PathLike, Method))
    ]
    if isinstance(method, Lookup) or not method.options():
        return tuple(named)
    names = (ASD_NAME, HEADS_NAME, PLAN_NAME, PROBES_NAME, THRESHOLDS_NAME, VOCABULARY_NAME)
    return *named, *(identity(one / name) for one in directories(target, resources) for name in names)


def read_reference(paths: Sequence[str], resources: Resources) -> jax.Array | None:
    """Returns the text files of an option `reference` as tokens for a lookup drafter; None without files.

    Raises:
      FileNotFoundError, ValueError: a file is missing or not text; one line.
    """
    if not paths:
        return None
    from jaxspec.drafting.lookup import joined
    from jaxspec.host.files import read_text

    return joined(resources.encode(read_text(path, "`reference` must be a text file")) for path in paths)
