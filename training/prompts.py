"""Prompts made of documents, for the commands in which a model writes: which ones, how they begin, how it goes on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cli.options import SamplingOptions
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.loading import find_model
from jaxspec.io import method_files
from training.data import conversations, tokenizer
from training.data.formats import Document
from training.data.sources import HELD_OUT, DataOptions, Kinds, SourceArgument, read_kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The options of the commands in which a model writes.

    Attributes:
      model: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded model.
      data: sources of prompts, as of the other training commands; weights say how many of each kind.
      prompts: how many texts to learn from.
      held_out: N, for one of N documents is held out, chosen by its hash; as in the model's training.
      prompt_tokens: longest prompt; it is the first half of a document. Where only an answer is learned, the
        prompt is the whole question, however long.
      new_tokens: generated after each prompt.
      batch: prompts at once.
      sampling: of the texts, greedy where nothing is said; its seed is that of the choice of prompts too.
      skip_malformed: report and leave out records that do not fit their format, instead of ending.
    """

    model: Path
    data: tuple[SourceArgument, ...]
    prompts: int = 400
    held_out: int = HELD_OUT
    prompt_tokens: int = 96
    new_tokens: int = 64
    batch: int = 4
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009
    skip_malformed: bool = False

    def __post_init__(self):
        for name in ("prompts", "prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")

    @property
    def law(self) -> dict[str, Any]:
        """The sampling settings: `temperature`, and the others that are not off."""
        off = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {name: value for name, value in self.sampling.numbers().items() if value != off[name]}

    @property
    def law_name(self) -> str:
        """The name of the sampling settings in file names."""
        return method_files.law_name(**self.law)


def read(options: PromptOptions, report: Callable[[str], None]) -> tuple[Kinds, Kinds]:
    """Reads the sources, conversations in the model's own chat template: training and held-out documents by kind.

    Raises:
      ValueError: see `training.data.sources.read_kinds`.
    """
    given = DataOptions(options.data, held_out=options.held_out, skip_malformed=options.skip_malformed)
    with tokenizer.files_of(find_model(options.model)) as directory:
        return read_kinds(given, conversations.chat_of(directory), report)


def choose(documents: Kinds, options: PromptOptions, count: int) -> list[Document]:
    """Chooses `count` documents, or all there are, of each kind as many as its weight says."""
    rng = np.random.default_rng(options.sampling.seed)
    weights = DataOptions(options.data).weights
    total = sum(weights.values())
    chosen: list[Document] = []
    for kind, part in documents.items():
        share = max(1, round(count * weights[kind] / total))
        chosen += [part[index] for index in rng.permutation(len(part))[:share]]
    return [chosen[index] for index in rng.permutation(len(chosen))[:count]]


def beginning(document: Document, options: PromptOptions, lm: LanguageModel) -> list[int]:
    """The whole question where only an answer is learned, and the context has room for it; else the first half."""
    question = lm.encode(question_of(document))
    if not document.spans[0].learn and len(question) + options.new_tokens <= lm.config.context_length:
        return question
    ids = lm.encode(document.text)
    return ids[: max(2, min(options.prompt_tokens, len(ids) // 2))]


def question_of(document: Document) -> str:
    """The text before the first that is learned."""
    return "".join(span.text for span in itertools.takewhile(lambda span: not span.learn, document.spans))
