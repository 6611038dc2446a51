"""Edits of a short passage: copy it, replace one or two words, swap two names, write a word in capitals.

Easy for an early exit: copying. Needs depth: the new word at each place of the old one.
"""

from __future__ import annotations

import random
import re

from training.data.tasks.task import ANIMALS, COLORS, NAMES, PLACES, THINGS, Task

_words = str.split

# {n} and {m} are the two names of a passage. The other fields are drawn for each sentence.
_SENTENCES = (
    "{n} went to the {place}.",
    "{n} had a {color} {thing}.",
    "{m} had a {size} {thing}.",
    "{n} saw a {size} {animal} in the {place}.",
    "The {animal} was {color} and {mood}.",
    "{n} gave the {thing} to {m}.",
    "{m} took the {thing} and ran to the {place}.",
    "{n} and {m} played with the {thing} all day.",
    "Then {m} found a {color} {thing} near the {place}.",
    "{m} was {mood}, but {n} was {mood2}.",
    "The {size} {animal} looked at {n}.",
    "{n} asked {m} to come to the {place}.",
    'Then {n} said, "I like your {thing}."',
    'At the {place} {m} said, "This is my {animal}."',
    "They put the {thing} into the {color} box.",
    "The {thing} was {size}, and the {animal} liked it.",
    "In the evening {n} went home with the {animal}.",
    "{m} made a {color} {thing} for {n}.",
    "One day {n} lost the {thing} in the {place}.",
    "{n} looked for {m} in the {place}.",
)
_SIZES = _words("big small little tall new soft")
_MOODS = _words("happy sad tired hungry proud quiet")
# A word may be replaced by another word of the same list; the passage stays readable.
_GROUPS = (NAMES, THINGS, ANIMALS, COLORS, PLACES, _SIZES, _MOODS)
_COPY = ("Copy this text:", "Write this again:", "Repeat this text:")
_REPLACE = (
    "Replace {old} by {new} in:",
    "Replace {old} with {new} in:",
    "Change {old} to {new} in:",
    "Write {new} instead of {old} in:",
)
_SHARES = {"copy": 0.15, "replace": 0.4, "replace two": 0.2, "swap": 0.15, "capitals": 0.1}


def make(chance: random.Random) -> Task:
    """Draws an edit task: a passage of two to six sentences, and one edit of it."""
    n, m = chance.sample(NAMES, 2)
    passage = " ".join(
        sentence.format(
            n=n, m=m, thing=chance.choice(THINGS), animal=chance.choice(ANIMALS), color=chance.choice(COLORS),
            place=chance.choice(PLACES), size=chance.choice(_SIZES), mood=chance.choice(_MOODS),
            mood2=chance.choice(_MOODS),
        )
        for sentence in chance.sample(_SENTENCES, chance.randint(2, 6))
    )  # fmt: skip
    (kind,) = chance.choices(list(_SHARES), list(_SHARES.values()))
    instruction, changes = _edit(kind, passage, chance)
    return Task(prompt(instruction, passage), " " + replaced(passage, changes), passage)


def prompt(instruction: str, passage: str) -> str:
    """Builds the prompt of an edit task: the text before the edited passage."""
    return f"{instruction}\n{passage}\nResult:"


def replaced(passage: str, changes: dict[str, str]) -> str:
    """Replaces each whole word that is a key of `changes`, all at once."""
    if not changes:
        return passage
    words = "|".join(map(re.escape, changes))
    return re.sub(rf"\b({words})\b", lambda found: changes[found.group()], passage)


def _edit(kind: str, passage: str, chance: random.Random) -> tuple[str, dict[str, str]]:
    """Returns the instruction, and the new word for each replaced word."""
    present = [word for word in dict.fromkeys(re.findall(r"\w+", passage)) if _group(word)]
    if kind == "copy":
        return chance.choice(_COPY), {}
    if kind == "capitals":
        old = chance.choice(present)
        return f"Write {old} in capitals in:", {old: old.upper()}
    names = [word for word in present if word in NAMES]
    if kind == "swap" and len(names) == 2:
        n, m = chance.sample(names, 2)
        return f"Let {n} and {m} change places in:", {n: m, m: n}
    count = 2 if kind == "replace two" and len(present) > 1 else 1
    changes: dict[str, str] = {}
    for old in chance.sample(present, count):
        taken = {*present, *changes.values()}
        changes[old] = chance.choice([word for word in _group(old) if word not in taken])
    form = chance.choice(_REPLACE)
    (first, *second) = [form.format(old=old, new=new) for old, new in changes.items()]
    for one in second:
        first = first.removesuffix(" in:") + ", and " + one[0].lower() + one[1:]
    return first, changes


def _group(word: str) -> list[str]:
    """Returns the list that a word belongs to; an empty list for the words of the sentence templates."""
    return next((group for group in _GROUPS if word in group), [])
