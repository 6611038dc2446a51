"""Makes prompts from documents, for the commands that generate text with a model."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cli.options import SamplingOptions
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io import checkpoint
from jaxspec.io.methods import method_files
from jaxspec.loading.loading import find_model
from training.data import bpe_tokenizer, conversations
from training.data.formats import Document
from training.data.sources import HELD_OUT, DataOptions, Kinds, SourceArgument, read_kinds
from training.loop import state_sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The options of the commands that generate text with a model.

    Attributes:
      model: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded model.
      data: sources of prompts, as in the other training commands; their weights set the share of each kind.
      prompts: number of texts to learn from.
      held_out: one in this many documents is held out, chosen by its hash; as in the model's training.
      prompt_tokens: longest prompt; a prompt is the first half of a document. If only an answer is learned, the
        prompt is the whole question, however long.
      new_tokens: number of tokens to generate after each prompt.
      batch: number of prompts at once.
      mesh: arrangement of the devices, such as data=2,model=4. Default: all devices along model.
      sampling: sampling of the texts, greedy by default; its seed also selects the prompts.
      skip_malformed: report and leave out malformed records instead of stopping.
      chat_template: the form of conversations, as in the other training commands.
    """

    model: Path
    data: tuple[SourceArgument, ...]
    prompts: int = 400
    held_out: int = HELD_OUT
    prompt_tokens: int = 96
    new_tokens: int = 64
    batch: int = 4
    mesh: str | None = None
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009
    skip_malformed: bool = False
    chat_template: str | None = None

    def __post_init__(self):
        for name in ("prompts", "prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")

    @property
    def distribution(self) -> dict[str, Any]:
        """The sampling settings: `temperature`, and the others that are on."""
        off = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return {name: value for name, value in self.sampling.numbers().items() if value != off[name]}

    @property
    def distribution_name(self) -> str:
        """The name of the sampling settings in file names."""
        return method_files.distribution_name(**self.distribution)


def load_model(
    model: str | os.PathLike[str], mesh: str | None = None, dtype: str | None = None
) -> LanguageModel:
    """Loads a model to generate text with; by default divided over all devices of this process."""
    where = mesh or state_sharding.decoding_mesh(checkpoint.read_config(find_model(model)))
    return load(model, dtype=dtype, mesh=where)


def read_documents(options: PromptOptions, report: Callable[[str], None]) -> tuple[Kinds, Kinds]:
    """Reads training and held-out documents by task type, with conversations in the model's own chat template.

    Raises:
      ValueError: see `training.data.sources.read_kinds`.
    """
    given = DataOptions(options.data, held_out=options.held_out, skip_malformed=options.skip_malformed)
    with bpe_tokenizer.files_of(find_model(options.model)) as directory:
        return read_kinds(given, conversations.chat_of(directory, options.chat_template), report)


def choose(documents: Mapping[str, Sequence[Document]], options: PromptOptions, count: int) -> list[Document]:
    """Chooses `count` documents, or all if there are fewer, in proportion to the weights of the task types."""
    rng = np.random.default_rng(options.sampling.seed)
    weights = DataOptions(options.data).weights
    total = sum(weights.values())
    chosen: list[Document] = []
    for kind, part in documents.items():
        share = max(1, round(count * weights[kind] / total))
        chosen += [part[index] for index in rng.permutation(len(part))[:share]]
    return [chosen[index] for index in rng.permutation(len(chosen))[:count]]


def beginning(document: Document, options: PromptOptions, lm: LanguageModel) -> list[int]:
    """Returns the tokens of the question if only an answer is learned and the question fits; else of the first half."""
    question = lm.encode(question_of(document))
    if not document.spans[0].learn and len(question) + options.new_tokens <= lm.config.context_length:
        return question
    ids = lm.encode(document.text)
    return ids[: max(2, min(options.prompt_tokens, len(ids) // 2))]


def question_of(document: Document) -> str:
    """Returns the text before the first learned span."""
    return "".join(span.text for span in itertools.takewhile(lambda span: not span.learn, document.spans))
