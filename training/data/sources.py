"""Data sources and their weights: reads them into documents by task type, then packs them into windows."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from tokenizers import Tokenizer

from jaxspec.console.parsing import Text
from jaxspec.host.messages import shown
from training.data import bpe_tokenizer, conversations, formats, packing, reading, sizing
from training.data.sizing import AUTO, Sized
from training.data.spool import Spool

# One in this many documents is held out. All commands use the same number, so that a probe is evaluated on text that
# its model has not seen.
HELD_OUT = 20
_LEAST_WEIGHT = 1e-6
# Documents by task type.
Kinds = dict[str, Sequence[formats.Document]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A data source, written PATH[,kind=K][,format=F][,weight=W].

    Attributes:
      path: a file or hf:NAME[:SPLIT]; see `training.data.reading.read_source`.
      kind: task type; held-out loss is reported for each. Default: the name of the file or data set.
      format: one of `training.data.formats.FORMATS`, or auto.
      weight: sampling weight, relative to the other sources.
    """

    path: str
    kind: str = ""
    format: str = formats.AUTO
    weight: float = 1.0

    def __post_init__(self):
        # Array names in a file contain the task type, with "|" as the separator; reports contain it too.
        if "|" in self.kind or not self.kind.isprintable() or not self.kind.strip():
            raise ValueError(
                f"the kind of {shown(self.path)} is {shown(self.kind)}; give a name of printable characters without | "
                "as kind=NAME"
            )
        if not _LEAST_WEIGHT <= self.weight <= 1 / _LEAST_WEIGHT:
            raise ValueError(
                f"weight is {self.weight} in {shown(self.path)}; give a number from {_LEAST_WEIGHT:g} to "
                f"{1 / _LEAST_WEIGHT:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parses a source as written on the command line.

        Raises:
          ValueError: the text does not have that form.
        """
        path, *settings = text.split(",")
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals or name not in ("kind", "format", "weight"):
                raise ValueError(f"{setting!r} in {text!r}; expected PATH[,kind=K][,format=F][,weight=W]")
            values[name] = value
        if "weight" in values:
            try:
                values["weight"] = float(values["weight"])
            except ValueError:
                raise ValueError(
                    f"weight is {shown(values['weight'])} in {shown(text)}; give a number"
                ) from None
        name = path.removeprefix("hf:")
        kind = values.pop("kind", "") or Path(name).stem
        return cls(path, kind, **values)

    def __str__(self) -> str:
        return f"{self.path},kind={self.kind},format={self.format},weight={self.weight!r}"


def _source(name: str, word: str) -> Source:
    try:
        return Source.parse(word)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


SourceArgument = Annotated[Source, Text("PATH[,kind=K][,format=F][,weight=W]", _source)]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Selects the training text, and how it is packed into batches.

    Attributes:
      data: the sources. Sources of the same kind are joined, and must have the same weight.
      window: tokens per packed row; longer documents are cut. `auto` follows the size of the data.
      batch: rows per micro-batch. `auto` follows the size of the data.
      held_out: one in this many documents is held out, chosen by its hash.
      held_out_rows: packed held-out rows of each kind to evaluate at each checkpoint.
      skip_malformed: report and leave out malformed records instead of stopping.
      chat_template: the form of conversations: a Jinja file, or vicuna, llama-2 or chatml. Default: the tokenizer's
        own; if it has none, Vicuna's form without a system prompt.
    """

    data: tuple[SourceArgument, ...]
    window: Sized = AUTO
    batch: Sized = AUTO
    held_out: int = HELD_OUT
    held_out_rows: int = 64
    skip_malformed: bool = False
    chat_template: str | None = None

    def __post_init__(self):
        sizing.check(self, window=2, batch=1, held_out=2, held_out_rows=1)
        if not self.data:
            raise ValueError("no data is given; name at least one source with --data")
        for source in self.data:
            if source.weight != self.weights[source.kind]:
                raise ValueError(
                    f"sources of kind {source.kind} weigh {source.weight} and {self.weights[source.kind]}; give "
                    "them one weight, or kinds of their own with kind=NAME"
                )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each task type."""
        return {source.kind: source.weight for source in self.data}


def read_kinds(
    options: DataOptions, chat: conversations.Chat, report: Callable[[str], None]
) -> tuple[Kinds, Kinds]:
    """Reads all sources; returns the training and the held-out documents, by task type.

    Raises:
      ValueError: a source cannot be read, or has too few documents for a held-out part.
    """
    kinds: dict[str, list[Sequence[formats.Document]]] = {}
    for source in options.data:
        found = reading.read_source(source.path, source.format, chat, options.skip_malformed, report)
        kinds.setdefault(source.kind, []).append(found)
    if chat.assumed and any(one.chat for several in kinds.values() for found in several for one in found):
        report(conversations.assumption())
    parts: tuple[Kinds, Kinds] = ({}, {})
    for kind, several in kinds.items():
        documents = several[0] if len(several) == 1 else itertools.chain.from_iterable(several)
        try:
            halves = packing.split(Spool.from_values(documents), options.held_out)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
        for part, half in zip(parts, halves, strict=True):
            part[kind] = half
    return parts


def data_key(
    options: DataOptions, documents: tuple[Kinds, Kinds], words: Tokenizer, marks: bpe_tokenizer.Marks
) -> str:
    """Hashes everything that determines the packed windows: text, tokenizer, marks and window."""
    texts, chats = hashlib.sha256(), False
    for kinds in documents:
        for kind, part in kinds.items():
            texts.update(f"\0{kind}\0".encode())
            for document in part:
                texts.update(repr(document.spans).encode())
                chats |= document.chat
    bos, ends = marks
    # A run of plain texts with one end token has the same windows as in earlier versions, and may be resumed.
    about = [words.to_str(), (bos, ends[0]), options.window, texts.hexdigest()]
    about += [ends] if chats or len(ends) > 1 else []
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def packed(
    options: DataOptions,
    run: Path,
    documents: tuple[Kinds, Kinds],
    words: Tokenizer,
    marks: bpe_tokenizer.Marks,
    key: str,
) -> tuple[dict[str, packing.Windows], dict[str, packing.Windows]]:
    """Packs the documents into (training, held-out) windows by task type. The run directory keeps them.

    Args:
      options: which text, and how it is packed.
      run: the run directory.
      documents: training and held-out documents, from `read_kinds`.
      words: the tokenizer.
      marks: the token that begins every document, and those that end texts.
      key: from `data_key`; stored windows with another key are made again.
    """

    def make() -> dict[str, dict[str, packing.Windows]]:
        return {
            name: {
                kind: packing.pack(bpe_tokenizer.encode_documents(words, part, *marks), options.window)
                for kind, part in kinds.items()
            }
            for name, kinds in zip(("training", "held_out"), documents, strict=True)
        }

    parts = packing.cached(run / packing.TOKENS_FILE, key, make)
    return parts["training"], parts["held_out"]
