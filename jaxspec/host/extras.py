"""The optional extras of the distribution: checks that one is installed, and tells how to install it."""

from __future__ import annotations

import importlib.util


class MissingExtra(ImportError):
    """A package of an extra is not installed; the message names it and the command to install it."""


def require(extra: str, *modules: str) -> None:
    """Checks that an extra is installed, without importing it.

    Args:
      extra: its name in the distribution's metadata, such as `train`.
      modules: modules that come with it, such as `grain` or `orbax.checkpoint`.

    Raises:
      MissingExtra: one of the modules is not installed.
    """
    for name in modules:
        if not _is_installed(name):
            raise MissingExtra(
                f"this needs {name}, of the extra `{extra}`: pip install '.[{extra}]' in jaxspec's repository",
                name=name,
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not
        return False
