"""Writes the page of results, and the pages of the papers' tables, from stored reports.

    python -m benchmarks.results

reads docs/results/PAPER-MODEL.json (`report.json` of `python -m benchmarks.papers PAPER --model MODEL --counts`),
PAPER-MODEL-times.json and PAPER-MODEL-int8.json (the same without `--counts`, in float32 and with `--weights int8`),
and writes docs/results.md, which has a verdict and a figure for each claim, and in docs/results a page with the claims
and tables of each paper and a chart of each report of counts. It also writes the index of docs/measurements, and
the tables of speeds in README.md and docs/measurements/real_model.md.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import figures, peers_report, speeds
from benchmarks.papers import s2d_sorted_target
from benchmarks.papers.tables import FORMAT, FREE, Cell, number, shown
from jaxspec.console import frame
from jaxspec.host.files import read_json
from jaxspec.measuring import charts
from jaxspec.measuring.bench.suite_options import Amount

DOCS = Path(__file__).parents[1] / "docs"
Report = Mapping[str, Any]
# Short names of the papers, and what they measured on.
PAPERS = {
    "adaspeed": ("AdaSPEED (Liu et al.)", "LayerSkip's Llama 1B and 7B, summaries; engine not known"),
    "s2d": (
        "S2D (Kavehzadeh et al. 2024)",
        "Vicuna 7B and 13B, LLaMA-Chat 70B, MT-bench; a harness with adaptive draft lengths",
    ),
    "asd": ("ASD (Metel et al. 2024)", "Llama-2-13B on CNN/DM, a V100; the code of Draft & Verify"),
}
# The fields of a report that the pages read, and how its title begins.
_FIELDS = {"paper", "model", "dtype", "amount", "prompts", "claims", "tables"}
_TITLES = {"adaspeed": "AdaSPEED", "s2d": "S2D", "asd": "Draft on the Fly"}
# Likely causes of what does not hold.
CAUSES = {
    "adaspeed": "Draft & Verify's stop is tuned here by the same search as AdaSPEED's. The intervals of their ratio "
    "end at 1.02 (greedy) and 1.04 (top-p), below the paper's 1.05 and 1.05 to 1.06, which have no interval. Exit "
    "3 of 12, a quarter of the layers like the paper's 4 of 16, is the lowest that was tried, and most "
    "rules are fastest there. With top-p on `large`, the tuning prompts choose K 2 for LayerSkip, and K 1 is faster on "
    "the reporting prompts: AdaSPEED is 1.12 times as fast as that.",
    "s2d": "Likely cause: at the costs of LLaMA-Chat-70B the last exit is the fastest alone, and SFT trains only "
    "it. The best one exit for all targets is the best on the reporting prompts, in favour of the exit. "
    "The sorted target was trained for 600 steps. Before heads had a price, S2D was faster than SFT in 4 of 6 cases. A "
    "replay in NumPy made the greedy counts. It equals the engine, which the commands run, in the 220 texts that were "
    "compared and in those of `tests/lab/test_recounts.py`; the commands were not run to their end.",
    "asd": "Likely causes of what does not hold: the attentions that change their input least are the last ones, "
    "which rule 2 keeps. On the reporting prompts α = .985 alone leaves out 2.4 of 12 attentions of "
    "`large` on average (2.1 of `small`), and with rule 2 .8 (.7). The search may leave out any MLP, two thirds of the "
    "bytes, which ASD does only for every m-th layer. Both models were trained with layer dropout, which Llama-2 was "
    "not. To tune ASD's numbers took longer (66 to 97 s on `small`, beside texts by `auto`) than the search (5 s), "
    "which judges masks by agreement instead of by time. Five searches of `small` on stories find masks that have 1.27 "
    "to 1.79 × plain on code at the costs of Llama-2-13B: the search decides more of an interval than the texts. The "
    "counts of `large` are older than those of `small`: one search for each column in place of five, m 3 and n 2 on "
    "code in place of 4 and 3, and intervals widened by √(8 ÷ 7) to an unbiased variance.",
}
TIMES = {"times": "float32", "int8": "int8"}
_HELD = {True: "yes", False: "no", None: "unclear"}
# The default amount of a measurement; a printed command has options for other amounts only.
_USUAL = dataclasses.asdict(Amount())
HOLDS, DOES_NOT, UNKNOWN, UNJUDGED = "**holds**", "**does not hold**", "cannot be told", "–"
# The largest difference, in per cent, that a verdict calls small.
SMALL = 8
# Times that another measurement on the other core disturbed: their figures are printed, and no verdict uses them.
DISTURBED = {("small", "float32"), ("small", "int8"), ("large", "int8")}
# Claims of the reports that have no verdict, by short name of the paper, and the reason.
UNTESTED = {
    "The best exit of AdaSPEED is lower than that of LayerSkip and Draft & Verify's stop (4 against 6 of 16).": (
        "adaspeed",
        "not tested: exit 3 of 12 is the lowest that was tried, and most rules are fastest there",
    ),
    s2d_sorted_target.FASTER: (
        "s2d",
        "not counted since heads have a price; without it 1.27 (1.21–1.33) on `small` at the costs of Vicuna-13B (the "
        "paper: 1.26), and less than 1 by the disturbed clock",
    ),
    s2d_sorted_target.LESS_ACCURATE: ("s2d", "cannot be told: by 2.23 points (-1.23 to 5.88) on `small`"),
    s2d_sorted_target.LACKING.says: ("s2d", ""),  # of both together
}

# Models of the commands that are not part of the project, and how to train them.
_RECIPES = "--config training/recipes/tasks.yaml --config training/recipes/sorted.yaml"
TRAINED = {
    f"runs/{name}/model": (
        f"git checkout 4b4a9dc9 && python -m training.{job} {_RECIPES} {options} --run runs/{name} --output "
        f"runs/{name}/model"
    )
    for name, job, options in (
        ("sft-draft", "sft", "--start-layers 6"),
        ("distilled-draft", "soft", "--exits 2 4 6 --target checkpoints/small --distil-weight 1"),
        ("sorted-target", "soft", "--exits 3 6 9 12 --steps 600"),
    )
}
# Claims that the reports do not judge: short name of the paper, claim, and the figures here or the reason.
UNTOLD = (
    (
        "adaspeed",
        "The speeds of LayerSkip's Llama 1B and 7B on CNN/DM.",
        "these models were not measured; the columns only have their costs",
    ),
    (
        "adaspeed",
        "A probe trained on 2,000 texts is right for 75 % of the draft tokens.",
        "other texts; ours are right for 84 % (exit 3) and 89 % (exit 6) of the draft tokens of `small`, and the base "
        "rate for 72 and 89 % ([Measurements](measurements/embedded.md)). Our probes read the state after the final "
        "norm, not before it. They are fitted by L-BFGS with a ridge, not by 500 batches of SGD, and with top-p to "
        "min(1, p ÷ q), not to agreement",
    ),
    (
        "asd",
        "The speeds of Llama-2-13B, its chat model and CodeLlama-13B; attention takes longer than the MLP; a search "
        "takes 11 hours.",
        "these models were not measured, the column only has their costs; here attention is a third of a layer's bytes",
    ),
    (
        "s2d",
        "EAGLE is slower without its loss on features (Table 3: 1.61 against 2.73 ×), and hardly without that on "
        "tokens (2.70).",
        "a head for `large` has 2.90 tokens per round with both, 1.86 without the first and 2.49 without the second; "
        "1.86, 1.19 and 1.60 × plain at free rows. The loss on tokens gains more here than in the paper "
        "([Measurements](measurements/embedded.md#does-eagle-need-its-loss-on-features))",
    ),
    (
        "s2d",
        "EAGLE, Medusa and Hydra gain from trees (Table 2).",
        "**holds** in tokens a round: a tree of 9 tokens has 1.24 times (1.22–1.28) those of a chain with Medusa, 1.23 "
        "(1.19–1.27) with Hydra and 1.06 (1.02–1.09) with EAGLE (the paper: 1.43, 1.02 and 1.23). At free rows "
        "trees win with every head; on this CPU with none "
        "([Measurements](measurements/embedded.md#does-a-tree-of-drafts-beat-a-chain))",
    ),
    (
        "s2d",
        "A larger target needs higher thresholds (Figure 3).",
        "in [our Figure 3](results/s2d.md), the fastest are τ .9 and .7 at the costs of the smaller targets, and .9 "
        "and .9 at those of the largest; these differences of 1 % have no interval",
    ),
    (
        "s2d",
        "A small pretrained model gains from sorting, too (Table 4: 1.17 against 1.05 ×).",
        "`small`, which has 1.93 × plain as a draft of `large` at free rows, has 2.38 once it is sorted, 1.23 times "
        "(1.17–1.30) as much "
        "([Measurements](measurements/embedded.md#does-a-small-pretrained-model-gain-from-sorting))",
    ),
    (
        "s2d",
        "A target trained on the draft's task gains more (Table 5: 1.53 against 1.38 ×).",
        "on GSM8K, `large` with fine-tuning has 1.83 × plain at free rows, and 1.19 without (1.54 with the embedded "
        "draft), by one setting that was not tuned ([Measurements](measurements/embedded.md))",
    ),
    (
        "s2d",
        "One draft serves several targets.",
        "`large` was made from `small`; a target from its own seed would take days of a core, as `small` did",
    ),
    (
        "blog",
        "2.61 × with Llama-3.1-8B for 70B, 2.06 × with n-grams on an edit.",
        "one prompt each; ours are in "
        "[Measurements](measurements/embedded.md#how-much-does-speculative-sampling-gain-on-large)",
    ),
)


class Judged(NamedTuple):
    """A claim on one model: the claim of a report as JSON, with the model and the kind of its costs."""

    model: str
    claim: Mapping[str, Any]


def verdict(judged: Sequence[Judged]) -> str:
    """Returns the verdict on a claim, and the numbers of the cases in which it holds, and does not hold.

    Args:
      judged: the claim for each model and each of the paper's cost ratios, or for the times of each model and format.

    Examples:
      >>> def case(holds, low=0.0, high=2.0):
      ...     return Judged("large", {"holds": holds, "figure": {"interval": [low, high]}, "costs": ""})
      >>> verdict([case(True), case(True)]), verdict([case(True), case(False), case(None)])
      ('**holds**: 2 of 2', 'cannot be told: 1 of 3, not 1')
      >>> verdict([case(None, 0.98, 1.012), case(False, 0.97, 0.99)]), verdict([])
      ('no difference above 3 %: 0 of 2, not 1', '–')
    """
    cases = [one.claim for one in judged if (one.model, one.claim["costs"]) not in DISTURBED]
    if not cases:
        return UNJUDGED
    found = [one["holds"] for one in cases]
    held, refuted = (sum(one is wanted for one in found) for wanted in (True, False))
    word = HOLDS if all(found) else DOES_NOT if refuted == len(found) else UNKNOWN
    intervals = [one["figure"]["interval"] or () if one["figure"] else () for one in cases]
    if word == UNKNOWN and all(intervals):
        most = math.ceil(max(100 * abs(end - 1) for interval in intervals for end in interval) - 1e-9)
        word = f"no difference above {most} %" if most <= SMALL else word
    return f"{word}: {held} of {len(found)}{f', not {refuted}' if refuted else ''}"


def load(directory: Path) -> dict[str, Report]:
    """Reads the reports by the names of their files without `.json`, the papers in the order of `PAPERS`.

    Raises:
      ValueError: there is none, or one is damaged or has the name of another; one line with the file.
    """
    names = [*PAPERS]
    found = {}
    for path in sorted(directory.glob("*.json")):
        paper, model, kind, *more = (*path.stem.split("-"), "", "")
        if paper not in PAPERS or not model or kind not in ("", *TIMES) or any(more):
            raise ValueError(
                f"{path} has no name of a report; give PAPER-MODEL, PAPER-MODEL-times or PAPER-MODEL-int8"
            )
        report = read_json(path)
        if report.get("format") != FORMAT or not report.keys() >= _FIELDS:
            raise ValueError(
                f"{path} is no report of `python -m benchmarks.papers` with format {FORMAT}; write it again"
            )
        given = (
            next((one for one in names if str(report["paper"]).startswith(_TITLES[one])), None),
            report["model"],
            "" if "repeats" not in report["amount"] else "int8" if "int8" in report["dtype"] else "times",
        )
        if given != (paper, model, kind):
            raise ValueError(f"{path} is the report of {'-'.join(filter(None, map(str, given)))}; rename it")
        found[path.stem] = report
    if not found:
        raise ValueError(f"{directory} has no reports; write them with `python -m benchmarks.papers`")
    return dict(sorted(found.items(), key=lambda one: (names.index(one[0].partition("-")[0]), one[0])))


def pages(reports: Mapping[str, Report]) -> dict[str, str]:
    """Returns the page of claims, and the pages of the papers' tables, by their paths in the documentation."""
    parts, made = [_INTRODUCTION], {}
    for paper, (title, measured) in PAPERS.items():
        own = {name: report for name, report in reports.items() if name.partition("-")[0] == paper}
        if not own:
            continue
        found = _claims(own)
        about = f"The paper: {measured}. [All figures and tables](results/{paper}.md)."
        parts.append("\n".join([f"## {title}", "", about, "", *_verdicts(found)]))
        lines = [f"# Tables of {title}", _TABLES, "\n".join(("## Claims", "", *_figures(found)))]
        lines += [CAUSES[paper]] if paper in CAUSES else []
        for name, report in own.items():
            if name.count("-") == 1:
                first = report["tables"][0]
                about = f"{name.partition('-')[2]}, {first['title']}, {first['columns'][0]}"
                lines.append(f"![{about}]({name}.svg)")
        tables = "\n\n".join(_tables(name, report) for name, report in own.items())
        lines += [f"`{made}` is trained by `{by}`." for made, by in TRAINED.items() if made in tables]
        lines.append(tables)
        made[f"results/{paper}.md"] = "\n\n".join(lines) + "\n"
    parts.append("\n".join(_untold()))
    return {"results.md": "\n\n".join(parts) + "\n", **made}


