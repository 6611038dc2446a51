"""The report of a suite: figures by run and category."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.console.tables import Table
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.measuring.bench import speed
from jaxspec.measuring.bench.bench_records import Record
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.free_rows import FreeRows
from jaxspec.measuring.bench.suite import Suite
from jaxspec.measuring.output import figure

ALL = "all"


def report(lm: LanguageModel, suite: Suite, *, interrupted: bool = False) -> dict[str, Any]:
    """The figures of a suite's records.

    Args:
      lm: the model of the suite.
      suite: a suite with at least one record.
      interrupted: whether the suite was interrupted.

    Returns:
      `model`, `device`, `dtype`, `machine`, `header` (see `Suite.header`), `distribution`, `prompts` (the number
      measured), `left_out` (the first turn that exceeded the context, by prompt id), `interrupted`; `runs`: the result
      of `figures` by run and category ("all" is the last); `best`: the run with the highest speed-up by category,
      including plain decoding with 1; `differences`: every text that differs from plain decoding's.
    """
    header = suite.header()
    groups: dict[str, list[Record]] = {}
    for record in suite.records:
        groups.setdefault(record.category, []).append(record)
    categories = groups | {ALL: suite.records}
    runs = {
        run: {
            name: figures(run, records, suite.sampling, suite.free.get(run))
            for name, records in categories.items()
        }
        for run in suite.runs
    }
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "dtype": lm.precision,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "header": header,
        "law": distribution_name(
            **{name: header[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        ),
        "prompts": len({record.id for record in suite.records}),
        "left_out": suite.left_out,
        "interrupted": interrupted,
        "runs": runs,
        "best": {name: max(runs, key=lambda run: runs[run][name]["speedup"] or 0.0) for name in categories},
        "differences": _differences(suite.records),
    }


def figures(
    run: str, records: Sequence[Record], sampling: bool, rounds: FreeRows | None = None
) -> dict[str, Any]:
    """The figures of a run on some prompts.

    Args:
      run: name of the run.
      records: the records of these prompts, including those of plain decoding.
      sampling: whether tokens were sampled.
      rounds: the run's rounds where rows are free; None if unknown.

    Returns:
      `prompts`; `texts` (each turn of a conversation counts) and their `tokens` in the first repeat;
      `tokens_per_second` and `speedup` as in `bench.speed`, with its `speedup_interval` by the bootstrap over the
      prompts (or batches) of each kind, None for a single one; the figures of `speed.acceptance`, and
      `acceptance_by_position`; `rows_free`, the predicted speed-up if a pass costs only the weights that it reads;
      `first_token_ms` and `token_ms` (time after a text's first token ÷ tokens after it), each with the `median` and
      the 95th percentile `p95` over all texts; `accuracy`, the share of texts that end with the answer;
      `identical_to_autoregressive`, `num_different` texts and their `largest_margin` (see `records.Difference`), None
      when sampling. Undefined numbers are None.
    """
    mine, plain = (_units(name, records) for name in (run, BASELINE))
    taken, others = list(mine.values()), list(plain.values())
    batches = [batch for batch, _ in mine]
    ratio, interval = speed.speed_ratio(taken, others, groups=batches, kinds=_kinds(run, records))
    own = [record for record in records if record.run == run]
    texts = list(speed.every_text(taken))
    per_token = [
        speed.running_ms(text) / (text.statistics.num_tokens - 1)
        for text in texts
        if text.statistics.num_tokens > 1
    ]
    right = [one for record in own if record.right is not None for one in record.right]
    accepted = speed.acceptance(taken)
    length, drafted = accepted["mean_acceptance_length"], accepted["mean_draft_length"]
    free = None
    if rounds is not None and length is not None and drafted is not None:
        free = rounds.speedup(length, drafted)
    different = [record.difference for record in own if record.difference is not None]
    margins = [abs(one.margin) for one in different if one.margin is not None]
    return {
        "prompts": len({record.id for record in own}),
        "texts": len(own),
        "tokens": sum(len(record.texts[0].tokens) for record in own),
        "tokens_per_second": speed.tokens_per_second(taken),
        "speedup": ratio,
        "speedup_interval": interval if len(set(batches)) > 1 else None,
        **accepted,
        "acceptance_by_position": speed.acceptance_by_position(taken),
        "rows_free": free,
        "first_token_ms": _spread([speed.first_token_ms(text) for text in texts]),
        "token_ms": _spread(per_token),
        "accuracy": statistics.mean(right) if right else None,
        "identical_to_autoregressive": None if sampling else not different,
        "num_different": None if sampling else len(different),
        "largest_margin": max(margins, default=None),
    }


def _units(run: str, records: Iterable[Record]) -> dict[tuple[int, int], list[list[Any]]]:
    """The texts of a run for `bench.speed`: by (batch, turn), a list of the texts of each repeat."""
    rows: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.run == run:
            rows.setdefault((record.batch, record.turn), []).append(record)
    return {
        unit: [list(texts) for texts in zip(*(one.texts for one in together), strict=True)]
        for unit, together in rows.items()
    }


def _kinds(run: str, records: Iterable[Record]) -> list[str]:
    """The kind of work of each of `_units`; the kinds of a mixed batch are joined."""
    kinds: dict[tuple[int, int], set[str]] = {}
    for record in records:
        if record.run == run:
            kinds.setdefault((record.batch, record.turn), set()).add(record.category)
    return [" ".join(sorted(names)) for names in kinds.values()]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "p95": float(np.quantile(values, 0.95))}


def _differences(records: Iterable[Record]) -> list[dict[str, Any]]:
    return [
        {
            "id": record.id,
            "turn": record.turn,
            "run": record.run,
            "repeat": record.difference.repeat,
            "position": record.difference.position,
            "tokens": list(record.difference.tokens),
            "margin": record.difference.margin,
        }
        for record in records
        if record.difference is not None
    ]


def shown_categories(report: Mapping[str, Any]) -> list[str]:
    """The categories of a table, with "all" last; only the category itself if there is one."""
    names = list(report["best"])
    return names[:1] if len(names) == 2 else names


def summary(report: Mapping[str, Any]) -> str:
    """A short description of the measurement."""
    header = report["header"]
    text = (
        f"{_count(report['prompts'], 'prompt')}, {report['law']}, at most {header['max_new_tokens']} new tokens, "
        f"{_count(header['repeats'], 'turn')}"
    )
    if header["batch"] > 1:
        text += f", in batches of {header['batch']} (speeds are of whole batches)"
    if report["left_out"]:
        text += f"; {len(report['left_out'])} exceed the context with the prompt or a later turn"
    return text + ("; interrupted, these are the results until then." if report["interrupted"] else ".")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(report: Mapping[str, Any]) -> Table:
    """The table of the figures by category, with its number of prompts, and run."""
    rows: list[Sequence[str]] = []
    for category in shown_categories(report):
        rows.append([f"{category} ({report['runs'][BASELINE][category]['prompts']})"])
        rows += [[run, *cells(report, run, category)] for run in report["runs"]]
    return Table(["run", *columns(report)], rows)


def columns(report: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a table of figures; some only if a run has the figure.

    Returns:
      Explanations by heading (of up to two lines); `cells` returns a row.
    """
    shown = dict(_COLUMNS)
    for heading, name in {"right": "accuracy", "rows\nfree": "rows_free"}.items():
        if all(kinds[ALL][name] is None for kinds in report["runs"].values()):
            del shown[heading]
    return shown


def cells(report: Mapping[str, Any], run: str, category: str) -> list[str]:
    """One row of the table of `columns`; cells have up to two lines."""
    one = report["runs"][run][category]
    best = "*" if report["best"][category] == run else ""
    interval = None if run == BASELINE else one["speedup_interval"]
    lengths = (one["mean_acceptance_length"], one["mean_acceptance_length_drafting"])
    row = {
        "same\ntext": "\n".join(filter(None, same(one))),
        "tokens/s": figure(one["tokens_per_second"], 1),
        "× plain\n95 %": f"{best}{figure(one['speedup'], 2)}\n"
        + ("" if interval is None else "{:.2f}–{:.2f}".format(*interval)),
        "acc.\nlength": "\n".join(figure(length, 2) for length in lengths),
        "acc.\nrate": figure(one["draft_acceptance_rate"], 2),
        "rows\nfree": figure(one["rows_free"], 2),
        "ms to\nfirst": _two(one["first_token_ms"], 0),
        "ms per\ntoken": _two(one["token_ms"], 1),
        "right": figure(one["accuracy"], 2),
    }
    return [row[heading] for heading in columns(report)]


_COLUMNS = {
    "same\ntext": "whether all texts equal plain decoding's; if not, the number of different texts, and the largest "
    "logit margin between the two tokens at a first difference",
    "tokens/s": "tokens after the first of each text ÷ their time; the median over the turns",
    "× plain\n95 %": "this speed ÷ that of plain decoding in the same turn, the median over the turns (* the "
    "fastest), and its interval by the bootstrap over the prompts of each kind",
    "acc.\nlength": "the mean acceptance length: tokens ÷ rounds, as in Spec-Bench, and 1 + accepted ÷ "
    "drafting rounds, as in vLLM",
    "acc.\nrate": "accepted ÷ draft tokens",
    "rows\nfree": "prediction of × plain if a pass costs only the weights that it reads, for any number of rows",
    "ms to\nfirst": "time to the first token, median and 95th percentile over texts",
    "ms per\ntoken": "time per token after the first, median and 95th percentile over texts",
    "right": "share of the texts that end with the answer",
}


def same(one: Mapping[str, Any]) -> tuple[str, str]:
    """Whether the texts of a run's `figures` equal plain decoding's, and the margin of a difference, for a table."""
    if one["identical_to_autoregressive"] is None:
        return "–", ""
    if one["identical_to_autoregressive"]:
        return "yes", ""
    gap = "" if one["largest_margin"] is None else f"≤ {one['largest_margin']:.1g}"
    return f"{one['num_different']} not", gap


def _two(spread: Mapping[str, float] | None, digits: int) -> str:
    return "–" if spread is None else "\n".join(figure(spread[name], digits) for name in ("median", "p95"))


def positions(report: Mapping[str, Any]) -> dict[str, list[float]]:
    """The acceptance by position over all categories, for the runs with drafts."""
    by_run = {run: kinds[ALL]["acceptance_by_position"] for run, kinds in report["runs"].items()}
    return {run: rates for run, rates in by_run.items() if rates}


def widest(rates: Mapping[str, Sequence[float]]) -> int:
    """The number of positions of the longest draft."""
    return max(itertools.chain((0,), map(len, rates.values())))
