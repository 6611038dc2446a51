"""A command line made from frozen dataclasses: options from fields, help from docstrings, errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from jaxspec.console.docs import attribute_docs
from jaxspec.console.errors import in_options, option_names
from jaxspec.io.embedded import EMBEDDED

# What the value of an option is called in the help, by its type and, where that says too little, by its name.
_METAVARS: dict[type, dict[str, str]] = {
    int: {"every": "M"},
    float: {},
    str: {
        "prompt": "[PROMPT]",
        "prompts": "[PROMPT ...]",
        "src": "SRC",
        "dst": "DST",
        "prompt_file": "FILE",
        "chat_template": "FILE",
        "output": "DIR",
        "model": "DIR|ID",
        "shape": "NAME",
        "methods": "A,B,C",
    },
}
_BY_TYPE = {int: "N", float: "X", str: "TEXT"}
# What an option that is left out means, where the code that reads it decides.
_DEFAULTS = {"model": EMBEDDED}


def parse(commands: dict[str, type], argv: Sequence[str], description: str) -> Any:
    """The command that `argv` asks for, as an instance of its dataclass.

    Args:
      commands: a dataclass by name of command; its docstring is the help.
      argv: without the name of the program.
      description: of the program, for its own help.

    Raises:
      SystemExit: help was asked for, and is printed.
      ValueError: the arguments are wrong; one line.
    """
    name = argv[0] if argv else ""
    if name in commands:
        return parse_as(commands[name], f"jaxspec {name}", argv[1:])
    if name and not name.startswith("-"):
        raise ValueError(f"unknown command {name!r}; the commands are {', '.join(commands)}")
    union: Any = None
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        member: Any = Annotated[command, tyro.conf.subcommand(name, description=summary)]
        union = member if union is None else union | member
    return parse_as(union, "jaxspec", argv, description)


def parse_as(target: Any, prog: str, argv: Sequence[str], description: str | None = None) -> Any:
    """What `argv` gives for `target`, a dataclass or a union of them; `prog` is called so in help and errors.

    Raises:
      SystemExit, ValueError: as `parse`.
    """
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.UseAppendAction)
    try:
        with one_line_errors(prog):
            return tyro.cli(
                target,
                prog=prog,
                description=description,
                args=list(argv),
                config=markers,
                registry=_registry(),
            )
    except ValueError as error:
        # What a dataclass itself refuses, it names by its fields.
        options = option_names(typing.cast(type, target)) if dataclasses.is_dataclass(target) else {}
        raise ValueError(in_options(str(error), options)) from None


@contextlib.contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turns what `tyro.cli` complains of within the block, in a box, into a ValueError of one line.

    Args:
      prog: the program as its user calls it, for the end of the line.

    Raises:
      SystemExit: help was asked for, and is printed.
      ValueError: the arguments are wrong.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            yield
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(f"{_one_line(complaint.getvalue())}; see {prog} --help") from None


def _one_line(complaint: str) -> str:
    """What tyro complains of, out of its box: a title, a statement, a rule, hints and more rules."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", complaint)
    blocks: list[list[str]] = [[]]
    for line in plain.splitlines():
        line = re.sub(r"^│ ?| *│$", "", line).rstrip()
        if line.startswith(("╭", "╰")):
            continue
        if line and not line.strip("─- "):
            blocks.append([])
        elif line:
            blocks[-1].append(line)
    if "╭" not in plain and len(blocks) > 1:
        del blocks[0]  # drawn without a frame, as where there is no UTF-8: the title has a rule of its own
    statement = " ".join(map(str.strip, blocks[0])).rstrip(".") or "the arguments cannot be understood"
    if missing := _missing(blocks[0]):
        return f"{' and '.join(missing)} must be given"
    if wrong := re.fullmatch(r"Error parsing (-\S+): (is .*)", statement):
        return f"{wrong[1]} {wrong[2]}"
    if refused := re.fullmatch(r"Error parsing (?!-)\S+: (.*)", statement):
        return refused[1]  # by a dataclass itself
    if extra := re.fullmatch(r"Unrecognized options: ([^-].*)", statement):
        return f"unexpected argument {extra[1]!r}; put a text of several words in quotes"
    for block in blocks[1:]:
        if block[0].strip() == "Perhaps you meant:":
            statement += f" (perhaps you meant {block[1].split()[0].rstrip(',')})"
    return statement[:1].lower() + statement[1:]


