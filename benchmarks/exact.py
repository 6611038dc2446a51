"""Equal greedy texts: `python -m benchmarks.exact --model DIR --run "METHOD --OPTION ..."` prints JSON.

Every method generates the texts of plain decoding in several precisions and batches, with `exact` and without.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.bench import prompts
from jaxspec.cli.methods import parse_run
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.results import Result
from jaxspec.host.progress import OnProgress
from jaxspec.methods import Method

PLAIN = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Options:
    """Tokens in which greedy texts differ from those of plain decoding, and the speed of plain decoding.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      runs: a method and its options, as in "layerskip --exit-layer 3".
      precisions: float32, bfloat16 and int8, which is float32 with int8 weights and activations.
      batches: numbers of prompts that are decoded together.
      each: number of prompts per kind.
      max_new_tokens: the token budget of each text.
      inexact: also generate without `exact`.
    """

    model: str = "large"
    runs: tuple[str, ...] = dataclasses.field(
        default=("ngram",), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8")
    batches: tuple[int, ...] = (1, 5)
    each: int = 2
    max_new_tokens: int = 96
    inexact: bool = True


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns, for each precision, method and batch, the numbers of tokens and of those that differ."""
    methods = {words: parse_run(words) for words in options.runs}
    rows = []
    for precision in options.precisions:
        int8 = precision == "int8"
        lm = load(
            options.model,
            dtype="float32" if int8 else precision,
            device="cpu",
            weights="int8" if int8 else None,
        )
        texts = [lm.encode(text, chat=_chats(lm)) for text in prompts.sample(options.each)]
        for exact in (True, False) if options.inexact else (True,):
            kind = {"precision": lm.precision, "exact": exact}
            plain = _generated(lm, texts, parse_run(PLAIN), 1, exact, options.max_new_tokens)
            for (name, method), batch in itertools.product(
                {PLAIN: parse_run(PLAIN), **methods}.items(), options.batches
            ):
                on_progress(f"{lm.precision}, exact {exact}: {name}, batch {batch}")
                made = _generated(lm, texts, method, batch, exact, options.max_new_tokens)
                rows.append(
                    {**kind, "method": name, "batch": batch, **compared(made, plain), "speed": speed(made)}
                )
    return {"model": options.model, "prompts": len(texts), "rows": rows}


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


def speed(texts: Sequence[Result]) -> float | None:
    """Returns the median of the texts' tokens per second; None if no text has one."""
    found = [text.statistics.tokens_per_second for text in texts]
    known = [number for number in found if number is not None]
    return round(float(np.median(known)), 2) if known else None


def _generated(
    lm: LanguageModel, texts: Sequence[Sequence[int]], method: Method, batch: int, exact: bool, budget: int
) -> list[Result]:
    given: dict[str, Any] = {"method": method, "exact": exact, "max_new_tokens": budget, "temperature": 0.0}
    parts = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    return [result for part in parts for result in lm.generate(part, max_batch=batch, **given)]


def _chats(lm: LanguageModel) -> bool:
    return lm.tokenizer is not None and lm.tokenizer.has_chat_template


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.exact", Options, measure))
