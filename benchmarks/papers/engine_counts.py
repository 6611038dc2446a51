"""Counts rounds and draft passes of greedy texts in the engine, run by run, with a file to resume from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.papers.counted import Case, Work
from benchmarks.papers.workbench import Workbench, distribution
from jaxspec.measuring.bench.prompts import Split
from jaxspec.measuring.line_log import LineLog
from jaxspec.texts.results import Result

# Generates one greedy text after a prompt: the result, and its draft passes by part.
Counting = Callable[[Sequence[int]], tuple[Result, Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Counter:
    """Counts the cases of one model on the prompts of one split.

    Attributes:
      bench: the workbench.
      split: the split of the prompts.
      parts: the parts of a draft pass; a change of these begins a new file.
      name: name of the file, for a paper with several.
      task_types: task types of the prompts; None for all.
    """

    bench: Workbench
    split: Split
    parts: str
    name: str = "counts"
    task_types: Sequence[str] | None = None

    def count(self, cases: Mapping[Case, Counting]) -> dict[Case, Work]:
        """Returns the counts of each case; those of the file are not counted again."""
        prompts = self.bench.encoded(self.split, self.task_types)
        options = self.bench.options
        header = {
            "format": "jaxspec.counts/1",
            "model": self.bench.lm.fingerprint,
            "dtype": self.bench.lm.precision,
            "parts": self.parts,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
            "max_new_tokens": options.max_new_tokens,
        }
        path = self.bench.directory / f"{self.name}-{self.split}.jsonl"
        log = LineLog(path, header, of="count", resume=options.resume)
        known = {Case(*entry["case"]): entry for entry in log.entries}
        for number, (case, counting) in enumerate(cases.items(), 1):
            if case in known:
                continue
            self.bench.on_progress(f"{self.split}: {case.row}, {case.setting}, {number} of {len(cases)}")
            known[case] = _entry(case, [counting(prompt) for prompt in prompts])
            log.add(known[case])
        return {
            case: Work(*(np.array(known[case][name]) for name in ("tokens", "rounds", "passes")))
            for case in cases
        }


def generated(bench: Workbench, prompt: Sequence[int], method: Any, temperature: float = 0.0) -> Result:
    """Generates a text: greedy, or sampled with the seed of the options."""
    options = bench.options
    found: Result = bench.lm.generate(
        prompt,
        method=method,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        **distribution(temperature),
    )
    return found


def _entry(case: Case, texts: Sequence[tuple[Result, Sequence[float]]]) -> dict[str, Any]:
    return {
        "case": list(case),
        "tokens": [max(result.statistics.num_tokens - 1, 0) for result, _ in texts],
        "rounds": [result.statistics.num_rounds for result, _ in texts],
        "passes": [list(map(float, passes)) for _, passes in texts],
    }
