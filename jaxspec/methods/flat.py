"""The options of all methods as one dataclass: what a command line with a `--method` option is made of."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing
from collections.abc import Iterable
from typing import Any

from jaxspec.console.docs import attribute_docs
from jaxspec.methods.base import Method, plain_type
from jaxspec.methods.registry import available, built_in


def flat_options(methods: Iterable[type[Method]], name: str = "MethodOptions") -> type:
    """Makes a frozen dataclass of all the methods' options.

    A field's description begins with the methods that read it, in brackets. Where methods describe an option of one
    name differently, each description stands after its methods.

    Args:
      methods: the methods.
      name: of the class.

    Raises:
      ValueError: two methods give one option different types or defaults.

    Examples:
      >>> from jaxspec.methods import NGram
      >>> flat_options([NGram])(ngram_max=4).ngram_max
      4
    """
    methods = list(methods)
    # One that is made of others has their options.
    drafting = [method for method in methods if method.options() and method.readers() == (method,)]
    fields: dict[str, dataclasses.Field[Any]] = {}
    types: dict[str, Any] = {}
    readers: dict[str, dict[str, list[str]]] = {}
    for method in methods:
        hints, helps = typing.get_type_hints(method), attribute_docs(method)
        for field in dataclasses.fields(method):
            kind = plain_type(hints[field.name])
            before = fields.setdefault(field.name, field)
            if types.setdefault(field.name, kind) != kind or before.default != field.default:
                others = ", ".join(name for names in readers[field.name].values() for name in names)
                raise ValueError(
                    f"the option {field.name} of method {method.name} has another type or default than {others}'s; "
                    "give it another name"
                )
            text = helps.get(field.name, "")
            readers.setdefault(field.name, {}).setdefault(text, []).append(method.name)
    lines = []
    for option, texts in readers.items():
        parts = (f"[{_group(names, drafting)}] {text}" for text, names in texts.items())
        words = [f"{option}: {' '.join(parts)}", *_defaults(option, drafting)]
        lines.append(textwrap.indent(" ".join(words), "  "))
    doc = "Options of the methods that stand in brackets; another method does not know them.\n\nAttributes:\n"
    made: list[tuple[str, Any, Any]] = []
    for option, field in fields.items():
        if types[option] == bool | None:  # two flags; neither is what leaving the option out means
            lines.append(f"  no_{option}: the opposite of `{option}`.")
            made.append((option, bool, dataclasses.field(default=False)))
            made.append(
                (f"no_{option}", bool, dataclasses.field(default=False, metadata={"negates": option}))
            )
        else:
            made.append(
                (option, types[option], dataclasses.field(default=field.default, metadata=field.metadata))
            )
    return dataclasses.make_dataclass(
        name, made, frozen=True, kw_only=True, namespace={"__doc__": doc + "\n".join(lines) + "\n"}
    )


@functools.cache
def all_options() -> type:
    """Returns `flat_options` of every method that can be loaded.

    Examples:
      >>> all_options()(exit_layer=3).exit_layer
      3
    """
    return flat_options(usable_methods()[0].values())


@functools.cache
def usable_methods() -> tuple[dict[str, type[Method]], list[str]]:
    """Returns every method whose options a command line can have, by name, and one line for each other one.

    Examples:
      >>> sorted(usable_methods()[0])[:2]
      ['adaspeed', 'adaspeed-probe']
    """
    found, problems = available()
    usable = dict(built_in())
    for name, method in found.items():
        try:
            flat_options([*usable.values(), method])
        except (ValueError, NameError, TypeError) as error:  # whatever is wrong with another package's fields
            problems = [*problems, f"method {name!r} is left out: {' '.join(str(error).split())}"]
        else:
            usable[name] = method
    return usable, problems


def given_options(options: Any) -> dict[str, Any]:
    """Returns what was set in an instance of `flat_options`, by option, as `registry.make` takes it.

    Raises:
      ValueError: a flag and its opposite are both set.

    Examples:
      >>> given_options(all_options()(exit_layer=3))
      {'exit_layer': 3}
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value, negated = getattr(options, field.name), field.metadata.get("negates")
        if value == field.default:
            continue
        if negated is None:
            given[field.name] = value
        elif given.setdefault(negated, False):
            raise ValueError(f"got both `{negated}` and `{field.name}`; give one of them")
    return given


def _group(names: list[str], drafting: list[type[Method]]) -> str:
    """Returns how a help text names some of the methods, in few words."""
    others = [method.name for method in drafting if method.name not in names]
    if not others:
        return "all that draft"
    return f"all but {', '.join(others)}" if len(others) <= 2 < len(names) else ", ".join(names)


def _defaults(option: str, methods: list[type[Method]]) -> list[str]:
    """Returns what is done where an option is left out, if the methods say: what most of them do comes first."""
    found: dict[str, list[str]] = {}
    for method in methods:
        if option in method.options() and option in method.usual():
            found.setdefault(method.usual()[option], []).append(method.name)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    others = (f"for {', '.join(names)} {text}" for text, names in ordered[1:])
    return ["Default: " + "; ".join([ordered[0][0], *others]) + "."] if ordered else []
