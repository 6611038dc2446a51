"""Measures the guarantee of method `auto`: `python -m benchmarks.auto_guarantee` prints a table and JSON.

On every kind of prompt, `auto` should be at most 3 % slower than plain decoding, and over all kinds at most 5 % slower
than the single method that is the best in hindsight. All methods generate after the same prompts in alternating turns,
with all programs compiled. Sampled texts use the coupled acceptor, so all methods write the same text with a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.cli.options import ModelOptions
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.speed import ratio_of_counts
from jaxspec.measuring.bench.timing import measure_runs, warm_up
from jaxspec.methods import Auto
from jaxspec.texts.results import Result, played_rounds

PASSAGE = (
    "Tea was first drunk in China, where it was a medicine before it became a daily drink. In the ninth century monks "
    "carried the seeds to Japan. Portuguese priests and merchants brought tea to Europe in the sixteenth century, and "
    "in the seventeenth it became fashionable in Britain, which planted it in India to compete with China. "
    "Today about seven million tonnes are grown each year, most of them in China, India, Kenya and Sri Lanka. "
)
# Kinds beside the four of `measuring.bench.prompts`: the texts of users' messages.
KINDS = {
    "chat": (
        "Hello! I had a long day at work. Do you have an idea how I could relax tonight?",
        "What is your favourite season, and why do people like it?",
        "My cat does not want to eat. What can I do?",
        "Who are you, and what can you help me with?",
    ),
    "instructions": (
        "Give three tips for staying healthy.",
        "Write a short letter to a landlord about a broken heater.",
        "Explain how a bicycle stays upright.",
        "Plan a day in Paris for a family with two children.",
    ),
    "summary": tuple(f"Summarise this text in {n} sentences.\n{PASSAGE}" for n in ("one", "two", "three", "four")),
    "long prompt": tuple(f"{5 * PASSAGE}\n{q}" for q in ("Who carried the seeds?", "Continue.", "Why?", "Where?")),
    "translation": tuple(
        f"Translate into {language}: The monks carried the seeds of tea to Japan in the ninth century."
        for language in ("French", "German", "Spanish", "Italian")
    ),
    "extraction": tuple(
        f"List all {what} of this text, separated by commas.\n{PASSAGE}"
        for what in ("countries", "numbers", "verbs", "peoples")
    ),
    "correction": tuple(
        f"Correct the spelling, and change nothing else: {text}"
        for text in (
            "The monks caried the seeds to Japan, where tea becam a daily drink of the peopel.",
            "In the sixteenth centurry merchants brougt tea to Europe and sold it for a high prise.",
            "Today most of the tee is grown in China, India, Kenia and Sri Lanka by smal farmers.",
            "Britain planted tea in India to compeet with the monopolly of the Chinese merchants.",
        )
    ),
    "list": tuple(
        f"Write a numbered list of ten {what}." for what in ("animals", "rivers", "jobs", "things to pack")
    ),
    "questions": (
        "Which planet is the largest, and how large is it?",
        "Why is the sky blue?",
        "What is the difference between a lake and a pond?",
        "How do vaccines work?",
    ),
    "JSON": tuple(
        f"Write a JSON array of five objects with the keys name, {key} and country."
        for key in ("age", "city", "height", "price")
    ),
}  # fmt: skip
# A candidate and its rounds in `Result.drafted_by`.
_ROUNDS = re.compile(r"(?:: |, )([^:,]+) in (\d+) rounds?")


@dataclasses.dataclass(frozen=True)
class Options:
    """Speeds of auto, plain decoding and single methods by kind of prompt, temperature and batch size.

    Attributes:
      methods: single methods beside plain decoding, separated by commas. Default: those that auto chooses among.
      kinds: only these kinds of prompts, separated by commas.
      temperatures: separated by commas.
      batches: batch sizes up to 4, separated by commas.
      max_new_tokens: of each text.
      repeats: turns of each batch.
      prompts_each: batches of each kind. They begin with different prompts.
    """

    methods: str | None = None
    kinds: str | None = None
    temperatures: str = "0,0.7,1"
    batches: str = "1,4"
    max_new_tokens: int = 48
    repeats: int = 1
    prompts_each: int = 1
    model: ModelOptions = ModelOptions()  # noqa: RUF009


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Runs all methods in turns on each kind, temperature and batch size.

    Returns:
      `model`, `device`, `methods`; `best`, the single method with the highest speed over all; `over_plain` and
      `over_best`, the ratio of the speed of `auto` to theirs with its interval; `kinds`: by kind the ratios to
      plain decoding of each method; `slowest`, the kind where `auto` is the slowest, and its ratio; `drafted_by`: by
      kind, the rounds in which each candidate of `auto` drafted; `by_prices`: by kind, the ratio of `auto` to plain
      decoding by the counts of its rounds and the prices from which it chose, which no other work disturbs.

    Raises:
      ValueError: unknown kinds, or a model without a tokenizer.
    """
    lm = options.model.load()
    texts = _texts(lm)
    chosen = list(texts) if options.kinds is None else [name.strip() for name in options.kinds.split(",")]
    if unknown := [name for name in chosen if name not in texts]:
        raise ValueError(f"unknown kinds {', '.join(unknown)}; give some of {', '.join(texts)}")
    singles = _singles(lm) if options.methods is None else options.methods.split(",")
    names = ["autoregressive", "auto", *singles]
    counts: dict[str, dict[str, list[np.ndarray]]] = {kind: {name: [] for name in names} for kind in chosen}
    drafted: dict[str, Counter[str]] = {kind: Counter() for kind in chosen}
    priced: dict[str, list[tuple[int, float]]] = {kind: [] for kind in chosen}
    cells = [
        (float(temperature), int(batch))
        for temperature, batch in itertools.product(options.temperatures.split(","), options.batches.split(","))
    ]  # fmt: skip
    for temperature, batch in cells:
        runs = {name: functools.partial(_run, lm, name, temperature, options) for name in names}
        units = [
            [texts[kind][(at + row) % len(texts[kind])] for row in range(batch)]
            for kind in chosen
            for at in range(options.prompts_each)
        ]
        where = f"temperature {temperature:g}, batch {batch}"
        on_progress(f"compiling for {where}")
        warm_up([lm], runs, units, on_progress)
        taken = measure_runs([lm], runs, units, options.repeats, warm=True, on_progress=on_progress)
        for at, results in enumerate(taken):
            kind = chosen[at // options.prompts_each]
            for name, turns in results.items():
                counts[kind][name].append(np.array([_count(turn) for turn in turns]))
            for result in itertools.chain.from_iterable(results["auto"]):
                for name, rounds in _ROUNDS.findall(result.drafted_by):
                    drafted[kind][name] += int(rounds)
                priced[kind].append(_priced(result, batch))
    sums = {kind: np.sum(pairs, axis=0) for kind, pairs in priced.items()}
    by_prices = {kind: float(tokens / steps) for kind, (tokens, steps) in sums.items()}
    return {**_report(lm, names, counts, drafted), "by_prices": by_prices}


def _texts(lm: LanguageModel) -> dict[str, list[list[int]]]:
    """Returns the prompts of each kind as token ids, through the chat template if the model has one."""
    if lm.tokenizer is None:
        raise ValueError(f"{lm.name} has no tokenizer; prompts of text need one")
    chat = lm.tokenizer.has_chat_template
    plain = {name: [lm.encode(text) for text in texts[:4]] for name, texts in prompts.load().items()}
    return plain | {name: [lm.encode(text, chat=chat) for text in texts] for name, texts in KINDS.items()}


def _singles(lm: LanguageModel) -> list[str]:
    """Returns the names of the methods among which `auto` chooses, without those with options of their own."""
    found = dict.fromkeys(one.name.split()[0] for one in lm.candidates(Auto()))
    return [name for name in found if name not in ("layerskip", "draft-verify")]


def _run(
    lm: LanguageModel, name: Any, temperature: float, options: Options, batch: Any, turn: int
) -> list[Result]:
    found: list[Result] = lm.generate(
        batch,
        method=Auto(explain=True) if name == "auto" else name,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=True,
        temperature=temperature,
        seed=turn,
        acceptor="coupled",
    )
    return found


def _priced(result: Result, batch: int) -> tuple[int, float]:
    """Returns the tokens of the rounds of a text, and the time of these rounds by the prices of `auto`, in plain steps.

    Drafts of a candidate count as if all had the mean length of the text's drafts.
    """
    prices, rounds = result.prices, played_rounds(result.token_records)
    if prices is None:  # no candidates
        return len(rounds), float(len(rounds))
    at = int(np.searchsorted(prices["rows"], batch).clip(max=len(prices["rows"]) - 1))
    live = result.statistics.num_prompt_tokens + len(result.tokens) / 2
    verify, draft = (np.array(prices[name][at]) @ (1, live) for name in ("verify", "draft"))
    lengths = np.array([drafted for drafted, _ in rounds])
    taken = verify[np.searchsorted(prices["widths"], lengths, side="right")].sum()
    mean = round(lengths[lengths > 0].mean()) if lengths.any() else 0
    for name, count in _ROUNDS.findall(result.drafted_by):
        taken += int(count) * draft[prices["candidates"].index(name), min(mean, draft.shape[1] - 1)]
    return len(result.tokens) - 1, float(taken / verify[0])


def _count(results: Sequence[Result]) -> tuple[float, float]:
    """Returns the tokens of a batch and its time in milliseconds."""
    tokens = sum(len(one.tokens) for one in results)
    return tokens, max(one.statistics.elapsed_ms - one.statistics.compile_ms for one in results)


def _report(
    lm: LanguageModel,
    names: Sequence[str],
    counts: dict[str, dict[str, list[np.ndarray]]],
    drafted: dict[str, Counter[str]],
) -> dict[str, Any]:
    every = {name: np.stack([one for of in counts.values() for one in of[name]]) for name in names}
    speeds = {name: float(of[..., 0].sum() / of[..., 1].sum()) for name, of in every.items()}
    best = max((name for name in names if name != "auto"), key=lambda name: speeds[name])
    kinds = {
        kind: {
            name: ratio_of_counts(np.stack(of[name]), np.stack(of["autoregressive"]))
            for name in names
            if name != "autoregressive"
        }
        for kind, of in counts.items()
    }
    slowest = min(kinds, key=lambda kind: kinds[kind]["auto"][0] or 0.0)
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "methods": list(names),
        "best": best,
        "over_plain": ratio_of_counts(every["auto"], every["autoregressive"]),
        "over_best": ratio_of_counts(every["auto"], every[best]),
        "slowest": [slowest, *kinds[slowest]["auto"]],
        "kinds": kinds,
        "drafted_by": drafted,
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = [name for name in report["methods"] if name != "autoregressive"]
    table = Table(
        "kind",
        *names,
        "auto, by prices",
        title=f"speed ÷ plain decoding: {report['model']} on {report['device']}",
    )
    for kind, row in report["kinds"].items():
        table.add_row(kind, *(_cell(*row[name]) for name in names), f"{report['by_prices'][kind]:.2f}")
    console = Console(file=sys.stderr, width=150)
    console.print(table)
    over_plain, over_best = (_cell(*report[name]) for name in ("over_plain", "over_best"))
    console.print(f"auto ÷ plain {over_plain}; auto ÷ {report['best']}, the best in hindsight, {over_best}")
    console.print(f"slowest kind: {report['slowest'][0]} {report['slowest'][1]:.2f}")


def _cell(ratio: float, interval: tuple[float, float]) -> str:
    return f"{ratio:.2f} ({interval[0]:.2f}–{interval[1]:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table to standard error and the report as JSON; returns the exit status."""
    return command.run("benchmarks.auto_guarantee", Options, measure, argv, _print)


if __name__ == "__main__":
    sys.exit(main())
