"""When to stop drafting? `python -m jaxspec.bench.stop_rules --model DIR` tunes stop rules alike and compares them.

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
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tyro

from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.oracle import oracle
from jaxspec.bench.stop_rules_report import show
from jaxspec.bench.timing import check_budget, interleaved
from jaxspec.bench.totals import acceptance, speed_ratio, tokens_per_second
from jaxspec.cli.errors import in_options, one_line, option_names
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.results import Result
from jaxspec.io.method_files import law_name, probe_path

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

    Attributes:
      model: a directory; by default the embedded model.
      exit_layers: which exits; by default all from 1 to half of the layers.
      constants: K's to try for the constant rule.
      gammas: γ's to start from, to try for each other rule; it moves from there as in Draft & Verify.
      num_draft_tokens: K of the rules other than the constant one.
      carry: start each text from the γ that the last one ended with, as the evaluations of Draft & Verify do; else
        every text starts from the same γ.
      burn_in: with carry, rounds on tuning prompts before anything is measured, so that γ has settled.
      kinds: of prompts; by default all.
      tuning_prompts, reporting_prompts: of each kind.
      acceptor: where temperature is above 0, block or rejection (the paper's); by default block.
      max_new_tokens: of each generation, which may end before.
      temperature: 0 for greedy.
      top_p: of the law, where temperature is above 0.
      repeats: interleaved turns on the reporting prompts.
      dtype, device: as everywhere.
      json: print one JSON object and nothing else.
    """

    model: str | None = None
    exit_layers: tuple[int, ...] = ()
    constants: tuple[int, ...] = (3, 5, 8, 12)
    gammas: tuple[float, ...] = (0.1, 0.3, 0.6, 0.8)
    num_draft_tokens: int = 12
    carry: bool = False
    burn_in: int = 1000
    kinds: tuple[str, ...] = prompt_set.KINDS
    tuning_prompts: int = 3
    reporting_prompts: int = 10
    acceptor: Literal["block", "rejection"] | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    repeats: int = 3
    dtype: str | None = None
    device: str | None = None
    json: bool = False

    def check(self) -> None:
        """Refuses what cannot be measured. Not when it is made: the parser would report it in its own way.

        Raises:
          ValueError: a number outside its range, or none at all.
        """
        check_budget(self.max_new_tokens)
        for option, numbers in (("constants", self.constants), ("gammas", self.gammas)):
            if not numbers:
                raise ValueError(f"`{option}` has no number; give at least one")


class Case(NamedTuple):
    """A rule at an exit with its number: K, or the γ that it starts from."""

    rule: str
    exit_layer: int
    number: float


# By prompt, what was generated after it, turn by turn.
Taken = list[list[Result]]


