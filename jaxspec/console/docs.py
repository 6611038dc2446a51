"""Descriptions of a dataclass's fields, from its docstring."""

from __future__ import annotations

import docstring_parser


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the description of each attribute by name, from the docstrings of a class and of its bases.

    Examples:
      >>> class Options:
      ...     '''Some options.
      ...
      ...     Attributes:
      ...       seed: of the randomness.
      ...     '''
      >>> attribute_docs(Options)
      {'seed': 'of the randomness.'}
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for entry in docstring_parser.parse(base.__doc__ or "").params:
            found.setdefault(entry.arg_name, " ".join((entry.description or "").split()))
    return found
