"""Speculative sampling and n-gram decoding (Chen et al. 2023; Leviathan et al. 2023; Saxena 2023; Yang et al. 2023).

The paper's figures are those of "Exploring Speculative Decoding for LLM Inference": 2.61 with Llama-3.1-8B drafting for
70B (4 bits, one prompt, K = 4, greedy), and 28.9 against 14.01 tokens/s with n-grams on one code edit. The first is an
upper bound, because its loop accepts too much (`first_rejection_indices.all()` tests whether index values are nonzero).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from benchmarks.papers import baselines
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import Cell, Claim, Report, Row, Table, all_hold, more_than, shown
from benchmarks.papers.workbench import Column, Measured, Workbench, distribution, speeds
from jaxspec.costs.rounds import tokens_per_round
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench.speed import Texts, every_text, ratio_of_counts, rows
from jaxspec.methods import DraftModel, LayerSkip, Method, NGram

PAPER = (
    "Speculative sampling and n-gram decoding (Chen et al. 2023, arXiv:2302.01318; Saxena 2023; Yang et al. 2023, "
    "arXiv:2304.04487), as measured in “Exploring Speculative Decoding for LLM Inference”"
)
TEMPERATURES = (0.0, 0.6, 1.0)
# K of the blog's experiment.
K = 4
SPECULATIVE, LOOKUP = 2.61, 2.06
NGRAM, COPYING, OPEN = "ngram", "copy-edit", "stories"
TOKEN_WISE = ", token-wise"
RATE, EXPECTED, OBTAINED = "a", "expected", "obtained"


def measure(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress = lambda what: None) -> Report:
    """Measures speculative sampling at three temperatures, and n-grams where text is copied and where it is not.

    Drafts are the model's own first layers, untrained, and a smaller embedded model of the same vocabulary, if there is
    one. The exit layer and the best constant draft length are chosen on tuning prompts.

    Raises:
      ValueError: see `Workbench` and `Suite`.
    """
    with Workbench(lm, options, on_progress) as bench:
        (drafts, best), constant = _drafts(bench), _constant(bench)
        runs = {at: _measure(bench, at, drafts, constant) for at in TEMPERATURES}
        notes = (baselines.cut(bench).note, *runs[0.0].different([*drafts, *constant, NGRAM]))
        accepted = _accepted(runs, drafts)
        tables = _speeds(runs, drafts, notes), accepted, _copying(runs[0.0], drafts)
        return bench.report(PAPER, tables, _claims(runs, drafts, best, accepted))


def _drafts(bench: Workbench) -> tuple[dict[str, Method], str]:
    """Returns the drafts with the paper's K by the name of their run, and the name of the fastest on tuning prompts.

    They are the fastest truncation, and smaller models if any. The fastest is not chosen on the reporting prompts,
    because its figure there would be biased.
    """
    truncations = {
        f"{name}, untrained": method for name, method in baselines.truncations(bench.lm, [K]).items()
    }
    others: dict[str, Method] = {
        f"{other}, K {K}": DraftModel(draft=other, num_draft_tokens=K)
        for other in baselines.smaller_models(bench.lm)
    }
    measured = bench.measure("tuning-draft", "tuning", {**truncations, **others})
    name = measured.best(list(truncations))
    return {name: truncations[name], **others}, measured.best([name, *others])


def _constant(bench: Workbench) -> dict[str, LayerSkip]:
    name, method = baselines.fastest(bench, "tuning-constant", baselines.constant_exits(bench.lm))
    return {f"best constant: {name}": method}


def _measure(
    bench: Workbench, temperature: float, drafts: dict[str, Method], constant: dict[str, LayerSkip]
) -> Measured:
    """Measures all runs at one temperature; at temperature 0, n-grams and the ideal stop too."""
    short = baselines.cut(bench, temperature)
    methods: dict[str, Method] = {**drafts, **constant}
    peers = dict(short.peers)
    if temperature:
        for run, method in drafts.items():
            peers[run + TOKEN_WISE] = baselines.generating(bench, method, temperature, acceptor="rejection")
    else:
        (best,) = constant.values()
        methods[NGRAM] = NGram()
        peers[baselines.ORACLE] = baselines.ideal_exit(bench, cast(int, best.exit_layer))
    return bench.measure(
        f"temperature-{temperature:g}",
        "reporting",
        methods,
        sampling=distribution(temperature),
        peers=peers,
        models=short.models,
    )


def _heading(temperature: float) -> str:
    return f"T = {temperature:g}"


def _speeds(runs: dict[float, Measured], drafts: dict[str, Method], notes: tuple[str, ...]) -> Table:
    columns = {_heading(at): Column(measured) for at, measured in runs.items()}
    notes = (
        "The paper used Llama-3.1-8B drafting for 70B, one prompt, K = 4, greedy; its loop accepts too much, "
        "so it is an upper bound.",
        "At temperature 0 both acceptances are the same; above it a draft is accepted as a block, or token by token "
        "as in the paper.",
        *notes,
    )
    order = [run for one in reversed(runs.values()) for run in one.suite.runs]
    named = [run for run in dict.fromkeys(order) if run != NGRAM]
    named += [run for run in runs[0.0].suite.runs if run not in named and run != NGRAM]
    # The paper has a separate draft model; without one, its figure is compared with the truncation.
    paper = {run: {_heading(0.0): SPECULATIVE} for run in [*drafts][1:] or drafts}
    return speeds("Speculative sampling with a draft, × plain decoding", columns, paper, named, notes)


def _accepted(runs: dict[float, Measured], drafts: dict[str, Method]) -> Table:
    """Returns a table of the tokens per round: obtained, and predicted from the acceptance rate."""
    lines = []
    for at, measured in runs.items():
        for draft in drafts:
            for run in (draft, draft + TOKEN_WISE):
                if run in measured.suite.runs:
                    lines.append(Row(f"{run}, {_heading(at)}", _rounds(measured, run)))
    return Table(
        "Tokens per drafting round: (1 − a^(K+1)) ÷ (1 − a), and obtained",
        (RATE, EXPECTED, OBTAINED),
        tuple(lines),
        (
            "a: the accepted share of the judged draft tokens; a draft is judged up to its first "
            "rejection. The formula takes acceptances as independent.",
        ),
    )


def _rounds(measured: Measured, run: str) -> dict[str, Cell]:
    accepted = rejections = drafts = 0
    for text in every_text(measured.taken(run)):
        counts = text.statistics
        accepted, drafts = accepted + counts.num_accepted_tokens, drafts + counts.num_drafts
        rejections += sum(counts.acceptance_histogram[:K])
    if not drafts:
        return {}
    rate = accepted / (accepted + rejections) if accepted + rejections else 0.0
    expected, obtained = tokens_per_round(rate, K), 1 + accepted / drafts
    return {RATE: Cell(ours=rate), EXPECTED: Cell(ours=expected), OBTAINED: Cell(ours=obtained)}


def _copying(greedy: Measured, drafts: dict[str, Method]) -> Table:
    columns = {kind: Column(greedy, (kind,)) for kind in (COPYING, OPEN)} | {"all": Column(greedy)}
    order = [run for run in greedy.suite.runs if run != NGRAM]
    return speeds(
        "N-gram decoding, × plain decoding, greedy",
        columns,
        {NGRAM: {COPYING: LOOKUP}},
        [*order, NGRAM],
        ("The paper used Llama-3.1-8B-Instruct on one code edit: 28.9 against 14.01 tokens/s.",),
    )


def _claims(
    runs: dict[float, Measured], drafts: dict[str, Method], best: str, accepted: Table
) -> list[Claim]:
    greedy = runs[0.0]
    speed, copying = greedy.ratio(best), greedy.ratio(NGRAM, kinds=(COPYING,))
    return [
        more_than("A draft makes decoding faster.", f"{best} ÷ plain", speed),
        more_than("A draft makes decoding about 2 to 3 times as fast.", f"{best} ÷ plain", speed, 2.0),
        _promised(accepted),
        _as_a_block(runs, drafts),
        more_than(
            "N-grams make editing and copying at least 2 times as fast.", "n-gram ÷ plain", copying, 2.0
        ),
        _more_on_copying(copying, greedy.ratio(NGRAM, kinds=(OPEN,))),
    ]


def _promised(accepted: Table) -> Claim:
    says = "Accepted token by token, a round gives (1 − a^(K+1)) ÷ (1 − a) tokens, within 10 %."
    pairs = {
        row.name: (row.cells[OBTAINED].ours or 0.0, row.cells[EXPECTED].ours or 1.0)
        for row in accepted.rows
        if row.cells and (TOKEN_WISE in row.name or row.name.endswith(_heading(0.0)))
    }
    if not pairs:
        return Claim(says, None, "nothing was drafted")
    name, (mine, promised) = max(pairs.items(), key=lambda pair: abs(pair[1][0] / pair[1][1] - 1))
    off = mine / promised - 1
    return Claim(
        says,
        abs(off) <= 0.1,
        f"largest deviation: {name}, {mine:.2f} for {promised:.2f}, {off:+.0%}",
    )


def _as_a_block(runs: dict[float, Measured], drafts: dict[str, Method]) -> Claim:
    """Judges the claim of Sun et al. 2024 by the interval of the ratio over the prompts, because the texts differ."""
    says = "Accepting a draft as a block gives at least as many tokens per round as token by token."
    parts = []
    for at, measured in runs.items():
        for draft in drafts if at else ():
            whole, single = (_yields(measured, run) for run in (draft, draft + TOKEN_WISE))
            ratio, interval = ratio_of_counts(whole, single)
            cell = Cell(ours=ratio, interval=interval if len(whole) > 1 else None)
            parts.append(more_than("", f"{draft}, T = {at:g}: block ÷ token-wise", cell))
    return all_hold(says, parts)


def _yields(measured: Measured, run: str) -> np.ndarray:
    """Returns the tokens of the rounds that drafted, and the number of these rounds, float64[prompts, turns, 2]."""

    def yielded(texts: Texts) -> tuple[int, int]:
        counts = [text.statistics for text in rows(texts)]
        drafts = sum(one.num_drafts for one in counts)
        return drafts + sum(one.num_accepted_tokens for one in counts), drafts

    return np.array([[yielded(one) for one in turns] for turns in measured.taken(run)], np.float64)


def _more_on_copying(copying: Cell, free: Cell) -> Claim:
    says = "N-grams gain more where text is copied than in open text."
    because = f"× plain on {COPYING} {shown(copying)}, on {OPEN} {shown(free)}"
    if copying.interval is None or free.interval is None:
        return Claim(says, None, f"{because}; there is no interval")
    (low, high), (lowest, highest) = copying.interval, free.interval
    holds = True if low > highest else False if high < lowest else None
    return Claim(says, holds, because if holds is not None else f"{because}; the intervals overlap")
