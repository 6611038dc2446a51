"""A suite's report as one self-contained HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxspec.console.tables import Table
from jaxspec.measuring import charts
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.suite_report import cells, columns, positions, same, shown_categories, widest

# Maximum number of different texts listed; the JSON report has all of them.
_LISTED = 50
# The names of the runs and the column after them remain visible where a table is wider than the screen.
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --line: #ddd; --band: #f2f2f2; --note: #666 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --page: #1b1b1b; --line: #3a3a3a; --band: #262626;
  --note: #999 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 71rem; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.charts { display: flex; flex-wrap: wrap; gap: 1.2rem 2rem } .scroll { overflow-x: auto }
table { border-collapse: separate; border-spacing: 0; font-size: 13px; line-height: 1.35 }
th, td { padding: .25rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: nowrap; background: var(--page) }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 6.5rem; max-width: 8.5rem;
  position: sticky; left: 0; overflow-wrap: anywhere }
tr.group td { font-weight: 600; background: var(--band); max-width: none; white-space: nowrap }
.same :is(th, td):nth-child(2) { position: sticky; left: 7.7rem; border-right: 1px solid var(--line) }
.same :is(th, td):first-child { width: 6.5rem; max-width: 6.5rem; box-sizing: content-box }
dt { font-weight: 600 } dd { margin: 0 0 .3rem 1rem } .note { color: var(--note) }
"""


def page(report: Mapping[str, Any]) -> str:
    """The HTML page of a report of `suite_report.report`."""
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(summary(report))}</p>',
        "<h2>Speed-up by category</h2>",
        f'<div class="charts">{"".join(map(str, speedups(report)))}</div>',
        "<h2>Figures</h2>",
        f'<div class="scroll same">{figures(report)._repr_html_()}</div>',
        "<dl>" + "".join(map(_explained, columns(report).items())) + "</dl>",
    ]
    rates = positions(report)
    if rates:
        note = "The share of the drafting rounds that accepted the first draft token, the second, and so on."
        parts += ["<h2>Acceptance by position</h2>", str(acceptance(report))]
        parts += [f'<p class="note">{note}</p>', _scroll(_positions(report, widest(rates)))]
    if report["differences"]:
        parts += ["<h2>Texts that differ from plain decoding's</h2>", _scroll(_differences(report))]
        if (more := len(report["differences"]) - _LISTED) > 0:
            parts.append(f'<p class="note">and {more} more</p>')
    parts += ["<h2>Settings</h2>", _scroll(Table(("", ""), _settings(report)))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


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


def speedups(report: Mapping[str, Any]) -> list[charts.Chart]:
    """A chart of the speed-ups for each category, all with one scale."""
    shown = shown_categories(report)
    found = [kinds[category] for kinds in report["runs"].values() for category in shown]
    most = max(
        [end for one in found for end in (one["speedup"], *(one["speedup_interval"] or ())) if end],
        default=1.0,
    )
    return [
        charts.bars(
            {run: kinds[category]["speedup"] for run, kinds in report["runs"].items()},
            {
                run: None if run == BASELINE else kinds[category]["speedup_interval"]
                for run, kinds in report["runs"].items()
            },
            title=_headline(report, category),
            label="× plain decoding",
            notes={run: same(kinds[category])[0] for run, kinds in report["runs"].items()},
            notes_label="same text",
            line=1.0,
            most=most,
        )
        for category in shown
    ]


def acceptance(report: Mapping[str, Any]) -> charts.Chart:
    """The chart of the acceptance by position, of a report with drafts."""
    colours = {run: charts.colour(number) for number, run in enumerate(report["runs"])}
    drawn = {run: charts.Curve(list(enumerate(rates, 1))) for run, rates in positions(report).items()}
    return charts.curves(
        drawn, x="position in the draft", y="share accepted", title="All prompts", colours=colours, most=1.0
    )


def figures(report: Mapping[str, Any]) -> Table:
    """The table of the figures by category, with its number of prompts, and run."""
    rows: list[Sequence[str]] = []
    for category in shown_categories(report):
        rows.append([f"{category} ({report['runs'][BASELINE][category]['prompts']})"])
        rows += [[run, *cells(report, run, category)] for run in report["runs"]]
    return Table(["run", *columns(report)], rows)


def _headline(report: Mapping[str, Any], category: str) -> str:
    return f"{category} ({_count(report['runs'][BASELINE][category]['prompts'], 'prompt')})"


def _positions(report: Mapping[str, Any], width: int) -> Table:
    rows: list[Sequence[str]] = []
    for category in shown_categories(report):
        by_run = {run: kinds[category]["acceptance_by_position"] for run, kinds in report["runs"].items()}
        drafting = [[run, *(f"{rate:.2f}" for rate in rates)] for run, rates in by_run.items() if rates]
        rows += [[category], *drafting] if drafting else []
    return Table(["run", *map(str, range(1, width + 1))], rows)


def _differences(report: Mapping[str, Any]) -> Table:
    headings = ("prompt", "turn", "run", "first different token", "margin (logits)")
    rows = [
        [
            one["id"],
            str(one["turn"] + 1),
            one["run"],
            str(one["position"] + 1),
            "–" if one["margin"] is None else f"{one['margin']:.2g}",
        ]
        for one in report["differences"][:_LISTED]
    ]
    return Table(headings, rows)


def _settings(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    header = {**report["header"], "machine": report["machine"]}
    header["runs"] = "; ".join(header["runs"].values())
    header["peers"] = "; ".join(header["peers"]) or "none"
    return [(name.replace("_", " "), "–" if value is None else str(value)) for name, value in header.items()]


def _explained(column: tuple[str, str]) -> str:
    heading, meaning = column
    return f"<dt>{escape(heading.replace(chr(10), ' '))}</dt><dd>{escape(meaning)}</dd>"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _scroll(table: Table) -> str:
    return f'<div class="scroll">{table._repr_html_()}</div>'
