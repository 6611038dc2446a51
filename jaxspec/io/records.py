"""Reads dataclasses from JSON: the fields, their types, and one-line errors."""

from __future__ import annotations

import dataclasses
import sys
import typing
from typing import Any, TypeVar

from jaxspec.host.messages import shown

T = TypeVar("T")
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}


def record(kind: type[T], content: Any, where: str) -> T:
    """Returns the dataclass in a JSON value, the inverse of `dataclasses.asdict`.

    Args:
      kind: a dataclass of whole numbers, finite numbers, texts and tuples of these.
      content: the JSON value, an object with each field of `kind` that has no default, and perhaps others.
      where: its origin, for the message.

    Raises:
      ValueError: a field is missing or has another type, or `kind` refuses a value; one line.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field.default for field in dataclasses.fields(typing.cast(Any, kind))}
    names = [name for name, default in fields.items() if default is dataclasses.MISSING]
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {shown(content)}; expected an object with {', '.join(names)}")
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"{where} has no `{missing[0]}`; expected an object with {', '.join(names)}")
    values = {}
    for name in [name for name in fields if name in content]:
        try:
            values[name] = _value(content[name], hints[name])
        except TypeError:
            expected = _described(hints[name])
            raise ValueError(f"{where} has {shown(content[name])} in `{name}`, expected {expected}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(value: Any, hint: Any) -> Any:
    """Returns a value as its type; raises TypeError."""
    parts = typing.get_args(hint)
    # An integer of JSON may be larger than any float.
    if hint in (int, float) and type(value) in (int, hint) and abs(value) <= sys.float_info.max:
        return hint(value)
    if hint is str and type(value) is str:
        return value
    if isinstance(value, list) and parts:
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(map(_value, value, kinds))
    raise TypeError


def _described(hint: Any) -> str:
    parts = typing.get_args(hint)
    if parts and parts[-1] is Ellipsis:
        return f"a list, each entry {_described(parts[0])}"
    return f"[{', '.join(map(_described, parts))}]" if parts else _NAMES[hint]
