"""Which methods there are: one per class in the files of this folder, and those that other packages add.

Another package adds a method by an entry point of the group `jaxspec.methods`, whose name is the method's:

    [project.entry-points."jaxspec.methods"]
    my-method = "my_package.method:MyMethod"
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from jaxspec.methods.base import Method

GROUP = "jaxspec.methods"
_NO_DEFAULT = object()
# What other libraries call our arguments, where the spelling is too far from ours to be a guess.
_ELSEWHERE = {
    "carry_gamma": "gamma=result.gamma of the text before",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


@functools.cache
def built_in() -> dict[str, type[Method]]:
    """Returns the methods of this package by name, in the order of their names.

    Examples:
      >>> "layerskip" in built_in()
      True
    """
    package = importlib.import_module("jaxspec.methods")
    found = {}
    for info in pkgutil.iter_modules(package.__path__, "jaxspec.methods."):
        for member in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(member) and issubclass(member, Method) and "name" in vars(member):
                found[member.name] = member
    return dict(sorted(found.items()))


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """Returns the methods that other packages add, by name; a built-in name cannot be taken."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in built_in()}


def names() -> tuple[str, ...]:
    """Returns the names of all methods: the built-in ones, then those of other packages.

    Examples:
      >>> names()[0]
      'adaspeed'
    """
    return (*built_in(), *sorted(_entry_points()))


def find(name: str) -> type[Method]:
    """Returns the method of a name.

    Raises:
      ValueError: there is none; the message lists those that are. Or the package that adds it cannot be loaded.

    Examples:
      >>> find("layerskip").__name__
      'LayerSkip'
    """
    if name in built_in():
        return built_in()[name]
    if name in _entry_points():
        return _loaded(_entry_points()[name])
    raise ValueError(f"unknown method {name!r}; the methods are {', '.join(names())}")


def available() -> tuple[dict[str, type[Method]], list[str]]:
    """Returns every method that can be loaded, by name, and one line for each that cannot.

    Examples:
      >>> methods, problems = available()
      >>> methods["ngram"].__name__
      'NGram'
    """
    found, problems = dict(built_in()), []
    for name, point in sorted(_entry_points().items()):
        try:
            found[name] = _loaded(point)
        except ValueError as error:
            problems.append(str(error))
    return found, problems


def parts() -> tuple[type[Method], ...]:
    """Returns the methods that draft and are not made of others: what others can be made of.

    Examples:
      >>> {"ngram", "layerskip"} <= {method.name for method in parts()}
      True
    """
    return tuple(method for method in available()[0].values() if method.options() and not method.composite)


def _loaded(point: EntryPoint) -> type[Method]:
    origin = f"method {point.name!r} of the entry point {point.value}"
    try:
        method = point.load()
    except Exception as error:  # whatever another package's import raises
        raise ValueError(
            f"{origin} cannot be loaded ({type(error).__name__}: {error}); repair or remove its package"
        ) from error
    if not (inspect.isclass(method) and issubclass(method, Method)):
        raise ValueError(f"{origin} is no subclass of jaxspec.methods.Method; repair or remove its package")
    if getattr(method, "name", None) != point.name:
        raise ValueError(f"{origin} calls itself {getattr(method, 'name', None)!r}; give both the same name")
    return method


def make(name: str, given: Mapping[str, Any], others: Iterable[str] = ()) -> Method:
    """Makes a method from its name and its options.

    Args:
      name: of the method.
      given: options by name.
      others: names of arguments that are no method's, for the guess at what a misspelt option means.

    Raises:
      ValueError: there is no such method, or no such option, or its value does not fit; one line.

    Examples:
      >>> make("layerskip", {"exit_layer": 3})
      LayerSkip(exit_layer=3)
    """
    method = find(name)
    read = {option for reader in method.readers() for option in reader.options()}
    foreign = [option for option in given if option not in read]
    if not foreign:
        return method.of(given)
    known = {option for other in available()[0].values() for option in other.options()}
    for option in foreign:
        if option not in known:
            raise ValueError(unknown(option, [*known, *others]))
    fitting = method.of({option: value for option, value in given.items() if option not in foreign})
    raise ValueError(fitting.refusal([f"`{option}`" for option in sorted(foreign)]))


def share(methods: Sequence[str], given: Mapping[str, Any]) -> dict[str, Method]:
    """Makes several methods from one set of options, of which each takes those it reads.

    Args:
      methods: names.
      given: options by name.

    Raises:
      ValueError: an unknown method, an option that none of them reads, or what a method says of its options.

    Examples:
      >>> share(["ngram", "layerskip"], {"exit_layer": 3})["layerskip"]
      LayerSkip(exit_layer=3)
    """
    classes = {name: find(name) for name in methods}
    defaults = {
        field.name: field.default for cls in available()[0].values() for field in dataclasses.fields(cls)
    }
    # What has its default is not given, as for `make`.
    given = {
        option: value for option, value in given.items() if value is not defaults.get(option, _NO_DEFAULT)
    }
    read = {name: cls.known(given) & given.keys() for name, cls in classes.items()}
    unread = sorted(given.keys() - {option for options in read.values() for option in options})
    if unread:
        raise ValueError(
            f"none of the methods {', '.join(methods)} has an option {', '.join(f'`{one}`' for one in unread)}; "
            "leave it out or add a method"
        )
    return {
        name: cls.of({option: given[option] for option in given if option in read[name]})
        for name, cls in classes.items()
    }


def unknown(name: str, known: Collection[str]) -> str:
    """Returns what to say of an argument that does not exist, with the one that was perhaps meant.

    Examples:
      >>> unknown("max_tokens", ["max_new_tokens", "seed"])
      'unknown option max_tokens; perhaps you meant max_new_tokens'
    """
    others = [other for other in known if other != name]
    guess = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, others, n=1)
    remedy = f"perhaps you meant {guess[0]}" if guess else "see help(jaxspec.LanguageModel.generate)"
    return f"unknown option {name}; {remedy}"
