"""Prints tokens per round of a benchmark's runs, or writes their counts as JSON: `python -m benchmarks.head_counts`.

`jaxspec bench --output DIR` writes records.jsonl with texts and times. Counts do not depend on the machine; a
comparison at other costs of a pass needs nothing else. docs/results/heads has those of heads without included weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.console import frame
from jaxspec.host.files import opened, parse_json, write_atomic
from jaxspec.host.messages import shown
from jaxspec.measuring.bench import speed

FORMAT = "jaxspec.head-counts/1"
# The fields of the records' header that counts depend on, or that describe the prompts.
_KEPT = (
    "model",
    "dtype",
    "prompts",
    "max_new_tokens",
    "chat",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
)
_COUNTS = ("num_tokens", "num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclasses.dataclass(frozen=True)
class Options:
    """Print the tokens per round of each run of a benchmark, and its ratio to the first run, with 95 % intervals.

    Attributes:
      records: the directory of `jaxspec bench --output`.
      output: a file for the counts of each text and run; if it is given, nothing is printed.
      only: the runs whose names begin with this word; all if empty.
    """

    records: Path
    output: Path | None = None
    only: str = ""


def counts(lines: Iterable[Mapping[str, Any]], only: str = "") -> dict[str, Any]:
    """Returns the counts of each run, a list with an entry for each text.

    Args:
      lines: the header of records.jsonl, and its entries.
      only: see `Options`.

    Returns:
      `runs` has for each run the tokens, rounds, drafts, draft tokens and accepted tokens of each text, and the number
      of its drafts of which 0, 1, 2, … tokens were accepted. `categories` has the kind of work of each text.

    Raises:
      ValueError: there are no records of such a run.

    Examples:
      >>> statistics = dict.fromkeys(_COUNTS, 3) | {"acceptance_histogram": [1, 2]}
      >>> one = {"id": "a/1", "category": "a", "run": "medusa", "texts": [{"statistics": statistics}]}
      >>> counts([{"model": "f"}, {"records": [one]}])["runs"]["medusa"]["histograms"]
      [[1, 2]]
    """
    header, *entries = lines
    runs: dict[str, dict[str, list[Any]]] = {}
    categories: dict[str, str] = {}
    for record in (record for entry in entries for record in entry["records"]):
        if not record["run"].startswith(only):
            continue
        categories[record["id"]] = record["category"]
        mine = runs.setdefault(record["run"], {name: [] for name in (*_COUNTS, "histograms")})
        for text in record["texts"]:
            for name in _COUNTS:
                mine[name].append(text["statistics"][name])
            mine["histograms"].append(text["statistics"]["acceptance_histogram"])
    if not runs:
        raise ValueError(f"there are no records of a run {shown(only)}; give the first word of a run's name")
    kept = {name: header[name] for name in _KEPT if name in header}
    return {"format": FORMAT, **kept, "categories": [*categories.values()], "runs": runs}


def table(runs: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Returns tokens ÷ rounds of each run as a Markdown table, and the ratio to the first run.

    The intervals are those of the bootstrap over the texts.

    Args:
      runs: the `runs` of `counts`; all on the same prompts.

    Examples:
      >>> print(table({"one": {"num_tokens": [4, 6], "num_rounds": [2, 3]}}))
      | run | tokens per round | ÷ one |
      |---|---|---|
      | one | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) |
    """
    pairs = [np.array([run["num_tokens"], run["num_rounds"]], float).T[:, None] for run in runs.values()]
    lines = [f"| run | tokens per round | ÷ {next(iter(runs))} |", "|---|---|---|"]
    for name, pair in zip(runs, pairs, strict=True):
        found = (speed.ratio_of_counts(pair, other) for other in (np.ones_like(pair), pairs[0]))
        cells = ["-" if of is None else f"{ratio:.2f} ({of[0]:.2f}–{of[1]:.2f})" for ratio, of in found]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options) -> None:
        with opened(options.records / "records.jsonl") as file:
            found = counts(map(parse_json, file), options.only)
        if options.output is None:
            print(table(found["runs"]))
            return
        runs = ",\n    ".join(
            f"{json.dumps(name)}: {json.dumps(run)}" for name, run in found.pop("runs").items()
        )
        head = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        write_atomic(options.output, f'{{\n  {head},\n  "runs": {{\n    {runs}\n  }}\n}}\n')

    return frame.run("benchmarks.head_counts", Options, work, argv)


if __name__ == "__main__":
    sys.exit(main())
