"""Equal greedy texts: `python -m benchmarks.exact --model DIR --run "METHOD --OPTION ..."` prints JSON.

Every method generates the texts of plain decoding in several precisions and batches, with `exact` and without. The
speeds of plain decoding with `exact` and without are measured in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.cli.methods import parse_run
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench import prompt_files, prompts
from jaxspec.measuring.bench.speed import acceptance, speed_ratio, tokens_per_second
from jaxspec.measuring.bench.timing import measure_runs
from jaxspec.texts.results import Result

PLAIN = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Options:
    """Tokens in which greedy texts differ from those of plain decoding, and the cost of `exact` in plain decoding.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      runs: a method and its options, as in "layerskip --exit-layer 3".
      precisions: float32, bfloat16 and int8, which is float32 with int8 weights and activations.
      batches: numbers of prompts that are decoded together.
      each: number of prompts per kind of the model's own prompts.
      prompt_file: prompts to use instead, in the formats of `jaxspec bench`.
      max_new_tokens: the token budget of each text.
      inexact: also generate without `exact`.
      repeats: turns of plain decoding with `exact` and without.
    """

    model: str = "large"
    runs: tuple[str, ...] = dataclasses.field(
        default=("ngram",), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8")
    batches: tuple[int, ...] = (1, 5)
    each: int = 2
    prompt_file: tuple[str, ...] = ()
    max_new_tokens: int = 96
    inexact: bool = True
    repeats: int = 1


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Compares the texts of all methods with those of plain decoding.

    Returns:
      `model`; `prompts`, their number; `rows`: for each precision, method and batch, tokens ÷ rounds, and the numbers
      of tokens and of those that differ; `costs`: for each precision the tokens per second of plain decoding with
      `exact` and without, and their ratio with its interval, see `speed_ratio`.
    """
    methods = {PLAIN: parse_run(PLAIN), **{words: parse_run(words) for words in options.runs}}
    rows, costs = [], []
    for precision in options.precisions:
        int8 = precision == "int8"
        lm = load(
            options.model,
            dtype="float32" if int8 else precision,
            device="cpu",
            weights="int8" if int8 else None,
        )
        texts = _prompts(lm, options)
        generate = functools.partial(_generate, lm, options.max_new_tokens)
        runs = {
            name: functools.partial(generate, exact=name == "exact")
            for name in (("exact", "usual") if options.inexact else ("exact",))
        }
        turns = list(measure_runs([lm], runs, texts, options.repeats, on_progress=on_progress))
        taken = {name: [results[name] for results in turns] for name in runs}
        if options.inexact:
            ratio, interval = speed_ratio(taken["exact"], taken["usual"])
            speeds = {f"{name}_tokens_per_second": tokens_per_second(taken[name]) for name in runs}
            costs.append(
                {"precision": lm.precision, **speeds, "exact_over_usual": ratio, "interval": interval}
            )
        for run, (name, method), batch in itertools.product(runs, methods.items(), options.batches):
            on_progress(f"{lm.precision}, {run}: {name}, batch {batch}")
            made = generate(texts, exact=run == "exact", method=method, max_batch=batch)
            kind = {"precision": lm.precision, "exact": run == "exact", "method": name, "batch": batch}
            per_round = acceptance([[made]])["mean_acceptance_length"]
            counts = compared(made, [results[0] for results in taken[run]])
            rows.append({**kind, "mean_acceptance_length": per_round, **counts})
    return {"model": options.model, "prompts": len(texts), "rows": rows, "costs": costs}


def compared(texts: Sequence[Result], expected: Sequence[Result]) -> dict[str, int]:
    """Returns the numbers of tokens and of texts, and how many of them differ; all tokens after the first one count."""
    differing = []
    for one, other in zip(texts, expected, strict=True):
        longest = max(len(one.tokens), len(other.tokens))
        same = (a == b for a, b in itertools.zip_longest(one.tokens, other.tokens))
        differing.append(longest - sum(itertools.takewhile(bool, same)))
    return {
        "tokens": sum(len(text.tokens) for text in texts),
        "differing_tokens": sum(differing),
        "texts": len(texts),
        "differing_texts": int(np.count_nonzero(differing)),
    }


def _generate(lm: LanguageModel, budget: int, texts: Any, turn: int = 0, **given: Any) -> Any:
    """Returns the result of one text, or those of several, by plain decoding unless a method is given."""
    given = {"method": parse_run(PLAIN), **given}
    return lm.generate(texts, max_new_tokens=budget, temperature=0.0, **given)


def _prompts(lm: LanguageModel, options: Options) -> list[list[int]]:
    if options.prompt_file:
        return [prompt_files.encoded(lm, task) for task in prompt_files.read_tasks(options.prompt_file)]
    return [lm.encode(text, chat=_chats(lm)) for text in prompts.sample(options.each, lm.directory)]


def _chats(lm: LanguageModel) -> bool:
    return lm.tokenizer is not None and lm.tokenizer.has_chat_template


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.exact", Options, measure))
