"""JSON schemas as automata over the JSON texts of their values.

The texts are a subset of the valid ones, so that a model cannot write without end between two values:

- Properties have the order of the schema. Other properties follow them, only if `additionalProperties` is given or no
  property is.
- Between two parts there is nothing, or what Python's `json.dumps` writes: a space after `,` and `:`, or a line break
  and an indent of two spaces for each level after `{`, `[` and `,`, and before `}` and `]`.
- Strings escape only what they must, as `json.dumps(..., ensure_ascii=False)` does.
- A string with a `format` and a `maxLength` has at most `FORMAT_LENGTH` characters.
- A value without a schema contains at most `ANY_DEPTH` objects or arrays inside each other, and a reference at most
  `REF_DEPTH` copies of itself.

The values of `enum` and `const` are written as they are, if they match the rest of the schema.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from jaxspec.grammar.automaton import UNICODE, Build, GrammarError, Node, Nodes, both, intersect
from jaxspec.grammar.numbers import Bound, between
from jaxspec.grammar.regex import Regex
from jaxspec.host.messages import nearest

# A schema without references and constants, and the number of copies of each reference around it.
Schema = dict[str, Any]
Refs = Mapping[str, int]
ANY_DEPTH, REF_DEPTH, FORMAT_LENGTH = 3, 4, 128
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# The keywords that imply a type if the schema has none.
_IMPLIED = {
    "object": "properties required additionalProperties minProperties maxProperties propertyNames",
    "array": "items prefixItems minItems maxItems",
    "string": "pattern minLength maxLength format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_SHAPING = " ".join(_IMPLIED.values()).split()
_CANNOT = (
    *("not", "if", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies", "contains"),
    *("uniqueItems", "$dynamicRef", "$recursiveRef", "extends", "disallow"),
)
# Keywords that change the texts. Other names are annotations, unless they are like one of these.
_KNOWN = {
    *("type", "enum", "const", "$ref", "$defs", "anyOf", "oneOf", "allOf", "additionalItems"),
    *("unevaluatedProperties", "unevaluatedItems", *_CANNOT, *_SHAPING),
}
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
_INTEGER, _NUMBER = r"-?(0|[1-9][0-9]*)", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"
_DAY = (
    "[12][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# A part of a name has at most 63 characters, and a name 253.
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Each is a subset of the format's texts. Other formats are annotations.
FORMATS = {
    "date": _DAY,
    "time": _CLOCK,
    "date-time": f"{_DAY}T{_CLOCK}",
    "duration": "P([0-9]+W|[0-9]+D(T[0-9]+H)?|T([0-9]+H([0-9]+M)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+",
    "hostname": rf"({_LABEL}\.){{0,7}}{_LABEL}",
    "uri": r"(https?|ftp)://[A-Za-z0-9]+([.-][A-Za-z0-9]+)*(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"
    r"(\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
}

# The forms of the values of keywords.
_FORMS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("an object", "properties", lambda given: isinstance(given, dict)),
    ("a list", "enum allOf prefixItems", lambda given: isinstance(given, list)),
    ("a list of schemas", "anyOf oneOf", lambda given: given and isinstance(given, list)),
    ("a list of strings", "required", lambda given: isinstance(given, list) and _are_texts(given)),
    ("a string", "$ref format pattern", lambda given: _are_texts(_patterns(given))),
    ("a number", _IMPLIED["number"], lambda given: _is_number(given)),
    ("1, since a finite table has no remainders", "multipleOf", lambda given: given == 1),
    (
        "a whole number",
        "minLength maxLength minItems maxItems minProperties maxProperties",
        lambda given: _is_number(given) and given >= 0 and given == int(given),
    ),
    (f"one of {', '.join(_TYPES)}, or a list of them", "type", lambda given: _are_types(_listed(given))),
)
# The named parts of an object and an array, the schema of the others, and that of those that no schema evaluates.
_PARTS = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("prefixItems", "items", "unevaluatedItems"),
}


class JsonSchema:
    """The automaton of a JSON schema.

    Args:
      schema: the schema, as `json.loads` returns it.
      nodes: where the automaton is built.
      any_depth: how many objects and arrays a value without a schema has inside each other.
    """

    def __init__(self, schema: Any, nodes: Nodes, any_depth: int = ANY_DEPTH) -> None:
        self._root, self._nodes, self._any_depth = schema, nodes, any_depth

    def document(self, end: Node) -> Node:
        """Returns the node that reads a text, perhaps after a space.

        Raises:
          GrammarError: the schema is wrong, or cannot be expressed.
        """
        start = self._value(self._root, "$", 0, end, {})
        return self._nodes.either(start, self._nodes.literal(b" ", start))

    def _value(self, schema: Any, path: str, level: int, end: Node, refs: Refs) -> Node:
        self._nodes.spend(32)
        if schema is False or end is None:
            return None
        schema = _enumerated(schema, path)
        self._check(schema, path)
        if "$ref" in schema:
            name = schema["$ref"]
            if refs.get(name, 0) > REF_DEPTH:
                return None
            refs = {**refs, name: refs.get(name, 0) + 1}
            schema = merged(_without(schema, "$ref"), self._target(name, path), path)
            return self._value(schema, path, level, end, refs)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                options, rest = schema[name], _without(schema, name)
                if isinstance(tag := rest.pop("discriminator", None), dict):  # of OpenAPI
                    rest = merged(rest, {"required": [tag.get("propertyName", "")]}, path)
                if name == "oneOf":
                    self._check_disjoint([merged(rest, one, path) for one in options], path)
                return self._nodes.either(
                    *(
                        self._value(merged(rest, one, path), f"{path}.{name}[{at}]", level, end, refs)
                        for at, one in enumerate(options)
                    )
                )
        if "allOf" in schema:
            schema = _merged_all(_without(schema, "allOf"), schema["allOf"], path)
            return self._value(schema, path, level, end, refs)
        if "enum" in schema:
            return self._constants(schema, path, level, end)
        types = _types(schema)
        if not schema.keys() & {*_SHAPING, "type"}:  # any value
            if refs.get("", 0) >= self._any_depth:
                types = [name for name in types if name not in ("object", "array")]
            refs = {**refs, "": refs.get("", 0) + 1}
        return self._nodes.either(*(self._of_type(name, schema, path, level, end, refs) for name in types))

    def _check(self, schema: Schema, path: str) -> None:
        for name in sorted(schema.keys() - _KNOWN):
            if guess := _misspelt(name):
                raise GrammarError(
                    f"JSON schema: {path} has the unknown keyword {_shown(name)}; write {guess}"
                )
        if schema.get("maxItems", 2) < 2:
            schema = _without(schema, "uniqueItems")
        for name in _CANNOT:
            # Without entries, others forbid nothing.
            if name in schema and (name in ("not", "if", "contains") or schema[name] not in ({}, [], False)):
                raise GrammarError(
                    f"JSON schema: {path}.{name} cannot be expressed as a finite table; write the schema without "
                    f"`{name}`"
                )

    def _target(self, name: str, path: str) -> Any:
        """Returns the schema of a reference."""
        found = self._root
        if name != "#" and not name.startswith("#/"):
            raise GrammarError(
                f"JSON schema: {path}.$ref is {_shown(name)}; only references inside the schema, such as "
                "#/$defs/name, are possible"
            )
        for part in unquote(name).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part) if isinstance(found, list) else part]
            except (KeyError, ValueError, IndexError, TypeError):
                raise GrammarError(
                    f"JSON schema: {path}.$ref is {_shown(name)}; there is no such part"
                ) from None
        return found

    def _constants(self, schema: Schema, path: str, level: int, end: Node) -> Node:
        """The texts of `enum`, of those that the rest of the schema allows."""
        values = [one for one in schema["enum"] if self._allows(schema, one, path)]
        return self._nodes.either(*(self._constant(one, level, end) for one in values))

    def _allows(self, schema: Schema, value: Any, path: str) -> bool:
        """Whether a value matches all but `enum`, in any order of its keys; formats are annotations."""
        kinds, end = _types_of(value), self._nodes.fresh()
        kind = kinds[-1]
        size = value if kind == "number" else len(value) if kind in _IMPLIED else 0
        words = schema.keys() & _IMPLIED.get(kind, "").split()
        limits = [name for name in words if _MERGE.get(name) in (min, max)]
        parts: list[tuple[Any, Any]] = []
        texts: list[Build] = []
        if kind in _PARTS:
            known, others = _parts(schema, kind, True)
            parts = [(one, known.get(name, others)) for name, one in _by_name(value).items()]
        if kind == "object":
            parts += [(name, schema.get("propertyNames", True)) for name in value]
        elif kind == "string":
            patterns = _patterns(schema.get("pattern", ()))
            texts = [self._regex(one, path, "pattern", quoted=False).search for one in patterns]
            texts.append(functools.partial(self._nodes.literal, value.encode()))
        return not (
            ("type" in schema and {*kinds}.isdisjoint(_types(schema)))
            or ("multipleOf" in schema and kinds == ["number"])
            or (kind == "object" and {*schema.get("required", ())} - value.keys())
            or any(_MERGE[name](size, schema[name]) != size for name in limits)
            or any(size == schema[name] for name in limits if name.startswith("exclusive"))
            or (texts and both(self._nodes, texts, end) is None)
            or any(
                self._value(merged(part, {"enum": [one]}, path), path, 0, end, {}) is None
                for one, part in parts
            )
        )

    def _constant(self, value: Any, level: int, end: Node) -> Node:
        if not isinstance(value, (dict, list)) or not value:
            return self._nodes.literal(_text(value), end)
        pairs = list(value.items()) if isinstance(value, dict) else [(None, one) for one in value]
        brackets = b"{}" if isinstance(value, dict) else b"[]"
        end = self._close(brackets[1:], level, end)
        for at, (key, one) in reversed(list(enumerate(pairs))):
            end = self._constant(one, level + 1, end)
            if key is not None:
                end = self._nodes.literal(_text(key), self._colon(end))
            end = self._separated(at > 0, brackets[:1], level, end)
        return end

    def _of_type(self, name: str, schema: Schema, path: str, level: int, end: Node, refs: Refs) -> Node:
        if name == "object":
            return self._object(schema, path, level, end, refs)
        if name == "array":
            return self._array(schema, path, level, end, refs)
        if name == "string":
            return self._string(schema, path, end)
        if name == "null":
            return self._nodes.literal(b"null", end)
        if name == "boolean":
            return self._nodes.either(self._nodes.literal(b"true", end), self._nodes.literal(b"false", end))
        return self._number(schema, path, name == "integer", end)

    # Between the parts.
    def _break(self, level: int, end: Node) -> Node:
        return self._nodes.either(end, self._nodes.literal(b"\n" + b"  " * level, end))

    def _close(self, bracket: bytes, level: int, end: Node) -> Node:
        return self._break(level, self._nodes.literal(bracket, end))

    def _colon(self, end: Node) -> Node:
        return self._nodes.literal(b":", self._nodes.either(end, self._nodes.literal(b" ", end)))

    def _separated(self, later: bool, bracket: bytes, level: int, end: Node) -> Node:
        """Returns the node before a member: it reads a comma, or the bracket before the first member."""
        start = self._break(level + 1, end)
        if not later:
            return self._nodes.literal(bracket, start)
        return self._nodes.literal(b",", self._nodes.either(start, self._nodes.literal(b" ", end)))

    def _object(self, schema: Schema, path: str, level: int, end: Node, refs: Refs) -> Node:
        nodes = self._nodes
        (properties, given), required = _parts(schema, "object", None), schema.get("required", [])
        # Without properties others are expected, and with them only if the schema mentions them.
        others, needed = (not properties, True) if given is None else (given, given)
        properties = {**properties, **{name: needed for name in required if name not in properties}}
        low = _whole(schema, "minProperties") or 0
        high = _whole(schema, "maxProperties")
        if others is not False and low > len(required) + 1:
            raise GrammarError(
                f"JSON schema: {path}.minProperties is {low}, but names of additional properties may repeat; name them "
                "in `properties`, or set additionalProperties to false"
            )
        most = max(low, 1 if high is None else high + 1)  # counts from here on are equal
        nodes.spend(most)
        close, empty = self._close(b"}", level, end), nodes.literal(b"{}", end)
        # By the number of members before: the node that reads the rest of the object.
        rests = [
            None if count < low or (high is not None and count > high) else close for count in range(most + 1)
        ]
        rests[0] = empty if not low else None
        if others is not False:
            rests = self._others(schema, others, [*properties], rests, (path, level, refs))
        for name, given in reversed(properties.items()):
            values: dict[Node, Node] = {
                to: self._name(
                    functools.partial(nodes.literal, _text(name)),
                    schema,
                    path,
                    self._colon(self._value(given, f"{path}.{name}", level + 1, to, refs)),
                )
                for to in set(rests[1:])
                if to is not None
            }
            members = [
                self._separated(count > 0, b"{", level, values.get(rest))
                for count, rest in enumerate([*rests[1:], rests[-1]])
            ]
            rests = (
                members
                if name in required
                else [nodes.either(*two) for two in zip(members, rests, strict=True)]
            )
        return rests[0]

    def _others(
        self, schema: Schema, others: Any, names: list[str], rests: list[Node], place: tuple[str, int, Refs]
    ) -> list[Node]:
        """The rests of an object, by the number of members before, with additional properties."""
        nodes, (path, level, refs) = self._nodes, place

        @functools.cache  # loops of equal members would not be equal nodes
        def member(to: Node) -> Node:
            start = self._colon(self._value(others, f"{path}.additionalProperties", level + 1, to, refs))
            return self._name(lambda to: self._other_names(names, to), schema, path, start)

        last = len(rests) - 1
        found: list[Node] = list(rests)
        if rests[last] is not None:  # any number
            loop = nodes.fresh()
            found[last] = nodes.close(loop, rests[last], self._separated(True, b"", level, member(loop)))
        for count in reversed(range(last)):
            more = self._separated(count > 0, b"{", level, member(found[count + 1]))
            found[count] = nodes.either(rests[count], more)
        return found

    def _name(self, build: Build, schema: Schema, path: str, end: Node) -> Node:
        """Returns the node that reads a quoted name of `build`, if `propertyNames` allows it."""
        builds = [build]
        if "propertyNames" in schema:
            texts = merged(schema["propertyNames"], {"type": "string"}, path)
            builds.append(lambda to: self._value(texts, f"{path}.propertyNames", 0, to, {}))
        return both(self._nodes, builds, end)

    def _other_names(self, names: list[str], end: Node) -> Node:
        """Returns the node that reads a quoted name that is none of the given ones and has no escapes."""
        nodes = self._nodes
        plain = [(0x20, 0x21), (0x23, 0x5B), (0x5D, UNICODE)]
        quote = nodes.literal(b'"', end)
        free = nodes.repeat(lambda to: nodes.chars(plain, to), 0, None, quote)

        def after(texts: list[str]) -> Node:
            heads = sorted({ord(text[0]) for text in texts if text})
            edges = [
                nodes.chars([(code, code)], after([text[1:] for text in texts if text[:1] == chr(code)]))
                for code in heads
                if any(low <= code <= high for low, high in plain)
            ]
            cuts = [-1, *heads, UNICODE + 1]
            gaps = [(low + 1, high - 1) for low, high in itertools.pairwise(cuts) if high - low > 1]
            return nodes.either(
                *edges, nodes.chars(intersect(gaps, plain), free), None if "" in texts else quote
            )

        return nodes.literal(b'"', after(names))

    def _array(self, schema: Schema, path: str, level: int, end: Node, refs: Refs) -> Node:
        nodes = self._nodes
        first, items = _parts(schema, "array", None)
        low = _whole(schema, "minItems") or 0
        high = _whole(schema, "maxItems")
        if items is None:
            items = not first or low > len(first)
        if items is False:
            high = len(first) if high is None else min(high, len(first))
        close, empty = self._close(b"]", level, end), nodes.literal(b"[]", end)

        @functools.cache  # loops of equal items would not be equal nodes
        def item(to: Node) -> Node:
            return self._value(items, f"{path}.items", level + 1, to, refs)

        def member(at: int, to: Node) -> Node:
            known = at < len(first)
            start = self._value(first[at], f"{path}[{at}]", level + 1, to, refs) if known else item(to)
            return self._separated(at > 0, b"[", level, start)

        count = max(low, len(first), 1) if high is None else high
        rest = close if count else empty
        if high is None and close is not None:
            loop = nodes.fresh()
            rest = nodes.close(loop, close, member(count, loop))
        for at in reversed(range(count)):
            nodes.spend(4)
            finish = close if at else empty
            rest = nodes.either(member(at, rest), finish if at >= low else None)
        return rest if low <= count else None

    def _string(self, schema: Schema, path: str, end: Node) -> Node:
        nodes = self._nodes
        builds: list[Build] = [
            self._regex(pattern, path, "pattern").search for pattern in _patterns(schema.get("pattern", ()))
        ]
        low = _whole(schema, "minLength") or 0
        high = _whole(schema, "maxLength")
        if (name := schema.get("format")) in FORMATS:
            builds.append(self._regex(FORMATS[name], path, "format").whole)
            high = high and min(high, max(low, FORMAT_LENGTH))
        if high is not None and high < low:
            return None
        if low or high is not None or not builds:
            char = functools.partial(nodes.chars, [(0, UNICODE)], quoted=True)
            builds.append(lambda to: nodes.repeat(char, low, high, to))
        return nodes.literal(b'"', both(nodes, builds, nodes.literal(b'"', end)))

    def _regex(self, pattern: str, path: str, name: str, quoted: bool = True) -> Regex:
        try:
            return Regex(pattern, self._nodes, quoted)
        except GrammarError as error:
            raise GrammarError(f"JSON schema: {path}.{name}: {error}") from None

    def _number(self, schema: Schema, path: str, whole: bool, end: Node) -> Node:
        bounds: list[Bound | None] = []
        for side, sign in (("minimum", 1), ("maximum", -1)):
            names = side, f"exclusive{side.title()}"
            bound = max(
                ((sign * schema[name], name != side) for name in names if name in schema), default=None
            )
            # No sign of a zero, which is another number for `between`.
            bounds.append(None if bound is None else (Decimal(repr(sign * bound[0] or 0)), bound[1]))
        whole |= schema.get("multipleOf") == 1
        if bounds == [None, None]:
            return Regex(_INTEGER if whole else _NUMBER, self._nodes).whole(end)
        low, high = bounds
        return between(self._nodes, low, high, whole, end)

    def _check_disjoint(self, options: list[Any], path: str) -> None:
        for at, one in enumerate(options):
            for other in range(at):
                self._nodes.spend(8)
                if not self._disjoint(options[other], one, 4):
                    raise GrammarError(
                        f"JSON schema: {path}.oneOf: a value may match both number {other} and number {at}; use anyOf, "
                        "or a required property with a different const in each"
                    )

    def _disjoint(self, one: Any, other: Any, depth: int) -> bool:
        """Whether no value matches both schemas, as far as this can be seen."""
        one, other = (self._resolved(schema, depth) for schema in (one, other))
        if one is False or other is False:
            return True
        if "enum" in one and "enum" in other and not _shared(one["enum"], other["enum"]):
            return True
        # A schema without a type matches values of all types, of which it writes only some.
        matched, written = (
            [self._kinds(schema, which) for schema in (one, other)] for which in (True, False)
        )
        shared = matched[0] & matched[1] & (written[0] | written[1])
        if not shared:
            return True
        if not depth or shared != {"object"}:
            return False
        for a, b in ((one, other), (other, one)):
            known = b.get("properties", {})
            if b.get("additionalProperties") is False and set(a.get("required", ())) - known.keys():
                return True
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        return any(
            self._disjoint(one["properties"][name], other["properties"][name], depth - 1)
            for name in shared
            if name in one.get("properties", {}) and name in other.get("properties", {})
        )

    def _resolved(self, schema: Any, depth: int) -> Any:
        while isinstance(schema, dict) and schema.keys() & {"$ref", "allOf"} and depth:
            name = "$ref" if "$ref" in schema else "allOf"
            parts = schema["allOf"] if name == "allOf" else [self._target(schema["$ref"], "$")]
            schema, depth = _merged_all(_without(schema, name), parts, "$"), depth - 1
        return schema if schema is False else _enumerated(schema, "$")

    def _kinds(self, schema: Schema, matched: bool) -> set[str]:
        """The types of the values that a schema matches, or writes; those of integers are numbers."""
        if "enum" in schema:
            return {_types_of(value)[-1] for value in schema["enum"]}
        names = _TYPES if matched and "type" not in schema else _types(schema)
        return {"number" if name == "integer" else name for name in names}


def read_schema(text: str) -> Any:
    """Returns the schema of a JSON text.

    Raises:
      GrammarError: it is not valid JSON.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from None


