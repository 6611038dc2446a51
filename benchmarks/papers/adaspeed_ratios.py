"""AdaSPEED's Table I from exact counts: every stop rule, tuned alike, at the costs of several models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.papers import adaspeed_counts, adaspeed_sampled, rules
from benchmarks.papers.adaspeed_counts import NAMES, TABLE
from benchmarks.papers.counted import Case, Column, Counted, Work, choose
from benchmarks.papers.rules import Rounds
from benchmarks.papers.tables import FREE, Claim, Counts, Table, more_than
from benchmarks.papers.workbench import Workbench
from jaxspec.costs.rounds import DraftCost
from jaxspec.measuring.bench.speed import weights
from jaxspec.methods.base import share_of_step

# The share of a step's bytes that the output head has in the paper's models, of which it measured LayerSkip's versions:
# Llama-3.2-1B (16 layers, a head of 128,256 × 2,048) and Llama-2-7B (32 layers, a head of 32,000 × 4,096).
HEADS = {"Llama 1B": 0.2126, "Llama 7B": 0.0198}
CONSTANT, PRODUCT, PROBE = NAMES["constant"], NAMES["product"], NAMES["probe"]
# The rules of the sweep of the exit layer, and values of γ0 in the table of its search.
SWEPT, SHOWN_GAMMAS = ("constant", "confidence", "product"), (0.1, 0.3, 0.6, 0.8, 0.95)
# The pairs of rules of which the paper finds the first faster, by texts; see `says`.
GREEDY, TOP_P = "Greedy", "With top-p"
PAIRS = {
    GREEDY: (("product", "constant"), ("product", "confidence"), ("product", "probe")),
    TOP_P: (("product", "constant"), ("product", "confidence"), ("probe", "product")),
}
# Two sentences of its text.
SMALLER = (
    "{texts}, AdaSPEED gains more over LayerSkip with the model of 1B than with that of 7B (costs only)."
)
ACCEPTED = "{texts}, a larger share of AdaSPEED's draft tokens is accepted with a probe than without."
PAYS = "An early exit with the best constant length is faster than plain decoding."
LOWER = (
    "The best exit of AdaSPEED is lower than that of LayerSkip and Draft & Verify's stop (4 against 6 of 16)."
)


def says(texts: str, row: str, other: str) -> str:
    """Returns the claim that a rule is faster than another.

    Examples:
      >>> says(TOP_P, "probe", "product")
      'With top-p, AdaSPEED is faster with a probe than without.'
    """
    words = {
        ("product", "constant"): "AdaSPEED is faster than LayerSkip",
        ("product", "confidence"): "AdaSPEED is faster than Draft & Verify's stop",
        ("product", "probe"): "AdaSPEED is faster without a probe than with one",
        ("probe", "product"): "AdaSPEED is faster with a probe than without",
    }
    return f"{texts}, {words[row, other]}."


class _Greedy:
    """Every rule at every exit with every number on greedy texts, by replay.

    Attributes:
      one: the fastest case of each rule on tuning texts.
      cases: the replayed cases by those of the tables.
      tuning: counts on tuning texts.
      kinds: task types of the tuning texts.
    """

    def __init__(self, bench: Workbench, exits: Sequence[int]) -> None:
        rounds = adaspeed_counts.replayed(bench, exits)
        columns = _columns(bench)
        self.cases = {Case(NAMES[case.rule], str(case).partition(", ")[2]): case for case in rounds}
        self.tuning, reporting = (
            {name: _work(rounds[case][split], case.exit_layer) for name, case in self.cases.items()}
            for split in (0, 1)
        )
        self.kinds = bench.kinds("tuning")
        self.one = Counted(columns, choose(self.tuning, columns), reporting, bench.kinds("reporting"))

    def by_exit(self, exits: Sequence[int]) -> Counted:
        """Returns the swept rules at each exit, with the number that is fastest there on tuning texts."""
        tuning = {case: work for case, work in self.tuning.items() if self.cases[case].rule in SWEPT}
        renamed = {
            case: Case(f"{case.row}, exit {self.cases[case].exit_layer}", case.setting) for case in tuning
        }
        chosen = choose({renamed[case]: work for case, work in tuning.items()}, self.one.columns)
        order = [f"{NAMES[rule]}, exit {layer}" for rule in SWEPT for layer in exits]
        counts = {renamed[case]: self.one.reporting[case] for case in tuning}
        return Counted(self.one.columns, {row: chosen[row] for row in order}, counts, self.one.kinds)

    def by_gamma(self) -> Counted:
        """Returns AdaSPEED with several γ0, at the exit that is fastest on tuning texts with any."""
        chosen = {}
        for gamma in (one for one in SHOWN_GAMMAS if one in rules.GAMMAS):
            chosen[f"γ0 {gamma:g}"] = {
                heading: next(
                    name
                    for name, other in self.cases.items()
                    if other == self.cases[best]._replace(number=gamma, settled=False)
                )
                for heading, best in self.one.chosen[PRODUCT].items()
            }
        return Counted(
            self.one.columns, chosen | {PRODUCT: self.one.chosen[PRODUCT]}, self.one.reporting, self.one.kinds
        )

    def lower(self, column: Column) -> Claim:
        """Judges whether AdaSPEED's best exit is the lowest, on the bootstrap's draws of tuning texts."""
        best = {}
        for rule in SWEPT:
            own = [case for case in self.tuning if self.cases[case].rule == rule]
            speeds = np.stack([column.drawn(self.tuning[case], weights(self.kinds)) for case in own])
            best[rule] = np.array([self.cases[case].exit_layer for case in own])[speeds.argmax(axis=0)]
        found, *draws = best["product"] < np.minimum(best["constant"], best["confidence"])
        share = float(np.mean(draws))
        rivals = best["constant"][0], best["confidence"][0]
        lowest = min(case.exit_layer for case in self.cases.values())  # none is lower
        holds = None if 0.025 < share < 0.975 or lowest in rivals else bool(found)
        words = ", ".join(f"{NAMES[rule]} {layers[0]}" for rule, layers in best.items())
        return Claim(
            LOWER, holds, f"exits: {words}; lower in {share:.0%} of the bootstrap's draws", column.heading
        )


def tables(bench: Workbench, exits: Sequence[int]) -> tuple[tuple[Table, ...], tuple[Claim, ...], Counts]:
    """Returns the tables over LayerSkip and over plain decoding, the paper's claims, and the greedy counts."""
    greedy = _Greedy(bench, exits)
    one = greedy.one
    near = {greedy.cases[case].exit_layer for rule in SWEPT for case in one.chosen[NAMES[rule]].values()}
    drawn = adaspeed_sampled.count(bench, near, exits, one.columns)
    notes = (
        "Exact counts of greedy texts. The columns of the paper's models have their costs by bytes: an exit after a "
        "share f of the layers costs h + (1 − h) f of a step, where the head's share h is "
        + " and ".join(f"{share:.1%} ({name})" for name, share in HEADS.items())
        + ".",
        f"At most {rules.LONGEST} draft tokens. The oracle stop reads the text.",
        *one.settings(),
    )
    swept, gammas = greedy.by_exit(exits), greedy.by_gamma()
    made = (
        one.table(
            "Table I, greedy, from counts: × LayerSkip with the best constant",
            _printed(0),
            CONSTANT,
            notes=notes,
        ),
        one.table("Table I, greedy, from counts: × plain", {}),
        one.by_kind("Table I, greedy, by task type, from counts", PRODUCT, CONSTANT),
        drawn.table(
            "Table I, top-p, from counts: × LayerSkip with the best constant",
            _printed(1),
            CONSTANT,
            notes=(adaspeed_sampled.NOTE, *drawn.settings()),
        ),
        drawn.table("Table I, top-p, from counts: × plain", {}),
        swept.table("The exit layer, greedy, from counts: × plain", {}),
        gammas.table(
            "The search for γ0, greedy, from counts: × AdaSPEED with the γ0 that is fastest on tuning prompts",
            {},
            PRODUCT,
            [row for row in gammas.chosen if row != PRODUCT],
            (f"The paper chose γ0 = {rules.PAPER_GAMMA:g} for all models.",),
        ),
    )
    claims = one.claims(PAYS, CONSTANT, None)
    claims += [*_compared(one, GREEDY, 0), *_compared(drawn, TOP_P, 1)]
    claims += [greedy.lower(column) for column in one.columns]
    claims += gammas.claims(
        "Greedy, one γ0 (0.8) serves all models: it is as fast as a tuned one, within 5 %.",
        f"γ0 {rules.PAPER_GAMMA:g}",
        PRODUCT,
        0.95,
    )
    return made, tuple(claims), one.raw()


