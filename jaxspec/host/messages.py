"""Formats error messages: the values in them, and their length."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Longer whole numbers are abbreviated.
_MAX_BITS = 1024
# The maximum number of characters of a message, for any content of a file, and of a word in a longer message.
_MAX_MESSAGE, _MAX_WORD = 300, 90
# The least similarity of a suggestion, see `difflib`; at .71, --system would be suggested for --temp.
_NEAR = 0.75
# The maximum number of characters of a value in a message.
_MAX_VALUE = 70


def shown(value: Any) -> str:
    """Returns a value for a message: short, and in one line."""
    return _shortened(" ".join(_SHORT.repr(value).split()), _MAX_VALUE)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which has a plural in -s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelled one probably stands for; None if none is similar, or it is too long.

    Leading dashes and slashes do not count.
    """
    if len(name) > _MAX_WORD:
        return None
    by_name = {one.lstrip("-/").lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lstrip("-/").lower(), by_name, n=1, cutoff=_NEAR)
    return by_name[near[0]] if near else None


def fitted(text: str) -> str:
    """Returns a message as one line of at most 300 printable characters.

    Control characters are escaped. If a message is too long, its longest words, such as names of tensors and paths,
    lose their middle, then the message itself does: its beginning names the file, its end tells the user what to do.
    """
    text = _shortened(" ".join(text.split()), 100 * _MAX_MESSAGE)  # a client may send a name of megabytes
    text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if len(text) > _MAX_MESSAGE:
        text = re.sub(rf"\S{{{_MAX_WORD + 1},}}", lambda word: _shortened(word[0], _MAX_WORD), text)
    return _shortened(text, _MAX_MESSAGE)


def _shortened(text: str, most: int) -> str:
    """Returns at most `most` characters of a text."""
    if len(text) <= most:
        return text
    end = most * 2 // 5
    return f"{text[: most - end - 1]}…{text[-end:]}"


def warn_caller(message: str) -> None:
    """Warns at the line that called this package, however many of its functions are in between."""
    frame, level = sys._getframe(1), 2
    while (outer := frame.f_back) and frame.f_globals.get("__name__", "").startswith("jaxspec."):
        frame, level = outer, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


@contextmanager
def brief_errors() -> Iterator[None]:
    """Applies `fitted` to the messages of bad-input errors that leave the block or the decorated function.

    Raises:
      ValueError, FileNotFoundError: the original error with its message fitted.
    """
    try:
        yield
    except FileNotFoundError as error:
        if error.filename is not None or fitted(str(error)) == str(error):
            raise
        raise FileNotFoundError(fitted(str(error))) from None
    except ValueError as error:
        if fitted(str(error)) == str(error):
            raise
        raise ValueError(fitted(str(error))) from None


class _Short(reprlib.Repr):
    """Abbreviates long whole numbers, because Python refuses to print those of thousands of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        """Returns a whole number; for a long one, only its number of digits."""
        bits = x.bit_length()
        if bits > _MAX_BITS:
            return f"a number of about {round(bits * math.log10(2))} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
