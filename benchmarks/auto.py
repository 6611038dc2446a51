"""Times `auto` and plain decoding in turns, in one process: `python -m benchmarks.auto MODEL PROMPTS.jsonl`.

A line of the file has `id` and `messages`. Prints a line for each prompt, and the row of a table: the geometric mean,
least and largest ratio, the ratios below .97 and .95, tokens a round and drafts a text. Each text has 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.measuring.bench.timing import measure_runs
from jaxspec.texts.results import Result

TOKENS = 64


def main() -> None:
    """Reads the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--weights", choices=["int8"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    prompts = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    lm = jaxspec.load(given.model, dtype="float32", weights=given.weights)

    def run_of(method: Any) -> Any:
        options: Any = {"max_new_tokens": TOKENS, "temperature": given.temperature, "ignore_eos": True}
        lm.warm_up(method=method, temperature=given.temperature)
        return lambda prompt, turn: lm.generate(prompt, method=method, seed=turn, **options)

    runs = {method: run_of(method) for method in ("autoregressive", "auto")}
    ratios: list[float] = []
    counts: list[tuple[float, float]] = []
    taken = measure_runs([lm], runs, [row["messages"] for row in prompts], given.repeats)
    for row, texts in zip(prompts, taken, strict=True):
        plain, auto = (statistics.median(map(_ms, texts[method])) for method in runs)
        of = [text.statistics for text in texts["auto"]]
        ratios.append(plain / auto)
        counts += [(statistics.fmean(s.num_rounds for s in of), statistics.fmean(s.num_drafts for s in of))]
        print(row["id"], f"{ratios[-1]:.3f}", *counts[-1], f"{plain:.0f} {auto:.0f} ms", flush=True)
    rounds, looks = map(statistics.fmean, zip(*counts, strict=True))
    below = (f"{sum(ratio < bound for ratio in ratios)}" for bound in (0.97, 0.95))
    speeds = f"{statistics.geometric_mean(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.2f}"
    print(f"| {speeds} | {' | '.join(below)} | {(TOKENS - 1) / rounds:.2f} | {looks:.1f} |")


def _ms(text: Result) -> float:
    """Returns the time from the first token of a text to its last, in milliseconds."""
    return text.statistics.decode_ms - text.statistics.decode_compile_ms


if __name__ == "__main__":
    main()
