"""Compares the targets of a sorted draft: speed-up and accuracy of each (Table 5 of the S2D paper)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers import accuracy
from benchmarks.papers.accuracy import Accuracies
from benchmarks.papers.s2d_printed import TABLE_5
from benchmarks.papers.s2d_runs import Served
from benchmarks.papers.tables import Cell, Claim, Row, Table, more_than
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.speed import spread, tokens_per_second

SPEED, SINGLE, MINE = "plain, tokens/s", "best exit", "S2D"
SAYS = "A sorted draft speeds a target up more that was trained on the task than one that was not (1.53 against 1.38)."


def table(served: Sequence[Served]) -> tuple[Table, Claim]:
    """Returns a table with a row for each target, greedily, and the claim that the more accurate one gains more."""
    right = accuracy.accuracies([(one.bench, one.runs[0.0]) for one in served])
    pair = _pair(served, right)
    # Directories by their last name, because a terminal line is too short for the whole path.
    short = [Path(one.target).name for one in served]
    names = short if len(set(short)) == len(short) else [one.target for one in served]
    rows = []
    for number, one in enumerate(served):
        speed, share = TABLE_5[pair.index(number)] if number in pair else (None, None)
        cells = {
            accuracy.COLUMN: right.cell(number, share),
            SPEED: Cell(ours=tokens_per_second(one.runs[0.0].taken(BASELINE))),
            SINGLE: one.runs[0.0].ratio(one.single.run),
            MINE: one.runs[0.0].ratio(one.mine.run, paper=speed),
        }
        rows.append(Row(names[number], cells))
    table_5 = (
        "Table 5 of the paper, Llama-2-13B trained on GSM8K and not, is compared with two targets of one size: the "
        "most and the least accurate."
    )
    notes = (
        *([table_5] if pair else []),
        "Best exit: the draft's exit that was fastest alone on the target's tuning prompts.",
        right.note,
    )
    made = Table(
        "Targets (Table 5): T = 0, speed-ups × plain",
        (accuracy.COLUMN, SPEED, SINGLE, MINE),
        tuple(rows),
        notes,
    )
    return made, _claim(served, right, pair)


def _pair(served: Sequence[Served], right: Accuracies) -> tuple[int, ...]:
    """Returns the most and the least accurate of the targets of one size; empty if no two have the same size."""
    shares = {number: drawn[0] for number, drawn in enumerate(right.drawn) if drawn is not None}
    by_size: dict[tuple[int, ...], list[int]] = {}
    for number in shares:
        config = served[number].bench.lm.config
        size = (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size)
        by_size.setdefault(size, []).append(number)
    for same in by_size.values():
        if len({shares[number] for number in same}) > 1:
            return max(same, key=shares.__getitem__), min(same, key=shares.__getitem__)
    return ()


def _claim(served: Sequence[Served], right: Accuracies, pair: tuple[int, ...]) -> Claim:
    if not pair:
        return Claim(SAYS, None, "no two targets of one size are known to differ in accuracy")
    better, worse = (served[number] for number in pair)
    names = [f"{served[number].target} ({right.cell(number).ours:.1f} % right)" for number in pair]
    trained = right.more("", (pair[0], pair[1]), (better.target, worse.target))
    if not trained.holds and right.cell(pair[0]).interval is not None:
        return Claim(SAYS, None, trained.because)
    ratios = [one.runs[0.0].drawn(one.mine.run) for one in (better, worse)]
    figure, interval = spread(ratios[0] / ratios[1])
    alone = len(better.runs[0.0].taken(better.mine.run)) < 2
    ratio = Cell(None, figure, None if alone else interval)
    return more_than(SAYS, f"S2D's speed-up on {names[0]} ÷ on {names[1]}", ratio)
