"""The pages of --help, from the docstrings of dataclasses."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jaxspec.console.docs import attribute_docs, description_of
from jaxspec.console.parsing import Option, Options, Positional, Text, arguments_in
from jaxspec.io.embedded import EMBEDDED

# Names of values by the name of the option, for text.
_METAVARS = {"output": "DIR", "model": "DIR|ID", "shape": "NAME", "methods": "A,B,C"}
_METAVARS |= {"prompt_file": "FILE", "chat_template": "FILE"}
_BY_TYPE = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
# Defaults to show for options whose dataclass has None, because the code that reads them replaces None.
_DEFAULTS = {"model": EMBEDDED}
# The least and the largest width of a page, and the width of its column of names.
_LEAST_WIDTH, _WIDTH, _MARGIN = 40, 80, 20


def program_help(prog: str, description: str, commands: Mapping[str, str]) -> str:
    """Returns the help of a program.

    Args:
      prog: its name.
      description: the description.
      commands: the dataclass of each command by name, as module:class.
    """
    docs = {name: resolve_name(place).__doc__ or "" for name, place in commands.items()}
    entries = [(name, doc.partition("\n")[0]) for name, doc in docs.items()]
    usage = f"usage: {prog} [-h] {{{','.join(commands)}}}"
    return "\n".join((usage, "", *_paragraphs(description), *_section("commands", entries)))


def command_help(prog: str, description: str | None, groups: Sequence[Options], changeable: bool) -> str:
    """Returns the help of a command.

    Args:
      prog: the name of the program.
      description: by default the docstring of the dataclass.
      groups: the options of the command, of a method and its parts, and of all commands.
      changeable: see `jaxspec.console.parsing.parse_as`.
    """
    own, of_method, general = groups
    sections: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for found in (general, own, of_method):
        for option in found.by_field.values():
            owner: Any = found.sections[option.section][0]
            text = attribute_docs(owner).get(option.field.name, "")
            if found is of_method and (usual := owner.usual().get(option.field.name)):
                text += f" Default: {usual}."
            place = ("arguments",) if Positional in option.notes else option.section
            entry = called(option, changeable), " ".join((text, *_remarks(option, changeable)))
            sections.setdefault(place, []).append(entry)
    arguments = sections.pop(("arguments",), [])
    usage = (
        shown if one.default is dataclasses.MISSING else f"[{shown}]"
        for one in arguments_in(own.by_field.values())
        for shown in (called(one) if Positional in one.notes else one.field.name.upper(),)
    )
    lines = [" ".join((f"usage: {prog} [-h] [OPTIONS]", *usage)), ""]
    lines += _paragraphs(description or description_of(own.sections[()][0]))
    for method, _ in [*of_method.sections.values()][:1]:
        lines += _paragraphs(f"Method {method.name}: {' '.join(description_of(method).split())}")  # type: ignore[attr-defined]
    lines += _section("arguments", arguments)
    for section, entries in sections.items():
        owner = (own.sections | of_method.sections)[section][0]
        name = owner.name if section in of_method.sections else owner.__name__
        for suffix in ("Options", "Numbers", "Grid"):
            name = name.removesuffix(suffix)
        about = description_of(owner) if section in own.sections and section and changeable else ""
        lines += _section(f"{name.lower()} options" if section else "options", entries, about)
    return "\n".join(lines).rstrip()


def called(option: Option, changeable: bool = False) -> str:
    """Returns the names of an option with its value, such as --n N; of an argument, the name of the value."""
    field, values = option.field, [note.metavar for note in option.notes if isinstance(note, Text)]
    names = [option.name, *field.metadata.get("aliases", ())]
    if option.type is bool:
        pair = changeable or option.default is not False
        return ", ".join([*names, *([f"--no-{option.name[2:]}"] if pair else ())])
    values += [f"{{{','.join(map(str, choices))}}}"] if (choices := typing.get_args(option.type)) else []
    values += [option.name] if Positional in option.notes else []
    values += [_METAVARS.get(field.name, "")] if option.type is str else []
    value = field.metadata.get("metavar") or next(filter(None, (*values, _BY_TYPE.get(option.type))))
    value = " ".join([value] * option.width)
    if Positional in option.notes:
        return f"{value} ..." if option.repeated else value
    several = f" [{value} ...]" if changeable and option.repeated else ""
    return ", ".join(f"{name} {value}{several}" for name in names)


def _remarks(option: Option, changeable: bool) -> Iterator[str]:
    """Yields what follows the description of an option."""
    name, default = option.field.name, option.default
    if details := option.field.metadata.get("details"):
        yield details
    if default is None and not changeable:
        default = _DEFAULTS.get(name)
    remarks = ["required"] if default is dataclasses.MISSING else []
    if option.repeated and not changeable:
        remarks.append("repeatable")
    if remarks[:1] != ["required"] and default not in (None, ()) and not isinstance(default, bool):
        remarks.append(f"default: {', '.join(map(str, default)) if option.repeated else default}")
    if remarks:
        yield f"({'; '.join(remarks)})"


def _width() -> int:
    return max(_LEAST_WIDTH, min(shutil.get_terminal_size().columns, _WIDTH))


def _paragraphs(text: str) -> list[str]:
    """Returns the lines of a text; a blank line follows each paragraph."""
    return [line for part in text.split("\n\n") for line in (*textwrap.wrap(part, _width()), "")]


def _section(title: str, entries: Sequence[tuple[str, str]], about: str = "") -> list[str]:
    """Returns the lines of a section; none without entries."""
    if not entries:
        return []
    width = _width()
    lines = [f"{title}:", *textwrap.wrap(about, width, initial_indent="  ", subsequent_indent="  ")]
    for names, text in entries:
        begin = f"  {names}"
        if len(begin) > _MARGIN - 2 or not text:
            lines.append(begin)
            begin = ""
        indent = " " * _MARGIN
        lines += textwrap.wrap(
            text, width, initial_indent=begin.ljust(_MARGIN), subsequent_indent=indent, break_on_hyphens=False
        )
    return [*lines, ""]
