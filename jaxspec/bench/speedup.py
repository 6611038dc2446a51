"""Is a method as fast as its acceptance allows? `python -m jaxspec.bench.speedup` prints JSON.

A method's speed-up over plain decoding is predicted from what it accepted and from the measured cost of its
parts:

    predicted = mean acceptance length × step(1 row) ÷ (draft steps a round × draft step + verify step)

The loop's own overhead, wasted copies and mischosen widths all show as obtained ÷ predicted below 1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from typing import Any

import jax
import tyro

from jaxspec.bench.dial import dial_model, walk_model
from jaxspec.bench.profile import SHAPES, Steps, WrongDrafts
from jaxspec.bench.timing import interleaved
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.ngram import NGram
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.loading import resolve_placement
from jaxspec.engine.results import Result
from jaxspec.model import llama
from jaxspec.protocol import Drafter, Weights


@dataclasses.dataclass(frozen=True)
class Options:
    """Speed-up obtained against speed-up predicted, on a random model of a named shape.

    Attributes:
      shape: one of profile's shapes.
      scale: the dial: how far the later layers are turned down, see `bench.dial`.
      exit_layer: layers of the draft; by default a quarter of the target's. ngram runs on a `walk_model`.
      num_draft_tokens: K of the draft model.
      max_new_tokens: of each generation.
      repeats: interleaved turns.
      dtype, device: as everywhere.
    """

    shape: str = "134m"
    scale: float = 0.01
    exit_layer: int | None = None
    num_draft_tokens: int = 5
    max_new_tokens: int = 96
    repeats: int = 5
    dtype: str | None = None
    device: str | None = None


def measure(options: Options) -> dict[str, Any]:
    """Runs `draft-model` and `ngram` beside plain decoding; see the module.

    Returns:
      `shape`, `device`, `dtype`, `step_ms` by rows, `draft_step_ms`, and per method `speedup`, `predicted`,
      `obtained_over_predicted`, `mean_acceptance_length`, `draft_acceptance_rate`,
      `identical_to_autoregressive`.
    """
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {options.shape!r}; give one of {', '.join(SHAPES)}")
    place, dtype = resolve_placement(options.dtype, options.device)
    shape = SHAPES[options.shape]
    depth = options.exit_layer or max(1, shape.num_layers // 4)
    with jax.default_device(place):
        config, params = dial_model(shape, options.scale, depth, jax.random.key(0), dtype)
        _, walk = walk_model(shape, jax.random.key(0), dtype)
    lm = LanguageModel(config, params, name=options.shape, device=place)
    walker = LanguageModel(config, walk, name=options.shape, device=place)
    draft = LanguageModel(config.truncated(depth), llama.truncate(params, depth), device=place)
    drafter = DraftModel(draft.config, num_draft_tokens=options.num_draft_tokens)
    start = list(range(3, 35))
    # The walk's own continuation, then its first token again: what follows has been there before.
    walked = walker.generate([[3]], max_new_tokens=options.max_new_tokens, ignore_eos=True)
    cases = {
        "draft-model": _Case(lm, start, (drafter, draft.params), options.max_new_tokens),
        "ngram": _Case(walker, [3, *walked[0].tokens, 3], (NGram(), None), options.max_new_tokens),
    }

    widths = sorted({1} | {w for case in cases.values() for w in case.drafter[0].verify_widths})
    timed: dict[str, Any] = {
        f"rows {w}": Steps(lm, Weights(params), WrongDrafts(w - 1) if w > 1 else Autoregressive(), 256)
        for w in widths
    }
    timed["draft"] = Steps(draft, Weights(draft.params), Autoregressive(), 256)
    for name, case in cases.items():
        timed |= {name: case.run, f"plain {name}": case.run_plain}
    for run in timed.values():
        run()
    for case in cases.values():
        case.forget()
    taken = interleaved(timed, options.repeats)
    step_ms = {w: statistics.median(taken[f"rows {w}"]) / timed[f"rows {w}"].rounds for w in widths}
    draft_ms = statistics.median(taken["draft"]) / timed["draft"].rounds
    return {
        "shape": options.shape,
        "device": lm.device.device_kind,
        "dtype": lm.dtype,
        "step_ms": step_ms,
        "draft_step_ms": draft_ms,
        "results": {
            name: case.report(step_ms, draft_ms if name == "draft-model" else 0.0)
            for name, case in cases.items()
        },
    }


class _Case:
    """One method beside plain decoding, on one model and prompt.

    Args:
      lm: the model.
      prompt: token ids.
      drafter: the method's drafter and its parameters.
      max_new_tokens: of each generation.
    """

    def __init__(
        self, lm: LanguageModel, prompt: list[int], drafter: tuple[Drafter, Any], max_new_tokens: int
    ) -> None:
        self.drafter = drafter
        self._generate = functools.partial(
            lm.generate, prompt, max_new_tokens=max_new_tokens, ignore_eos=True
        )
        self.forget()

    def forget(self) -> None:
        """Drops what was generated so far."""
        self._mine: list[Result] = []
        self._plain: list[Result] = []

    def run(self) -> None:
        """Generates by the method."""
        self._mine.append(self._generate(method=self.drafter))

    def run_plain(self) -> None:
        """Generates plainly."""
        self._plain.append(self._generate())

    def report(self, step_ms: dict[int, float], draft_step_ms: float) -> dict[str, Any]:
        """The figures of the method, given what its parts cost."""
        first = self._mine[0]
        predicted = _predicted(first, self.drafter[0], step_ms, draft_step_ms)
        speedup = statistics.median(
            plain.statistics.decode_ms / mine.statistics.decode_ms
            for mine, plain in zip(self._mine, self._plain, strict=True)
        )
        return {
            "speedup": speedup,
            "predicted": predicted,
            "obtained_over_predicted": speedup / predicted,
            "mean_acceptance_length": first.statistics.mean_acceptance_length,
            "draft_acceptance_rate": first.statistics.draft_acceptance_rate,
            "identical_to_autoregressive": first.tokens == self._plain[0].tokens,
        }


def _predicted(result: Result, drafter: Drafter, step_ms: dict[int, float], draft_step_ms: float) -> float:
    """The speed-up that these counts and costs allow."""
    counts, full = result.statistics, drafter.num_draft_tokens + 1
    if drafter.verify_widths == (full,):
        verify_ms = counts.num_rounds * step_ms[full]
    else:
        # Rounds without a draft are one row; those with one are charged for all K + 1.
        verify_ms = counts.num_drafts * step_ms[full] + (counts.num_rounds - counts.num_drafts) * step_ms[1]
    # A draft step per draft token, and one more after each draft that was accepted whole.
    whole = counts.acceptance_histogram[-1]
    draft_ms = (
        draft_step_ms * (counts.num_rounds * drafter.num_draft_tokens + whole) if draft_step_ms else 0.0
    )
    return (counts.num_tokens - 1) * step_ms[1] / (verify_ms + draft_ms)


def main() -> None:
    """Prints the report as JSON."""
    try:
        print(json.dumps(measure(tyro.cli(Options)), indent=2))
    except ValueError as error:
        sys.exit(f"jaxspec: error: {error}")


if __name__ == "__main__":
    main()