def _compared(one: Counted, texts: str, place: int) -> Iterator[Claim]:
    """Yields the claims that a rule is faster than another on some texts, and two sentences about them."""
    paper = _printed(place)

    def printed(row: str, other: str) -> dict[str, float]:
        return {model: paper[row][model] / paper[other][model] for model in HEADS}

    for row, other in PAIRS[texts]:
        if {NAMES[row], NAMES[other]} <= one.chosen.keys():
            names = NAMES[row], NAMES[other]
            yield from one.claims(says(texts, row, other), *names, paper=printed(*names))
    small, big = (column for column in one.columns if column.heading in HEADS)
    gains = [one.drawn(PRODUCT, column) / one.drawn(CONSTANT, column) for column in (small, big)]
    of_paper = printed(PRODUCT, CONSTANT)
    gain = one.cell(gains[0] / gains[1], of_paper[small.heading] / of_paper[big.heading])
    claim = more_than(SMALLER.format(texts=texts), f"gain at {small.heading} ÷ at {big.heading}", gain)
    yield dataclasses.replace(claim, costs=f"{small.heading} ÷ {big.heading}")
    for column in one.columns if PROBE in one.chosen else ():
        rates = [_accepted(one, row, column) for row in (PROBE, PRODUCT)]
        claim = more_than(ACCEPTED.format(texts=texts), "rate with ÷ without", one.cell(rates[0] / rates[1]))
        yield dataclasses.replace(claim, costs=column.heading)


