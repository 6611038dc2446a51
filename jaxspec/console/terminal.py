"""Terminal output: colours, and escapes of a model's text."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from jaxspec.host import progress

DIM, ACCEPTED = "2", "32"
# C0 except tab and newline, DEL, C1, the characters that embed, override or isolate the direction of a text, and code
# points that are no characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours enabled (see no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, stream: TextIO) -> str:
    """Returns a model's text for a stream: a terminal gets control characters as escapes such as \\x1b.

    They could move the cursor, change the title or reverse the order of the text. Newlines and tabs remain, and a
    stream that is not a terminal gets the text unchanged.
    """
    return without_controls(text) if stream.isatty() else text


def without_controls(text: str) -> str:
    """Returns a text with control characters as escapes; newlines and tabs remain."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def painted(text: str, code: str) -> str:
    """Returns text in a colour or style, set for each line separately, so that a pager or a cut line ends it."""
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def tell(line: str) -> None:
    """Writes a line from a command to standard error."""
    with progress.hidden():
        print(f"jaxspec: {line}", file=sys.stderr, flush=True)
