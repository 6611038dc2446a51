"""Is a method as fast as its acceptance allows? `python -m benchmarks.prediction` prints JSON.

A method's speed-up over plain decoding is predicted from what its rounds drafted and accepted, and from the
cost of their parts, measured apart in the same run:

    predicted = tokens × step(1 row) ÷ Σ over rounds (drafted × draft step + last pass + verification(width))

The loop's own overhead, wasted copies, recompilations and mischosen widths all show as obtained ÷ predicted
below 1.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import command
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.dial import dial_model, walk_model
from jaxspec.bench.profile import SHAPES
from jaxspec.bench.speed import acceptance, speed_ratio
from jaxspec.bench.steps import Steps, SubmodelSteps, WrongDrafts
from jaxspec.bench.suite_options import check_budget
from jaxspec.bench.timing import OnProgress, Run, interleaved, measure_runs, median_ratio
from jaxspec.cli.options import Placement
from jaxspec.drafting.asd import ASD
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.ngram import NGram
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.loading import resolve_placement
from jaxspec.engine.results import Result
from jaxspec.model import llama
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Drafter, Weights
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow, ProductBelow


@dataclasses.dataclass(frozen=True)
class Options:
    """Speed-up obtained against speed-up predicted, on a random model of a named shape.

    Attributes:
      shape: one of profile's shapes.
      scale: the dial: how far the later layers are turned down, see `bench.dial`.
      exit_layer: layers of the early exits and of the draft model; by default a quarter of the target's.
      num_draft_tokens: K of constant drafts; those with a stop rule have 12, ngram 10.
      max_new_tokens: of each generation.
      repeats: interleaved turns.
      methods: which ones, with commas between; by default all.
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
    """Runs each method beside plain decoding, and then the parts of its rounds; see the module.

    `ngram` runs on a `walk_model`, whose text repeats; the others on a `dial_model`. `draft-verify` skips
    every other one of the later layers, with a traced and with a static mask.

    Returns:
      `shape`, `device`, `dtype`, `step_ms` of plain decoding, `results`: per method `speedup` (see
      `bench.speed`), `predicted`, `obtained_over_predicted`, what `speed.acceptance` gives, `draft_step_ms`,
      `identical_to_autoregressive`; where both ran, `traced_over_static`: the speed with a
      static mask ÷ that with a traced one; with `asd`, `asd_prefill_over_plain`: the time of a prefill of 256
      tokens that gathers similarities ÷ that of one that does not.
    """
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {options.shape!r}; give one of {', '.join(SHAPES)}")
    check_budget(options.max_new_tokens)
    place, dtype = resolve_placement(options.placement.dtype, options.placement.device)
    shape = SHAPES[options.shape]
    depth = options.exit_layer or max(1, shape.num_layers // 4)
    with jax.default_device(place):
        config, params = dial_model(shape, options.scale, depth, jax.random.key(0), dtype)
        _, walk = walk_model(shape, jax.random.key(0), dtype)
    lm = LanguageModel(config, params, name=options.shape, device=place)
    walker = LanguageModel(config, walk, name=options.shape, device=place)
    # The walk's own continuation, then its first token again: what follows has been there before.
    walked = walker.generate([[3]], max_new_tokens=options.max_new_tokens, ignore_eos=True)
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
        parts |= {what: part for what, part in case.parts().items() if what not in parts}
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
) -> dict[str, _Case]:
    """Every method to be measured."""
    config, layers, most = lm.config, lm.config.num_layers, options.num_draft_tokens
    draft = (config.truncated(depth), llama.truncate(lm.params, depth))
    skipped = range(depth, layers - 1, 2)
    mask = LayerPlan.skipping(layers, skipped, skipped)
    first, rest = only_layers(layers, range(depth)), only_layers(layers, range(depth, layers))
    start = list(range(3, 35))
    # On the dial the attention of every later layer looks superfluous to ASD; m spares the others.
    every, keep_last = depth + 1, 2
    whole = range(every - 1, layers - keep_last, every)
    asd_mask = LayerPlan.skipping(layers, [*range(depth, layers - keep_last), *whole], whole)
    # A random model is sure of nothing: thresholds as low as its probabilities are.
    confidence, product = ConfidenceBelow(AdaptiveGamma(0.05)), ProductBelow(AdaptiveGamma(0.02))
    drafters: dict[str, tuple[Drafter, dict[str, Any]]] = {
        "draft-model": (DraftModel(draft[0], num_draft_tokens=most), {"plan": first, "again": True}),
        "layerskip": (LayerSkip(config, depth, num_draft_tokens=most), {"plan": first, "rest": rest}),
        "adaspeed": (LayerSkip(config, depth, product, 12), {"plan": first, "rest": rest}),
        "draft-verify": (DraftVerify(config, mask.traced(), confidence), {"plan": mask}),
        "draft-verify static": (DraftVerify(config, mask, confidence), {"plan": mask}),
        "asd": (ASD(config, 0.985, every, keep_last, confidence), {"plan": asd_mask}),
    }
    cases = {"ngram": _Case(walker, again, NGram(), None, options.max_new_tokens)}
    for name, (drafter, parts) in drafters.items():
        params = draft[1] if name == "draft-model" else None
        cases[name] = _Case(lm, start, drafter, params, options.max_new_tokens, **parts)
    if options.methods is None:
        return cases
    named = [name.strip() for name in options.methods.split(",")]
    unknown = [name for name in named if name not in cases]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; give some of {', '.join(cases)}")
    return {name: cases[name] for name in named}