def charts_of(reports: Mapping[str, Report]) -> dict[str, str]:
    """Returns a chart of each report of counts, as SVG, by name."""
    return {name: _chart(report) for name, report in reports.items() if name.count("-") == 1}


def _chart(report: Report) -> str:
    """Returns a chart of the first table of a report, as SVG: its rows at the costs of its first column."""
    table = report["tables"][0]
    column = table["columns"][0]
    cells = {row["name"]: row["cells"][column] for row in table["rows"] if row["cells"].get(column)}
    made = charts.bars(
        {name: cell["ours"] for name, cell in cells.items()},
        {name: cell["interval"] for name, cell in cells.items()},
        title=f"{report['model']}, {table['title'].rpartition(': ')[2]}",
        label=column,
        line=1.0,
    )
    return f"{made}\n"


class Claim(NamedTuple):
    """A claim of a paper on all models.

    Attributes:
      says: the claim.
      times: the claim by the times of each model and format.
      free, costs: the claim by counts at free rows, and at the paper's costs.
    """

    says: str
    times: Sequence[Judged]
    free: Sequence[Judged]
    costs: Sequence[Judged]


def _claims(own: Mapping[str, Report]) -> list[Claim]:
    """Returns the claims of the reports of a paper."""
    found: dict[str, dict[str, list[Judged]]] = {}
    for name, report in own.items():
        _, model, *rest = name.split("-")
        for claim in report["claims"]:
            if claim["says"] in UNTESTED:
                continue
            kind = TIMES[rest[0]] if rest else FREE if claim["costs"] == FREE else "paper"
            judged = Judged(model, {**claim, "costs": kind} if rest else claim)
            found.setdefault(claim["says"], {}).setdefault(kind, []).append(judged)
    claims = []
    for says, by_kind in found.items():
        times = [judged for kind in TIMES.values() for judged in by_kind.get(kind, [])]
        costs = by_kind.get("paper", [])
        claims.append(Claim(says, times, by_kind.get(FREE, []), costs))
    return claims


