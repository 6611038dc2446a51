"""A few facts, then questions: look-ups in one or two steps, and comparisons.

Easy for an early exit: the form of an answer. Needs depth: the looked-up word, most of all where one fact leads to
another. Every question gives a word and asks for a later word of its fact, and a two-step answer writes both steps: a
target of 4M parameters does not learn it otherwise. The number of facts varies: with five in every task, that target
learned only the form of the answers, and filled it with arbitrary words of the facts for thousands of steps.
"""

from __future__ import annotations

import random

from training.data.tasks.task import ANIMALS, COLORS, NAMES, PLACES, THINGS, Task

# Share of the tasks by their number of facts.
_COUNTS = {1: 0.1, 2: 0.25, 3: 0.25, 4: 0.2, 5: 0.2}


def make(chance: random.Random) -> Task:
    """Draws a look-up task: one to five facts of one form, one to four questions about them, and all answers."""
    (count,) = chance.choices(list(_COUNTS), list(_COUNTS.values()))
    lines, questions = chance.choice((_labels, _owners, _places, _ages, _friends))(count, chance)
    asked = chance.sample(questions, min(chance.randint(1, 4), len(questions)))
    chance.shuffle(lines)
    numbered = list(enumerate(asked, start=1))
    prompt = "\n".join([*lines, *(f"{number}. {question}" for number, (question, _) in numbered), "Answers:"])
    return Task(
        prompt, "".join(f"\n{number}. {answer}" for number, (_, answer) in numbered), "\n".join(lines)
    )


_Facts = tuple[list[str], list[tuple[str, str]]]


def _labels(count: int, chance: random.Random) -> _Facts:
    """Makes pairs of a word and the word beside it: the shortest look-up."""
    keys, values = chance.sample((NAMES, THINGS, ANIMALS, COLORS, PLACES), 2)
    rows = _rows(count, chance, keys, values)
    return [f"{key}: {value}" for key, value in rows], [(f"{key}?", f"{key}: {value}") for key, value in rows]


def _owners(count: int, chance: random.Random) -> _Facts:
    """Makes facts about who has which thing of which color."""
    rows = _rows(count, chance, NAMES, THINGS, COLORS)
    lines = [f"{name} has a {color} {thing}." for name, thing, color in rows]
    questions = []
    for name, thing, color in rows:
        questions += [
            (f"What does {name} have?", f"{name} has a {color} {thing}."),
            (f"What color is the thing of {name}?", f"The thing of {name} is {color}."),
        ]
    return lines, questions


def _places(count: int, chance: random.Random) -> _Facts:
    """Makes facts about things in boxes and boxes in places: look-ups in two steps."""
    # "box" is excluded, because a box in a box would be ambiguous.
    rows = _rows(_half(count), chance, [thing for thing in THINGS if thing != "box"], COLORS, PLACES)
    lines = []
    questions = []
    for thing, color, place in rows:
        lines += [f"The {thing} is in the {color} box.", f"The {color} box is in the {place}."]
        questions += [
            (f"Where is the {color} box?", f"The {color} box is in the {place}."),
            (f"In which box is the {thing}?", f"The {thing} is in the {color} box."),
            (f"In which place is the {thing}?", f"The {thing} is in the {color} box, in the {place}."),
        ]
    return lines, questions


def _ages(count: int, chance: random.Random) -> _Facts:
    """Makes facts about ages: look-ups and comparisons."""
    names = chance.sample(NAMES, count)
    ages = dict(zip(names, chance.sample(range(2, 100), count), strict=True))
    lines = [f"{name} is {age} years old." for name, age in ages.items()]
    questions = [(f"How old is {name}?", f"{name} is {ages[name]} years old.") for name in names]
    if count > 1:
        for n in names:
            m = chance.choice([name for name in names if name != n])
            word, choose = chance.choice((("older", max), ("younger", min)))
            answer = f"{n} is {ages[n]}, {m} is {ages[m]}: {choose(n, m, key=ages.__getitem__)} is {word}."
            questions.append((f"Who is {word}, {n} or {m}?", answer))
    return lines, questions


def _friends(count: int, chance: random.Random) -> _Facts:
    """Makes facts about friends and their animals: look-ups in two steps."""
    names = chance.sample(NAMES, 2 * _half(count))
    pairs = list(zip(names[::2], names[1::2], chance.sample(ANIMALS, _half(count)), strict=True))
    lines = [f"The friend of {n} is {m}." for n, m, _ in pairs]
    lines += [f"{m} has a {animal}." for _, m, animal in pairs]
    questions = []
    for n, m, animal in pairs:
        questions += [
            (f"Who is the friend of {n}?", f"The friend of {n} is {m}."),
            (f"What does {m} have?", f"{m} has a {animal}."),
            (f"What does the friend of {n} have?", f"The friend of {n} is {m}: {m} has a {animal}."),
        ]
    return lines, questions


def _half(count: int) -> int:
    """Returns the number of pairs of facts for about `count` facts."""
    return (count + 1) // 2


def _rows(count: int, chance: random.Random, *columns: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(chance.sample(column, count) for column in columns), strict=True))
