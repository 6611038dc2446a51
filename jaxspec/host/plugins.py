"""Finds and loads what other packages add by entry points."""

from __future__ import annotations

from collections.abc import Callable, Container
from importlib.metadata import EntryPoint, entry_points
from typing import Any


def added(group: str, own: Container[str]) -> dict[str, EntryPoint]:
    """Returns the entry points of a group by name, sorted, without the names in `own`, which cannot be replaced."""
    found = {point.name: point for point in entry_points(group=group) if point.name not in own}
    return dict(sorted(found.items()))


def loaded(point: EntryPoint, noun: str, expected: str, is_expected: Callable[[Any], bool]) -> Any:
    """Returns the object of an entry point.

    Args:
      point: the entry point.
      noun: a word for the object in messages.
      expected: the object that is expected, in words.
      is_expected: returns whether an object is as expected.

    Raises:
      ValueError: it cannot be loaded, or is not as expected; one line.
    """
    origin = f"{noun} {point.name!r} of the entry point {point.value}"
    try:
        found = point.load()
    except Exception as error:  # whatever another package's import raises
        raise ValueError(
            f"{origin} cannot be loaded ({type(error).__name__}: {error}); repair or remove its package"
        ) from error
    if not is_expected(found):
        raise ValueError(f"{origin} is not {expected}; repair or remove its package")
    return found
