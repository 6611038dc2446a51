"""Small Python tasks: a function from its description, and a few assignments followed step by step.

Easy for an early exit: syntax, indentation, names copied from the description. Needs depth: the choice of the idiom,
and a value computed from another value.
"""

from __future__ import annotations

import random

from training.data.tasks.task import Task

_words = str.split

_LISTS = _words("xs ys items values numbers data row scores")
_TEXTS = _words("text word line name s label")
_ADJECTIVES = _words("my new the first other quick main small")
_VARIABLES = _words("a b c d e f g h i j k m n p q x y z")
# (description, body). {x} is a list, {s} a string, {k} a one-digit number.
IDIOMS = (
    ("sum of the squares of {x}", "return sum(v * v for v in {x})"),
    ("sum of the cubes of {x}", "return sum(v ** 3 for v in {x})"),
    ("sum of {x}", "return sum({x})"),
    ("largest of {x}", "return max({x})"),
    ("smallest of {x}", "return min({x})"),
    ("difference of largest and smallest of {x}", "return max({x}) - min({x})"),
    ("average of {x}", "return sum({x}) / len({x})"),
    ("how many of {x} are above {k}", "return sum(1 for v in {x} if v > {k})"),
    ("how many of {x} are equal to {k}", "return {x}.count({k})"),
    ("those of {x} above {k}", "return [v for v in {x} if v > {k}]"),
    ("those of {x} below {k}", "return [v for v in {x} if v < {k}]"),
    ("even numbers of {x}", "return [v for v in {x} if v % 2 == 0]"),
    ("odd numbers of {x}", "return [v for v in {x} if v % 2 == 1]"),
    ("multiples of {k} in {x}", "return [v for v in {x} if v % {k} == 0]"),
    ("{x} with {k} added to each", "return [v + {k} for v in {x}]"),
    ("{x} with each times {k}", "return [v * {k} for v in {x}]"),
    ("{x} with the sign of each changed", "return [-v for v in {x}]"),
    ("{x} sorted", "return sorted({x})"),
    ("{x} sorted from large to small", "return sorted({x}, reverse=True)"),
    ("{x} sorted by absolute value", "return sorted({x}, key=abs)"),
    ("{x} backwards", "return {x}[::-1]"),
    ("first {k} of {x}", "return {x}[:{k}]"),
    ("last {k} of {x}", "return {x}[-{k}:]"),
    ("{x} without the first {k}", "return {x}[{k}:]"),
    ("every second of {x}", "return {x}[::2]"),
    ("{x} without doubles", "return list(dict.fromkeys({x}))"),
    ("whether {x} has doubles", "return len(set({x})) < len({x})"),
    ("whether all of {x} are above {k}", "return all(v > {k} for v in {x})"),
    ("whether any of {x} is below {k}", "return any(v < {k} for v in {x})"),
    ("whether {x} is sorted", "return {x} == sorted({x})"),
    ("whether {x} is empty", "return not {x}"),
    ("position of {k} in {x}", "return {x}.index({k})"),
    ("position of the largest of {x}", "return {x}.index(max({x}))"),
    ("pairs of neighbours of {x}", "return list(zip({x}, {x}[1:]))"),
    ("differences of neighbours of {x}", "return [w - v for v, w in zip({x}, {x}[1:])]"),
    (
        "how often each of {x} occurs",
        "counts = {{}}\n    for v in {x}:\n        counts[v] = counts.get(v, 0) + 1\n    return counts",
    ),
    (
        "running sums of {x}",
        "total = 0\n    sums = []\n    for v in {x}:\n        total += v\n        sums.append(total)\n"
        "    return sums",
    ),
    ("product of {x}", "result = 1\n    for v in {x}:\n        result *= v\n    return result"),
    ("{x} as one list without levels", "return [v for part in {x} for v in part]"),
    ("{x} cut into parts of {k}", "return [{x}[i:i + {k}] for i in range(0, len({x}), {k})]"),
    ("second largest of {x}", "return sorted({x})[-2]"),
    ("middle one of {x}", "return sorted({x})[len({x}) // 2]"),
    ("{x} joined by commas", "return ', '.join(str(v) for v in {x})"),
    ("{s} backwards", "return {s}[::-1]"),
    ("{s} in upper case", "return {s}.upper()"),
    ("{s} in lower case", "return {s}.lower()"),
    ("{s} without spaces", "return {s}.replace(' ', '')"),
    ("{s} without spaces at its ends", "return {s}.strip()"),
    ("words of {s}", "return {s}.split()"),
    ("how many words {s} has", "return len({s}.split())"),
    ("longest word of {s}", "return max({s}.split(), key=len)"),
    ("shortest word of {s}", "return min({s}.split(), key=len)"),
    ("first letters of the words of {s}", "return [w[0] for w in {s}.split()]"),
    ("{s} with its words backwards", "return ' '.join({s}.split()[::-1])"),
    ("whether {s} reads the same backwards", "return {s} == {s}[::-1]"),
    ("whether {s} is a number", "return {s}.isdigit()"),
    ("vowels of {s}", "return [c for c in {s} if c in 'aeiou']"),
    ("how many vowels {s} has", "return sum(1 for c in {s} if c in 'aeiou')"),
    ("digits of {s}", "return [int(c) for c in {s} if c.isdigit()]"),
    ("{s} repeated {k} times", "return {s} * {k}"),
    ("first {k} letters of {s}", "return {s}[:{k}]"),
)
LARGEST = 99


