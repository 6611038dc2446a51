"""Reads a command line as frozen dataclasses: options from fields, help from docstrings, errors of one line."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Protocol

from jaxspec.console.errors import in_options
from jaxspec.host.messages import nearest, shown

# Names of one thing: where one is given, the first that the command knows is meant. The others are those of vLLM,
# llama.cpp and transformers; `PROMPT` is an argument.
_SYNONYMS = (
    ("PROMPT", "-p", "--prompt"),
    ("--model", "-m"),
    ("--temperature", "--temp"),
    ("--max-new-tokens", "--max-tokens", "--n-predict", "--predict"),
    ("--repetition-penalty", "--repeat-penalty"),
    ("--system", "--system-prompt"),
    ("--num-draft-tokens", "--num-speculative-tokens", "--draft-max"),
    ("--draft", "--model-draft", "--assistant-model"),
    ("--weights", "--quantization", "-q"),
    ("--max-batch", "--batch", "--batch-size", "--max-num-seqs", "--parallel"),
    ("--max-model-len", "--ctx-size", "-c"),
    ("--served-model-name", "--alias"),
)
# Our words for options that have another form here, or several meanings.
_ELSEWHERE = {
    "-n": "--max-new-tokens",
    "--int8": "--weights int8",
    "--load-in-8bit": "--weights int8",
    "--tensor-parallel-size": "--mesh",
    "--data-parallel-size": "--mesh",
    "--speculative-config": "--method",
}
_HELP = ("-h", "--help")
_IS_OPTION = re.compile(r"--$|-+[^\W\d_]")
_MISSING: Any = dataclasses.MISSING
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


class Positional:
    """In the `Annotated` type of a field: an argument, which has no name."""


class Text(NamedTuple):
    """In the `Annotated` type of a field: how a word becomes a value.

    Attributes:
      metavar: the name of the value in the help.
      read: returns the value, given the name of the option and the word; raises ValueError.
    """

    metavar: str
    read: Callable[[str, str], Any]


class Option(NamedTuple):
    """A field of a dataclass as an option or argument.

    Attributes:
      section: the names of the fields that lead to the dataclass; () for the outermost.
      field: the field. Its metadata may contain `option`, another name than the field's; `aliases`, additional names;
        `metavar`, the name of the value; and `details`, text that follows the description.
      name: such as --max-new-tokens; of an argument, such as PROMPT.
      type: of the value, or of each value of several.
      default: `dataclasses.MISSING` if the option is required.
      optional: whether None is a value.
      repeated: whether the option has several values.
      width: the number of words of a value.
      notes: of the type.
    """

    section: tuple[str, ...]
    field: dataclasses.Field[Any]
    name: str
    type: Any
    default: Any
    optional: bool
    repeated: bool
    width: int
    notes: tuple[Any, ...]


class Options(NamedTuple):
    """The options in dataclasses.

    Attributes:
      sections: the class and the default of each section; outer ones come first.
      by_field: option by the name of its field.
      by_name: option by each of its names, and the value of a flag of this name, else None.
    """

    sections: dict[tuple[str, ...], tuple[type, Any]]
    by_field: dict[str, Option]
    by_name: dict[str, tuple[Option, bool | None]]


class Words(NamedTuple):
    """The words of a command line.

    Attributes:
      given: the words of each option, by the name of its field; True and False for a flag.
      rest: the words that belong to no option.
      unknown: the names of options that do not exist.
      problems: the errors of options with too few or too many values.
    """

    given: dict[str, list[Any]]
    rest: list[str]
    unknown: list[str]
    problems: list[str]


@dataclasses.dataclass
class _Help:
    """The option of every program.

    Attributes:
      help: show this message and exit.
    """

    help: bool = dataclasses.field(default=False, metadata={"aliases": ("-h",)})


class Kinds(Protocol):
    """The methods, for `parse_as`: the module `jaxspec.methods.registry`."""

    def available(self) -> tuple[Mapping[str, Any], list[str]]:
        """Returns all methods by name, and problems."""

    def chosen(self, name: str, given: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
        """Returns the method `name` and its parts, for the words of options; raises ValueError."""


def without_command(prog: str, name: str, description: str, commands: Mapping[str, str]) -> NoReturn:
    """Prints the help of a program with commands, or raises the error of a name that is no command.

    Args:
      prog: the name of the program.
      name: the first argument.
      description: the description in the help.
      commands: the dataclass of each command by name, as module:class; imported for the help only.

    Raises:
      SystemExit: after the help was printed, for --help.
      ValueError: there is no such command; one line.
    """
    if name in _HELP:
        from jaxspec.console.help import program_help

        print(program_help(prog, description, commands))
        raise SystemExit(0)
    if name.startswith("-"):
        raise ValueError(f"{_unknown([name], _HELP)}; see {prog} --help")
    raise ValueError(f"unknown command {name!r}; the commands are {', '.join(commands)}")


def parse_as(
    target: type,
    argv: Sequence[str],
    prog: str,
    description: str | None = None,
    changeable: bool = False,
    kinds: Kinds | None = None,
) -> Any:
    """Parses `argv` as an instance of `target`.

    Args:
      target: a dataclass.
      argv: the arguments, without the name of the program.
      prog: the name of the program in help and errors.
      description: the description in the help; by default the docstring of `target`.
      changeable: whether later arguments replace earlier ones, such as those of a file. All values of an option then
        follow one name, --no-plot resets --plot, and the value None resets an option.
      kinds: the methods, for a dataclass with the fields `method`, a name, and `drafting`. The options of the method
        and of its parts are read too, and `drafting` becomes the method.

    Raises:
      SystemExit: after the help was printed, for --help.
      ValueError: the arguments are invalid; one line.
    """
    own, of_all, of_method, general = (Options({}, {}, {}) for _ in range(4))
    collect(_Help, general, False)
    collect(target, own, changeable)
    for kind in kinds.available()[0].values() if kinds else ():
        collect(kind, of_all, changeable)

    def read(more: Options) -> tuple[Words, dict[str, list[Any]]]:
        words = _words(argv, own.by_field.values(), more.by_name | own.by_name | general.by_name, changeable)
        return words, {name: words.given.pop(name) for name in [*words.given] if name not in own.by_field}

    words, others = read(of_all)
    given, asks_help = words.given, others.pop("help", None)
    chosen: Sequence[Any] = ()
    if kinds and ("method" in given or not asks_help):
        chosen = kinds.chosen((given.get("method") or [own.by_field["method"].default])[-1], others)
    for kind in chosen:
        collect(kind, of_method, changeable, (kind.__name__,))
    if asks_help:
        from jaxspec.console.help import command_help

        print(command_help(prog, description, (own, of_method, general), changeable))
        raise SystemExit(0)
    # An option may take a value in one method and none in another.
    words, others = read(of_method)
    try:
        if words.problems:
            raise ValueError(words.problems[0])
        if words.unknown:
            raise ValueError(_unknown(words.unknown, of_method.by_name | own.by_name | general.by_name))
        command = _made(words.given, own, changeable)
        if words.rest:
            advice = "put a text in quotes, and give flags such as --chat no value"
            raise ValueError(f"unexpected argument {shown(words.rest[0])}; {advice}")
        options = {
            name: _value(of_method.by_field[name], taken, changeable) for name, taken in others.items()
        }
    except ValueError as error:
        # A dataclass that rejects a value names the field, not the option.
        raise ValueError(in_options(f"{error}; see {prog} --help", option_names(target))) from None
    return dataclasses.replace(command, drafting=chosen[0].from_options(options)) if chosen else command


def option_names(command: type) -> dict[str, str]:
    """Returns option by parameter, such as max_new_tokens: --max-new-tokens, of a dataclass and those nested in it."""
    collect(command, found := Options({}, {}, {}), False)
    return {name: option.name for name, option in found.by_field.items()}


def collect(
    owner: type,
    found: Options,
    changeable: bool,
    section: tuple[str, ...] = (),
    default: Any = _MISSING,
) -> None:
    """Adds the options of a dataclass, and of those nested in it, to `found`; the first of a name stays.

    Args:
      owner: the dataclass.
      found: the options.
      changeable: whether every flag can be reset, see `parse_as`.
      section: the section of the dataclass.
      default: its instance with the defaults; `dataclasses.MISSING` for those of the class.
    """
    hints, declared = typing.get_type_hints(owner, include_extras=True), inspect.get_annotations(owner)
    found.sections[section] = owner, default
    # The options that a class adds come before those that it inherits.
    for field in sorted(dataclasses.fields(owner), key=lambda field: field.name not in declared):
        hint: Any = hints[field.name]
        usual: Any = field.default if default is _MISSING else getattr(default, field.name)
        if usual is _MISSING and callable(field.default_factory):
            usual = field.default_factory()
        if dataclasses.is_dataclass(hint):
            collect(typing.cast(type, hint), found, changeable, (*section, field.name), usual)
        elif hint is not Any and field.name not in found.by_field:  # Any: `drafting`
            option = _option(section, field, hint, usual)
            found.by_field[field.name] = option
            for name in (option.name, *field.metadata.get("aliases", ())):
                found.by_name.setdefault(name, (option, True if option.type is bool else None))
            if option.type is bool and (changeable or usual is not False):  # --json needs no --no-json
                found.by_name.setdefault("--no-" + option.name[2:], (option, False))


def _option(section: tuple[str, ...], field: dataclasses.Field[Any], hint: Any, default: Any) -> Option:
    """Returns the option of a field. A union is read as the first of its types that a word can have."""
    notes, optional, repeated, width = (), False, False, 1
    while parts := typing.get_args(hint):
        origin = typing.get_origin(hint)
        if origin is Literal:
            break
        if origin is Annotated:
            hint, *rest = parts
            notes += tuple(rest)
        elif origin is tuple:
            hint, repeated = parts[0], repeated or parts[-1] is Ellipsis
            width = 1 if parts[-1] is Ellipsis else len(parts)
        else:
            optional |= type(None) in parts
            readable = (bool, int, float, str, Path)
            hint = next(part for part in parts if part in readable or typing.get_origin(part) is Literal)
    name = field.metadata.get("option", "--" + field.name.replace("_", "-"))
    name = field.name.upper() if Positional in notes else name
    return Option(section, field, name, hint, default, optional, repeated, width, notes)


def _words(
    argv: Sequence[str],
    own: Iterable[Option],
    by_name: Mapping[str, tuple[Option, bool | None]],
    changeable: bool,
) -> Words:
    """Returns the words of a command line by their use.

    Args:
      argv: the words.
      own: the options among which are the arguments.
      by_name: as in `Options`.
      changeable: see `parse_as`.
    """
    words, left = Words({}, [], [], []), list(reversed(argv))
    while left:
        word = left.pop()
        written, equals, value = word.partition("=")
        name = _own_name(written.replace("_", "-"), by_name)
        if word == "--":
            words.rest.extend(reversed(left))
            break
        if not _IS_OPTION.match(word):
            words.rest.append(word)
            continue
        if name not in by_name:
            words.unknown.append(written)
            continue
        option, flag = by_name[name]
        field, most = option.field.name, len(left) if changeable and option.repeated else 1
        taken: list[Any] = [value] if equals else []
        if flag is not None:
            words.problems.extend([f"{name} takes no value; leave out ={value}"] if equals else ())
            taken, most = [flag], 0
        while len(taken) < most and left and not _IS_OPTION.match(left[-1]):
            taken.append(left.pop())
        if not taken and most == 1:
            words.problems.append(f"{name} has no value; write {name}=VALUE for one that begins with -")
        words.given[field] = taken if changeable else [*words.given.get(field, ()), *taken]
    for option in arguments_in(own):
        if words.rest and option.field.name not in words.given:
            count = len(words.rest) if option.repeated else 1
            words.given[option.field.name] = [words.rest.pop(0) for _ in range(count)]
    return words


def _own_name(name: str, known: Iterable[str]) -> str:
    """Returns the name under which a command knows an option; the given one if it has none."""
    same = next((names for names in _SYNONYMS if name in names), ())
    return next((one for one in (name, *same) if one in known), name)


def arguments_in(options: Iterable[Option]) -> list[Option]:
    """Returns the arguments of a command; of one that has none, the option of the model may be given as one."""
    given = list(options)
    found = [option for option in given if Positional in option.notes]
    return found or [option for option in given if option.name == "--model"]


def _made(given: Mapping[str, Sequence[Any]], own: Options, changeable: bool) -> Any:
    """Makes the instance of the dataclass in `own`.

    Raises:
      ValueError: an option is missing or invalid; one line.
    """
    absent = [one for name, one in own.by_field.items() if one.default is _MISSING and name not in given]
    if absent:
        from jaxspec.console.help import called

        raise ValueError(f"{' and '.join(map(called, absent))} must be given")
    values: dict[tuple[str, ...], dict[str, Any]] = {section: {} for section in own.sections}
    for name, words in given.items():
        option = own.by_field[name]
        values[option.section][name] = _value(option, words, changeable)
    for section, (owner, default) in [*own.sections.items()][:0:-1]:
        if default is _MISSING:
            values[section[:-1]][section[-1]] = owner(**values[section])
        elif values[section]:
            values[section[:-1]][section[-1]] = dataclasses.replace(default, **values[section])
    return own.sections[()][0](**values[()])


def _value(option: Option, words: Sequence[Any], changeable: bool) -> Any:
    """Returns the value of an option from its words.

    Raises:
      ValueError: a word is invalid; one line.
    """
    values: list[Any] = []
    text = next((note for note in option.notes if isinstance(note, Text)), None)
    choices = {str(one): one for one in typing.get_args(option.type)}
    if option.repeated and option.type in _NUMBERS:
        words = [part for word in words for part in word.split(",") if part]
    for word in words if option.repeated else words[-1:]:
        if option.type is bool or (changeable and option.optional and word == "None"):
            values.append(word if isinstance(word, bool) else None)
        elif text is not None:
            values.append(text.read(option.name, word))
        else:
            try:
                values.append(choices[word] if choices else option.type(word))
            except (KeyError, ValueError):
                wanted = f"one of {', '.join(map(repr, choices))}" if choices else _NUMBERS[option.type]
                raise ValueError(f"{option.name} is {shown(word)}; give {wanted}") from None
    if not option.repeated:
        return values[0]
    if len(values) % option.width:
        raise ValueError(f"{option.name} has {len(values)} values; give {option.width} for each entry")
    return tuple(values) if option.width == 1 else tuple(zip(*[iter(values)] * option.width, strict=True))


def _unknown(names: Sequence[str], known: Iterable[str]) -> str:
    """Returns the error message for options that do not exist."""
    known, first = [name for name in known if name.startswith("-")], names[0].replace("_", "-")
    other = _ELSEWHERE.get(first, "")
    near = other if other.partition(" ")[0] in known else nearest(first, known)
    meant = "" if near is None else f"; perhaps you meant {near}"
    names = list(dict.fromkeys(names))
    return f"unknown option{'s' if len(names) > 1 else ''} {', '.join(names)}{meant}"