def _verdicts(claims: Sequence[Claim]) -> Iterator[str]:
    """Yields the lines of a table with the verdicts and the first figure for each claim."""
    yield "| claim | at the paper's costs | measured here | paper | figure |"
    yield "|---|---|---|---|---|"
    for claim in claims:
        first = (claim.costs or claim.times or claim.free)[:1]
        words = [verdict(judged) for judged in (claim.costs, claim.times)]
        here = _together(first, "ours") if first[0].claim["figure"] else ""
        cells = [claim.says, *words, _together(first, "paper") or "–", here or "–"]
        yield f"| {' | '.join(cells)} |"


def _figures(claims: Sequence[Claim]) -> Iterator[str]:
    """Yields the lines of a table with all figures of each claim."""
    yield "| claim | paper | free rows | at the paper's costs | measured here |"
    yield "|---|---|---|---|---|"
    for claim in claims:
        cells = [
            claim.says,
            _together(claim.costs or claim.times[:1], "paper"),
            _together(claim.free, "ours"),
            *(
                "<br>".join(filter(None, (verdict(judged), _together(judged, "ours"))))
                for judged in (claim.costs, claim.times)
            ),
        ]
        yield f"| {' | '.join(cells)} |"


def _untold() -> Iterator[str]:
    """Yields the lines of a table of the claims that the reports do not judge."""
    yield "## Other claims"
    yield ""
    yield "| paper | claim | here |"
    yield "|---|---|---|"
    untested = ((paper, says, why) for says, (paper, why) in UNTESTED.items() if why)
    for paper, says, why in (*untested, *UNTOLD):
        yield f"| {PAPERS[paper][0].partition(' (')[0] if paper in PAPERS else paper} | {says} | {why} |"


