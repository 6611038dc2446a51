"""AdaSPEED's stop rules on sampled texts: the settings to try, and counts of rounds and draft passes in the engine."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.papers import counted, rules
from benchmarks.papers.adaspeed_counts import NAMES
from benchmarks.papers.counted import Column, Counted
from benchmarks.papers.engine_counts import Counter, Counting
from benchmarks.papers.rules import Case
from benchmarks.papers.workbench import Workbench
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.texts.results import Result

# Sampling of LayerSkip's evaluations, which AdaSPEED's follow.
TOP_P: dict[str, Any] = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
CONSTANTS, GAMMAS = (1, 2, 4, 8, 16), (0.1, 0.3, 0.6, 0.8)
NOTE = (
    "Temperature .6, top-p .9, one seed: every rule writes another text, and the intervals contain that. Chosen among "
    f"K {', '.join(map(str, CONSTANTS))} and γ {', '.join(map(str, GAMMAS))}, at the exits that are fastest for greedy "
    "texts or have a probe. Drafts are accepted as a block; the paper accepts "
    "token by token. Draft tokens after the end of a text are not counted: of greedy texts these are 1 to 5 % with a "
    "threshold, and less than 1 % with K 2."
)


def cases(lm: LanguageModel, near: Collection[int], exits: Sequence[int]) -> list[Case]:
    """Returns the settings to try, all rules at the same exits, so that no rule has more choice than another.

    Args:
      lm: the model.
      near: exits that are fast for greedy texts; those with a probe for sampled texts are added.
      exits: the exits of the model.
    """
    name = distribution_name(**TOP_P)
    probed = {layer for layer in exits if rules.probe(lm, layer, name) is not None}
    return [
        Case(rule, layer, number)
        for rule in NAMES
        if rule != "oracle"
        for layer in sorted(probed if rule == "probe" else {*near, *probed})
        for number in (CONSTANTS if rule == "constant" else GAMMAS)
    ]


def count(
    bench: Workbench, near: Collection[int], exits: Sequence[int], columns: Sequence[Column]
) -> Counted:
    """Counts every case on tuning texts, and the fastest of each rule on reporting texts; see `cases`.

    The parts of a draft pass are layers and heads.
    """
    made = {
        counted.Case(NAMES[case.rule], str(case).partition(", ")[2]): _counting(bench, case)
        for case in cases(bench.lm, near, exits)
    }
    parts = f"layers, heads; {distribution_name(**TOP_P)}, seed {bench.options.seed}"
    tuning, reporting = (Counter(bench, split, parts, "counts-top-p") for split in ("tuning", "reporting"))
    chosen = counted.choose(tuning.count(made), columns)
    needed = {case for by_heading in chosen.values() for case in by_heading.values()}
    counts = reporting.count({case: made[case] for case in sorted(needed)})
    return Counted(tuple(columns), chosen, counts, bench.kinds("reporting"))


def _counting(bench: Workbench, case: Case) -> Counting:
    return functools.partial(_count, bench, case)


def _count(bench: Workbench, case: Case, prompt: Sequence[int]) -> tuple[Result, Sequence[float]]:
    options = bench.options
    result: Result = bench.lm.generate(
        prompt, method=case.method(), max_new_tokens=options.max_new_tokens, seed=options.seed, **TOP_P
    )
    drafted = result.statistics.num_draft_tokens
    return result, [drafted * case.exit_layer, drafted]
