"""Compares methods on one prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.console.tables import Table
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.bench.speed import acceptance, first_token_ms, speed_ratio, tokens_per_second
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.measuring.bench.timing import Run, measure_runs
from jaxspec.measuring.output import figure
from jaxspec.methods import Method, registry
from jaxspec.requests.reading import Messages, Prompt
from jaxspec.requests.results import Result
from jaxspec.sampling import is_greedy

BASELINE = "autoregressive"
# The mean acceptance length has two columns, because both definitions are in use.
_HEADINGS = (
    *(
        "method",
        "tokens",
        "first token ms",
        "tokens per s",
        "times plain",
        "tokens ÷ rounds",
        "1+acc. ÷ drafts",
    ),
    *("acc. rate", "same text"),
)


@shows_progress
def compare(
    lm: LanguageModel,
    prompt: Prompt | Messages,
    methods: Mapping[str, Method],
    *,
    repeats: int = 3,
    on_progress: OnProgress = lambda step: None,
    on_measured: Callable[[dict[str, Any]], None] = lambda report: None,
    **generation: Any,
) -> dict[str, Any]:
    """Times methods on one prompt in turns with plain decoding, after compilation.

    Each method generates once before the timing, which compiles it. See `bench.speed` for the definitions of speed
    and speed-up.

    Args:
      lm: the model.
      prompt: text, token ids or messages.
      methods: the methods by their names in the result. The baseline, autoregressive, is added and comes first.
      repeats: number of timed texts per method.
      on_progress: called with a description of the current step.
      on_measured: called after each text with a report in the form of the result, from the last text of each method
        that has generated, including those that are not counted.
      **generation: arguments of `lm.generate`, such as max_new_tokens.

    Returns:
      `model`, `device`, `dtype`, and `results`: a list of `method`, `text` (None without a tokenizer), `tokens` (the
      number of new tokens), `first_token_ms` (from the call to the first token without compilation, the median over
      the repeats), `tokens_per_second`, `speedup` over autoregressive, the figures of `speed.acceptance`,
      `identical_to_autoregressive` (None when sampling, because only the distributions are equal), and `lossy`
      (True if the distributions differ too, see `requests.results.Result`). Undefined numbers are None.

    Raises:
      ValueError: `repeats` is below 1, or an error of `lm.generate`.
    """
    check_count("repeats", repeats)
    chosen = {BASELINE: registry.make(BASELINE, {})} | dict(methods)
    names = list(chosen)

    given = generation.get("temperature")
    sampling = not is_greedy(lm.defaults.get("temperature", 0.0) if given is None else given)
    last: dict[str, list[Result]] = {}

    def report(results: Mapping[str, list[Result]]) -> dict[str, Any]:
        entries = [
            _entry(name, results[name], results[BASELINE], sampling) for name in names if name in results
        ]
        return {"model": lm.name, "device": lm.device_kind, "dtype": lm.precision, "results": entries}

    def run_of(name: str, method: Method) -> Run:
        def run(prompt: Any, turn: int) -> Result:
            result: Result = lm.generate(prompt, method=method, **generation)
            last[name] = [result]
            if BASELINE in last:
                on_measured(report(last))
            return result

        return run

    # `stream` checks its arguments at once, so an error of any method is raised before the first one compiles.
    for method in chosen.values():
        lm.stream(prompt, method=method, **generation)
    runs = {name: run_of(name, method) for name, method in chosen.items()}
    (results,) = measure_runs([lm], runs, [prompt], repeats, on_progress=on_progress)
    return report(results)


def _entry(name: str, results: list[Result], baseline: list[Result], sampling: bool) -> dict[str, Any]:
    first = results[0]
    return {
        "method": name,
        "text": first.text,
        "tokens": first.statistics.num_tokens,
        "first_token_ms": statistics.median(map(first_token_ms, results)),
        "tokens_per_second": tokens_per_second([results]),
        "speedup": speed_ratio([results], [baseline])[0],
        **acceptance([results]),
        "identical_to_autoregressive": None if sampling else first.tokens == baseline[0].tokens,
        "lossy": first.lossy,
    }


def table(report: Mapping[str, Any]) -> Table:
    """The table of a report of `compare`, also of an unfinished one."""
    rows = []
    for entry in report["results"]:
        same = entry["identical_to_autoregressive"]
        rows.append(
            [
                entry["method"],
                str(entry["tokens"]),
                figure(entry["first_token_ms"], 1),
                figure(entry["tokens_per_second"], 1),
                figure(entry["speedup"], 2),
                figure(entry["mean_acceptance_length"], 2),
                figure(entry["mean_acceptance_length_drafting"], 2),
                figure(entry["draft_acceptance_rate"], 2),
                "lossy" if entry["lossy"] else "–" if same is None else "yes" if same else "no",
            ]
        )
    return Table(_HEADINGS, rows)