def _together(judged: Sequence[Judged], key: str) -> str:
    """Returns the figures of a claim, a line for each model, or for each cost ratio of the paper."""
    lines = []
    for model, claim in judged:
        figure = claim["figure"]
        digits = 3 if figure is not None and abs(figure["ours"]) < 0.1 else 2
        several = claim["costs"] not in ("", FREE)
        if key == "paper":
            costs = f"{claim['costs']}: " if claim["costs"] else ""
            words = (
                "" if figure is None or figure["paper"] is None else f"{costs}{figure['paper']:.{digits}f}"
            )
        else:
            held = _HELD[claim["holds"]]
            costs = f", {claim['costs']}" if several else ""
            words = held if figure is None else _figure(figure, digits) + _alike(claim, digits)
            words = f"`{model}`{costs}: {words}"
        lines.append(words)
    return "<br>".join(dict.fromkeys(filter(None, lines)))


def _tables(name: str, report: Report) -> str:
    paper, model, *rest = name.split("-")
    weights = " --weights int8" if rest == ["int8"] else ""
    counts = "" if rest else " --counts"
    prompts = ", ".join(f"{count} {split}" for split, count in report["prompts"].items() if count)
    lines = [f"## `{model}`, {'times in ' + TIMES[rest[0]] if rest else 'counts'}", ""]
    lines += [
        f"Prompts: {prompts}; at most {report['amount']['max_new_tokens']} tokens. Printed by",
        "",
        "```bash",
    ]
    given = "".join(
        f" --{name.replace('_', '-')} {report['amount'][name]}"
        for name, usual in _USUAL.items()
        if report["amount"].get(name, usual) != usual
    )
    given += "".join(f' --run "{words}"' for words in report.get("runs", ()))
    if report.get("sorted_target"):
        given += f" --sorted-target {report['sorted_target']}"
    given += "".join(f" {word}" for word in report.get("more", ()))
    lines += [f"python -m benchmarks.papers {paper} --model {model}{counts}{weights}{given}", "```"]
    for table in report["tables"]:
        lines += ["", f"| {table['title']} | {' | '.join(table['columns'])} |"]
        lines.append("|---" * (1 + len(table["columns"])) + "|")
        for row in table["rows"]:
            cells = (row["cells"].get(column) for column in table["columns"])
            lines.append(f"| {row['name']} | {' | '.join(_cell(cell, table['digits']) for cell in cells)} |")
        if table["notes"]:
            lines += ["", *(f"- {note}" for note in table["notes"])]
    reasons = [claim for claim in report["claims"] if claim["figure"] is None]
    if reasons:
        lines += ["", "**Claims of several figures, or of none**", ""]
    for claim in reasons:
        costs = f" ({claim['costs']})" if claim["costs"] else ""
        lines.append(f"- {claim['says']}{costs} {_HELD[claim['holds']]}: {claim['because']}")
    return "\n".join(lines)


