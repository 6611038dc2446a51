"""Copy-and-edit tasks made from stories: "Replace Tim by Sam in: …", then the passage with the name replaced.

Prompt lookup drafts best on copied text with small changes. The tasks come from the training stories.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import re

_words = str.split

NAMES = _words(
    "Tim Sam Lily Tom Sue Ben Mia Max Anna Jack Sara Lucy Timmy Spot Amy Bob Jane Emma Mark Sally Daisy Leo "
    "Kate Billy Molly Joe Ella Fred Rose Jill John Mary Lucas Nina Peter Ruby Susie Tommy Zoe Kim Bella Jim "
    "Sarah Benny Buddy Fluffy Grace Jimmy Johnny Lila Polly Rex Sammy Tina Toby Bobby"
)
# A word may be replaced by another word of the same group; the story stays readable.
THINGS = (
    _words(
        "ball car doll kite box hat book cake bike boat flower toy drum truck spoon shoe stone key bell cup"
    ),
    _words("dog cat bird frog bear fox fish duck mouse rabbit lion pig cow horse monkey squirrel bee owl"),
    _words("red blue green yellow pink purple white black brown orange"),
    _words("big small little old new shiny soft pretty happy sad nice good"),
)
REPLACE = (
    "Replace {old} by {new} in:",
    "Replace {old} with {new} in:",
    "Change {old} to {new} in this text:",
    "Write {new} instead of {old} in:",
    "Copy this text, but replace {old} by {new}:",
    "Put {new} in the place of {old}:",
)
COPY = ("Copy this text:", "Write this again:", "Repeat this text:")
# Length of a passage, in characters. Two of the longest with the instruction fit a window of 512 tokens.
SHORTEST, LONGEST = 15, 520
# Probability of each task type: replace a name, replace a word, copy.
_SHARES = (0.6, 0.25, 0.15)
_PER_STORY = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """A copy-and-edit task and its answer.

    Attributes:
      prompt: the instruction, the passage, and `Result:`.
      answer: the passage after the edit.
    """

    prompt: str
    answer: str


def prompt(instruction: str, passage: str) -> str:
    """Builds the prompt of a task: the instruction, the passage, and `Result:`."""
    return f"{instruction}\n{passage}\nResult:"


def tasks(story: str) -> list[Task]:
    """Makes at most three tasks from a story. The random numbers are seeded by a hash of the story."""
    chance = random.Random(hashlib.sha256(story.encode()).digest())
    made = []
    for _ in range(_PER_STORY):
        passage = _passage(story, chance)
        kind = chance.choices(("name", "thing", "copy"), _SHARES)[0]
        if passage is not None:
            made.append(_task(passage, kind, chance))
    return made


def replace(old: str, new: str, passage: str) -> str:
    """Replaces every whole word `old` in a passage."""
    return re.sub(rf"\b{re.escape(old)}\b", new, passage)


def _passage(story: str, chance: random.Random) -> str | None:
    """Returns consecutive sentences of `SHORTEST` to `LONGEST` characters on one line; None if there are too few."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", " ".join(story.split()))
    first = chance.randrange(len(sentences))
    # Log-uniform, so that short passages are as frequent as long ones: a model learns to copy on the short ones.
    wanted = math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST)))
    taken = ""
    for sentence in sentences[first:]:
        longer = f"{taken} {sentence}".strip()
        if len(longer) > LONGEST or len(taken) >= wanted:
            break
        taken = longer
    return taken if len(taken) >= SHORTEST else None


def _task(passage: str, kind: str, chance: random.Random) -> Task:
    present = set(re.findall(r"\b\w+\b", passage))
    for groups in {"name": ((NAMES,), THINGS), "thing": (THINGS, (NAMES,)), "copy": ()}[kind]:
        open_groups = [group for group in groups if not present.issuperset(group)]
        choices = [(word, group) for group in open_groups for word in group if word in present]
        if choices:
            old, group = chance.choice(choices)
            new = chance.choice([word for word in group if word not in present])
            instruction = chance.choice(REPLACE).format(old=old, new=new)
            return Task(prompt(instruction, passage), replace(old, new, passage))
    return Task(prompt(chance.choice(COPY), passage), passage)
