"""Measures how much a model needs its upper layers.

    python -m training.depth --config training/recipes/tasks.yaml --model checkpoints/large --cut 6

If the upper layers of a model do nothing, early exits and skipped layers are fast, but the model without these layers
is faster. This command prints the fitness test of the model on held-out text (loss by exit, and more), and the
decoding speed of the model truncated after `--cut` layers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

import jaxspec
from jaxspec.engine.language_model import LanguageModel
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.speed import speed_ratio, tokens_per_second
from jaxspec.measuring.bench.timing import Run, measure_runs
from jaxspec.model import llama
from training import command
from training.data import bpe_tokenizer, conversations, formats, packing, sources
from training.data.sources import DataOptions
from training.reports import fitness_report as fitness
from training.reports.fitness import Texts
from training.start import document_marks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Prints, as JSON, the fitness test of a model on held-out text, and the decoding speed of the truncated model.

    Attributes:
      model: a Hugging Face directory.
      cut: number of layers of the truncated model.
      documents: largest number of held-out documents of each kind.
      prompts: number of the project's own prompts of each kind to decode from.
      max_new_tokens: new tokens per prompt.
      repeats: interleaved repetitions.
    """

    model: Path
    data: DataOptions
    cut: int
    documents: int = 25
    prompts: int = 3
    max_new_tokens: int = 64
    repeats: int = 3

    def __post_init__(self):
        for name in ("cut", "documents", "prompts", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")


def held_out_texts(
    lm: LanguageModel, options: Options, words: Tokenizer, console: Console
) -> dict[str, Texts]:
    """Reads held-out texts by task type, packed as in training."""
    chat = conversations.chat_of(options.model, options.data.chat_template)
    _, held_out = sources.read_kinds(options.data, chat, console.print)
    marks = document_marks(lm.config, options.model)
    return {
        kind: Texts(
            **packing.spread(
                _packed(part[: options.documents], words, marks, options), options.data.held_out_rows
            )
        )
        for kind, part in held_out.items()
    }


def _packed(
    documents: Sequence[formats.Document], words: Tokenizer, marks: bpe_tokenizer.Marks, options: Options
) -> packing.Windows:
    return packing.pack(bpe_tokenizer.encode_documents(words, documents, *marks), options.data.window)


def speeds(lm: LanguageModel, options: Options) -> dict[str, Any]:
    """Measures plain decoding with the whole and the truncated model: tokens per second of each, and their ratio."""
    config = lm.config.truncated(options.cut)
    cut = LanguageModel(config, llama.truncate(lm.params, options.cut), lm.tokenizer, device=lm.device)
    of_kind = prompts.load(directory=lm.directory)
    texts, kinds = zip(
        *((text, kind) for kind, its in of_kind.items() for text in its[: options.prompts]), strict=True
    )

    def run_of(model: LanguageModel) -> Run:
        generate = functools.partial(
            model.generate,
            method="autoregressive",
            max_new_tokens=options.max_new_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        return lambda prompt, turn: generate(prompt)

    runs = {"cut": run_of(cut), "whole": run_of(lm)}
    by_prompt = list(measure_runs([cut, lm], runs, texts, options.repeats))
    taken = {name: [results[name] for results in by_prompt] for name in runs}
    ratio, interval = speed_ratio(taken["cut"], taken["whole"], kinds=kinds)
    return {
        "layers": options.cut,
        "tokens_per_second": tokens_per_second(taken["cut"]),
        "whole_tokens_per_second": tokens_per_second(taken["whole"]),
        "speedup": ratio,
        "speedup_interval": interval,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        lm = jaxspec.load(options.model, dtype="float32")
        if options.cut >= lm.config.num_layers:
            raise ValueError(f"cut is {options.cut}; give 1 to {lm.config.num_layers - 1}")
        words = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        texts = held_out_texts(lm, options, words, console)
        report = {"fitness": fitness.measure(lm, texts), "cut": speeds(lm, options)}
        print(json.dumps(report, indent=2))

    return command.run("training.depth", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
