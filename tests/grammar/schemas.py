"""JSON schemas as users write them, each with values that they allow."""

from __future__ import annotations

import random
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG_CONSTANT = {
    "large": 1e30,
    "deep": [[[[[[1]]]]]],
    "day": "2024-02-29",
    "tuple": [1, "more"],
    "named": {"b": {}, "a": 1},
    "more": True,
}
SCHEMAS: dict[str, tuple[Any, list[Any]]] = {
    "person": (PERSON, [{"name": "Zoë", "age": 7}, {"name": "日本", "age": 150, "email": "a.b@c-d.org"}]),
    "all optional": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "null"}, "c": {"type": "boolean"}},
        },
        [{}, {"a": ""}, {"b": None}, {"a": 'x\n"\\/\t', "c": True}],
    ),
    "weather": (
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "temperature": {"type": "number"},
                "unit": {"enum": ["C", "F", None]},
                "hours": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            },
            "required": ["city", "temperature", "unit", "hours"],
        },
        [{"city": "Oslo", "temperature": -3.5, "unit": "C", "hours": [1, 2, 30]}],
    ),
    "nested": (
        {
            "type": "object",
            "properties": {
                "user": {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}},
                "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
            },
            "required": ["user"],
        },
        [{"user": {}}, {"user": {"id": "123e4567-e89b-12d3-a456-426614174000"}, "tags": ["ab", "c"]}],
    ),
    "dictionary": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"": 0, "é": -12}],
    ),
    "others": (
        {
            "properties": {"id": {"type": "integer"}},
            "required": ["id"],
            "additionalProperties": {"type": "string"},
        },
        [{"id": 1}, {"id": 1, "i": "x", "ido": "y", "": "z"}],
    ),
    "counted": (
        {
            "type": "object",
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"a": True}, {"a": True, "b": False}],
    ),
    "counted names": (
        {
            "type": "object",
            "properties": {name: {"type": "null"} for name in "abcd"},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 3,
        },
        [{"a": None, "d": None}, {"b": None, "c": None, "d": None}],
    ),
    "named": (
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "integer"}},
        [{}, {"x-": 1, "x-a": 2}],
    ),
    "required only": ({"type": "object", "required": ["z"]}, [{"z": 1}, {"z": [None], "y": {}}]),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        },
        [[1, "a"]],
    ),
    "tuple and more": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}, "maxItems": 3},
        [[], [1], [1, True], [1, True, False]],
    ),
    "exact array": ({"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}, [[1, 1]]),
    "at least": ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [[None] * 2, [None] * 5]),
    "matrix": (
        {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 1},
        [[[]], [[1, 2.5], [3e10]]],
    ),
    "constants": (
        {"enum": ["a", 1, None, {"x": [1, {}], "y": []}, '\u0001"é']},
        ["a", 1, None, {"x": [1, {}], "y": []}, '\u0001"é'],
    ),
    "constants in another order": (
        {
            "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"type": "integer"}, "c": {"minItems": 1}},
            "required": ["b"],
            "additionalProperties": {"enum": [[], {"v": 1, "u": 2}]},
            "minProperties": 2,
            "$defs": {"point": {"properties": {"x": {}, "y": {"type": "number", "exclusiveMinimum": 0}}}},
            "enum": [
                {"b": 1, "a": {"y": 1e-20, "x": 2}},
                {"z": {"u": 2, "v": 1}, "b": 2.0},
                {"c": [], "b": 1},
                {"c": [1], "b": 0},
                {"a": {"y": 0}, "b": 0},
                {"z": [1], "b": 0},
                {"b": 0.5, "a": {}},
                {"b": 3},
                {"a": 1, "c": 2},
            ],
        },
        [{"b": 1, "a": {"y": 1e-20, "x": 2}}, {"z": {"u": 2, "v": 1}, "b": 2.0}, {"c": [1], "b": 0}],
    ),
    "constants of a union": (
        {
            "anyOf": [
                {"properties": {"k": {"const": 1}, "v": {"type": ["null", "array"]}}},
                {"prefixItems": [{"multipleOf": 1}], "items": {"maxLength": 1}, "type": "array"},
                {"pattern": "^[^a]$", "type": "string"},
            ],
            "enum": [
                {"v": None, "k": 1},
                {"v": 0, "k": 1},
                [1, "é"],
                [0.5],
                [1, "éé"],
                "\u0001",
                "a",
                "bb",
                1,
            ],
        },
        [{"v": None, "k": 1}, [1, "é"], "\u0001", 1],
    ),
    "constants beyond the texts of their schemas": (
        {
            "properties": {
                "day": {"type": "string", "format": "date", "minLength": 1},
                "tuple": {"prefixItems": [{"type": "integer"}]},
                "deep": {"type": "array"},
                "large": {"type": "number", "minimum": 1},
                "named": {"propertyNames": {"maxLength": 1}},
            },
            "const": LONG_CONSTANT,
        },
        [LONG_CONSTANT],
    ),
    "typed enum": ({"type": "string", "enum": ["a", 1, "bcd"], "minLength": 2}, ["bcd"]),
    "any of": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None]),
    "any of required": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
    ),
    "union": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                "cat": {
                    "type": "object",
                    "properties": {
                        "kind": {"const": "cat"},
                        "lives": {"type": "integer", "exclusiveMaximum": 10},
                    },
                    "required": ["kind", "lives"],
                },
                "dog": {
                    "type": "object",
                    "properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}},
                    "required": ["kind"],
                },
            },
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog"}, {"kind": "dog", "barks": True}],
    ),
    "one of types": (
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "array", "maxItems": 0}]},
        ["é", []],
    ),
    "one of closed objects": (
        {
            "oneOf": [
                {"properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
                for name in "ab"
            ]
        },
        [{"a": 1}, {"b": 1}],
    ),
    "all of": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
                {"properties": {"a": {"type": "integer", "maximum": 3}, "b": {"type": "string"}}},
            ]
        },
        [{"a": 3}, {"a": -3, "b": ""}],
    ),
    "two patterns": (
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "maxLength": 4},
        ["ab", 'a"xb'],
    ),
    "slug": (
        {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 9},
        ["a", "ab-cd", "abcdefghi"],
    ),
    # The patterns of `Decimal` in pydantic 2.12 and 2.13.
    "decimals": (
        {
            "prefixItems": [
                {
                    "anyOf": [
                        {"type": "number"},
                        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
                        {"type": "null"},
                    ]
                },
                {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"},
            ]
        },
        [[1.5, "+1.25"], ["-.5", "0100."], [None]],
    ),
    "a password": (
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$", "maxLength": 5},
        ["aA1", '"1"B"'],
    ),
    "a format and many characters": (
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
        ["https://example.org/a?b=c"],
    ),
    "searched": ({"type": "string", "pattern": "b+|^c"}, ["b", "xbx", "c\\", "abbb"]),
    "list": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "integer"},
                        "n": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["v", "n"],
                }
            },
            "$ref": "#/$defs/node",
        },
        [{"v": 1, "n": None}, {"v": 1, "n": {"v": 2, "n": {"v": 3, "n": None}}}],
    ),
    "tree": (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name"],
        },
        [{"name": ""}, {"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]}],
    ),
    "formats": (
        {
            "type": "object",
            "properties": {
                name: {"type": "string", "format": name}
                for name in (
                    "date",
                    "time",
                    "date-time",
                    "ipv4",
                    "ipv6",
                    "hostname",
                    "uri",
                    "duration",
                    "int32",
                )
            },
        },
        [
            {"date": "2024-02-28", "time": "23:59:59Z"},
            {"date-time": "1999-12-31T00:00:00.5+01:30", "ipv4": "127.0.0.1", "hostname": "a-b.c"},
            {"ipv6": "0:0:0:0:0:0:0:1"},
            {"uri": "https://example.org:80/a/b?c=d#e", "duration": "P1DT2H", "int32": "as it is"},
        ],
    ),
    "bounds": (
        {
            "type": "object",
            "properties": {
                "ratio": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                "delta": {"type": "integer", "minimum": -20, "maximum": -3},
                "price": {"type": "number", "exclusiveMinimum": 0},
                "cold": {"type": "number", "maximum": -0.5},
                "count": {"type": "number", "multipleOf": 1},
            },
        },
        [
            {"ratio": 0.25, "delta": -20, "price": 0.01, "cold": -0.5, "count": 12},
            {"ratio": 0, "price": 1234.5},
        ],
    ),
    "nullable": ({"type": ["string", "null"], "maxLength": 1}, ["a", None]),
    "an annotation": ({"type": "integer", "minimum": 3, "nullable": True, "x-y": 1}, [3, 12345]),
    "anything": ({}, [1.5, "a", None, [], {}, {"a": [1, {"b": "c"}]}]),
    "item of anything": ({"type": "array", "items": True, "maxItems": 2}, [[1, {"a": None}]]),
    "required and unnamed": ({"properties": {"a": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": None}]),
    "short names": (
        {"properties": {"abc": {}, "a": {"type": "null"}}, "propertyNames": {"maxLength": 2}},
        [{}, {"a": None}],
    ),
    "unevaluated": (
        {
            "allOf": [{"properties": {"a": {"type": "null"}}, "required": ["z"]}],
            "properties": {"b": {"type": "null"}},
            "unevaluatedProperties": {"type": "integer"},
        },
        [{"b": None, "a": None, "z": 1}],
    ),
    "unevaluated in a part": (
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
                {"properties": {"b": {"type": "null"}}},
            ]
        },
        [{}, {"a": None}],
    ),
    "items of two schemas": (
        {
            "allOf": [
                {"prefixItems": [{"type": "integer"}], "minItems": 1},
                {"prefixItems": [{}, {"const": 3}], "items": {"const": 4}},
                {"prefixItems": [], "items": {"minimum": 3}, "maxItems": 3},
            ]
        },
        [[3], [7, 3], [3, 3, 4]],
    ),
    "unevaluated items": (
        {"prefixItems": [{"type": "null"}], "minItems": 2, "unevaluatedItems": {"const": 1}},
        [[None, 1]],
    ),
    "equal constants": ({"enum": [1, 2, True], "const": 1.0}, [1]),
    "whole constants": ({"enum": [0.5, 2], "multipleOf": 1}, [2]),
    "large bounds": ({"type": "integer", "minimum": 10**30 + 7, "maximum": 10**30 + 9}, [10**30 + 8]),
    "no zero with a sign": ({"type": "number", "minimum": -0.0, "exclusiveMaximum": 0.5}, [0, 0.25]),
    "an encoded reference": ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}}, [None]),
    "draft 4": ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[], [1]]),
}
# Schemas that cannot be expressed or are wrong, each with a part of the error message.
REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"x": {"not": {"type": "null"}}}}, r"\$\.x\.not cannot be expressed"),
    ({"if": {"type": "null"}, "then": False}, r"\$\.if cannot"),
    ({"not": {}}, r"\$\.not cannot"),
    ({"if": {}, "then": {"type": "integer"}}, r"\$\.if cannot"),
    ({"type": "array", "contains": {}}, r"\$\.contains cannot"),
    ({"type": "array", "items": {"patternProperties": {"a": {}}}}, r"\$\.items\.patternProperties cannot"),
    ({"type": "array", "uniqueItems": True}, r"\$\.uniqueItems cannot"),
    ({"type": "integer", "multipleOf": 5}, r"\$\.multipleOf is 5; expected 1, since"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        r"\$\.oneOf: a value may match both number 0 and number 1",
    ),
    ({"oneOf": [{"properties": {name: {}}, "required": [name]} for name in "ab"]}, "may match both number"),
    ({"type": "object", "minProperties": 3}, r"\$\.minProperties is 3, but names"),
    ({"$ref": "#/$defs/none"}, r'\$\.\$ref is "#/\$defs/none"; there is no such part'),
    ({"$ref": "https://example.org/s.json"}, "only references inside the schema"),
    ({"type": "text"}, r'\$\.type is "text"; expected one of object, array'),
    ({"type": "string", "pattern": "("}, r"\$\.pattern: the regular expression '\(' is wrong: missing \)"),
    ({"type": "string", "pattern": "a(?=b)"}, "has a look-around inside, which cannot be expressed"),
    ({"type": "string", "pattern": "(?!a)b"}, "has a look-around inside"),
    ({"type": "string", "pattern": "^(?<!a)b"}, "has a look-around inside"),
    ({"type": "string", "pattern": "^(?!)a"}, "no text matches"),
    ({"type": "string", "pattern": "a(?!)|(?<!)b"}, "no text matches"),
    # In Python, True == 1.
    ({"allOf": [{"items": {"const": 1}}, {"items": {"const": True}}], "minItems": 1}, "no text matches"),
    ({"properties": {"k": {"const": True}}, "enum": [{"k": 1}]}, "no text matches"),
    ({"type": "string", "pattern": "^(a|^b)c$"}, "has an anchor"),
    ({"type": "string", "minLength": -1}, r"\$\.minLength is -1; expected a whole number"),
    ({"type": "integer", "minimum": "3"}, r'\$\.minimum is "3"; expected a number'),
    ({"allOf": [{"minimum": "3"}, {"minimum": 3}]}, r'\$\.minimum is "3"; expected a number'),
    ({"uniqueItems": True, "maxItems": "x"}, r'\$\.maxItems is "x"; expected a whole number'),
    ({"type": [{}]}, r"\$\.type is \[\{\}\]; expected one of"),
    ({"type": "string", "pattern": ["a"]}, r'\$\.pattern is \["a"\]; expected a string'),
    ({"type": "string", "pattern": "(?u)a"}, "ASCII and UNICODE flags are incompatible"),
    ({"required": [1]}, r"\$\.required is \[1\]; expected a list of strings"),
    ({"$ref": ["#"]}, r'\$\.\$ref is \["#"\]; expected a string'),
    ({"$ref": "#name"}, "only references inside the schema"),
    ('{"const": 1e400}', "the number 1e400 is not finite"),
    ({"const": float("nan")}, "the number NaN is not finite"),
    ({"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2.0, "a": 1}}]}, "may match both number 0"),
    ({"properties": []}, r"\$\.properties is \[\]; expected an object"),
    *(
        ({"type": "object", wrong: ["a"]}, rf'\$ has the unknown keyword "{wrong}"; write {right}')
        for wrong, right in {
            "requried": "required",
            "propertys": "properties",
            "minlength": "minLength",
            "anyof": "anyOf",
        }.items()
    ),
    ({"anyOf": []}, r"\$\.anyOf is \[\]; expected a list of schemas"),
    ({"allOf": [{"format": "date"}, {"format": "time"}]}, "two different `format`"),
    ("3", r"\$ is 3; expected an object or a boolean"),
    (3, "the JSON schema is a int; give"),
    ("[", "not valid JSON"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no text matches"),
    (False, "no text matches"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no text matches"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "no text matches"),
    ({"$ref": "#"}, "no text matches"),
    ({"enum": ["\ud800"]}, "a character that is no text"),
]


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    """A schema of the keywords that can be expressed."""
    kinds = ["string", "integer", "number", "enum", "union", "boolean"] + ["object", "array", "object"] * (
        depth > 0
    )
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["a", 'b"', 1, 2.5, None, True, [1], {"k": "v"}], rng.randint(1, 4))}
    if kind == "union":
        return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
    schema: dict[str, Any] = {"type": kind if rng.random() < 0.8 else [kind, "null"]}
    low, high = sorted((rng.randint(-30, 30), rng.randint(-30, 30)))

    def some(**keywords: Any) -> None:
        schema.update({key: value for key, value in keywords.items() if rng.random() < 0.5})

    if kind == "string":
        some(
            minLength=rng.randint(0, 2),
            maxLength=rng.randint(2, 6),
            pattern=rng.choice(["^[a-c]*$", "x", "[^é]$"]),
        )
    elif kind in ("integer", "number"):
        scale = 1 if kind == "integer" else 8
        some(minimum=low / scale, maximum=high / scale)
    elif kind == "array":
        some(items=random_schema(rng, depth - 1), minItems=rng.randint(0, 2), maxItems=rng.randint(2, 4))
        some(prefixItems=[random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))])
    elif kind == "object":
        names = rng.sample(["a", "ab", "b c", "é", 'q"'], rng.randint(0, 4))
        some(properties={name: random_schema(rng, depth - 1) for name in names})
        some(required=[name for name in names if rng.random() < 0.5], maxProperties=rng.randint(1, 4))
        some(additionalProperties=rng.choice([False, True, random_schema(rng, depth - 1)]), minProperties=1)
    return schema


def random_value(rng: random.Random, depth: int = 2) -> Any:
    """A value that may or may not match such a schema."""
    kind = rng.choice(
        ["string", "integer", "number", "null", "boolean", *(["object", "array"] * (depth > 0) * 2)]
    )
    if kind == "object":
        names = sorted(rng.sample(["a", "ab", "b c", "é", 'q"', "z"], rng.randint(0, 3)))
        return {name: random_value(rng, depth - 1) for name in names}
    if kind == "array":
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "string":
        return "".join(rng.choice('abcx"é') for _ in range(rng.randint(0, 5)))
    return {"integer": rng.randint(-20, 20), "number": rng.randint(-90, 90) / 8, "null": None}.get(kind, True)
