"""Tasks with certain answers as a prompt set: `python -m training.tasks --output FILE`.

    python -m training.tasks --output tasks.jsonl
    jaxspec bench --model checkpoints/small --prompt-file tasks.jsonl --chat off

The embedded targets are trained on tasks that are made by rule (`training.data.tasks`). Here are others, those that
come after the last one that a training takes, in the form of Spec-Bench: one category for each family.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec.io.files import write_atomic
from training import command
from training.data import tasks
from training.parsing import parse_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes prompts that ask for a sum, a piece of code, an edit or a look-up, as JSON lines.

    Attributes:
      output: the file, for `jaxspec bench --prompt-file`.
      families: which tasks. Default: all.
      count: prompts of each.
    """

    output: Path
    families: tuple[str, ...] = tuple(tasks.FAMILIES)
    count: int = 20

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"count is {self.count}; give at least 1")
        for family in self.families:
            if family not in tasks.FAMILIES:
                raise ValueError(f"families is {family!r}; choose some of {', '.join(tasks.FAMILIES)}")


def prompts(families: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Prompts of tasks that no training takes, unless it asks for more than the usual number of a family.

    Nor does it take them in other words: tasks whose origin is that of one before are left out.

    Examples:
      >>> [entry["category"] for entry in prompts(["sums"], 1)]
      ['sums']
    """
    for family in families:
        # More than are taken, for those that are left out: nearly half of the sums.
        made = tasks.tasks(family, 2 * tasks.USUAL_COUNT + 20 * count)
        learned = {task.origin for task in itertools.islice(made, tasks.USUAL_COUNT)}
        others = (task for task in made if task.origin not in learned)
        for number, task in enumerate(itertools.islice(others, count), 1):
            yield {"question_id": f"{family}/{number}", "category": family, "turns": [task.prompt]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns the exit status."""

    def work(given: list[str], program: str, console: Console) -> int:
        options = parse_plain(Options, given, program)
        entries = list(prompts(options.families, options.count))
        write_atomic(options.output, "".join(json.dumps(entry) + "\n" for entry in entries))
        console.print(f"wrote {len(entries)} prompts to {options.output}", markup=False)
        return 0

    return command.run("training.tasks", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
