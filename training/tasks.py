"""Writes generated tasks as prompts: a prompt set, or the prompts of a model that was trained on such tasks.

    python -m training.tasks --output tasks.jsonl
    jaxspec bench --model checkpoints/small --prompt-file tasks.jsonl --chat off
    python -m training.tasks --model checkpoints/small --count 16
    jaxspec bench --model small

The embedded targets are trained on generated tasks (`training.data.tasks`). This command writes later tasks of the same
families, which training has not used: in the form of Spec-Bench, one category for each family; or as a model's
`jaxspec.prompts.json`.
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

from jaxspec.host.files import write_atomic, write_json
from jaxspec.measuring.bench import prompts as own
from training import command
from training.data import tasks
from training.option_files import parse_plain

# The task types of `jaxspec.measuring.bench.prompts` for the families. That module also has story openings, some to
# tune with and some to report on.
WORK = {"sums": "mathematics", "code": "code", "edits": "copy-edit", "facts": "facts"}
_MOST = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes prompts that ask for a sum, a piece of code, an edit or a look-up.

    Attributes:
      output: the file, JSON lines for `jaxspec bench --prompt-file`.
      model: a model's directory. Instead of `output`, its jaxspec.prompts.json is written: half of the prompts to
        tune
        with, half to report on, and as many of the project's own story openings.
      families: the task families. Default: all; for a model all except lists of labels.
      count: number of prompts of each family.
    """

    output: Path | None = None
    model: Path | None = None
    families: tuple[str, ...] = ()
    count: int = 20

    def __post_init__(self):
        if (self.output is None) == (self.model is None):
            raise ValueError("give either output=FILE or model=DIR")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ValueError(
                f"model is {self.model}, which is no model's directory; give one with a config.json"
            )
        if self.model is not None and (self.count % 2 or self.count > 2 * _MOST):
            raise ValueError(f"count is {self.count}; give an even number up to {2 * _MOST} for a model")
        if self.count < 1:
            raise ValueError(f"count is {self.count}; give at least 1")
        for family in self.families:
            if family not in tasks.FAMILIES:
                raise ValueError(f"families is {family!r}; choose some of {', '.join(tasks.FAMILIES)}")


def prompts(families: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Yields prompts of tasks that no training uses, unless it asks for more than the usual number of a family.

    Tasks with the origin of an earlier task are left out too.

    Examples:
      >>> [entry["category"] for entry in prompts(["sums"], 1)]
      ['sums']
    """
    for family in families:
        # More than needed, because nearly half of the sums share an origin with an earlier one.
        made = tasks.tasks(family, 2 * tasks.USUAL_COUNT + 20 * count)
        learned = {task.origin for task in itertools.islice(made, tasks.USUAL_COUNT)}
        others = (task for task in made if task.origin not in learned)
        for number, task in enumerate(itertools.islice(others, count), 1):
            yield {"question_id": f"{family}/{number}", "category": family, "turns": [task.prompt]}


def model_prompts(families: Sequence[str], count: int) -> dict[own.Split, dict[str, list[str]]]:
    """Returns the prompts of a model: `count` of each task type, half for each purpose.

    `jaxspec.measuring.bench.prompts` reads them.
    """
    made: dict[str, list[str]] = {WORK.get(family, family): [] for family in families}
    for entry in prompts(families, count):
        made[WORK.get(entry["category"], entry["category"])] += entry["turns"]
    half = count // 2
    parts: dict[own.Split, slice] = {"tuning": slice(half), "reporting": slice(half, None)}
    return {
        split: {"stories": list(own.load(split)["stories"][:half])}
        | {kind: texts[part] for kind, texts in made.items()}
        for split, part in parts.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        if options.model is not None:
            output = options.model / own.NAME
            by_split = model_prompts(options.families or tuple(WORK), options.count)
            write_json(output, by_split)
            count = sum(len(texts) for kinds in by_split.values() for texts in kinds.values())
        else:
            assert options.output is not None
            output = options.output
            entries = list(prompts(options.families or tuple(tasks.FAMILIES), options.count))
            write_atomic(output, "".join(json.dumps(entry) + "\n" for entry in entries))
            count = len(entries)
        console.print(f"wrote {count} prompts to {output}", markup=False)

    return command.run("training.tasks", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
