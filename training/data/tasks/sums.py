"""Word problems in the form of GSM8K: one to three steps, each with its calculation, numbers below 100.

Easy for an early exit: the wording, the operands, a repeated result. Needs depth: the operation, and the digits of a
result at their first occurrence.
"""

from __future__ import annotations

import ast
import functools
import operator
import random
import re

from training.data.tasks.task import COLORS, NAMES, THINGS, Task

LARGEST = 99
# A few million tokens are too few to learn multiplication or division by larger numbers.
LARGEST_FACTOR = 12

# (question, steps). {n} {m} {o} are names, {t} a plural, {k} {l} colours, {a} … {d} numbers. Brackets contain a
# calculation. Its result gets the next of the names x, y, z.
_TEMPLATES = (
    ("{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?", "{n} has [a+b] {t}."),
    ("{n} has {a} {t} and loses {b} of them. How many {t} are left?", "There are [a-b] {t} left."),
    ("There are {a} {t} on one shelf and {b} on another. How many {t} are there?", "There are [a+b] {t}."),
    ("{n} packs {a} boxes with {b} {t} in each. How many {t} is that?", "That is [a*b] {t}."),
    ("{n} shares {a} {t} among {b} friends. How many {t} does each get?", "Each friend gets [a/b] {t}."),
    ("A book has {a} pages. {n} has read {b} of them. How many are left?", "There are [a-b] pages left."),
    ("{n} is {a} years old. {m} is {b} years older. How old is {m}?", "{m} is [a+b] years old."),
    ("{n} is {a} years old. {m} is {b} years younger. How old is {m}?", "{m} is [a-b] years old."),
    ("One ticket costs {a} dollars. How much do {b} tickets cost?", "The tickets cost [a*b] dollars."),
    ("{a} children stand in {b} equal rows. How many are in each row?", "Each row has [a/b] children."),
    ("{n} walks {a} miles every day. How many miles is that in {b} days?", "{n} walks [a*b] miles."),
    ("{n} needs {a} points and has {b}. How many are missing?", "{n} needs [a-b] more points."),
    (
        "{n} has {a} {t}. {n} finds {b} more and gives {c} to {m}. How many {t} does {n} have left?",
        "First {n} has [a+b] {t}. Then {n} has [x-c] {t}.",
    ),
    (
        "{n} has {a} {t}. {m} has {b} more than {n}. How many {t} do they have together?",
        "{m} has [a+b] {t}. Together they have [a+x] {t}.",
    ),
    (
        "{n} has {a} {t}. {m} has {b} fewer than {n}. How many {t} do they have together?",
        "{m} has [a-b] {t}. Together they have [a+x] {t}.",
    ),
    (
        "{n} buys {a} boxes with {b} {t} in each and gives away {c}. How many {t} are left?",
        "The boxes hold [a*b] {t}. There are [x-c] {t} left.",
    ),
    (
        "{n} has {a} bags with {b} {t} in each and {c} more {t}. How many {t} is that?",
        "The bags hold [a*b] {t}. That makes [x+c] {t}.",
    ),
    (
        "{n} had {a} dollars and spent {b} on a book and {c} on a pen. How many dollars are left?",
        "{n} spent [b+c] dollars. There are [a-x] dollars left.",
    ),
    (
        "{n} packs {a} {t} into bags of {b} and sells {c} bags. How many bags are left?",
        "{n} packs [a/b] bags. There are [x-c] bags left.",
    ),
    (
        "{n} finds {a} {t} and {m} finds {b}. They share them among {c} children. How many does each get?",
        "They find [a+b] {t}. Each child gets [x/c] {t}.",
    ),
    (
        "{n} has {a} {t}. {m} has twice as many. How many {t} do they have together?",
        "{m} has [a*2] {t}. Together they have [a+x] {t}.",
    ),
    (
        "{n} has {a} {t}. {m} has three times as many. How many more does {m} have than {n}?",
        "{m} has [a*3] {t}. {m} has [x-a] more.",
    ),
    (
        "{n} has {a} {t} and gives half of them to {m}, who had {b}. How many {t} does {m} have now?",
        "{n} gives [a/2] {t}. {m} has [b+x] {t}.",
    ),
    (
        "{n} reads {a} pages on Monday and {b} on Tuesday. The book has {c} pages. How many are left?",
        "{n} reads [a+b] pages. There are [c-x] pages left.",
    ),
    (
        "A grown-up pays {a} dollars and a child {b}. What do one grown-up and {c} children pay?",
        "The children pay [b*c] dollars. All pay [a+x] dollars.",
    ),
    (
        "A boat goes {a} miles every hour for {b} hours, and then {c} more miles. How far does it go?",
        "First it goes [a*b] miles. In all it goes [x+c] miles.",
    ),
    (
        "A rope of {a} feet is cut into {b} equal parts. {n} uses {c} feet of one. How much of it is left?",
        "Each part has [a/b] feet. There are [x-c] feet left.",
    ),
    (
        "There are {a} birds in a tree. {b} fly away and {c} come. How many birds are in the tree now?",
        "After some fly away there are [a-b] birds. Now there are [x+c] birds.",
    ),
    (
        "{n} has {a} {t}. {m} has {b} more than {n}. {o} has {c} fewer than {m}. How many more does {o} have "
        "than {n}?",
        "{m} has [a+b] {t}. {o} has [x-c] {t}. {o} has [y-a] more.",
    ),
    (
        "{n} buys {a} pens for {b} dollars each and a book for {c} dollars, and pays with {d} dollars. How many "
        "dollars come back?",
        "The pens cost [a*b] dollars. All costs [x+c] dollars. {n} gets back [d-y] dollars.",
    ),
    (
        "{n} has {a} boxes with {b} {k} {t} and {c} boxes with {d} {l} {t}. How many {t} is that?",
        "There are [a*b] {k} {t}. There are [c*d] {l} {t}. That makes [x+y] {t}.",
    ),
    (
        "{n} bakes {a} rolls in the morning and {b} later. {n} sells {c} and packs the rest into {d} bags. How many "
        "rolls are in each bag?",
        "{n} bakes [a+b] rolls. There are [x-c] rolls left. Each bag has [y/d] rolls.",
    ),
    (
        "{n} saves {a} dollars a week for {b} weeks and had {c} before. A toy costs {d} dollars. How many dollars are "
        "left after {n} buys it?",
        "{n} saves [a*b] dollars. {n} has [x+c] dollars. There are [y-d] dollars left.",
    ),
    (
        "There are {a} children in a class. Half of them walk, {b} take the bus and the others ride bikes. How many "
        "ride bikes?",
        "There are [a/2] who walk. The others are [a-x] children. There are [y-b] who ride bikes.",
    ),
    (
        "{n} has {a} {t}. {m} has twice as many. {o} has {b} more than {m}. How many more does {o} have than {n}?",
        "{m} has [a*2] {t}. {o} has [x+b] {t}. {o} has [y-a] more.",
    ),
    (
        "A farm has {a} cows and {b} pigs. The farmer sells {c} animals and buys {d}. How many animals are there now?",
        "There are [a+b] animals. Then there are [x-c] animals. Now there are [y+d] animals.",
    ),
    (
        "{n} wins {a} points for each of {b} coins, loses {c} and wins {d} more. How many points does {n} have?",
        "The coins bring [a*b] points. Then {n} has [x-c] points. Now {n} has [y+d] points.",
    ),
    (
        "{n} bakes {a} trays with {b} cakes each. {c} burn. {d} friends share the rest. How many cakes does each get?",
        "{n} bakes [a*b] cakes. There are [x-c] good ones. Each friend gets [y/d] cakes.",
    ),
    (
        "{n} reads {a} pages a day for {b} days and {c} pages a day for {d} days. How many pages is that?",
        "First {n} reads [a*b] pages. Then {n} reads [c*d] pages. That makes [x+y] pages.",
    ),
    (
        "A garden has {a} rows of {b} flowers. A goat eats {c} and {n} picks {d}. How many flowers are left?",
        "There are [a*b] flowers. The goat leaves [x-c] flowers. There are [y-d] flowers left.",
    ),
)
_RESULTS = "xyz"
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_CALCULATION = re.compile(r"\[([^]]+)\]")


