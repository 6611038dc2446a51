"""Inserts generated text into the documentation, and writes `llms.txt` and the Markdown of each page for programs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import html
import io
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The pages of the repository have only this sentence.
_PRINTS = re.compile(r"^`jaxspec (\w+) --help` prints the options\.$", re.MULTILINE)
ROOT = Path(__file__).parents[1]
ROWS = "| method | drafts come from | needs |\n|---|---|---|\n"
nav: Any = None


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Replaces each `{{ NAME ARGUMENT }}` by the text of the function of `PARTS`.

    The help of a command is inserted after the sentence that names it.
    """
    markdown = _PRINTS.sub(lambda match: f"{match[0]}\n\n{command_help(match[1])}", markdown)
    return re.sub(
        r"\{\{ (\w+)(?: (\S+))? \}\}",
        lambda match: PARTS[match[1]](*filter(None, match.groups()[1:])) if match[1] in PARTS else match[0],
        markdown,
    )


def on_nav(nav: Any, **context: Any) -> None:
    """Keeps the navigation for `llms.txt`."""
    globals()["nav"] = nav


def on_post_build(config: Any, **context: Any) -> None:
    """Writes the Markdown of each page beside it, and `llms.txt`, the list of these files (llmstxt.org)."""
    site, lines = (
        Path(config["site_dir"]),
        [f"# {config['site_name']}", "", f"> {config['site_description']}"],
    )
    for section in nav.items:
        lines += ["", f"## {section.title}", ""]
        for page in section.children or [section]:
            path = site / page.file.src_uri
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page.markdown, encoding="utf-8")
            lines.append(f"- [{page.title}]({page.file.src_uri})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def page_of(path: str) -> str:
    """Returns the text of a Markdown file of another directory, with its links to the documentation made relative."""
    return (ROOT / path).read_text(encoding="utf-8").replace("](../docs/", "](")


def code_of(path: str) -> str:
    """Returns a Python file as a block of code."""
    return block("python", (ROOT / path).read_text(encoding="utf-8").strip())


def block(language: str, text: str) -> str:
    """Returns a text as a block of code; its fence is longer than any in the text."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"


def notebook(name: str) -> str:
    """Returns the cells of a notebook with their stored outputs as Markdown."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else block("python", source))
        parts += map(shown, cell.get("outputs", []))
    return "\n\n".join(parts)


def shown(output: dict[str, Any]) -> str:
    """Returns an output of a notebook's cell: a picture, HTML or text, the first of them that it has."""
    data = output.get("data", {"text/plain": output.get("text", [])})
    if "image/svg+xml" in data:
        svg = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="plot" src="data:image/svg+xml;base64,{svg}">'
    if "text/html" in data:
        # On one line, so that Markdown reads neither a fence nor a heading in it.
        return "".join(data["text/html"]).strip().replace("\n", "&#10;")
    return block("text", "".join(data["text/plain"]).rstrip())


def command_help(command: str) -> str:
    """Returns the output of `jaxspec COMMAND --help`: prose, and a list of definitions for each group of options."""
    from jaxspec.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main([command, "--help"])
    if status:
        raise ValueError(f"jaxspec {command} --help ended with status {status}")
    # The entries of a group are indented below its title. A description follows its name, or is on the next lines,
    # indented more.
    prose, *groups = re.split(r"^(\S.*):\n(?=  \S)", printed.getvalue(), flags=re.MULTILINE)
    usage, *paragraphs = re.split(r"\n\s*\n", prose.strip())
    parts = [f"<pre><code>{html.escape(usage.removeprefix('usage: '))}</code></pre>"]
    parts += [f"<p>{inline(paragraph)}</p>" for paragraph in paragraphs]
    for title, group in zip(groups[::2], groups[1::2], strict=True):
        entries = re.findall(r"^  (\S.*?)(?: {2,}|\n {3,}|$)(.*(?:\n {3,}\S.*)*)", group, re.MULTILINE)
        parts += [f"<p><strong>{html.escape(title)}</strong></p>", definitions(entries)]
    return "\n".join(parts)


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    """Returns names and their descriptions as an HTML list."""
    rows = (
        f"<dt><code>{html.escape(name)}</code></dt><dd>{inline(' '.join(text.split()))}</dd>"
        for name, text in entries
    )
    return f'<dl class="options">{"".join(rows)}</dl>'


def inline(text: str) -> str:
    """Returns a plain text as HTML, with its `code` and its --options marked."""
    return re.sub(r"`([^`]+)`|(?<!\S)(--[\w-]+)", r"<code>\1\2</code>", html.escape(text, quote=False))


def methods_table() -> str:
    """Returns the table of the methods, from their docstrings."""
    from jaxspec.methods import registry

    return ROWS + "\n".join(
        f"| `{name}` | {method.summary()} | {method.needs or 'nothing'} |"
        for name, method in registry.built_in().items()
    )


def method_classes() -> str:
    """Returns the reference of each method: its class, and the options that it shares with others."""
    from jaxspec.console.docs import attribute_docs
    from jaxspec.methods import registry

    parts = []
    for method in registry.built_in().values():
        parts.append(f"::: jaxspec.methods.{method.__name__}\n    options:\n      members: false")
        own, texts = vars(method).get("__annotations__", {}), attribute_docs(method)
        shared = [one.name for one in dataclasses.fields(method) if one.name not in own and one.name in texts]
        if shared:
            parts += ["Shared options:", definitions((name, texts[name]) for name in shared)]
    return "\n\n".join(parts)


PARTS = {
    "file": page_of,
    "code": code_of,
    "notebook": notebook,
    "help": command_help,
    "methods": methods_table,
    "classes": method_classes,
}