def measure(options: Options, on_progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Tunes every rule on the tuning prompts, then generates from the reporting prompts.

    Returns:
      `model`, `device`, `law`, `carry`, `plain_tokens_per_second`; `tuning`: of every case that was tried `rule`,
      `exit_layer`, `number` and `speedup`; `rules`: by rule, "oracle" among them, `exit_layer` and `number` (both of
      the fastest case in tuning; the oracle has those of the constant rule and no number), `tokens_per_second`,
      `speedup` over plain decoding and `over_constant`, each with its `_interval` (see `totals.speed_ratio`), and
      what `totals.acceptance` gives. A probe's exits are those that have one for the law beside the model.

    Raises:
      ValueError, FileNotFoundError: an unknown kind of prompt, a number outside its range, or what `load` and
        `generate` raise.
    """
    options.check()
    lm = load(options.model, dtype=options.dtype, device=options.device)
    tuning = _prompts(lm, options, "tuning", options.tuning_prompts)
    reporting = _prompts(lm, options, "reporting", options.reporting_prompts)
    top_p = options.top_p if options.temperature else 1.0
    law = law_name(options.temperature, top_p=top_p)
    # Not the model's own defaults for the filters: the law is the one that is named.
    numbers = {"temperature": options.temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}
    generate: Callable[..., Result] = functools.partial(
        lm.generate, max_new_tokens=options.max_new_tokens, **numbers
    )
    if options.carry:
        generate = _carrying(generate)
    cases = {case: _method(options, case) for case in _cases(lm, options, law)}
    take = functools.partial(_take, lm, generate, on_progress=on_progress)
    if options.carry:
        _settle(
            generate, [method for case, method in cases.items() if case.rule != "constant"], tuning, options
        )

    first = take({"plain": {}} | cases, tuning, 1)
    tried = {case: speed_ratio(first[case], first["plain"])[0] for case in cases}
    best = {
        rule: max((case for case in cases if case.rule == rule), key=lambda case: tried[case] or 0.0)
        for rule in dict.fromkeys(case.rule for case in cases)
    }
    chosen: dict[Any, Any] = {"plain": {}} | {rule: cases[case] for rule, case in best.items()}
    if not options.temperature:
        chosen["oracle"] = _oracles(lm, generate, reporting, best["constant"].exit_layer, options)
    taken = take(chosen, reporting, options.repeats)
    return {
        "model": lm.name,
        "device": lm.device.device_kind,
        "law": law,
        "carry": options.carry,
        "plain_tokens_per_second": tokens_per_second(list(itertools.chain(*taken["plain"]))),
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
    for kind in options.kinds:
        if kind not in known:
            raise ValueError(f"unknown kind of prompt {kind!r}; give some of {', '.join(known)}")
        if not 1 <= each <= len(known[kind]):
            raise ValueError(f"{split}_prompts is {each}; give 1 to {len(known[kind])}")
    return [lm.encode(text) for kind in options.kinds for text in known[kind][:each]]


def _cases(lm: LanguageModel, options: Options, law: str) -> list[Case]:
    exits = options.exit_layers or tuple(range(1, max(2, lm.config.num_layers // 2 + 1)))

    def is_there(exit_layer: int) -> bool:
        return lm.directory is not None and probe_path(lm.directory, exit_layer, law).is_file()

    return [
        Case(rule, exit_layer, number)
        for rule in RULES
        for exit_layer in exits
        if rule != "probe" or is_there(exit_layer)
        for number in (options.constants if rule == "constant" else options.gammas)
    ]


def _method(options: Options, case: Case) -> dict[str, Any]:
    """A case as `generate` takes it."""
    chosen = RULES[case.rule] | {"exit_layer": case.exit_layer}
    if options.temperature and options.acceptor:
        chosen["acceptor"] = options.acceptor
    if case.rule == "constant":
        return chosen | {"num_draft_tokens": int(case.number)}
    return chosen | {"num_draft_tokens": options.num_draft_tokens, "gamma": case.number}


def _carrying(generate: Callable[..., Result]) -> Callable[..., Result]:
    """The same, but each text of a method with a γ starts from the γ that the method's last text ended with."""
    ended: dict[Any, float | None] = {}

    def run(prompt: Any, *, seed: int = 0, **method: Any) -> Result:
        if "gamma" not in method:
            return generate(prompt, seed=seed, **method)
        case = tuple(sorted(method.items()))
        result = generate(prompt, seed=seed, **method | {"gamma": ended.get(case, method["gamma"])})
        ended[case] = result.gamma
        return result

    return run


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
) -> Callable[[int], dict[str, Any]]:
    """By the number of a prompt, the method that knows its text."""

    def knowing(prompt: list[int]) -> dict[str, Any]:
        rule = oracle(lm, prompt, generate(prompt).tokens, exit_layer, options.max_new_tokens)
        return {"method": LayerSkip(lm.config, exit_layer, rule, options.num_draft_tokens)}

    return list(map(knowing, prompts)).__getitem__


def _take(
    lm: LanguageModel,
    generate: Callable[..., Result],
    methods: Mapping[Any, Any],
    prompts: Sequence[list[int]],
    repeats: int,
    *,
    on_progress: Callable[[str], None],
) -> dict[Any, Taken]:
    """What each method generates, one prompt at a time, in turns; the turn that compiles does not count."""
    taken: dict[Any, Taken] = {name: [[] for _ in prompts] for name in methods}

    def run(name: Any, at: int) -> None:
        method = methods[name](at) if callable(methods[name]) else methods[name]
        taken[name][at].append(generate(prompts[at], seed=len(taken[name][at]), **method))

    for name in methods:
        on_progress(f"compiling {name}")
        run(name, 0)
        taken[name][0].clear()
    lm.executables.wait()
    for at in range(len(prompts)):
        on_progress(f"measuring {len(methods)} cases: prompt {at + 1} of {len(prompts)}")
        interleaved({str(name): functools.partial(run, name, at) for name in methods}, repeats)
    return taken


def _figures(texts: Taken, plain: Taken, constant: Taken) -> dict[str, Any]:
    results = list(itertools.chain(*texts))
    speedup, over = speed_ratio(texts, plain), speed_ratio(texts, constant)
    return {
        "tokens_per_second": tokens_per_second(results),
        "speedup": speedup[0],
        "speedup_interval": speedup[1],
        "over_constant": over[0],
        "over_constant_interval": over[1],
        **acceptance(results),
    }


def main() -> None:
    """Prints a table, or JSON."""
    try:
        options = tyro.cli(Options)
        report = measure(options, lambda what: print(what, file=sys.stderr))
    except (ValueError, OSError) as error:
        sys.exit(f"jaxspec: error: {in_options(one_line(error), option_names(Options))}")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