def _accepted(one: Counted, row: str, column: Column) -> np.ndarray:
    """Returns the accepted share of a row's draft tokens, see `Column.drawn`: a round adds one token to these."""
    work, weighted = one.reporting[one.chosen[row][column.heading]], weights(one.kinds)
    rate: np.ndarray = (weighted @ (work.tokens - work.rounds)) / (weighted @ work.passes[:, 1])
    return rate


def _printed(texts: int) -> dict[str, Mapping[str, float]]:
    """Returns the paper's figures of greedy (0) or sampled texts (1), by row and model."""
    return {NAMES[rule]: dict(zip(HEADS, figures[texts], strict=True)) for rule, figures in TABLE.items()}


def _columns(bench: Workbench) -> tuple[Column, ...]:
    target, depth = bench.lm.loaded, bench.lm.config.num_layers
    layer = share_of_step(DraftCost(layers=1, heads=0), target)
    free = Column(FREE, (layer, 1 - depth * layer))
    return (free, *(Column(name, ((1 - head) / depth, head)) for name, head in HEADS.items()))


def _work(rounds: Rounds, exit_layer: int) -> Work:
    """Returns the counts with two parts, layers and heads. Verification reads the draft's layers only once."""
    drafted = rounds.by_length @ np.arange(rounds.by_length.shape[1])
    return Work(
        rounds.tokens, rounds.by_length.sum(axis=1), np.stack([drafted * exit_layer, drafted], axis=1)
    )