def merged(one: Any, other: Any, path: str) -> Any:
    """Returns a schema of the values that match both; `const` becomes `enum`.

    Raises:
      GrammarError: two keywords cannot be combined.
    """
    if one is False or other is False:
        return False
    one, other = (_enumerated(schema, path) for schema in (one, other))
    if not other.keys() & {"allOf", "anyOf", "oneOf", "$ref"}:  # it does not see what others evaluate
        for _, rest, unevaluated in _PARTS.values():
            if unevaluated in other:
                other.setdefault(rest, other.pop(unevaluated))
    result = dict(one)
    for key, value in other.items():
        if key not in one or key in _ANNOTATIONS or _frozen(one[key]) == _frozen(value):
            result[key] = value
        elif key in ("anyOf", "oneOf", "$ref"):
            result["allOf"] = [*result.get("allOf", []), {key: value}]
        elif key in _MERGE:
            result[key] = _MERGE[key](one[key], value)
        elif key not in ("properties", "prefixItems") and not key.startswith(("$", "x-")):
            raise GrammarError(f"JSON schema: {path} has two different `{key}`, which cannot be combined")
    for key, rest, _ in _PARTS.values():
        if key in result and one and other:
            result[key] = _joined(*((schema.get(key, {}), schema.get(rest, True)) for schema in (one, other)))
    return result


