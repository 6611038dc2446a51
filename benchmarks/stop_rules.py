"""When to stop drafting? `python -m benchmarks.stop_rules --model DIR` tunes stop rules alike and compares them.

Early-exit drafts under each stop rule of AdaSPEED's comparison (Table I of its paper): constant K as in LayerSkip,
the confidence of the last token as in Draft & Verify, the product over the draft, and the product of a probe's
estimates. Each rule gets the exit and the number (K, or the γ that it starts from) with which it was fastest on
tuning prompts; the speeds are those on other prompts, beside plain decoding and, where texts are greedy, beside an
oracle that knows where each draft goes wrong.

What differs from the paper: its rules have no bound on the draft's length but the text, here `num_draft_tokens`; where
tokens are drawn, its acceptance is token by token, the usual one here block verification (`--acceptor rejection` is
the paper's); and its γ is carried from text to text (`--carry`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from benchmarks import command
from benchmarks.stop_rules_report import show
from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.carry import carrying
from jaxspec.bench.oracle import oracle
from jaxspec.bench.speed import Taken, acceptance, speed_ratio, tokens_per_second
from jaxspec.bench.suite_options import check_budget
from jaxspec.bench.timing import OnProgress, Run, measure_runs
from jaxspec.cli.options import ModelOptions, SamplingOptions
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result
from jaxspec.io.method_files import law_name, probe_path
from jaxspec.methods import Autoregressive, registry

# K's and γ's that are tried where none is given.
CONSTANTS, GAMMAS = (3, 5, 8, 12), (0.1, 0.3, 0.6, 0.8)
PLAIN: dict[str, Any] = {"method": Autoregressive()}
# Rule → method and options.
RULES: dict[str, dict[str, Any]] = {
    "constant": {"method": "layerskip"},
    "confidence": {"method": "layerskip", "stop_rule": "confidence"},
    "product": {"method": "adaspeed"},
    "probe": {"method": "adaspeed-probe"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Early exits under each stop rule, beside plain decoding.

    Where sampling is not given, texts are greedy, whatever the model's own defaults are.

    Attributes:
      exit_layers: an exit to try. Default: all from 1 to half of the layers.
      constants: a K to try for the constant rule. Default: 3, 5, 8, 12.
      gammas: a γ to start from, to try for each other rule; it moves from there as in Draft & Verify. Default: .1,
        .3, .6, .8.
      num_draft_tokens: K of the rules other than the constant one.
      carry: start each text from the γ that the last one ended with, as the evaluations of Draft & Verify do; else
        every text starts from the same γ.
      burn_in: with carry, rounds on tuning prompts before anything is measured, so that γ has settled.
      kinds: a kind of prompts. Default: all.
      num_tuning_prompts: how many prompts of each kind to tune with.
      num_reporting_prompts: how many others of each kind to report on.
      acceptor: where temperature is above 0, block or rejection (the paper's); by default block.
      max_new_tokens: of each generation, which may end before.
      repeats: interleaved turns on the reporting prompts.
      json: print one JSON object and nothing else.
    """

    exit_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--exit-layer"})
    constants: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--constant"})
    gammas: tuple[float, ...] = dataclasses.field(default=(), metadata={"option": "--gamma"})
    num_draft_tokens: int = 12
    carry: bool = False
    burn_in: int = 1000
    kinds: tuple[str, ...] = dataclasses.field(default=(), metadata={"option": "--kind"})
    num_tuning_prompts: int = 3
    num_reporting_prompts: int = 10
    acceptor: Literal["block", "rejection"] | None = None
    max_new_tokens: int = 64
    repeats: int = 3
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_budget(self.max_new_tokens)
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; give at least 1")


