"""Fills the documentation with what only the program knows: the help of each command, the table of methods."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

ROWS = "| method | drafts come from | needs |\n|---|---|---|\n"


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Replaces `{{ file PATH }}` by a file of the project, `{{ help COMMAND }}` by the help of that command, and
    `{{ methods }}` by the table of methods."""
    markdown = re.sub(r"\{\{ file (\S+) \}\}", lambda match: page_of(Path(match[1])), markdown)
    markdown = re.sub(r"\{\{ help (\w+) \}\}", lambda match: command_help(match[1]), markdown)
    return markdown.replace("{{ methods }}", methods_table()) if "{{ methods }}" in markdown else markdown


def page_of(path: Path) -> str:
    """Returns the text of a Markdown file of another directory, with its links to the documentation made relative."""
    return (Path(__file__).parents[1] / path).read_text(encoding="utf-8").replace("](../docs/", "](")


def command_help(command: str) -> str:
    """Returns what `jaxspec COMMAND --help` prints, as a block of code."""
    from jaxspec.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main([command, "--help"])
    if status:
        raise ValueError(f"jaxspec {command} --help ended with status {status}")
    return f"```text\n{printed.getvalue().strip()}\n```"


def methods_table() -> str:
    """Returns the table of the methods, from their docstrings."""
    from jaxspec.methods import registry

    return ROWS + "\n".join(
        f"| `{name}` | {method.summary()} | {method.needs or 'nothing'} |"
        for name, method in registry.built_in().items()
    )