def make(chance: random.Random) -> Task:
    """Draws a code task: an idiom with probability 3/5, otherwise a trace of assignments."""
    return _idiom(chance) if chance.random() < 0.6 else _trace(chance)


def _idiom(chance: random.Random) -> Task:
    description, body = chance.choice(IDIOMS)
    words = {"x": chance.choice(_LISTS), "s": chance.choice(_TEXTS), "k": chance.randint(2, 9)}
    argument = words["x"] if "{x}" in description else words["s"]
    name = f"{chance.choice(_ADJECTIVES)}_{chance.choice(_words('part job one task step fn tool'))}"
    asked = description.format(**words)
    return Task(f"# {name}: {asked}", f"\ndef {name}({argument}):\n    {body.format(**words)}", asked)


def _trace(chance: random.Random) -> Task:
    """Makes a program of assignments, and the same assignments with the values they read and their results.

    The right side is written before its values, so that each token needs one look-up; small models fail at two at once.
    """
    values: dict[str, int] = {}
    lines = []
    steps = []
    for name in chance.sample(_VARIABLES, chance.randint(2, 5)):
        expression, value = _expression(values, chance)
        lines.append(f"{name} = {expression}")
        read = " ".join(str(values.get(word, word)) for word in expression.split())
        steps.append(" = ".join(dict.fromkeys((name, expression, read, str(value)))))
        values[name] = value
    program = "\n".join(lines)
    return Task(f"{program}\n# step by step", "\n" + "\n".join(steps), program)


def _expression(values: dict[str, int], chance: random.Random) -> tuple[str, int]:
    """Returns a right side that reads earlier variables, and its value, 0 to `LARGEST`."""
    while True:
        if not values or chance.random() < 0.3:
            number = chance.randint(1, 20)
            return str(number), number
        left = chance.choice(list(values))
        if chance.random() < 0.2:
            return left, values[left]
        sign = chance.choice("++-*")
        if sign == "*":
            right = str(chance.randint(2, 4))
        else:
            right = chance.choice(list(values)) if chance.random() < 0.4 else str(chance.randint(1, 9))
        other = values[right] if right in values else int(right)
        value = {"+": values[left] + other, "-": values[left] - other, "*": values[left] * other}[sign]
        if 0 <= value <= LARGEST:
            return f"{left} {sign} {right}", value