def make(chance: random.Random) -> Task:
    """Draws a word problem with random names, things and numbers."""
    question, steps = chance.choice(_TEMPLATES)
    n, m, o = chance.sample(NAMES, 3)
    k, colour = chance.sample(COLORS, 2)
    words = {"n": n, "m": m, "o": o, "t": _plural(chance.choice(THINGS)), "k": k, "l": colour}
    calculations = tuple(_CALCULATION.findall(steps))
    while True:
        numbers = _numbers(calculations, chance)
        results = _results(calculations, numbers)
        if results is not None:
            break
    shown = iter(calculations)
    values = numbers | dict(zip(_RESULTS, results, strict=False))

    def calculation(match: re.Match) -> str:
        name = next(shown)
        filled_in = re.sub("[a-dx-z]", lambda one: str(values[one.group()]), name)
        result = results[calculations.index(name)]
        return f"{filled_in}=<<{filled_in}={result}>>{result}"

    # One line per step, as in GSM8K.
    filled = _CALCULATION.sub(calculation, steps).format(**words).replace(". ", ".\n")
    prompt = f"Question: {question.format(**words, **numbers)}\nAnswer:"
    # Problems that differ only in names and things have the same origin.
    origin = question.format(**dict.fromkeys(words, ""), **numbers)
    return Task(prompt, f" {filled}\n#### {results[-1]}", origin)


def _plural(thing: str) -> str:
    return thing + ("es" if thing.endswith(("x", "s")) else "s")


@functools.cache
def _parsed(calculation: str) -> tuple[str, type[ast.operator], str]:
    tree = ast.parse(calculation, mode="eval").body
    assert isinstance(tree, ast.BinOp)
    return ast.unparse(tree.left), type(tree.op), ast.unparse(tree.right)


def _numbers(calculations: tuple[str, ...], chance: random.Random) -> dict[str, int]:
    """Draws numbers for the names a to d: small for factors and divisors, half of the others below 30."""
    small = {
        side
        for left, operation, right in map(_parsed, calculations)
        for side in ((left, right) if operation is ast.Mult else (right,) if operation is ast.Div else ())
    }
    return {
        name: chance.randint(2, LARGEST_FACTOR if name in small else chance.choice((30, LARGEST)))
        for name in "abcd"
    }


def _results(calculations: tuple[str, ...], numbers: dict[str, int]) -> list[int] | None:
    """Returns the result of each calculation; None if one is not a whole number from 2 to `LARGEST`."""
    known: dict[str, int] = dict(numbers)
    results = []
    for name, (left, operation, right) in zip(_RESULTS, map(_parsed, calculations), strict=False):
        one, other = (known[side] if side in known else int(side) for side in (left, right))
        if operation is ast.Div and one % other:
            return None
        result = _OPERATIONS[operation](one, other)
        if not 2 <= result <= LARGEST:  # "1 dolls" is not grammatical
            return None
        known[name] = result
        results.append(result)
    return results
