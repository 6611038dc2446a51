"""The time that kept prefixes save: `python -m benchmarks.prefix --model smollm2` prints JSON.

All programs are compiled before the first measurement, and the two ways to run alternate.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.engine.keywords import MethodName
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.session.prefix import PrefixStore


@dataclasses.dataclass(frozen=True)
class Options:
    """Times with and without the caches of earlier texts.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      method: the method of all texts.
      shared: the tokens with which all prompts of the batch begin, and those of the first turn.
      own: the tokens after them.
      rows: the prompts of the batch.
      new: the tokens generated after each prompt.
      repeats: measurements of each kind.
    """

    model: str = "smollm2"
    method: MethodName = "autoregressive"
    shared: int = 500
    own: int = 24
    rows: int = 8
    new: int = 32
    repeats: int = 5


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns medians in milliseconds: of two turns of a conversation, and of a batch with a common system prompt."""
    lm = load(options.model)
    rng = np.random.default_rng(0)

    def draw(size: int) -> list[int]:
        return rng.integers(10, min(lm.config.vocab_size, 1000), size).tolist()

    begin, first, second = draw(options.shared), draw(options.own), draw(options.own)
    store = PrefixStore(2**31)
    turns: dict[str, list[list[float]]] = {"kept": [], "fed": []}

    def conversation(kept: bool) -> None:
        lm.prefixes = store if kept else None
        store.clear()
        took, answer = _first_token_ms(lm, [*begin, *first], options)
        again, _ = _first_token_ms(lm, [*begin, *first, *answer, *second], options)
        turns["kept" if kept else "fed"].append([took, again])

    prompts = [[*begin, *draw(options.own)] for _ in range(options.rows)]

    def batch(kept: bool) -> None:
        lm.prefixes = store if kept else None
        store.clear()
        results = lm.generate(
            prompts,
            method=options.method,
            max_new_tokens=options.new,
            ignore_eos=True,
            max_batch=options.rows,
        )
        begun = max(result.statistics.elapsed_ms - result.statistics.decode_ms for result in results)
        begins["kept" if kept else "fed"].append(begun)

    begins: dict[str, list[float]] = {"kept": [], "fed": []}
    functions = {
        f"{name} {way}": (lambda run=run, way=way: run(way == "kept"))
        for name, run in {"turns": conversation, "batch": batch}.items()
        for way in ("fed", "kept")
    }
    interleaved(functions, 1, lambda turn: on_progress("compiling"))
    lm.executables.wait()
    for way in ("fed", "kept"):
        turns[way].clear()
        begins[way].clear()
    took = interleaved(functions, options.repeats, on_progress)
    report: dict[str, Any] = {"model": lm.name, "options": dataclasses.asdict(options)}
    for way in ("fed", "kept"):
        firsts, seconds = (statistics.median(column) for column in zip(*turns[way], strict=True))
        report[way] = {
            "first_turn_first_token_ms": firsts,
            "second_turn_first_token_ms": seconds,
            "second_over_first": seconds / firsts,
            "batch_last_first_token_ms": statistics.median(begins[way]),
            "batch_ms": statistics.median(took[f"batch {way}"]),
        }
    for name in ("second_turn_first_token_ms", "batch_last_first_token_ms", "batch_ms"):
        report[f"fed_over_kept_{name.removesuffix('_ms')}"] = report["fed"][name] / report["kept"][name]
    return report


def _first_token_ms(lm: LanguageModel, prompt: Sequence[int], options: Options) -> tuple[float, list[int]]:
    """Returns the time to the first token of a text, and the whole text."""
    began = time.perf_counter()
    pieces = lm.stream(list(prompt), method=options.method, max_new_tokens=options.new, ignore_eos=True)
    tokens = next(pieces).tokens
    took = 1e3 * (time.perf_counter() - began)
    return took, [*tokens, *(token for piece in pieces for token in piece.tokens)]


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.prefix", Options, measure))
