"""Generated tasks with one correct answer: sums, code, edits, look-ups, chains of look-ups.

A target for speculative decoding must need its depth. Three layers write free text about as well as twelve, but not a
sum, the value of a variable, or the word that an edit asks for. Each task mixes long runs that any early exit can write
(wording, copied operands, syntax) with single tokens that need depth (a digit of a result, the replaced word). Only the
answer is learned.

A family is one file with a function `make(chance) -> Task`. Tasks that differ only in names have the same origin, and
are held out together, so the held-out tasks have other numbers, facts and passages. There are few idioms of code, so
held-out code tasks have other arguments or constants of known idioms.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from training.data.tasks import chains, code, edits, facts, labels, sums
from training.data.tasks.task import Task

FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    "sums": sums.make,
    "code": code.make,
    "edits": edits.make,
    "facts": facts.make,
    "labels": labels.make,
    "chains": chains.make,
}
PREFIX = "tasks:"
# Default number of tasks of a family: about 5 million tokens of sums.
USUAL_COUNT = 50_000


def tasks(family: str, count: int) -> Iterator[Task]:
    """Generates the first `count` tasks of a family, with different prompts. The sequence is always the same.

    Raises:
      ValueError: the family does not exist, or has fewer tasks.

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
    """Generates the tasks of `tasks:FAMILY[:COUNT]`: pairs of a place and a record of `prompt`, `completion`, `origin`.

    Raises:
      ValueError: the family does not exist, or the count is not a positive integer.
    """
    family, _, number = path.removeprefix(PREFIX).partition(":")
    if number and not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"{number!r} in {path!r}; expected tasks:FAMILY or tasks:FAMILY:COUNT")
    for index, task in enumerate(tasks(family, int(number) if number else USUAL_COUNT)):
        yield f"{path} task {index}", dataclasses.asdict(task)
