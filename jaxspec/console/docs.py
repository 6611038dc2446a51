"""Descriptions of a dataclass and of its fields, from its docstring."""

from __future__ import annotations

import inspect

import docstring_parser


def description_of(cls: type) -> str:
    """Returns the docstring of a class without the list of its attributes."""
    return (inspect.getdoc(cls) or "").partition("\nAttributes:")[0].strip()


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the description of each attribute by name, from the docstrings of a class and of its bases."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for entry in docstring_parser.parse(base.__doc__ or "").params:
            found.setdefault(entry.arg_name, " ".join((entry.description or "").split()))
    return found
