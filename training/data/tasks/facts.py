"""Five or six facts, then questions: look-ups, the same in two steps, and comparisons.

Easy for an early exit: the form of an answer. What needs depth: the word that is looked up, above all where one fact
leads to another.
"""

from __future__ import annotations

import random

from training.data.tasks.task import ANIMALS, COLORS, NAMES, PLACES, THINGS, Task

LINES = 5


def make(chance: random.Random) -> Task:
    """Draws a look-up task: facts of one form, two to four questions about them, and all answers."""
    lines, questions = chance.choice((_owners, _places, _ages, _friends))(chance)
    asked = chance.sample(questions, chance.randint(2, 4))
    chance.shuffle(lines)
    numbered = list(enumerate(asked, start=1))
    prompt = "\n".join([*lines, *(f"{number}. {question}" for number, (question, _) in numbered), "Answers:"])
    return Task(
        prompt, "".join(f"\n{number}. {answer}" for number, (_, answer) in numbered), "\n".join(lines)
    )


_Facts = tuple[list[str], list[tuple[str, str]]]


def _owners(chance: random.Random) -> _Facts:
    """Who has what, of which color."""
    rows = _rows(chance, NAMES, THINGS, COLORS)
    lines = [f"{name} has a {color} {thing}." for name, thing, color in rows]
    questions = []
    for name, thing, color in rows:
        questions += [
            (f"What does {name} have?", f"{name} has a {color} {thing}."),
            (f"Who has the {thing}?", f"{name} has the {thing}."),
            (f"What color is the {thing}?", f"The {thing} is {color}."),
            (f"What color is the thing of {name}?", f"The thing of {name} is {color}."),
        ]
    return lines, questions


def _places(chance: random.Random) -> _Facts:
    """What lies in which box, and where the boxes are: two steps."""
    # A box in a box would make two boxes, and a box lies in a place too: each question names what it asks for.
    rows = _rows(chance, [thing for thing in THINGS if thing != "box"], COLORS, PLACES)
    chosen = rows[: LINES // 2 + 1]
    lines = []
    questions = []
    for thing, color, place in chosen:
        lines += [f"The {thing} is in the {color} box.", f"The {color} box is in the {place}."]
        questions += [
            (f"In which place is the {thing}?", f"The {thing} is in the {place}."),
            (f"In which place is the {color} box?", f"The {color} box is in the {place}."),
            (f"Which thing is in the {color} box?", f"The {thing} is in the {color} box."),
            (f"Which thing is in the {place}?", f"The {thing} is in the {place}."),
        ]
    return lines, questions


def _ages(chance: random.Random) -> _Facts:
    """How old people are: look-ups and comparisons."""
    names = chance.sample(NAMES, LINES)
    ages = dict(zip(names, chance.sample(range(2, 100), LINES), strict=True))
    lines = [f"{name} is {age} years old." for name, age in ages.items()]
    questions = [(f"How old is {name}?", f"{name} is {ages[name]} years old.") for name in names]
    for n in names:
        m = chance.choice([name for name in names if name != n])
        older, younger = (n, m) if ages[n] > ages[m] else (m, n)
        questions += [
            (f"Who is older, {n} or {m}?", f"{older} is older than {younger}."),
            (f"Who is younger, {n} or {m}?", f"{younger} is younger than {older}."),
        ]
    oldest, youngest = max(names, key=ages.__getitem__), min(names, key=ages.__getitem__)
    return lines, [
        *questions,
        ("Who is the oldest?", f"{oldest} is the oldest."),
        ("Who is the youngest?", f"{youngest} is the youngest."),
    ]


def _friends(chance: random.Random) -> _Facts:
    """Who is whose friend, and who has which animal: two steps."""
    names = chance.sample(NAMES, LINES)
    animals = dict(zip(names, chance.sample(ANIMALS, LINES), strict=True))
    friends = dict(zip(names, names[1:] + names[:1], strict=True))
    chosen = names[:3]
    lines = [f"The friend of {n} is {friends[n]}." for n in chosen]
    lines += [f"{friends[n]} has a {animals[friends[n]]}." for n in chosen]
    questions = []
    for n in chosen:
        m, animal = friends[n], animals[friends[n]]
        questions += [
            (f"Who is the friend of {n}?", f"The friend of {n} is {m}."),
            (f"What does {m} have?", f"{m} has a {animal}."),
            (f"What does the friend of {n} have?", f"The friend of {n} has a {animal}."),
            (f"Who has the {animal}?", f"{m} has the {animal}."),
        ]
    return lines, questions


def _rows(chance: random.Random, *columns: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(chance.sample(column, LINES) for column in columns), strict=True))