def _missing(block: list[str]) -> list[str]:
    """The required options that a statement names, each with its value; what explains them stands further right."""
    if not block or not block[0].lstrip().startswith("Missing from "):
        return []
    margin = min((len(line) - len(line.lstrip()) for line in block[1:]), default=0)
    return [line.strip() for line in block[1:] if len(line) - len(line.lstrip()) == margin]


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.struct_rule(_dataclass_rule)
    registry.primitive_rule(_optional_rule)
    registry.primitive_rule(_number_rule)
    return registry


def _dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """As tyro's own, but the help names values by what they are, and is silent on a default of None."""
    # tyro wraps what it is given in a generic dataclass of its own.
    if not dataclasses.is_dataclass(info.type) or info.type.__module__.startswith("tyro"):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    helps = attribute_docs(info.type)
    fields = []
    # What a class adds stands before what it shares with others.
    own = inspect.get_annotations(info.type)
    for field in sorted(dataclasses.fields(info.type), key=lambda field: field.name not in own):
        default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        hint = hints[field.name]
        if not dataclasses.is_dataclass(hint):
            hint = Annotated[hint, _display(field, hint, default)]
        if default is False:  # --json needs no --no-json
            hint = Annotated[hint, tyro.conf.FlagCreatePairsOff]
        help_text = " ".join(filter(None, (helps.get(field.name), field.metadata.get("details"))))
        fields.append(StructFieldSpec(field.name, hint, default, help_text))
    return StructConstructorSpec(info.type, tuple(fields))


def _display(field: dataclasses.Field[Any], hint: Any, default: Any) -> Any:
    """How an option is called and explained; metadata `option` is a name other than the field's, `aliases`
    further names, `metavar` what its value is called, `details` what follows its description."""
    kind = next((kind for kind in _types(hint) if kind in _BY_TYPE), None)
    metavar = field.metadata.get("metavar") or (kind and _METAVARS[kind].get(field.name, _BY_TYPE[kind]))
    if isinstance(default, bool):
        shown, metavar = "", None
    elif isinstance(default, tuple):
        shown = "(repeatable)"
    else:
        default = _DEFAULTS.get(field.name) if default is None else default
        shown = "" if default is None or default is tyro.MISSING else f"(default: {default})"
    name = field.metadata.get("option", "").removeprefix("--") or None
    aliases = field.metadata.get("aliases")
    return tyro.conf.arg(name=name, aliases=aliases, metavar=metavar, help_behavior_hint=shown)


def _types(hint: Any) -> Iterator[Any]:
    """A type, and those it is made of."""
    yield hint
    for part in typing.get_args(hint):
        yield from _types(part)


def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """`X | None` is read as X: None is what leaving the option out means, not a word to type."""
    members = typing.get_args(info.type)
    if (
        info.type_origin not in (types.UnionType, typing.Union)
        or len(members) != 2
        or type(None) not in members
    ):
        return None
    inner = next(member for member in members if member is not type(None))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    of_inner, shown = spec.is_instance, spec.str_from_instance
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or of_inner(value),
        str_from_instance=lambda value: [] if value is None else shown(value),
    )


_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """As tyro's own, but what is no number is called so."""
    if info.type not in _NUMBERS:
        return None

    def read(given: list[str]) -> int | float:
        try:
            number: int | float = info.type(given[0])
            return number
        except ValueError:
            raise ValueError(f"is {given[0]!r}; give {_NUMBERS[info.type]}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=_BY_TYPE[info.type],
        instance_from_str=read,
        # A default of 1 will do for a float.
        is_instance=lambda value: isinstance(value, (int, info.type)) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