def _merged_all(schema: Any, parts: Iterable[Any], path: str) -> Any:
    return functools.reduce(lambda one, other: merged(one, other, path), parts, schema)


def _types(schema: Schema) -> list[str]:
    given = schema.get("type")
    if given is None:
        implied = [name for name, words in _IMPLIED.items() if schema.keys() & words.split()]
        given = implied or [name for name in _TYPES if name != "integer"]
    names = _listed(given)
    return [name for name in names if name != "integer" or "number" not in names]


def _by_name(parts: Any) -> dict[Any, Any]:
    return dict(enumerate(parts)) if isinstance(parts, list) else parts


def _parts(schema: Schema, kind: str, default: Any) -> tuple[dict[Any, Any], Any]:
    """Returns the schemas of the named parts and of the others."""
    known, rest, unevaluated = _PARTS[kind]
    found, others = schema.get(known, {}), schema.get(rest, schema.get(unevaluated, default))
    if isinstance(others, list):  # of older drafts
        found, others = others, schema.get("additionalItems", default)
    return _by_name(found), others


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> Any:
    """Joins the named parts of two schemas; a part that one of them does not name is an additional one for it."""
    sides = [(_by_name(known), rest) for known, rest in (one, other)]
    names = {**sides[0][0], **sides[1][0]}
    found = {name: _all_of(*(known.get(name, rest) for known, rest in sides)) for name in names}
    return [*found.values()] if list in (type(one[0]), type(other[0])) else found


