"""Error messages: how a value is written in one, and how long one may be."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Longer whole numbers are not written out.
_MAX_BITS = 1024
# The characters of a message, whatever a file contains, and of a word in one that is longer than that.
_MAX_MESSAGE, _MAX_WORD = 300, 90
# The characters of a value in a message.
_MAX_VALUE = 70


def shown(value: Any) -> str:
    """A value as a message shows it: short, and in one line.

    Examples:
      >>> shown("a\\nb"), shown(list(range(100))), shown(10**5000)
      ("'a\\\\nb'", '[0, 1, 2, 3, 4, 5, ...]', 'a number of about 5000 digits')
    """
    return _without_middle(" ".join(_SHORT.repr(value).split()), _MAX_VALUE)


def fitted(text: str) -> str:
    """A message in one line of at most 300 printable characters.

    Control characters are escaped. A message that is too long loses the middle of its longest words, such as names of
    tensors and paths, and then its own middle: the beginning names the file, the end says what to do.

    Examples:
      >>> fitted("a\\x1b[2J\\nb"), len(fitted("x" * 1000 + " is missing"))
      ('a\\\\x1b[2J b', 101)
    """
    text = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in " ".join(text.split())
    )
    if len(text) > _MAX_MESSAGE:
        text = re.sub(rf"\S{{{_MAX_WORD + 1},}}", lambda word: _without_middle(word[0], _MAX_WORD), text)
    return _without_middle(text, _MAX_MESSAGE)


def _without_middle(text: str, most: int) -> str:
    """At most `most` characters of a text."""
    if len(text) <= most:
        return text
    end = most * 2 // 5
    return f"{text[: most - end - 1]}…{text[-end:]}"


@contextmanager
def brief_errors() -> Iterator[None]:
    """Makes the messages of bad input that leave the block, or a function that this decorates, `fitted`.

    Raises:
      ValueError, FileNotFoundError: with the message of the one that was raised, fitted.
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
    """Python refuses to write out whole numbers of thousands of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        """A whole number; of a long one only how long it is."""
        bits = x.bit_length()
        if bits > _MAX_BITS:
            return f"a number of about {round(bits * math.log10(2))} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
