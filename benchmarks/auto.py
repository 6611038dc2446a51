"""Times methods and plain decoding in turns, in one process: `python -m benchmarks.auto MODEL PROMPTS.jsonl`.

A line of the file has `id` and `messages`. Prints a line for each prompt, and the row of a table for each method: the
geometric mean, median, least and largest ratio, the ratios below .97 and .95, tokens a round and drafts a text. Each
text has 64 tokens. A small model repeats itself after its answer, and lookups copy the repetition: read the median too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.measuring.bench.timing import measure_runs
from jaxspec.requests.results import Result

TOKENS = 64


def main() -> None:
    """Reads the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--weights", choices=["int8"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", nargs="+", default=["auto"], help="compared with plain decoding")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    prompts = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    lm = jaxspec.load(given.model, dtype="float32", weights=given.weights)

    def run_of(method: Any) -> Any:
        options: Any = {"max_new_tokens": TOKENS, "temperature": given.temperature, "ignore_eos": True}
        lm.warm_up(method=method, temperature=given.temperature)
        return lambda prompt, turn: lm.generate(prompt, method=method, seed=turn, **options)

    runs = {method: run_of(method) for method in ("autoregressive", *given.methods)}
    taken = list(measure_runs([lm], runs, [row["messages"] for row in prompts], given.repeats))
    for method in given.methods:
        ratios: list[float] = []
        counts: list[tuple[float, float]] = []
        for row, texts in zip(prompts, taken, strict=True):
            plain, own = (statistics.median(map(_ms, texts[name])) for name in ("autoregressive", method))
            of = [text.statistics for text in texts[method]]
            ratios.append(plain / own)
            counts += [
                (statistics.fmean(s.num_rounds for s in of), statistics.fmean(s.num_drafts for s in of))
            ]
            print(
                method, row["id"], f"{ratios[-1]:.3f}", *counts[-1], f"{plain:.0f} {own:.0f} ms", flush=True
            )
        rounds, looks = map(statistics.fmean, zip(*counts, strict=True))
        speeds = " | ".join(
            f"{of(ratios):.3f}" for of in (statistics.geometric_mean, statistics.median, min, max)
        )
        below = " | ".join(f"{sum(ratio < bound for ratio in ratios)}" for bound in (0.97, 0.95))
        print(f"| {method} | {speeds} | {below} | {(TOKENS - 1) / rounds:.2f} | {looks:.1f} |")


def _ms(text: Result) -> float:
    """Returns the time from the first token of a text to its last, in milliseconds."""
    return text.statistics.decode_ms - text.statistics.decode_compile_ms


if __name__ == "__main__":
    main()
