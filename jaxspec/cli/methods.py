"""How a command line names a method and gives it options: `--method NAME` and `--run "NAME --OPTION ..."`."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from tyro.conf import DisallowNone

from jaxspec.console.docs import attribute_docs
from jaxspec.console.errors import in_options, option_names
from jaxspec.console.parsing import parse_as
from jaxspec.methods import Method, registry
from jaxspec.methods.base import plain_type

_METHOD = "method"
# A method without options.
_PLAIN = "autoregressive"


def method_field() -> str:
    """Returns the field of the option --method, whose help names every method, also those of other packages."""
    methods, problems = registry.available()
    for problem in problems:
        _warn_once(problem)
    details = f"One of {', '.join(methods)}. --help --method NAME describes one and its options."
    metadata = {"metavar": "NAME", "details": details}
    return dataclasses.field(default=registry.DEFAULT, metadata=metadata)


@functools.cache
def _warn_once(problem: str) -> None:
    """Several commands have the option --method, and each looks for the methods of other packages."""
    print(f"jaxspec: warning: {problem}", file=sys.stderr)


def with_options(command: type, words: Sequence[str]) -> type:
    """Returns a command with the options of the method that its words name.

    Args:
      command: a dataclass with the fields `method` and `drafting`.
      words: of the command line, after the name of the command.

    Raises:
      ValueError: there is no such method, or an option belongs to other methods only; one line.
    """
    given = _given(words)
    named = _last(given.get(_METHOD, []))
    if not named:
        # The help of a command without a method has only the common options.
        shows_help = not {"-h", "--help"}.isdisjoint(words)
        usual = {field.name: field.default for field in dataclasses.fields(command)}[_METHOD]
        named = _PLAIN if shows_help else str(usual)
    method = registry.find(named)
    options = options_of(method, words)
    hints = typing.get_type_hints(command, include_extras=True)
    own = [field for field in dataclasses.fields(command) if field.name in vars(command)["__annotations__"]]
    fields: list[Any] = [
        (field.name, hints[field.name], dataclasses.field(default=field.default, metadata=field.metadata))
        for field in own
        if field.name != "drafting"
    ]
    fields.append(("drafting", options, dataclasses.field(default=options())))
    doc = command.__doc__ or ""
    if _METHOD in given:
        doc = doc.replace("Attributes:", f"Method {method.name}: {_described(method)}\n\n    Attributes:")
    made = dataclasses.make_dataclass(
        command.__name__, fields, bases=(command,), frozen=True, namespace={"__doc__": doc}
    )
    if "explain" in given and not hasattr(options, "explain"):
        raise ValueError(
            f"--explain reports the choices of method auto, not {method.name}; jaxspec compare measures its speed, "
            "jaxspec inspect the agreement of early exits, and docs/choose_a_method.md says when it pays"
        )
    having = names()
    foreign = {
        name: _last(given[name]) for name in given if name in having.keys() - option_names(made).keys()
    }
    try:
        registry.check_options(method, foreign)
    except ValueError as error:
        raise ValueError(in_options(str(error), having)) from None
    return made


def names() -> dict[str, str]:
    """Returns the command-line option of each option of any method, by its name in Python."""
    options = {name for method in registry.available()[0].values() for name in method.options()}
    return {name: "--" + name.replace("_", "-") for name in sorted(options)}


def _described(method: type[Method]) -> str:
    """Returns the docstring of a method without its sections, on one line."""
    return " ".join(
        re.split(r"\n\s*(?:Class )?[Aa]ttributes:|\n\s*Examples:", method.__doc__ or "")[0].split()
    )


def options_of(method: type[Method], words: Sequence[str]) -> type:
    """Makes a frozen dataclass of a method's options; those of the parts that `words` name are among them."""
    fields: dict[str, Any] = {}
    lines = []
    for reader in (method, *method.parts(_options(method, words))):
        hints, helps, usual = typing.get_type_hints(reader), attribute_docs(reader), reader.usual()
        for field in dataclasses.fields(reader):
            if field.name in fields:
                continue
            hint = plain_type(hints[field.name])
            if hint == bool | None:
                hint = Annotated[hint, DisallowNone]  # a pair of flags
            default = dataclasses.field(default=field.default, metadata=field.metadata)
            fields[field.name] = (field.name, hint, default)
            more = f" Default: {usual[field.name]}." if field.name in usual else ""
            lines.append(f"  {field.name}: {helps.get(field.name, '')}{more}\n")
    doc = f"{method.name}: {method.summary()}.\n\nAttributes:\n{''.join(lines)}"
    return dataclasses.make_dataclass(
        "MethodOptions", fields.values(), frozen=True, kw_only=True, namespace={"__doc__": doc}
    )


def made(name: str, options: Any) -> Method:
    """Makes a method from an instance of `options_of`.

    Raises:
      ValueError: an option does not fit; one line.
    """
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return registry.make(name, {option: one for option, one in values.items() if one != defaults[option]})


def made_of(named: str | None, runs: Sequence[str]) -> dict[str, Method] | None:
    """Returns the methods of --methods and --run, by the words that name each; None if none is given.

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    if named is None and not runs:
        return None
    names = [] if named is None else [name.strip() for name in named.split(",")]
    return {name: registry.make(name, {}) for name in names} | {words: parse_run(words) for words in runs}


def parse_run(words: str) -> Method:
    """Returns the method of a value of --run, such as "layerskip --exit-layer 3".

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    try:
        return parse_method(words)
    except ValueError as error:
        raise ValueError(f"`runs` {words!r}: {in_options(str(error), names())}") from None


def parse_method(words: str) -> Method:
    """Returns the method of a name and options, such as "layerskip --exit-layer 3".

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    name, *rest = shlex.split(words) or [""]
    method = registry.find(name)
    options = options_of(method, rest)
    registry.check_options(method, _options(method, rest))
    return made(name, parse_as(options, rest, f"jaxspec generate --method {name}"))


def usual_methods(num_layers: int) -> list[str]:
    """Returns the methods that are measured where none is named.

    Args:
      num_layers: of the model.
    """
    return [
        name
        for name, method in registry.available()[0].items()
        if method.compared and not method.needs and num_layers >= method.min_layers
    ]


def _given(words: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each option in the words, by the option's name in Python."""
    given: dict[str, list[str]] = {}
    name, options = None, names()
    for word in words:
        if word == "--":
            break
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            name = option.replace("-", "_")
            if name.removeprefix("no_") in options and name not in options:
                name = name.removeprefix("no_")  # the opposite of a flag
            given.setdefault(name, []).extend([value] if equals else [])
        elif name is not None:
            given[name].append(word)
            name = None
    return given


def _options(method: type[Method], words: Sequence[str]) -> dict[str, str | list[str]]:
    """Returns the values of options: a list for an option of the method that may be repeated, else the last value."""
    repeatable = {field.name for field in dataclasses.fields(method) if isinstance(field.default, tuple)}
    given = _given(words).items()
    return {name: values if name in repeatable else values[-1] for name, values in given if values}


def _last(values: Sequence[str]) -> str:
    return values[-1] if values else ""
