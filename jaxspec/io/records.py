"""Reads dataclasses from JSON: the fields, their types, and one-line errors. The files that belong to a model."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from jaxspec.host.files import no_file, read_json, write_json
from jaxspec.host.messages import brief_errors, shown

T = TypeVar("T")
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}


@dataclasses.dataclass(frozen=True)
class ModelRecord:
    """The content of a JSON file that belongs to a model: the fields of a subclass, and the model's fingerprint.

    Attributes:
      FORMAT: the value of `format` in the file.
      MADE_BY: the command that makes such a file, for messages.
      MODEL: the key of the fingerprint.
    """

    FORMAT: ClassVar[str]
    MADE_BY: ClassVar[str]
    MODEL: ClassVar[str] = "model"

    @classmethod
    @brief_errors()
    def read(cls, path: str | os.PathLike[str], model: str | None) -> Self:
        """Returns the record in a file, checked to be for the model of this fingerprint; None accepts any model.

        Raises:
          FileNotFoundError, ValueError: the file is missing, damaged or of another model; one line with the remedy.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"{no_file(path)}; make one with `{cls.MADE_BY}`")
        content = read_json(path)
        check_origin(path, content, cls.FORMAT, cls.MADE_BY, model, cls.MODEL)
        return record(cls, content, str(path))

    def write(self, path: str | os.PathLike[str], model: str, found_by: Mapping[str, Any]) -> None:
        """Writes the file, whole or not at all; `found_by` describes how its content was found."""
        about = {"format": self.FORMAT, self.MODEL: model, "found_by": found_by}
        write_json(path, dataclasses.asdict(self) | about)


def check_origin(
    path: str | os.PathLike[str],
    content: Mapping[str, Any],
    form: str,
    made_by: str,
    model: str | None,
    key: str = "model",
) -> None:
    """Refuses the content of a file of another format, or of another model than `model`; see `ModelRecord`."""
    if content.get("format") != form:
        raise ValueError(
            f"{path} has the format {content.get('format')}, expected {form}; make one with `{made_by}`"
        )
    if model is not None and content.get(key) != model:
        raise ValueError(
            f"{path} belongs to another model ({content.get(key)}, this one is {model}); make one with `{made_by}`"
        )


def record(kind: type[T], content: Any, where: str) -> T:
    """Returns the dataclass in a JSON value, the inverse of `dataclasses.asdict`.

    Args:
      kind: a dataclass of whole numbers, finite numbers, texts, other such dataclasses, and tuples and mappings of
        these, or of them and None.
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
            values[name] = _value(content[name], hints[name], where)
        except TypeError:
            expected = _described(hints[name])
            raise ValueError(f"{where} has {shown(content[name])} in `{name}`, expected {expected}") from None
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(value: Any, hint: Any, where: str) -> Any:
    """Returns a value as its type; raises TypeError, or ValueError for a part of it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    # An integer of JSON may be larger than any float.
    if hint in (int, float) and type(value) in (int, hint) and abs(value) <= sys.float_info.max:
        return hint(value)
    if isinstance(hint, types.UnionType):  # X | None
        return None if value is None else _value(value, parts[0], where)
    if hint is str and type(value) is str:
        return value
    if dataclasses.is_dataclass(hint):
        return record(typing.cast(Any, hint), value, where)
    if origin is Mapping and isinstance(value, dict):
        return {name: _value(one, parts[1], f"{where}: {name}") for name, one in value.items()}
    if origin is tuple and isinstance(value, list | tuple):  # a tuple was not written yet
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_value(one, kind, where) for one, kind in zip(value, kinds, strict=True))
    raise TypeError


def _described(hint: Any) -> str:
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return f"{_described(parts[0])} or null"
    if typing.get_origin(hint) is Mapping:
        return f"an object, each entry {_described(parts[1])}"
    if parts and parts[-1] is Ellipsis:
        return f"a list, each entry {_described(parts[0])}"
    return f"[{', '.join(map(_described, parts))}]" if parts else _NAMES.get(hint, "an object")
