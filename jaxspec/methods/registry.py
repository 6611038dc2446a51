"""Finds the methods of this package, in `jaxspec.methods` and `jaxspec.heads`, and those of other packages.

Another package adds a method with an entry point of the group `jaxspec.methods`, which has the method's name:

    [project.entry-points."jaxspec.methods"]
    my-method = "my_package.method:MyMethod"
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from jaxspec.host import plugins
from jaxspec.host.messages import nearest, shown
from jaxspec.methods.base import Method

GROUP = "jaxspec.methods"
# The method where none is named.
DEFAULT = "auto"
# What other libraries call our arguments, where the spelling is too far from ours to be a guess.
_ELSEWHERE = {
    "carry_gamma": "gamma=result.gamma of the text before",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


@functools.cache
def built_in() -> dict[str, type[Method]]:
    """Returns the methods of this package by name, sorted."""
    found = {}
    for name in _modules():
        for member in vars(importlib.import_module(name)).values():
            if inspect.isclass(member) and issubclass(member, Method) and "name" in vars(member):
                found[member.name] = member
    return dict(sorted(found.items()))


def _modules() -> Iterator[str]:
    """Yields the modules that may define methods: those of this package, and `method` of each head's package."""
    for info in pkgutil.iter_modules(importlib.import_module("jaxspec.methods").__path__):
        yield f"jaxspec.methods.{info.name}"
    for info in pkgutil.iter_modules(importlib.import_module("jaxspec.heads").__path__):
        if info.ispkg:
            yield f"jaxspec.heads.{info.name}.method"


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """Returns the methods that other packages add, by name. A built-in method cannot be replaced."""
    return plugins.added(GROUP, built_in())


def names() -> tuple[str, ...]:
    """Returns the names of all methods: the built-in ones, then those of other packages."""
    return (*built_in(), *_entry_points())


def find(name: str) -> type[Method]:
    """Returns the method with this name.

    Raises:
      ValueError: no method has this name (the message lists all names), or the package that adds it cannot be loaded.
    """
    if name in built_in():
        return built_in()[name]
    if name in _entry_points():
        return _loaded(_entry_points()[name])
    guess = nearest(name, names())
    meant = f"perhaps you meant {guess}; " if guess else ""
    raise ValueError(f"unknown method {shown(name)}; {meant}the methods are {', '.join(names())}")


def available() -> tuple[dict[str, type[Method]], list[str]]:
    """Returns every method that can be loaded, by name, and an error message of one line for each other one."""
    found, problems = dict(built_in()), []
    for name, point in _entry_points().items():
        try:
            found[name] = _loaded(point)
        except ValueError as error:
            problems.append(str(error))
    return found, problems


def _loaded(point: EntryPoint) -> type[Method]:
    method: type[Method] = plugins.loaded(
        *(point, "method", "a subclass of jaxspec.methods.Method"),
        lambda found: inspect.isclass(found) and issubclass(found, Method),
    )
    if (name := getattr(method, "name", None)) != point.name:
        raise ValueError(
            f"method {point.name!r} of the entry point {point.value} has the name {name!r}; give both the same name"
        )
    return method


def chosen(name: str, given: Mapping[str, Sequence[Any]]) -> tuple[type[Method], ...]:
    """Returns a method and its parts, for the options of a command line.

    Args:
      name: the name of the method.
      given: the words of each option that is not the command's own.

    Raises:
      ValueError: there is no such method, or an option belongs to other methods only; one line.
    """
    method = find(name)
    several = {field.name for field in dataclasses.fields(method) if isinstance(field.default, tuple)}
    options = {option: words if option in several else words[-1] for option, words in given.items() if words}
    parts = (method, *method.parts(options)) if method.composite else (method,)
    foreign = given.keys() - {field.name for part in parts for field in dataclasses.fields(part)}
    if "explain" in foreign:
        raise ValueError(
            f"`explain` reports the choices of method auto, not {name}; jaxspec compare measures its speed, "
            "jaxspec inspect the agreement of early exits, and docs/choose_a_method.md says when it pays"
        )
    if foreign:
        check_options(method, options | dict.fromkeys(foreign))
    return parts


def make(name: str, given: Mapping[str, Any], others: Iterable[str] = ()) -> Method:
    """Makes a method from its name and its options.

    Args:
      name: the name of the method.
      given: options by name.
      others: names of arguments that are not options of a method. An error message may suggest one of them for a
        misspelt option.

    Raises:
      ValueError: the method or an option does not exist, or a value is invalid; one line.
    """
    method = find(name)
    check_known(given, others)
    converted = method.converted(given)
    check_options(method, converted, others)
    return method.from_options(converted)


def check_options(method: type[Method], given: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Raises an error for options that neither a method nor its parts have.

    Args:
      method: the method.
      given: options by name.
      others: as for `make`.

    Raises:
      ValueError: one line that names the methods with this option, or suggests a similar option.
    """
    check_known(given, others)
    read = {option for part in (method, *method.parts(given)) for option in part.options()}
    for option in given:
        if option not in read:
            having = [name for name, other in available()[0].items() if option in other.options()]
            raise ValueError(f"method {method.name} has no option `{option}`; {_these(having)}")


def check_known(given: Collection[str], others: Iterable[str] = ()) -> None:
    """Raises an error for options that no method has.

    Args:
      given: names of options.
      others: as for `make`.

    Raises:
      ValueError: one line that suggests a similar option.
    """
    known = {one for method in available()[0].values() for one in method.options()} if given else set()
    for option in given:
        if option not in known:
            raise ValueError(unknown(option, known, others))


def _these(having: Sequence[str]) -> str:
    if len(having) == 1:
        return f"it is an option of {having[0]}"
    return f"it is an option of {', '.join(having[:-1])} and {having[-1]}"


def unknown(name: str, options: Iterable[str], arguments: Iterable[str] = ()) -> str:
    """Returns the error message for an argument that does not exist, with a similar one as a suggestion.

    Args:
      name: the argument.
      options: names of the methods' options.
      arguments: names of the other arguments of a call in Python; none if the argument is from elsewhere.
    """
    arguments = tuple(arguments)
    others = [other for other in (*options, *arguments) if other != name]
    guess = _ELSEWHERE.get(name) or nearest(name, others)
    otherwise = "see help(jaxspec.LanguageModel.generate)" if arguments else "no method has it"
    remedy = f"perhaps you meant {guess}" if guess else otherwise
    return f"unknown option {name}; {remedy}"
