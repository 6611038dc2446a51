"""Tasks with certain answers, made by rule and without end: sums, code, edits, look-ups.

Targets for speculative decoding must need their depth. A text whose every token is a guess can be written by three
layers as well as by twelve; a sum, the value of a variable or the word that an edit asks for cannot. Each task here
mixes both: long runs that any early exit can write (wording, copied operands, syntax), broken by single tokens that
take depth (a digit of a result, the replaced word). Only the answer is learned, never the question.

A family is one file with a function `make(chance) -> Task`. Tasks that differ in nothing but names have one origin,
and are held out together: what is judged are other numbers, facts and passages than those that were learned. Idioms
of code are few, so there it is another argument or constant of an idiom that was.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from training.data.tasks import code, edits, facts, labels, sums
from training.data.tasks.task import Task

FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    "sums": sums.make,
    "code": code.make,
    "edits": edits.make,
    "facts": facts.make,
    "labels": labels.make,
}
PREFIX = "tasks:"
# Tasks of a family where no number is given: about 5 million tokens of sums.
USUAL_COUNT = 50_000


def tasks(family: str, count: int) -> Iterator[Task]:
    """Makes the first `count` tasks of a family, no two with the same prompt; always the same ones.

    Raises:
      ValueError: there is no such family, or it has fewer tasks.

    Examples:
      >>> [task.completion for task in tasks("sums", 1)][0].splitlines()[-1].startswith("####")
      True
    """
    if family not in FAMILIES:
        raise ValueError(f"no family of tasks {family!r}; choose one of {', '.join(FAMILIES)}")
    chance = random.Random(f"{family} 3")
    seen: set[str] = set()
    for _ in range(20 * count):
        if len(seen) == count:
            return
        task = FAMILIES[family](chance)
        if task.prompt not in seen:
            seen.add(task.prompt)
            yield task
    if len(seen) < count:
        raise ValueError(f"only {len(seen)} different tasks of family {family} were found; ask for fewer")


def records(path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Makes the tasks of `tasks:FAMILY[:COUNT]`: of each its place and its record of `prompt`, `completion`, `origin`.

    Raises:
      ValueError: no such family, or the count is no whole number above 0.
    """
    family, _, number = path.removeprefix(PREFIX).partition(":")
    if number and not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"{number!r} in {path!r}; expected tasks:FAMILY or tasks:FAMILY:COUNT")
    for index, task in enumerate(tasks(family, int(number) if number else USUAL_COUNT)):
        yield f"{path} task {index}", dataclasses.asdict(task)