class Case(NamedTuple):
    """A rule at an exit with its number: K, or the γ that it starts from."""

    rule: str
    exit_layer: int
    number: float


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Tunes every rule on the tuning prompts, then generates from the reporting prompts.

    Returns:
      `model`, `device`, `law`, `carry`, `plain_tokens_per_second`; `tuning`: of every case that was tried `rule`,
      `exit_layer`, `number` and `speedup`; `rules`: by rule, "oracle" among them, `exit_layer` and `number` (both of
      the fastest case in tuning; the oracle has those of the constant rule and no number), `tokens_per_second`,
      `speedup` over plain decoding and `over_constant`, each with its `_interval` (see `speed.speed_ratio`), and
      what `speed.acceptance` gives. A probe's exits are those that have one for the law beside the model.

    Raises:
      ValueError, FileNotFoundError: an unknown kind of prompt, a number outside its range, or what `load` and
        `generate` raise.
    """
    lm = options.model.load()
    tuning = _prompts(lm, options, "tuning", options.num_tuning_prompts)
    reporting = _prompts(lm, options, "reporting", options.num_reporting_prompts)
    law = options.sampling.numbers()
    generate: Callable[..., Result] = functools.partial(
        lm.generate, max_new_tokens=options.max_new_tokens, **law
    )
    if options.carry:
        generate = carrying(generate)
    cases = {case: _method(options, case) for case in _cases(lm, options, law_name(**law))}
    for case in cases.values():  # what is wrong with any of them is raised here; nothing runs yet
        lm.stream(tuning[0], max_new_tokens=options.max_new_tokens, **law, **case)
    take = functools.partial(_take, lm, generate, seed=options.sampling.seed, on_progress=on_progress)
    if options.carry:
        _settle(
            generate, [method for case, method in cases.items() if case.rule != "constant"], tuning, options
        )

    first = take({"plain": PLAIN} | cases, tuning, 1)
    tried = {case: speed_ratio(first[case], first["plain"])[0] for case in cases}
    best = {
        rule: max((case for case in cases if case.rule == rule), key=lambda case: tried[case] or 0.0)
        for rule in dict.fromkeys(case.rule for case in cases)
    }
    chosen: dict[Any, Any] = {"plain": PLAIN} | {rule: cases[case] for rule, case in best.items()}
    if not law["temperature"]:
        chosen["oracle"] = _oracles(lm, generate, reporting, best["constant"].exit_layer, options)
    taken = take(chosen, reporting, options.repeats)
    return {
        "model": lm.name,
        "device": lm.device.device_kind,
        "law": law_name(**law),
        "carry": options.carry,
        "plain_tokens_per_second": tokens_per_second(taken["plain"]),
        "tuning": [{**case._asdict(), "speedup": speedup} for case, speedup in tried.items()],
        "rules": {
            rule: {
                "exit_layer": best.get(rule, best["constant"]).exit_layer,
                "number": best[rule].number if rule in best else None,
                **_figures(texts, taken["plain"], taken["constant"]),
            }
            for rule, texts in taken.items()
            if rule != "plain"
        },
    }


def _prompts(lm: LanguageModel, options: Options, split: prompt_set.Split, each: int) -> list[list[int]]:
    known = prompt_set.load(split)
    kinds = options.kinds or tuple(known)
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"unknown kind of prompt {kind!r}; give some of {', '.join(known)}")
        if not 1 <= each <= len(known[kind]):
            raise ValueError(f"num_{split}_prompts is {each}; give 1 to {len(known[kind])}")
    return [lm.encode(text) for kind in kinds for text in known[kind][:each]]


def _cases(lm: LanguageModel, options: Options, law: str) -> list[Case]:
    exits = options.exit_layers or tuple(range(1, max(2, lm.config.num_layers // 2 + 1)))

    def is_there(exit_layer: int) -> bool:
        return lm.directory is not None and probe_path(lm.directory, exit_layer, law).is_file()

    return [
        Case(rule, exit_layer, number)
        for rule in RULES
        for exit_layer in exits
        if rule != "probe" or is_there(exit_layer)
        for number in ((options.constants or CONSTANTS) if rule == "constant" else (options.gammas or GAMMAS))
    ]


def _method(options: Options, case: Case) -> dict[str, Any]:
    """A case as `generate` takes it."""
    given = RULES[case.rule] | {"exit_layer": case.exit_layer}
    if case.rule == "constant":
        given |= {"num_draft_tokens": int(case.number)}
    else:
        given |= {"num_draft_tokens": options.num_draft_tokens, "gamma": case.number}
    chosen: dict[str, Any] = {"method": registry.make(str(given.pop("method")), given)}
    if options.sampling.temperature and options.acceptor:
        chosen["acceptor"] = options.acceptor
    return chosen


def _settle(
    generate: Callable[..., Result], methods: Sequence[dict[str, Any]], prompts: Any, options: Options
) -> None:
    """Lets every carried γ move for the rounds of the burn-in."""
    for method in methods:
        rounds = 0
        for seed, prompt in enumerate(itertools.cycle(prompts)):
            if rounds >= options.burn_in:
                break
            # A text of one token has no round.
            rounds += max(1, generate(prompt, seed=seed, **method).statistics.num_rounds)


def _oracles(
    lm: LanguageModel, generate: Callable[..., Result], prompts: Any, exit_layer: int, options: Options
) -> Callable[[Sequence[int]], dict[str, Any]]:
    """By prompt, the method that knows its text."""

    def knowing(prompt: list[int]) -> dict[str, Any]:
        rule = oracle(lm, prompt, generate(prompt).tokens, exit_layer, options.max_new_tokens)
        return {"method": LayerSkip(lm.config, exit_layer, rule, options.num_draft_tokens)}

    known = {tuple(prompt): knowing(prompt) for prompt in prompts}
    return lambda prompt: known[tuple(prompt)]


def _take(
    lm: LanguageModel,
    generate: Callable[..., Result],
    methods: Mapping[Any, Any],
    prompts: Sequence[list[int]],
    repeats: int,
    *,
    seed: int,
    on_progress: OnProgress,
) -> dict[Any, Taken]:
    """What each method generates, by prompt, turn by turn; a method may depend on the prompt."""

    def run(method: Any) -> Run:
        return lambda prompt, turn: generate(
            prompt, seed=seed + turn, **(method(prompt) if callable(method) else method)
        )

    runs = {str(name): run(method) for name, method in methods.items()}
    taken = list(measure_runs([lm], runs, prompts, repeats, on_progress=on_progress))
    return {name: [by_run[str(name)] for by_run in taken] for name in methods}


def _figures(taken: Taken, plain: Taken, constant: Taken) -> dict[str, Any]:
    speedup, over = speed_ratio(taken, plain), speed_ratio(taken, constant)
    return {
        "tokens_per_second": tokens_per_second(taken),
        "speedup": speedup[0],
        "speedup_interval": speedup[1],
        "over_constant": over[0],
        "over_constant_interval": over[1],
        **acceptance(taken),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, or JSON; returns the exit status."""
    return command.run("benchmarks.stop_rules", Options, measure, show, argv)


if __name__ == "__main__":
    sys.exit(main())