def _enumerated(schema: Any, path: str) -> Schema:
    """Returns a schema with `enum` in place of `const`, and without keywords that are null.

    Raises:
      GrammarError: the value of a keyword has a wrong form.
    """
    if schema is True:
        return {}
    _expect(isinstance(schema, dict), path, "an object or a boolean", schema)
    result: Schema = {name: given for name, given in schema.items() if given is not None or name == "const"}
    for expected, names, is_one in _FORMS:
        for name in result.keys() & names.split():
            _expect(is_one(result[name]), f"{path}.{name}", expected, result[name])
    if "const" not in result:
        return result
    constant = [result["const"]]
    values = _shared(result["enum"], constant) if "enum" in result else constant
    return {**_without(result, "const"), "enum": values}


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    both_given = [schema for schema in (one, other) if schema is not True]
    return {"allOf": both_given} if len(both_given) == 2 else both_given[0] if both_given else True


def _shared(one: list[Any], other: list[Any]) -> list[Any]:
    known = {_frozen(value) for value in other}
    return [value for value in one if _frozen(value) in known]


def _frozen(value: Any) -> Any:
    """Returns what equal values share: 1 and 1.0 are equal, and so are objects in another order."""
    if isinstance(value, dict):
        return frozenset((name, _frozen(one)) for name, one in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _shared_types(one: Any, other: Any) -> list[Any]:
    """The types in both; an integer is a number."""
    lists = [set(_listed(given)) for given in (one, other)]
    wider = [names | ({"integer"} if "number" in names else set()) for names in lists]
    return sorted(wider[0] & wider[1])


# How two values of a keyword are joined, so that a value matches both schemas.
_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), _all_of),
    "type": _shared_types,
    "enum": _shared,
    "required": lambda one, other: [*one, *(name for name in other if name not in one)],
    "pattern": lambda one, other: (*_patterns(one), *_patterns(other)),
    "allOf": lambda one, other: [*one, *other],
}


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text} is not finite")
    return number


