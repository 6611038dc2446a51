"""Reads pickles of plain values: Python's reader with the operations and functions that tensors need, and no others.

It is the reader in Python, `pickle._Unpickler`, because the table of its operations can be replaced. The one in C
computes the hash of any key, such as a tuple whose hash takes years, and calls `__setstate__` of any object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

# The functions that a pickle may call, by full name. A function gets its arguments from the pickle, of any type.
Makers = Mapping[str, Callable[..., Any]]
_OPERATIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BINPERSID),
)
# PyTorch stores this attribute with the dictionary of a module's tensors; it changes no tensor.
_METADATA = "_metadata"


class ForeignError(ValueError):
    """A pickle names a function that is not among the makers; the message is the function's name."""


class Maker(NamedTuple):
    """A function that a pickle may name. It has no attribute that a pickle could set."""

    name: str
    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Returns the value of the function."""
        return self.call(*arguments)


class ByName(dict[str, Any]):
    """A dictionary of a pickle. Text is the only key type whose hash takes no more time than its length."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise ValueError("its pickle has a dictionary with keys other than text")
        super().__setitem__(key, value)


def load(pickled: bytes, makers: Makers, persistent: Callable[[Any], Any]) -> Any:
    """Returns the value in a pickle: text, numbers, tuples, lists, dictionaries with text keys, and makers' results.

    Args:
      pickled: the pickle; the time is linear in its length, if that of each maker is constant.
      makers: the functions that the pickle may call.
      persistent: makes the value of a persistent id.

    Raises:
      ForeignError: the pickle names a function that is not in `makers`.
      ValueError: the pickle is damaged or holds other values, or a maker refuses its arguments.
    """
    reader = _Reader(pickled, makers, persistent)
    try:
        value = reader.load()
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError):
        raise ValueError("its pickle is damaged, or has operations that tensors do not need") from None
    if max(reader.memo, default=0) > len(pickled):
        raise ValueError("its pickle remembers more values than it has")
    return value


class _Reader(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    memo: dict[int, Any]

    def __init__(self, pickled: bytes, makers: Makers, persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._makers, self._persistent = makers, persistent

    def find_class(self, module: str, name: str) -> Maker:
        full = f"{module}.{name}"
        if full not in self._makers:
            raise ForeignError(full)
        return Maker(full, self._makers[full])

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def _empty_dict(self) -> None:
        self.append(ByName())

    def _build(self) -> None:
        state = self.stack.pop()
        if not (
            isinstance(self.stack[-1], ByName) and isinstance(state, ByName) and set(state) == {_METADATA}
        ):
            raise ValueError("its pickle sets attributes of an object, which tensors do not need")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{name[0]: pickle._Unpickler.dispatch[name[0]] for name in _OPERATIONS},
        pickle.EMPTY_DICT[0]: _empty_dict,
        pickle.BUILD[0]: _build,
    }