def _cell(cell: Mapping[str, Any] | None, digits: int) -> str:
    if cell is None:
        return ""
    paper = "" if cell["paper"] is None else f"; paper {number(cell['paper'], digits)}"
    return _figure(cell, digits) + paper


def _alike(claim: Mapping[str, Any], digits: int) -> str:
    """Returns the geometric mean over kinds of work, if the claim has one."""
    return f"; alike {_figure(claim['alike'], digits)}" if claim.get("alike") else ""


def _figure(cell: Mapping[str, Any], digits: int = 2) -> str:
    interval = cell["interval"]
    return shown(Cell(None, cell["ours"], None if interval is None else (interval[0], interval[1])), digits)


_MADE = "<!-- Made by `python -m benchmarks.results` from docs/results/*.json; do not edit. -->"
_TABLES = f"""{_MADE}

[Results](../results.md) has the claims, and describes the columns."""
_INTRODUCTION = f"""# Results

{_MADE}

The papers' claims, measured again. A row has a verdict at the paper's costs, one on the clock, and one figure, that of
the first model at the first cost; the page of each paper has all figures. They are ratios of speeds, except those of
cosines, accuracies and accepted shares. Settings of a method are chosen on tuning prompts and reported on others, for
each column separately. Brackets have the 95 % interval by the bootstrap over prompts, within their kinds. A kind weighs
as much as it has tokens, and stories have 46 %; *alike* is the geometric mean over the kinds.

- **at the paper's costs**: exact counts of rounds and draft passes, at the relative cost of a draft pass in the paper's
  models. A verification costs one step of plain decoding for any number of rows. Each head that a rule looks at has its
  price, which halves S2D's gain over its fastest exit (1.05 in place of 1.10 at the costs of Vicuna-13B). Counts of
  greedy texts do not depend on the machine. At **free rows** (on the pages of the papers) a draft pass costs the bytes
  of the weights that it reads.
- **measured here**: times of `large` in float32 on one core of a 2-core CPU, November 26, 2026, where each verified row
  costs time. 16 reporting prompts are too few for a bootstrap, so its intervals are widened by 1.2. A measurement on
  the other core disturbed the times of `small`, and of `large` in int8: there the first 10 of 12 layers seem 1.29 to
  1.50 times as fast as all, and 1.20 is possible. The pages of the papers print them, and no verdict uses them.

The embedded models `large` (15.9M parameters) and `small` (4.1M) solve generated tasks and write poor stories
([Measurements](measurements/embedded.md)). `large` was made from `small`, so the two are not independent. No interval
covers other models, another training of a draft, another choice of the settings or, except in the counts of `small`,
another search of Draft & Verify.

**The last three of 12 layers hardly serve the tasks, and no verdict about ASD or AdaSPEED depends on that; only × plain
does.** Both models fail this check of their depth: the layers lower the loss on answers by less than .02. With the
first 9 layers of `small` as the target, ASD ÷ Draft & Verify at free rows is .753 (.733–.774) in place of .754, and
AdaSPEED ÷ LayerSkip 1.11 (1.07–1.16) in place of 1.14. An independent recount found these figures; no command prints
them. The first 10 or 9 layers of `large` alone decode 1.20 or 1.34
times as fast as all, with nearly the same answers: × plain contains as much.

A claim holds for a model at a cost if its interval is above 1 (.95 where the claim allows 5 %, 0 for a difference), and
is refuted if it is below. "Holds" and "does not hold" are for all cases; "3 of 4, not 1" is for a claim that holds in 3
and is refuted in 1. "No difference above x %" is for intervals that all end within x % of 1, where x is at most 8. A
verdict uses all digits: 1.00 may be below or above 1. More than 200 intervals are judged, so some are wrong by chance.
A claim about cosines or accuracies has no costs: its cases are in the column of the paper's costs."""


