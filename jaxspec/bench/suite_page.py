"""A suite's report as one HTML page, with its plots, that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jaxspec.bench import charts
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.suite_report import cells, columns, positions, shown_categories, widest

# Texts that differ are listed up to here; all of them stand in the JSON.
_LISTED = 50
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr.group td { font-weight: 600; background: #f4f4f4 }
dt { font-weight: 600 } dd { margin: 0 0 .3rem 1rem } .legend span { margin-right: 1.2rem; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em } .note { color: #666 }
svg text { font: 11px system-ui, sans-serif; fill: #444 } svg .grid { stroke: #e4e4e4 }
svg .line { stroke: #222; stroke-dasharray: 4 3 } svg .whisker { stroke: #222; stroke-width: 1.5 }
"""


def page(report: Mapping[str, Any]) -> str:
    """The page of what `suite_report.report` returns."""
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    colours = {run: charts.colour(number) for number, run in enumerate(report["runs"])}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(summary(report))}</p>',
        "<h2>Speed-up by category</h2>",
        charts.legend(colours),
        _scroll(_speedups(report)),
        "<h2>Figures</h2>",
        _scroll(_figures(report)),
        "<dl>" + "".join(map(_explained, columns(report).items())) + "</dl>",
    ]
    rates = positions(report)
    if rates:
        drawn = charts.lines(rates, colours, x="position in the draft", label="accepted")
        drafting = {run: colours[run] for run in rates}
        parts += ["<h2>Acceptance by position</h2>", charts.legend(drafting), _scroll(drawn)]
        note = "Of the rounds with a draft, the share that accepted its first token, its second, and so on."
        parts += [f'<p class="note">{note}</p>', _scroll(_positions(report, widest(rates)))]
    if report["differences"]:
        parts += ["<h2>Texts that are not plain decoding's</h2>", _scroll(_differences(report))]
    parts += ["<h2>What was measured</h2>", _scroll(_table(("", ""), _settings(report)))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def summary(report: Mapping[str, Any]) -> str:
    """What was measured, in a sentence or two."""
    header = report["header"]
    said = (
        f"{_prompts(report['prompts'])}, {report['law']}, at most {header['max_new_tokens']} new tokens, "
        f"{header['repeats']} turn{'s' if header['repeats'] > 1 else ''}"
    )
    if header["batch"] > 1:
        said += f", in batches of {header['batch']} (speeds are of whole batches)"
    if report["left_out"]:
        said += f"; of {len(report['left_out'])} the context has no room for the prompt or a later turn"
    return said + ("; interrupted, this is what was measured until then." if report["interrupted"] else ".")


def _prompts(count: int) -> str:
    return f"{count} prompt{'' if count == 1 else 's'}"


def _speedups(report: Mapping[str, Any]) -> str:
    def by_category(name: str) -> dict[str, Any]:
        return {run: {c: one[name] for c, one in kinds.items()} for run, kinds in report["runs"].items()}

    ratios, intervals = by_category("speedup"), by_category("speedup_interval")
    del intervals[BASELINE]
    return charts.bars(ratios, intervals, label="× plain decoding", line=1.0)


def _figures(report: Mapping[str, Any]) -> str:
    headings = ["", *columns(report)]
    rows: list[Sequence[str]] = []
    for category in shown_categories(report):
        rows.append([f"{category} ({_prompts(report['runs'][BASELINE][category]['prompts'])})"])
        rows += [[run, *cells(report, run, category)] for run in report["runs"]]
    return _table(headings, rows)


def _positions(report: Mapping[str, Any], width: int) -> str:
    rows: list[Sequence[str]] = []
    for category in shown_categories(report):
        by_run = {run: kinds[category]["acceptance_by_position"] for run, kinds in report["runs"].items()}
        drafting = [[run, *(f"{rate:.2f}" for rate in rates)] for run, rates in by_run.items() if rates]
        rows += [[category], *drafting] if drafting else []
    return _table(["", *map(str, range(1, width + 1))], rows)


def _differences(report: Mapping[str, Any]) -> str:
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
    more = len(report["differences"]) - _LISTED
    return _table(headings, rows) + (f'<p class="note">and {more} more</p>' if more > 0 else "")


def _settings(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    header = {**report["header"], "machine": report["machine"]}
    header["runs"] = "; ".join(header["runs"].values())
    header["peers"] = "; ".join(header["peers"]) or "none"
    return [(name.replace("_", " "), "–" if value is None else str(value)) for name, value in header.items()]


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of one cell are headings of the rows below them."""
    headings = list(headings)
    head = "".join(f"<th>{_lines(heading)}</th>" for heading in headings)
    body = "".join(
        f'<tr class="group"><td colspan="{len(headings)}">{escape(row[0])}</td></tr>'
        if len(row) == 1
        else "<tr>" + "".join(f"<td>{_lines(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _explained(column: tuple[str, str]) -> str:
    heading, meaning = column
    return f"<dt>{escape(heading.replace(chr(10), ' '))}</dt><dd>{escape(meaning)}</dd>"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _scroll(content: str) -> str:
    return f'<div class="scroll">{content}</div>'
