"""Measures a draft window: `python -m benchmarks.draft_window`.

It prints a row for each number of tokens in the cache, at its end. The row has the time of a step of all layers without
and with the window, timed in turns. It also has the tokens a round without and with the window, after as many tokens of
the documentation. The draft runs all layers, so every draft token is accepted without a window. With `--shape` it only
times steps of random weights. With `--device-model` too, it predicts from published figures the speed-up of drafts of
half the layers, and the acceptance with the window that gives the same: the break-even.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import jaxspec
from jaxspec import LanguageModel
from jaxspec.costs.rounds import DraftCost, predicted_speedup
from jaxspec.measuring.accelerators import ACCELERATORS
from jaxspec.measuring.bench.device_profile import SHAPES, language_model
from jaxspec.measuring.bench.steps import SubmodelSteps
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.measuring.roofline import roofline
from jaxspec.model.plan import LayerPlan

ROOT = Path(__file__).parents[1]
STEPS, TURNS, LEFT = 4, 7, 64


def step_ms(lm: LanguageModel, window: tuple[int, int], contexts: Sequence[int]) -> list[tuple[float, float]]:
    """Returns the milliseconds of a step without and with the window, medians, for each number of cached tokens."""
    every = LayerPlan.skipping(lm.config.num_layers)
    config = dataclasses.replace(lm.config, draft_window=window)
    few = LanguageModel(config, lm.params, name=lm.name, device=lm.device)
    timed = {
        (context, one is few): SubmodelSteps(one, every, live=context - LEFT, capacity=context)
        for context in contexts
        for one in (lm, few)
    }
    runs = {str(key): lambda steps=steps: steps(STEPS) for key, steps in timed.items()}
    for run in runs.values():
        run()
    taken = interleaved(runs, TURNS)
    ms = {key: statistics.median(taken[str(key)]) / STEPS for key in timed}
    return [(ms[context, False], ms[context, True]) for context in contexts]


def tokens_a_round(
    lm: LanguageModel, window: tuple[int, int], contexts: Sequence[int], count: int, num_draft_tokens: int
) -> list[tuple[float, float]]:
    """Returns the tokens a round without and with the window, after the first tokens of the documentation."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    tokens = lm.encode("\n".join(page.read_text("utf-8") for page in pages))
    found = []
    for context in contexts:
        pair = []
        for few in ((), window):
            result = lm.generate(
                tokens[: context - LEFT - count],
                method=jaxspec.methods.ASD(
                    alpha=1, every=0, keep_last=0, stop_rule=("constant",),
                    num_draft_tokens=num_draft_tokens, draft_window=few,
                ),
                max_new_tokens=count,
                ignore_eos=True,
            )  # fmt: skip
            assert not isinstance(result, list)
            pair.append(result.statistics.mean_acceptance_length or 1.0)
        found.append((pair[0], pair[1]))
    return found


def break_evens(
    device: str, shape: str, window: tuple[int, int], contexts: Sequence[int], acceptance: float
) -> list[tuple[float, float, float]]:
    """Returns, for each number of cached tokens, the predicted speed-up without and with the window at an acceptance
    rate, and the rate with the window that has the speed-up without it."""
    costs = roofline(ACCELERATORS[device], SHAPES[shape], shape)
    whole = DraftCost(layers=costs.num_layers / 2)
    few = dataclasses.replace(whole, window=sum(window))

    def speedup(draft: DraftCost, rate: float, context: int) -> float:
        plain = DraftCost().round_ms(costs, 0, context)
        return predicted_speedup(rate, plain, lambda length: draft.round_ms(costs, length, context)).speedup

    found = []
    for context in contexts:
        without, low, high = speedup(whole, acceptance, context), 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if speedup(few, middle, context) < without else (low, middle)
        found.append((without, speedup(few, acceptance, context), high))
    return found


def main() -> None:
    """Reads the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="time steps of this shape with random weights, such as 1b")
    parser.add_argument("--weights", choices=["int8"])
    parser.add_argument("--window", default="4,2048", metavar="SINKS,W")
    parser.add_argument(
        "--contexts", default="1024,2048,4096,8192", help="tokens in the cache, powers of two"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens that are generated after each context")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--device-model", choices=sorted(ACCELERATORS), help="predict, with --shape")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a draft token, with --device-model")
    given = parser.parse_args()
    contexts = [int(one) for one in given.contexts.split(",")]
    sinks, last = (int(one) for one in given.window.split(","))
    if given.device_model:
        print("tokens in the cache | speed-up, predicted | with the window | break-even acceptance")
        found = break_evens(given.device_model, given.shape, (sinks, last), contexts, given.acceptance)
        for context, row in zip(contexts, found, strict=True):
            print(context, *(f"{number:.2f}" for number in row), sep=" | ")
        return
    if given.shape:
        lm = language_model(None, given.shape, "float32", None, None, given.weights, "auto")
    else:
        lm = jaxspec.load(given.model, dtype="float32", weights=given.weights, prefix_cache="1GB")
    print(f"{lm.name}, {lm.precision}, {lm.device_kind}, a window of {sinks} and {last} tokens")
    print("tokens in the cache | step, ms | with the window, ms | ratio | tokens a round | with the window")
    times = step_ms(lm, (sinks, last), contexts)
    rounds = [(float("nan"),) * 2] * len(contexts)
    if not given.shape:
        rounds = tokens_a_round(lm, (sinks, last), contexts, given.tokens, given.num_draft_tokens)
    for context, (plain, few), (all_read, some_read) in zip(contexts, times, rounds, strict=True):
        cells = f"{plain:.1f} | {few:.1f} | {few / plain:.2f} | {all_read:.2f} | {some_read:.2f}"
        print(f"{context - LEFT} | {cells}", flush=True)


if __name__ == "__main__":
    main()