@functools.lru_cache(1024)
def _misspelt(name: str) -> str | None:
    """Returns the keyword that an unknown one is like, such as `requried`; None for an annotation."""
    guess = nearest(name, {*_KNOWN, *_ANNOTATIONS, "minContains", "maxContains"})
    return guess if guess and guess in _KNOWN and (len(guess) > 4 or guess.lower() == name.lower()) else None


def _without(schema: Schema, name: str) -> Schema:
    return {key: value for key, value in schema.items() if key != name}


def _expect(right: Any, where: str, expected: str, given: Any) -> None:
    if not right:
        raise GrammarError(f"JSON schema: {where} is {_shown(given)}; expected {expected}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 60 else f"{text[:57]}..."


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_types(values: Sequence[Any]) -> bool:
    return all(value in _TYPES for value in values)


def _patterns(given: Any) -> tuple[Any, ...]:
    """Those that were merged are a tuple, which JSON does not have."""
    return given if isinstance(given, tuple) else (given,)


def _whole(schema: Schema, name: str) -> int | None:
    return int(schema[name]) if name in schema else None


def _types_of(value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["boolean"]
    if isinstance(value, (int, float)):
        return [*(["integer"] if value == int(value) else []), "number"]
    names: dict[type, str] = {dict: "object", list: "array", str: "string"}
    return [names.get(type(value), "null")]
