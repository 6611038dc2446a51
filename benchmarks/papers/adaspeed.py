"""AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding (Liu et al.): when should an early exit stop drafting?

Measures Table I of the paper, its search for γ0 and its sweep of the exit layer. Greedy texts are tuned by replay: the
drafts of each rule at each exit with each number are counted exactly and priced (see `rules`, `prices`). The
best setting of each rule then runs in the engine on other prompts. Sampled texts are tuned in the engine.

The paper's rules do not limit the length of a draft; here the limit is 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.papers import adaspeed_counts, adaspeed_ratios, adaspeed_sampled, baselines, rules
from benchmarks.papers.adaspeed_counts import NAMES, TABLE, Counted
from benchmarks.papers.adaspeed_sampled import TOP_P
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.rules import Case
from benchmarks.papers.tables import Cell, Claim, Report, Row, Table, more_than
from benchmarks.papers.workbench import Measured, Workbench
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.methods import Method

PAPER = "AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding (Liu et al.)"
_UNTRAINED = (
    "untrained: this model's first layers as a draft model with its own cache; they were not trained to draft "
    "beyond the model's own training."
)
OVER, TIMES, PREDICTED, FREE = "× LayerSkip", "× plain", "predicted", "rows free"


def measure(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress = lambda what: None) -> Report:
    """Measures the stop rules of early exits, greedy and sampled, each tuned over exits and numbers.

    Raises:
      ValueError: see `Workbench` and `Suite`.
    """
    with Workbench(lm, options, on_progress) as bench:
        exits = adaspeed_counts.exit_layers(lm)
        if options.counts:
            return bench.report(PAPER, *adaspeed_ratios.tables(bench, exits))
        counted = adaspeed_counts.count(bench, exits)
        chosen = {rule: case for rule in NAMES if (case := counted.best(rule)) is not None}
        # Tuned separately for greedy and for sampled texts, like the rules.
        untrained = (
            _untrained(bench, "greedy-untrained"),
            _untrained(bench, "top-p-untrained", sampling=TOP_P),
        )
        greedy = _greedy(bench, chosen, untrained[0])
        drawn = _drawn(bench, exits, chosen, untrained[1])
        tables = (
            _greedy_table(bench, counted, chosen, greedy, untrained[0]),
            _drawn_table(*drawn, untrained[1]),
            _exits_table(counted, exits),
            _gammas_table(counted, chosen),
        )
        return bench.report(PAPER, tables, _claims(counted, chosen, greedy, drawn))


def _untrained(bench: Workbench, name: str, **options: Any) -> dict[str, Method]:
    """Returns the fastest truncation of the model as a draft model with its own cache, by the name of its run."""
    best, method = baselines.fastest(bench, name, baselines.truncations(bench.lm), **options)
    return {f"untrained: {best}": method}


def _greedy(bench: Workbench, chosen: Mapping[str, Case], untrained: Mapping[str, Method]) -> Measured:
    """Measures the best of each rule on the reporting prompts, with an ideal stop and the truncated model."""
    short = baselines.cut(bench)
    methods: dict[str, Method] = {
        NAMES[rule]: case.method() for rule, case in chosen.items() if rule != "oracle"
    }
    ideal = baselines.ideal_exit(bench, chosen["oracle"].exit_layer, rules.LONGEST)
    peers = dict(short.peers) | {baselines.ORACLE: ideal}
    return bench.measure("greedy", "reporting", {**untrained, **methods}, peers=peers, models=short.models)


def _drawn(
    bench: Workbench, exits: Sequence[int], chosen: Mapping[str, Case], untrained: Mapping[str, Method]
) -> tuple[dict[str, Case], Measured]:
    """Tunes each rule on sampled texts, and measures it on others."""
    near = {chosen[rule].exit_layer for rule in ("constant", "confidence", "product")}
    cases = adaspeed_sampled.cases(bench.lm, near, exits)
    named = {str(case): case for case in cases}
    tried = bench.measure(
        "top-p-tuning", "tuning", {name: case.method() for name, case in named.items()}, sampling=TOP_P
    )
    best = {
        rule: named[tried.best([name for name, case in named.items() if case.rule == rule])]
        for rule in dict.fromkeys(case.rule for case in cases)
    }
    methods: dict[str, Method] = {NAMES[rule]: case.method() for rule, case in best.items()}
    return best, bench.measure("top-p", "reporting", {**untrained, **methods}, sampling=TOP_P)


def _greedy_table(
    bench: Workbench,
    counted: Counted,
    chosen: Mapping[str, Case],
    measured: Measured,
    untrained: Mapping[str, Method],
) -> Table:
    constant = NAMES["constant"]
    rows = [Row("plain", {TIMES: Cell(ours=1.0)})]
    for name in baselines.cut(bench).peers:
        rows.append(Row(name, {TIMES: measured.ratio(name)}))
    rows += _untrained_rows(measured, untrained)
    for rule, case in chosen.items():
        name, paper = NAMES[rule], TABLE[rule][0][0] if rule in TABLE else None
        cells = {
            OVER: measured.ratio(name, constant, paper=paper),
            TIMES: measured.ratio(name),
            PREDICTED: counted.speedup(case, 1),
            FREE: counted.free(case),
        }
        rows.append(Row(f"{name}: {_numbers(case)}", cells))
    notes = (
        "The paper's figures are for its 1B model (7B: 1.00, 1.12, 1.18, 1.12), on summaries.",
        "predicted: rounds counted by replay, priced by rounds of the real loop; rows free: priced by the weights that "
        "a pass reads, as on an accelerator.",
        *(
            f"The prices at exit {layer} do not rise with the length, or differ by over 20 % between programs, in "
            f"{adaspeed_counts.ATTEMPTS} measurements: do not use its predictions."
            for layer in counted.unsound
        ),
        _UNTRAINED,
        baselines.cut(bench).note,
        *measured.different([*untrained, *(NAMES[rule] for rule in chosen)]),
    )
    return Table("Table I, greedy", (OVER, TIMES, PREDICTED, FREE), tuple(rows), notes)


def _untrained_rows(measured: Measured, untrained: Mapping[str, Method]) -> list[Row]:
    over = NAMES["constant"]
    return [Row(name, {OVER: measured.ratio(name, over), TIMES: measured.ratio(name)}) for name in untrained]


def _drawn_table(best: Mapping[str, Case], measured: Measured, untrained: Mapping[str, Method]) -> Table:
    rows = [Row("plain", {TIMES: Cell(ours=1.0)}), *_untrained_rows(measured, untrained)]
    for rule, case in best.items():
        over = measured.ratio(NAMES[rule], NAMES["constant"], paper=TABLE[rule][1][0])
        rows.append(Row(f"{NAMES[rule]}: {_numbers(case)}", {OVER: over, TIMES: measured.ratio(NAMES[rule])}))
    notes = (
        "Temperature .6, top-p .9. The paper's figures are for its 1B model (7B: 1.00, 1.14, 1.21, 1.24). Drafts are "
        "accepted as a block; the paper accepts token by token.",
        _UNTRAINED,
    )
    return Table("Table I, top-p", (OVER, TIMES), tuple(rows), notes)


def _exits_table(counted: Counted, exits: Sequence[int]) -> Table:
    """Returns a table of the best number of each rule at each exit."""
    rows = []
    for rule, name in NAMES.items():
        cases = {layer: counted.best(rule, layer) for layer in exits}
        cells = {str(layer): counted.speedup(case, 1) for layer, case in cases.items() if case is not None}
        if cells:
            rows.append(Row(name, cells))
    return Table(
        "The exit layer: × plain, predicted",
        tuple(map(str, exits)),
        tuple(rows),
        ("At each exit with the number that is best there on tuning prompts.",),
    )


def _gammas_table(counted: Counted, chosen: Mapping[str, Case]) -> Table:
    """Returns a table of each rule at its best exit with several γ0."""
    shown = [gamma for gamma in adaspeed_ratios.SHOWN_GAMMAS if gamma in rules.GAMMAS]
    known = {rule: chosen[rule].exit_layer for rule in rules.THRESHOLDS if rule in chosen}
    rows = [
        Row(
            f"γ0 {gamma:g}",
            {NAMES[rule]: counted.speedup(Case(rule, layer, gamma), 1) for rule, layer in known.items()},
        )
        for gamma in shown
    ]
    settled = {
        rule: next(case for case in counted.rounds if case[:2] == (rule, layer) and case.settled)
        for rule, layer in known.items()
    }
    rows.append(Row("settled", {NAMES[rule]: counted.speedup(case, 1) for rule, case in settled.items()}))
    ended = ", ".join(f"{NAMES[rule]} at {case.number:.2f}" for rule, case in settled.items())
    return Table(
        "The search for γ0: × plain, predicted",
        tuple(NAMES[rule] for rule in known),
        tuple(rows),
        (
            f"The paper chose γ0 = {rules.PAPER_GAMMA:g}. settled: each text starts from the γ that the rule reaches "
            f"from there when it is carried from tuning text to tuning text, as its authors evaluate ({ended}).",
        ),
    )


def _claims(
    counted: Counted,
    chosen: Mapping[str, Case],
    greedy: Measured,
    drawn: tuple[Mapping[str, Case], Measured],
) -> tuple[Claim, ...]:
    def faster(texts: str, measured: Measured, known: Mapping[str, Case]) -> Iterator[Claim]:
        for rule, other in adaspeed_ratios.PAIRS[texts]:
            says = adaspeed_ratios.says(texts, rule, other)
            if rule in known and other in known:
                ratio = measured.ratio(NAMES[rule], NAMES[other])
                yield more_than(says, f"{NAMES[rule]} ÷ {NAMES[other]}", ratio)
            else:
                missing = NAMES[rule if rule not in known else other]
                yield Claim(says, None, f"{missing} has no case here: the model has no probe for these texts")

    best, sampled = drawn
    constant = NAMES["constant"]
    return (
        more_than(adaspeed_ratios.PAYS, f"{constant} ÷ plain", greedy.ratio(constant)),
        *faster(adaspeed_ratios.GREEDY, greedy, chosen),
        *faster(adaspeed_ratios.TOP_P, sampled, best),
        _lower_exit(counted, chosen),
    )


def _lower_exit(counted: Counted, chosen: Mapping[str, Case]) -> Claim:
    says = adaspeed_ratios.LOWER
    exits = {rule: chosen[rule].exit_layer for rule in ("product", "constant", "confidence")}
    found = ", ".join(f"{NAMES[rule]} {layer}" for rule, layer in exits.items())
    if len({case.exit_layer for case in counted.rounds}) == 1:
        return Claim(says, None, f"exits: {found}, the only one of this model that was tried")
    return Claim(says, exits["product"] < min(exits["constant"], exits["confidence"]), f"exits: {found}")


def _numbers(case: Case) -> str:
    """Formats a case without its rule's name."""
    return str(case).partition(", ")[2]
