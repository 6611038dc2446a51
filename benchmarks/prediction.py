"""Compares speed-ups with those that acceptance predicts: `python -m benchmarks.prediction` prints JSON.

The speed-up of a method over plain decoding is predicted from the drafted and accepted tokens of its rounds, and from
the cost of their parts, measured separately in the same run:

    predicted = tokens × step(1 row) ÷ Σ over rounds (drafted × draft step + last pass + verification(width))

Overhead of the loop, needless copies, recompilations and badly chosen widths appear as obtained ÷ predicted below 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import command
from benchmarks.cases import Case, dial_cases
from benchmarks.synthetic_acceptance import dial_model, walk_model
from jaxspec.cli.options import Placement
from jaxspec.drafting.asd_drafter import ASD
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.drafting.ngram_drafter import NGram
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.loading.loading import resolve_placement
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.bench.speed import speed_ratio
from jaxspec.measuring.bench.steps import Steps
from jaxspec.measuring.bench.suite_options import check_budget
from jaxspec.measuring.bench.timing import interleaved, measure_runs, median_ratio
from jaxspec.protocol import Weights
from jaxspec.sampling import seed_key


@dataclasses.dataclass(frozen=True)
class Options:
    """Compares obtained with predicted speed-ups, on a random model of a named shape.

    Attributes:
      shape: one of profile's shapes.
      scale: scale of the later layers' residual branches, see `benchmarks.synthetic_acceptance`.
      exit_layer: layers of the early exits and of the draft model. Default: a quarter of the target's.
      num_draft_tokens: K of drafts of constant length; those with a stop rule have 12, ngram 10.
      max_new_tokens: new tokens per generation.
      repeats: interleaved repetitions.
      methods: methods, separated by commas. Default: all.
    """

    shape: str = "134m"
    scale: float = 0.01
    exit_layer: int | None = None
    num_draft_tokens: int = 5
    max_new_tokens: int = 96
    repeats: int = 5
    methods: str | None = None
    placement: Placement = Placement()  # noqa: RUF009


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Runs each method and plain decoding in turns, then the parts of their rounds; see the module.

    `ngram` runs on a `walk_model`, whose text repeats; the others on a `dial_model`. `draft-verify` skips every other
    one of the later layers, with a traced and with a static mask.

    Returns:
      `shape`, `device`, `dtype`, `step_ms` of plain decoding, `results`: per method `speedup`,
      `predicted`, `obtained_over_predicted`, the figures of `speed.acceptance`, `draft_step_ms`,
      `identical_to_autoregressive`; if both ran, `traced_over_static`: the speed with a static mask ÷ that with a
      traced one; with `asd`, `asd_prefill_over_plain`: the time of a prefill of 256 tokens with measured similarities
      ÷ that of one without.
    """
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {options.shape!r}; give one of {', '.join(SHAPES)}")
    check_budget(options.max_new_tokens)
    place, dtype = resolve_placement(options.placement.dtype, options.placement.device)
    shape = SHAPES[options.shape]
    depth = options.exit_layer or max(1, shape.num_layers // 4)
    with jax.default_device(place):
        config, params = dial_model(shape, options.scale, depth, seed_key(0), dtype)
        _, walk = walk_model(shape, seed_key(0), dtype)
    lm = LanguageModel(config, params, name=options.shape, device=place)
    walker = LanguageModel(config, walk, name=options.shape, device=place)
    # The walk's own text, then its first token again, so that the continuation repeats the prompt.
    walked = walker.generate(
        [[3]], method="autoregressive", max_new_tokens=options.max_new_tokens, ignore_eos=True
    )
    again = [3, *walked[0].tokens, 3]
    cases = _cases(options, lm, walker, again, depth)

    for model in (lm, walker):
        mine = {name: case for name, case in cases.items() if case.lm is model}
        if not mine:
            continue
        first, *_ = mine.values()
        runs = {BASELINE: first.plain_run} | {name: case.run for name, case in mine.items()}
        (taken,) = measure_runs([model], runs, [first.prompt], options.repeats, on_progress=on_progress)
        for name, case in mine.items():
            case.take(taken[name], taken[BASELINE])

    plain = Steps(lm, Weights(lm.params), Autoregressive(), 256)
    parts: dict[str, Any] = {"plain step": plain}
    for case in cases.values():
        parts |= {what: make() for what, make in case.parts().items() if what not in parts}
    timed = dict(parts)
    if "asd" in cases:
        gathering = Steps(lm, Weights(lm.params), ASD(lm.config), 256)
        timed |= {"prefill": _done(plain.prefill), "prefill asd": _done(gathering.prefill)}
    for run in timed.values():
        run()
    times = interleaved(timed, options.repeats, lambda turn: on_progress(f"measuring the parts, {turn}"))
    costs = {what: statistics.median(times[what]) / part.rounds for what, part in parts.items()}
    report: dict[str, Any] = {
        "shape": options.shape,
        "device": lm.device.device_kind,
        "dtype": lm.dtype,
        "step_ms": costs["plain step"],
        "results": {name: case.report(costs) for name, case in cases.items()},
    }
    if {"draft-verify", "draft-verify static"} <= cases.keys():
        static, traced = cases["draft-verify static"], cases["draft-verify"]
        report["traced_over_static"] = speed_ratio([static.mine], [traced.mine])[0]
    if "asd" in cases:
        report["asd_prefill_over_plain"] = median_ratio(times["prefill asd"], times["prefill"])
    return report


def _done(function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function())


def _cases(
    options: Options, lm: LanguageModel, walker: LanguageModel, again: list[int], depth: int
) -> dict[str, Case]:
    """Returns every method to measure."""
    most, budget = options.num_draft_tokens, options.max_new_tokens
    cases = {"ngram": Case(walker, again, NGram(), None, budget)} | dial_cases(lm, depth, most, budget)
    if options.methods is None:
        return cases
    named = [name.strip() for name in options.methods.split(",")]
    unknown = [name for name in named if name not in cases]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; give some of {', '.join(cases)}")
    return {name: cases[name] for name in named}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report as JSON; returns the exit status."""
    return command.run("benchmarks.prediction", Options, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
