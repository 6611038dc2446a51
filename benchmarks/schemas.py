"""JSON schemas for `benchmarks.structured`: 30 like those of applications, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def _object(optional: str = "", **properties: Any) -> Schema:
    """Returns the schema of an object; the properties are required, except those named in `optional`."""
    required = [name for name in properties if name not in optional.split()]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: Any, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _one(*values: Any) -> Schema:
    return {"enum": list(values)}


_NUMBER, _FLAG, _NULL = {"type": "number"}, {"type": "boolean"}, {"type": "null"}
_NAME, _WORD = _text(24, minLength=1), _text(12, pattern="^[a-z]+$")
_DATE, _TIME = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}
_EMAIL, _UUID = {"type": "string", "format": "email"}, {"type": "string", "format": "uuid"}
_MONEY = _object(
    amount={"type": "number", "minimum": 0, "maximum": 100000}, currency=_one("EUR", "USD", "GBP")
)
_ADDRESS = _object("state", street=_NAME, city=_NAME, state=_text(2), zip=_text(10, pattern="^[0-9]{5}$"))
_PERSON = _object("email", name=_NAME, age=_whole(0, 130), email=_EMAIL)
_SCORE = {"type": "number", "minimum": 0, "maximum": 1}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _object("child", label=_WORD, child={"$ref": "#/$defs/node"})},
}

REAL: dict[str, Schema] = {
    "person": _PERSON,
    "address": _ADDRESS,
    "invoice": _object(
        "note",
        number=_text(12, pattern="^INV-[0-9]{4,6}$"),
        date=_DATE,
        lines=_list(_object(item=_NAME, quantity=_whole(1, 999), price=_MONEY), minItems=1, maxItems=3),
        total=_MONEY,
        note=_text(40),
    ),
    "calendar event": _object(title=_NAME, start=_TIME, end=_TIME, guests=_list(_EMAIL, maxItems=3)),
    "weather call": _object("unit", city=_NAME, unit=_one("celsius", "fahrenheit")),
    "search call": _object(
        "limit", query=_text(40, minLength=1), limit=_whole(1, 50), filters=_list(_WORD, maxItems=3)
    ),
    "sentiment": _object(label=_one("positive", "negative", "neutral"), confidence=_SCORE),
    "labels": _object(labels=_list(_one("bug", "feature", "question", "docs"), minItems=1, maxItems=3)),
    "entities": _object(
        entities=_list(_object(text=_NAME, type=_one("PER", "ORG", "LOC"), start=_whole(0, 9999)), maxItems=3)
    ),
    "steps and answer": _object(steps=_list(_text(40), minItems=1, maxItems=3), answer=_NUMBER),
    "quiz": _object(
        question=_text(60, minLength=1), choices=_list(_NAME, minItems=4, maxItems=4), answer=_whole(0, 3)
    ),
    "recipe": _object(
        title=_NAME,
        servings=_whole(1, 12),
        ingredients=_list(_object(name=_NAME, grams=_whole(1, 5000)), minItems=1, maxItems=4),
        vegan=_FLAG,
    ),
    "product": _object(
        "tags",
        sku=_text(8, pattern="^[A-Z]{2}[0-9]{6}$"),
        name=_NAME,
        price=_MONEY,
        tags=_list(_WORD, maxItems=3),
    ),
    "order": _object(
        id=_UUID,
        status=_one("open", "paid", "sent"),
        to=_ADDRESS,
        items=_list(_whole(1, 9999), minItems=1, maxItems=5),
    ),
    "review": _object(stars=_whole(1, 5), title=_text(30), body=_text(80)),
    "user or error": {"anyOf": [_object(user=_PERSON), _object(error=_text(40), code=_whole(400, 599))]},
    "shapes": _list(
        {
            "oneOf": [
                _object(kind={"const": "circle"}, radius=_NUMBER),
                _object(kind={"const": "box"}, width=_NUMBER, height=_NUMBER),
            ]
        },
        minItems=1,
        maxItems=3,
    ),
    "nullable": _object(name={"type": ["string", "null"], "maxLength": 20}, parent={"anyOf": [_UUID, _NULL]}),
    "nested list": _list(_list(_whole(-9, 9), minItems=1, maxItems=3), minItems=1, maxItems=3),
    "tree": _TREE,
    "point": {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": False, "minItems": 2},
    "counts": {"type": "object", "additionalProperties": _whole(0, 99), "maxProperties": 3},
    "server": _object("tls", host={"type": "string", "format": "hostname"}, port=_whole(1, 65535), tls=_FLAG),
    "network": _object(address={"type": "string", "format": "ipv4"}, mask=_whole(0, 32)),
    "commit": _object(type=_one("feat", "fix", "docs"), subject=_text(50, minLength=1), breaking=_FLAG),
    "sql": _object(
        table=_WORD, columns=_list(_WORD, minItems=1, maxItems=4), limit={"type": ["integer", "null"]}
    ),
    "move": _object(from_=_text(2, pattern="^[a-h][1-8]$"), to=_text(2, pattern="^[a-h][1-8]$")),
    "patient": _object(
        "allergies",
        name=_NAME,
        born=_DATE,
        blood=_one("A", "B", "AB", "0"),
        allergies=_list(_WORD, maxItems=2),
    ),
    "translation": _object(language=_text(2, pattern="^[a-z]{2}$"), text=_text(60, minLength=1)),
    "all of": {"allOf": [_object(id=_whole(1, 99)), {"properties": {"id": {"multipleOf": 1}}}]},
}


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Returns a schema of bounded size, with the features of `REAL` in random combinations."""
    kinds: list[Callable[[], Schema]] = [
        lambda: _text(rng.randint(1, 12), minLength=rng.randint(0, 1)),
        lambda: {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{1,5}$", "^[A-Z][0-9]+$", "^(yes|no)$", "^x?y$"]),
        },
        lambda: {
            "type": "string",
            "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"]),
        },
        lambda: _whole(low := rng.randint(-50, 50), low + rng.randint(0, 500)),
        lambda: {"type": "number"},
        lambda: {"type": ["boolean", "null"]},
        lambda: _one(*rng.sample(["a", "B c", 1, 2.5, None, True, 'q"', "é"], rng.randint(1, 4))),
        lambda: {"const": rng.choice(["fixed", 7, {"a": []}, None])},
    ]
    if depth < 2 and rng.random() < (0.9 if not depth else 0.4):

        def inner() -> Schema:
            return random_schema(rng, depth + 1)

        def record() -> Schema:
            names = rng.sample(
                ["id", "name", "value", "Größe", "a b", "x", "items", "is_ok"], rng.randint(1, 5)
            )
            found = _object(
                " ".join(name for name in names if rng.random() < 0.3), **{name: inner() for name in names}
            )
            return found if rng.random() < 0.8 else found | {"additionalProperties": True}

        kinds = [
            *(record, record, record),
            lambda: _list(inner(), minItems=rng.randint(0, 1), maxItems=rng.randint(1, 3)),
            lambda: {"anyOf": [inner(), inner()]},
            lambda: {"$ref": "#/$defs/a", "$defs": {"a": inner()}} if not depth else inner(),
        ]
    return rng.choice(kinds)()
