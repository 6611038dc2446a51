"""How a value stands in an error message."""

from __future__ import annotations

import math
import reprlib
from typing import Any

# Longer whole numbers are not written out.
_MAX_BITS = 1024


def shown(value: Any) -> str:
    """A value as a message shows it: short, and in one line.

    Examples:
      >>> shown("a\\nb"), shown(list(range(100))), shown(10**5000)
      ("'a\\\\nb'", '[0, 1, 2, 3, 4, 5, ...]', 'a number of about 5000 digits')
    """
    return " ".join(_SHORT.repr(value).split())


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
