"""Reads options from the command line and from YAML files, and writes them as YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxspec.console.docs import description_of
from jaxspec.console.parsing import parse_as
from jaxspec.host import files
from training.data import sizing
from training.data.sizing import Auto
from training.data.sources import Source
from training.loop.optimizer import FROM_PRETRAINED

Options = TypeVar("Options")

_CONFIG, _DATA = "--config", "--data"
_MAX_YAML_BYTES, _MAX_DEPTH = 1_000_000, 10
_CONFIG_HELP = (
    "Options may also be in YAML files, one name and value each: --config FILE.yaml, any number of times; the "
    "command line takes precedence."
)


def parse(command: type[Options], arguments: Sequence[str], prog: str) -> Options:
    """Parses options from any number of `--config FILE.yaml` and from the command line, which takes precedence.

    A YAML file contains option names (with _ or -) and values; sections are optional. Later files take precedence.

    Raises:
      ValueError: a file cannot be read, or an option is unknown or impossible; one line.
      SystemExit: help was asked for, and is printed.
    """
    given = list(arguments)
    words: list[str] = []
    rest: list[str] = []
    while given:
        word = given.pop(0)
        if word == _CONFIG or word.startswith(_CONFIG + "="):
            file = word[len(_CONFIG) + 1 :] or (given.pop(0) if given else "")
            words += yaml_words(Path(file))
        else:
            rest.append(word)
    rest = _collected(rest, _DATA)
    return parse_plain(command, [*words, *rest], prog, f"{description_of(command)}\n\n{_CONFIG_HELP}")


def parse_plain(
    command: type[Options], arguments: Sequence[str], prog: str, description: str | None = None
) -> Options:
    """Parses options from the command line only.

    Raises:
      ValueError, SystemExit: as `parse`.
    """
    _refuse_empty(arguments)
    options: Options = parse_as(command, arguments, prog, description, changeable=True)
    return options


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuses an option with an empty value, because an empty path would mean the working directory."""
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        option = name if word.startswith("--") else option
        if not word.strip() or (word.startswith("--") and equals and not value.strip()):
            raise ValueError(f"{option or 'an argument'} is empty; give a value, or leave it out")


def _collected(words: list[str], option: str) -> list[str]:
    """Collects the values of a repeated option behind its first name; the parser would use only the last ones."""
    others: list[str] = []
    values: list[str] = []
    ours = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            ours = name == option
        if not ours:
            others.append(word)
        elif not word.startswith("--"):
            values.append(word)
        elif equals:
            values.append(value)
    return [*others, option, *values] if values else words


def yaml_words(file: Path) -> list[str]:
    """Converts a YAML file to command-line arguments.

    Raises:
      ValueError: it cannot be read, or is no mapping of options.
    """
    try:
        content = _read_yaml(file)
    except OSError as error:
        raise ValueError(f"cannot read {file} ({error.strerror}); --config wants a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{file} is not YAML of options: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, expected options by name")
    return _words(content)


def _read_yaml(file: Path) -> Any:
    """Returns the content of a YAML file without objects, aliases or deep nesting.

    Raises:
      OSError: the file cannot be read.
      yaml.YAMLError, ValueError: it is not YAML, or has more than options need; the message may have several lines.
    """
    with files.opened(file) as stream:
        content = stream.read(_MAX_YAML_BYTES + 1)
    if len(content) > _MAX_YAML_BYTES:
        raise ValueError(f"it has more than {_MAX_YAML_BYTES} bytes")
    text, depth = content.decode(), 0
    # Events are produced without recursion, and before aliases can multiply their values.
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has the alias *{event.anchor}; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    return yaml.safe_load(text)


def _words(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = "--" + str(name).replace("_", "-")
        if isinstance(value, dict):
            words += _words(value)
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list):
            words += [option, *map(_word, _flat(value))]
        else:
            words += [option, _word(value)]
    return words


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


def _word(value: Any) -> str:
    if isinstance(value, dict):
        path, settings = value.get("path"), [f"{k}={v}" for k, v in value.items() if k != "path"]
        return ",".join([str(path), *settings])
    return str(value)


def plain(options: Any) -> Any:
    """Converts options to dictionaries, lists, strings and numbers, for YAML and JSON."""
    if isinstance(options, (Source, Auto, Path)):
        return str(options)
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        return {field.name: plain(getattr(options, field.name)) for field in dataclasses.fields(options)}
    return [plain(item) for item in options] if isinstance(options, tuple) else options


def to_yaml(options: Any) -> str:
    """Writes the resolved options as YAML that `--config` reads."""
    return yaml.safe_dump(plain(options), sort_keys=False)


def chosen_earlier(file: Path) -> dict[str, Any]:
    """Reads what the start and the size of the data chose for a run, from the file of `to_yaml`; {} if unreadable."""
    try:
        content = _read_yaml(file)
        sections = [part for part in content.values() if isinstance(part, dict)]
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}
    return {
        name: value
        for section in sections
        for name, value in section.items()
        if (name in sizing.NAMES and isinstance(value, int))
        or (name in FROM_PRETRAINED and isinstance(value, (int, float)))
    }
