"""The models that come with jaxspec: their names and where they lie. Nothing here needs JAX."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

# The one that serves where none is named.
EMBEDDED = "large"
_PACKAGE = Path(__file__).parents[1]
# Of a wheel, of a checkout.
_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def embedded_names() -> list[str]:
    """Their names, the default first."""
    found = {path.parent.name for path in embedded_files("*/config.json")}
    return sorted(found, key=lambda name: (name != EMBEDDED, name))


def embedded_files(pattern: str) -> list[Path]:
    """The files that come with jaxspec and match a pattern, in their order, those of a wheel first."""
    return [path for root in _ROOTS for path in sorted(root.glob(pattern))]


def embedded_model(name: str = EMBEDDED) -> Path:
    """The directory of a model that comes with jaxspec.

    Raises:
      FileNotFoundError: no model of this name comes with it.
    """
    for root in _ROOTS:
        if re.fullmatch(r"[\w-]+", name) and (root / name / "config.json").is_file():
            return root / name
    raise FileNotFoundError(
        f"no model {name!r} comes with this installation, only {', '.join(embedded_names()) or 'none'}; "
        "give one of them, or install jaxspec again"
    )


def comes_along(directory: str | os.PathLike[str], name: str) -> bool:
    """Whether a model that was loaded as `name` from `directory` is not its user's: loaded by the name of an embedded
    one, or from within the installed package."""
    directory = Path(directory).resolve()
    return directory.is_relative_to(_PACKAGE.resolve()) or any(
        directory == (root / name).resolve() for root in _ROOTS if re.fullmatch(r"[\w-]+", name)
    )


def names_and_guess(name: str) -> str:
    """For a name that is no model's: the embedded models' names, and which of them was perhaps meant."""
    names = embedded_names()
    near = difflib.get_close_matches(name.lower(), names, 1)
    return ", ".join(names) + (f" (perhaps you meant {near[0]})" if near else "")