def tables() -> list[tuple[Path, str, str]]:
    """Returns the made tables of written pages: the page, the mark before the table, and the table."""
    readme, measurements = DOCS.parent / "README.md", DOCS / "measurements"
    peers = read_json(measurements / "peers.json")
    return [
        (readme, speeds.MADE, speeds.short()),
        (readme, peers_report.MADE, peers_report.table(peers)),
        (measurements / "real_model.md", peers_report.MADE, peers_report.table_by_kind(peers)),
    ]


@dataclasses.dataclass(frozen=True)
class Results:
    """Write docs/results.md and the pages of tables from the reports in docs/results."""

    def run(self) -> None:
        """Writes the pages and the charts.

        Raises:
          ValueError: see `load`.
        """
        directory = DOCS / "results"
        reports = load(directory)
        for path, text in pages(reports).items():
            (DOCS / path).write_text(text, encoding="utf-8")
        for name, drawn in charts_of(reports).items():
            (directory / f"{name}.svg").write_text(drawn, encoding="utf-8")
        measurements = DOCS / "measurements"
        index = figures.page(figures.load(measurements / "figures.json"))
        (measurements / "index.md").write_text(index, encoding="utf-8")
        for page, mark, table in tables():
            page.write_text(speeds.replaced(page.read_text("utf-8"), mark, table), encoding="utf-8")
        print(f"wrote {DOCS / 'results.md'} and its tables from {len(reports)} reports", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return frame.run("benchmarks.results", Results, Results.run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
