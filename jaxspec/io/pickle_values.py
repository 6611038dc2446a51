"""Reads pickles of plain values without `pickle`, and creates only plain values and the results of given functions.

`pickle.Unpickler` builds any object that a pickle describes. A pickle of a few hundred bytes can describe a tuple whose
hash takes years, or change an array used elsewhere. This reader takes one step for each opcode of `pickletools`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The functions that a pickle may call, by full name. A function gets its arguments from the pickle, of any type.
Makers = Mapping[str, Callable[..., Any]]
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# PyTorch stores this attribute with the dictionary of a module's tensors; it changes no tensor.
_METADATA = "_metadata"


class ForeignError(ValueError):
    """A pickle names a function that is not among the makers; the message is the function's name."""


class Maker(NamedTuple):
    """A function that a pickle may name."""

    name: str
    call: Callable[..., Any]


def load(pickled: bytes, makers: Makers, persistent: Callable[[Any], Any]) -> Any:
    """Returns the value in a pickle: text, numbers, tuples, lists, dictionaries with text keys, and makers' results.

    Args:
      pickled: the pickle; the time is linear in its length.
      makers: the functions that the pickle may call.
      persistent: makes the value of a persistent id.

    Raises:
      ForeignError: the pickle names a function that is not in `makers`.
      ValueError: the pickle is damaged or holds other values, or a maker refuses its arguments.
    """
    machine = _Machine(makers, persistent, len(pickled))
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    except (IndexError, KeyError):
        raise ValueError("its pickle is damaged") from None


class _Machine:
    def __init__(self, makers: Makers, persistent: Callable[[Any], Any], most: int) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._makers, self._persistent, self._most = makers, persistent, most

    def step(self, name: str, argument: Any) -> None:
        if name in _ARGUMENTS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(reversed([self.stack.pop() for _ in range(_TUPLES[name])])))
        elif name not in ("PROTO", "FRAME"):
            method = getattr(self, "_" + name.lower(), None)
            if method is None:
                raise ValueError(f"its pickle has the operation {name}, which tensors do not need")
            method(argument)

    def _mark(self, _: None) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self._below.pop()
        return values

    def _pop(self, _: None) -> None:
        self.stack.pop()

    def _tuple(self, _: None) -> None:
        values = tuple(self._since_mark())
        self.stack.append(values)

    def _empty_list(self, _: None) -> None:
        self.stack.append([])

    def _empty_dict(self, _: None) -> None:
        self.stack.append({})

    def _append(self, _: None) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: None) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("its pickle appends to a value that is not a list")
        self.stack[-1].extend(values)

    def _setitem(self, _: None) -> None:
        value = self.stack.pop()
        self._update([self.stack.pop(), value])

    def _setitems(self, _: None) -> None:
        self._update(self._since_mark())

    def _update(self, pairs: list[Any]) -> None:
        # Text is the only key type whose hash takes no more time than its length.
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str) for key in pairs[::2]):
            raise ValueError("its pickle has a dictionary with keys other than text")
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _binput(self, number: int) -> None:
        if number > self._most:
            raise ValueError("its pickle remembers more values than it has")
        self._memo[number] = self.stack[-1]

    _long_binput = _binput

    def _memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _binget(self, number: int) -> None:
        self.stack.append(self._memo[number])

    _long_binget = _binget

    def _global(self, name: str) -> None:
        self._push_maker(name.replace(" ", "."))

    def _stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("its pickle names a function by a value that is not text")
        self._push_maker(f"{module}.{name}")

    def _push_maker(self, name: str) -> None:
        if name not in self._makers:
            raise ForeignError(name)
        self.stack.append(Maker(name, self._makers[name]))

    def _binpersid(self, _: None) -> None:
        self.stack.append(self._persistent(self.stack.pop()))

    def _reduce(self, _: None) -> None:
        arguments, maker = self.stack.pop(), self.stack.pop()
        if not (isinstance(maker, Maker) and isinstance(arguments, tuple)):
            raise ValueError("its pickle calls a value that is not a function")
        try:
            self.stack.append(maker.call(*arguments))
        except TypeError:
            raise ValueError(f"its pickle calls {maker.name} with wrong arguments") from None

    def _build(self, _: None) -> None:
        state = self.stack.pop()
        if not (isinstance(self.stack[-1], dict) and isinstance(state, dict) and set(state) == {_METADATA}):
            raise ValueError("its pickle sets attributes of an object, which tensors do not need")