class _Case:
    """One method beside plain decoding, on one model and prompt.

    Args:
      lm: the model.
      prompt: token ids.
      drafter, params: the method.
      max_new_tokens: of each generation.
      plan: what a draft step runs; None where drafting costs nothing.
      rest: what verification runs, where it shares what the draft ran; None where it runs everything.
      again: whether a draft accepted whole is followed by one more draft step.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: list[int],
        drafter: Drafter,
        params: Any,
        max_new_tokens: int,
        plan: LayerPlan | None = None,
        rest: LayerPlan | None = None,
        again: bool = False,
    ) -> None:
        self.lm, self.prompt = lm, prompt
        self._plan, self._rest, self._again = plan, rest, again
        self._widths = drafter.verify_widths
        generate = functools.partial(lm.generate, max_new_tokens=max_new_tokens, ignore_eos=True)
        self.plain_run: Run = lambda prompt, turn: generate(prompt)
        self.run: Run = lambda prompt, turn: generate(prompt, method=(drafter, params))

    def take(self, mine: list[Result], plain: list[Result]) -> None:
        """Takes what was generated by the method, and plainly, turn by turn."""
        self.mine, self._plain = mine, plain

    def _width(self, drafted: int) -> int:
        return min(width for width in self._widths if width > drafted)

    def _verify_name(self, width: int) -> str:
        return f"{self._rest or 'all'} over {width}"

    def parts(self) -> dict[str, Callable[[], None]]:
        """What the rounds that were seen are made of, by name."""
        parts: dict[str, Callable[[], None]] = {}
        for width in {self._width(drafted) for drafted in self.mine[0].draft_lengths}:
            if self._rest is not None:
                part: Callable[[], None] = SubmodelSteps(self.lm, self._rest, width)
            else:
                drafter = WrongDrafts(width - 1) if width > 1 else Autoregressive()
                part = Steps(self.lm, Weights(self.lm.params), drafter, 256)
            parts[self._verify_name(width)] = part
        if self._plan is not None:
            parts[f"draft {self._plan}"] = SubmodelSteps(self.lm, self._plan)
        if self._plan is not None and self._rest is not None:
            parts[f"last {self._plan}"] = SubmodelSteps(self.lm, self._plan, head=False)
        return parts

    def report(self, costs: dict[str, float]) -> dict[str, Any]:
        """The figures of the method, given what each part costs in milliseconds."""
        first = self.mine[0]
        draft_ms = costs[f"draft {self._plan}"] if self._plan is not None else 0.0
        last_ms = costs[f"last {self._plan}"] if self._rest is not None else 0.0
        lengths = first.draft_lengths
        verify_ms = sum(costs[self._verify_name(self._width(drafted))] + last_ms for drafted in lengths)
        steps = sum(lengths) + (first.statistics.acceptance_histogram[-1] if self._again else 0)
        plain_ms = (first.statistics.num_tokens - 1) * costs["plain step"]
        predicted = plain_ms / (verify_ms + steps * draft_ms)
        speedup, _ = speed_ratio([self.mine], [self._plain])
        return {
            "speedup": speedup,
            "predicted": predicted,
            "obtained_over_predicted": None if speedup is None else speedup / predicted,
            **acceptance([self.mine]),
            "draft_step_ms": draft_ms or None,
            "identical_to_autoregressive": first.tokens == self._plain[0].tokens,
        }


def only_layers(num_layers: int, layers: Sequence[int]) -> LayerPlan:
    """The plan that runs these layers, whole."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    return LayerPlan.skipping(num_layers, others, others)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report as JSON; returns the exit status."""
    return command.run("benchmarks.prediction", Options, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
