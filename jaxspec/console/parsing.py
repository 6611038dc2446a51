"""Makes a command line from frozen dataclasses: options from fields, help from docstrings, errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
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

from jaxspec.console.docs import attribute_docs, description_of
from jaxspec.console.errors import in_options, option_names
from jaxspec.host.messages import nearest
from jaxspec.io.embedded import EMBEDDED

# Names of values in the help, by the type and the name of an option. `_BY_TYPE` is for the other options of a type.
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
# Our option for the names of other tools.
_ELSEWHERE = {
    "--temp": "--temperature",
    "--max-tokens": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--system-prompt": "--system",
    "-n": "--max-new-tokens",
    "-m": "--model",
}
# Their options for the text, which is an argument here.
_PROMPTS = ("-p", "--prompt")
# Defaults to show for options whose dataclass has None, because the code that reads them replaces None.
_DEFAULTS = {"model": EMBEDDED}


class RefusedValue(Exception):
    """One of several values of an option is invalid. tyro hides the message of a ValueError in this case."""


def parse(commands: dict[str, type], argv: Sequence[str], description: str) -> Any:
    """Parses the arguments of the program `jaxspec`, and returns an instance of the dataclass of a command.

    Args:
      commands: the dataclasses by the name of the command. The docstring of a dataclass is the help of its command.
      argv: the arguments, without the name of the program.
      description: the description of the program in its help.

    Raises:
      SystemExit: after the help was printed, for --help.
      ValueError: the arguments are invalid; one line.
    """
    name = argv[0] if argv else ""
    if name in commands:
        return parse_as(commands[name], argv[1:], f"jaxspec {name}")
    if name and not name.startswith("-"):
        raise ValueError(f"unknown command {name!r}; the commands are {', '.join(commands)}")
    union: Any = None
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        member: Any = Annotated[command, tyro.conf.subcommand(name, description=summary)]
        union = member if union is None else union | member
    return parse_as(union, argv, "jaxspec", description)


def parse_as(
    target: Any, argv: Sequence[str], prog: str, description: str | None = None, changeable: bool = False
) -> Any:
    """Parses `argv` as an instance of `target`, a dataclass or a union of dataclasses.

    Args:
      target: a dataclass, or a union of dataclasses.
      argv: the arguments, without the name of the program.
      prog: the name of the program in help and errors.
      description: the description in the help; by default the docstring of `target`.
      changeable: whether later arguments replace earlier ones, such as those of a file. The last value of an option
        counts, --no-plot resets --plot, and the value None resets an option.

    Raises:
      SystemExit: after the help was printed, for --help.
      ValueError: the arguments are invalid; one line.
    """
    markers: tuple[Any, ...] = (tyro.conf.OmitArgPrefixes,)
    if not changeable:
        markers += (tyro.conf.OmitSubcommandPrefixes, tyro.conf.UseAppendAction)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                target,
                prog=prog,
                description=description,
                args=list(argv),
                config=markers,
                registry=_registry(changeable),
            )
    except RefusedValue as error:
        said = f"{error}; see {prog} --help"
    except SystemExit as stop:
        if not stop.code:
            raise
        said = f"{_one_line(complaint.getvalue(), argv, _known(target, changeable))}; see {prog} --help"
    # A dataclass that rejects a value names the field, not the option.
    options = option_names(typing.cast(type, target)) if dataclasses.is_dataclass(target) else {}
    raise ValueError(in_options(said, options))


def _one_line(complaint: str, argv: Sequence[str], known: set[str]) -> str:
    """Returns tyro's error message as one line.

    tyro draws a box of a title, a statement and hints, separated by horizontal rules. It prints the values of an
    unknown option as unknown options too, and reports it only if no option is missing, so such an option is found here.

    Args:
      complaint: the box.
      argv: the arguments.
      known: the options.
    """
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
        del blocks[0]  # without UTF-8 tyro draws no frame, and the title is a block
    statement = " ".join(map(str.strip, blocks[0])).rstrip(".") or "the arguments cannot be understood"
    missing = _missing(blocks[0])
    unknown = _unknown(argv, known)
    if unknown and (missing or statement.startswith("Unrecognized options: ")):
        return unknown
    if missing:
        return f"{' and '.join(missing)} must be given"
    if wrong := re.fullmatch(r"Error parsing (-\S+): (is .*)", statement):
        return f"{wrong[1]} {wrong[2]}"
    if refused := re.fullmatch(r"Error parsing (?!-)\S+: (.*)", statement):
        return refused[1]  # a dataclass raised the error
    if extra := re.fullmatch(r"Unrecognized options: ([^-].*)", statement):
        return (
            f"unexpected argument {extra[1]!r}; put a text in quotes, and give flags such as --chat no value"
        )
    return statement[:1].lower() + statement[1:]


def _known(target: Any, changeable: bool) -> set[str]:
    """Returns all names of the options of a dataclass; for a union of commands only --help."""
    if not dataclasses.is_dataclass(target):
        return {"-h", "--help"}
    names = {"-h", "--help"}
    hints = typing.get_type_hints(target, include_extras=True)
    for field in dataclasses.fields(target):
        if dataclasses.is_dataclass(hints[field.name]):
            names |= _known(hints[field.name], changeable)
        elif tyro.conf.Positional not in getattr(hints[field.name], "__metadata__", ()):
            name = field.metadata.get("option", "--" + field.name.replace("_", "-"))
            names |= {name, *field.metadata.get("aliases", ())}
            if bool in _types(hints[field.name]) and (changeable or field.default is not False):
                names.add("--no-" + name[2:])
    return names


def _unknown(argv: Sequence[str], known: set[str]) -> str | None:
    """Returns the error message for the arguments that are not options; None if all are."""
    words = list(itertools.takewhile(lambda word: word != "--", argv))
    names = [word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word)]
    unknown = [name for name in dict.fromkeys(names) if name.replace("_", "-") not in known]
    if not unknown:
        return None
    first = unknown[0].replace("_", "-")
    near = _ELSEWHERE[first] if _ELSEWHERE.get(first) in known else nearest(first, known)
    meant = "" if near is None else f"; perhaps you meant {near}"
    if first in _PROMPTS and "--system" in known:
        meant = "; give the text without an option, in quotes"
    return f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}{meant}"


def _missing(block: list[str]) -> list[str]:
    """Returns the missing options, with their values, that a statement of tyro lists; [] for another statement.

    The descriptions of the options are indented further and are left out.
    """
    if not block or not block[0].lstrip().startswith("Missing from "):
        return []
    margin = min((len(line) - len(line.lstrip()) for line in block[1:]), default=0)
    return [line.strip() for line in block[1:] if len(line) - len(line.lstrip()) == margin]


def _registry(changeable: bool) -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.struct_rule(functools.partial(_dataclass_rule, changeable=changeable))
    registry.primitive_rule(functools.partial(_optional_rule, changeable=changeable))
    registry.primitive_rule(_number_rule)
    return registry


def _dataclass_rule(info: StructTypeInfo, changeable: bool) -> StructConstructorSpec | None:
    """Reads a dataclass as tyro does, but names values in the help by their meaning, and hides defaults of None."""
    # tyro wraps the target in a generic dataclass of its own.
    if not dataclasses.is_dataclass(info.type) or info.type.__module__.startswith("tyro"):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    helps = attribute_docs(info.type)
    fields, repeated = [], {}
    # The options that a class adds come before those that it inherits.
    own = inspect.get_annotations(info.type)
    for field in sorted(dataclasses.fields(info.type), key=lambda field: field.name not in own):
        hint, default = hints[field.name], _default(field, info.default)
        description = helps.get(field.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if changeable and not description:
                description = description_of(hint)
            title = hint.__name__.removesuffix("Options").removesuffix("Numbers").removesuffix("Grid").lower()
            hint = Annotated[hint, tyro.conf.arg(name=title, prefix_name=False)]
        elif not changeable:
            hint = Annotated[hint, _display(field, hint, default)]
            if default is False:  # --json needs no --no-json
                hint = Annotated[hint, tyro.conf.FlagCreatePairsOff]
            if isinstance(default, tuple):
                # tyro appends what is given to the default, but it replaces the default here as for any other option.
                repeated[field.name], default = default, ()
        elif default is None or default == ():
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
        help_text = " ".join(filter(None, (description, field.metadata.get("details"))))
        fields.append(StructFieldSpec(field.name, hint, default, help_text))

    @functools.wraps(info.type, updated=())  # tyro shows its docstring
    def instantiate(**values: Any) -> Any:
        return info.type(**values | {name: values[name] or default for name, default in repeated.items()})

    return StructConstructorSpec(instantiate, tuple(fields))


def _default(field: dataclasses.Field[Any], owner: Any) -> Any:
    """Returns the default of a field: that in `owner`, an instance of its dataclass, if it is one."""
    if dataclasses.is_dataclass(owner):
        return getattr(owner, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def _display(field: dataclasses.Field[Any], hint: Any, default: Any) -> Any:
    """Returns the name of an option and of its value, and the text of its default.

    The metadata of a field may contain `option`, another name than the field's; `aliases`, additional names; `metavar`,
    the name of the value; and `details`, text that follows the description.
    """
    kind = next((kind for kind in _types(hint) if kind in _BY_TYPE), None)
    metavar = field.metadata.get("metavar") or (kind and _METAVARS[kind].get(field.name, _BY_TYPE[kind]))
    if isinstance(default, bool):
        shown, metavar = "", None
    elif isinstance(default, tuple):
        shown = f"(repeatable; default: {', '.join(map(str, default))})" if default else "(repeatable)"
    else:
        default = _DEFAULTS.get(field.name) if default is None else default
        shown = "" if default is None or default is tyro.MISSING else f"(default: {default})"
    name = field.metadata.get("option", "").removeprefix("--") or None
    aliases = field.metadata.get("aliases")
    return tyro.conf.arg(name=name, aliases=aliases, metavar=metavar, help_behavior_hint=shown)


def _types(hint: Any) -> Iterator[Any]:
    """Yields a type and its type arguments, recursively."""
    yield hint
    for part in typing.get_args(hint):
        yield from _types(part)


def _optional_rule(info: PrimitiveTypeInfo, changeable: bool) -> PrimitiveConstructorSpec[Any] | None:
    """Reads `X | None` as X, because None means that the option is not given; if `changeable`, also the word None."""
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
    read, of_inner, shown = spec.instance_from_str, spec.is_instance, spec.str_from_instance
    if changeable:
        spec = dataclasses.replace(
            spec,
            instance_from_str=lambda words: None if words == ["None"] else read(words),
            choices=None if spec.choices is None else (*spec.choices, "None"),
        )
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or of_inner(value),
        str_from_instance=lambda value: [] if value is None else shown(value),
    )


_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Reads a number as tyro does, but with a message of the project for other text."""
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
        # 1 is a valid default of a float.
        is_instance=lambda value: isinstance(value, (int, info.type)) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
