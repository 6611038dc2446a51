"""AdaSPEED's Table I from exact counts: every stop rule, tuned alike, at the costs of several models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.papers import adaspeed_counts, rules
from benchmarks.papers.adaspeed_counts import NAMES, TABLE
from benchmarks.papers.counted import Case, Column, Counted, Work, choose
from benchmarks.papers.rules import Rounds
from benchmarks.papers.tables import FREE, Claim, Table
from benchmarks.papers.workbench import Workbench
from jaxspec.choosing.costs import DraftCost
from jaxspec.methods.base import share_of_step

# The share of a step's bytes that the output head has in the paper's models, of which it measured LayerSkip's versions:
# Llama-3.2-1B (16 layers, a head of 128,256 × 2,048) and Llama-2-7B (32 layers, a head of 32,000 × 4,096).
HEADS = {"Llama 1B": 0.2126, "Llama 7B": 0.0198}
CONSTANT = NAMES["constant"]


def counted(bench: Workbench, exits: Sequence[int]) -> Counted:
    """Counts every rule at every exit with every number by replay."""
    rounds = adaspeed_counts.replayed(bench, exits)
    columns = _columns(bench)
    cases = {Case(NAMES[case.rule], str(case).partition(", ")[2]): case for case in rounds}
    tuning, reporting = (
        {name: _work(rounds[case][split], case.exit_layer) for name, case in cases.items()}
        for split in (0, 1)
    )
    return Counted(columns, choose(tuning, columns), reporting, bench.kinds("reporting"))


def tables(bench: Workbench, exits: Sequence[int]) -> tuple[tuple[Table, ...], tuple[Claim, ...]]:
    """Returns the tables over LayerSkip and over plain decoding, and the paper's claims at each cost."""
    one = counted(bench, exits)
    paper = {NAMES[rule]: {"Llama 1B": small[0], "Llama 7B": large} for rule, (small, large) in TABLE.items()}
    notes = (
        "Exact counts of greedy texts. The columns of the paper's models have their costs by bytes: an exit after a "
        "share f of the layers costs h + (1 − h) f of a step, where the head's share h is "
        + " and ".join(f"{share:.1%} ({name})" for name, share in HEADS.items())
        + ".",
        f"At most {rules.LONGEST} draft tokens. The oracle stop reads the text.",
        *one.settings(),
    )
    made = (
        one.table(
            "Table I, greedy, from counts: × LayerSkip with the best constant", paper, CONSTANT, notes=notes
        ),
        one.table("Table I, greedy, from counts: × plain", {}),
    )
    claims = one.claims(
        "An early exit with the best constant length is faster than plain decoding.", CONSTANT, None
    )
    for says, row, other in (
        ("Greedy, AdaSPEED is faster than LayerSkip.", "product", "constant"),
        ("Greedy, AdaSPEED is faster than Draft & Verify's stop.", "product", "confidence"),
        ("Greedy, AdaSPEED is faster without a probe than with one.", "product", "probe"),
    ):
        if NAMES[other] in one.chosen:
            printed = {model: paper[NAMES[row]][model] / paper[NAMES[other]][model] for model in HEADS}
            claims += one.claims(says, NAMES[row], NAMES[other], paper=printed)
    return made, tuple(claims)


def _columns(bench: Workbench) -> tuple[Column, ...]:
    target, depth = bench.lm.loaded, bench.lm.config.num_layers
    layer = share_of_step(DraftCost(layers=1, head=False), target)
    free = Column(FREE, (layer, 1 - depth * layer))
    return (free, *(Column(name, ((1 - head) / depth, head)) for name, head in HEADS.items()))


def _work(rounds: Rounds, exit_layer: int) -> Work:
    """Returns the counts with two parts, layers and heads. Verification reads the draft's layers only once."""
    drafted = rounds.by_length @ np.arange(rounds.by_length.shape[1])
    return Work(
        rounds.tokens, rounds.by_length.sum(axis=1), np.stack([drafted * exit_layer, drafted], axis=1)
    )
