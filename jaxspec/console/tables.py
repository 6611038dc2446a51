"""Tables for terminals, pages and notebooks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; a notebook shows it, and `rich` prints it.

    Attributes:
      headings: the headings of the columns, the first for the names of the rows; () for none. Headings and cells have
        up to two lines.
      rows: the cells by row; a row of one cell is a heading of the rows below it.
      name: the maximum number of characters of a line of a row's name in a terminal.
      left: the number of columns, from the first, that are aligned left in a terminal.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: int = 15
    left: int = 1

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as printed:
            console.print(self)
        return "\n".join(line.rstrip() for line in printed.get().splitlines())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{_lines(heading)}</th>" for heading in self.headings)
        body = "".join(
            f'<tr class="group"><td colspan="{len(self.headings)}">{escape(row[0])}</td></tr>'
            if len(row) == 1
            else "<tr>" + "".join(f"<td>{_lines(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __rich__(self) -> Any:
        from rich import box, table, text

        # Narrow, so that the widest tables fit 80 columns.
        made = table.Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
        made.show_header = bool(self.headings)
        for number, heading in enumerate(self.headings or [""] * len(self.rows[0])):
            made.add_column(heading, justify="left" if number < self.left else "right", no_wrap=not number)
        for name, *cells in self.rows:
            lines = text.Text("\n".join(wrapped(name, self.name)), style="" if cells else "bold")
            made.add_row(lines, *map(text.Text, cells))
        return made


def wrapped(text: str, width: int) -> list[str]:
    """Returns a text in lines of at most so many characters; only longer words are broken, at their hyphens."""
    long = any(len(word) > width for word in text.split())
    return textwrap.wrap(text, width, break_on_hyphens=long) or [""]


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
