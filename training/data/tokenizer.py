"""A byte-level BPE tokenizer, trained on plain text and saved as transformers expects it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxspec.console.errors import one_line
from jaxspec.io import files
from jaxspec.io.gguf_file import is_gguf
from jaxspec.io.tokenizer import copy_files
from training.data.formats import Document
from training.data.packing import Encoded

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
# What begins a document, or None, and what ends it.
Marks = tuple[int | None, int]
# 256 bytes and the two special tokens: below this some text could not be written.
SMALLEST_VOCABULARY = 258
# Characters of each kind on which a tokenizer is learned, in proportion to the kinds' weights.
TOKENIZER_CHARACTERS = 12_000_000


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns at most `vocab_size` tokens; any UTF-8 text comes back exactly from its tokens.

    Encoding puts `<s>` (id 0) in front; `</s>` (id 1) ends a document and is added by whoever packs it.

    Raises:
      ValueError: the vocabulary cannot hold all bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one, so that numbers are read alike whatever was frequent; then the regular expression of
    # GPT-2, which keeps a word with the space before it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def learn(
    kinds: Mapping[str, Sequence[Document]], weights: Mapping[str, float], vocab_size: int
) -> Tokenizer:
    """Learns a tokenizer from documents by kind, of each a share that follows its weight."""
    total = sum(weights.values())

    def texts() -> Iterator[str]:
        for kind, documents in kinds.items():
            left = TOKENIZER_CHARACTERS * weights[kind] / total
            for document in documents:
                if left <= 0:
                    break
                yield document.text[: int(left)]
                left -= len(document.text)

    return train(texts(), vocab_size)


def save(
    tokenizer: Tokenizer, directory: Path, context_length: int, chat_template: str | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which `AutoTokenizer` loads from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    files.write_atomic(directory / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    # Last: where it is, the tokenizer is whole.
    files.write_atomic(directory / "tokenizer.json", tokenizer.to_str(pretty=True))


def load(source: Path) -> Tokenizer:
    """Reads the tokenizer of a model's directory, a run directory, or a GGUF file.

    Raises:
      ValueError: there is none, or a broken one.
    """
    with files_of(source) as directory:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer.json in {source}; give a directory that has one")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more special
            raise ValueError(f"{file} is no tokenizer: {one_line(error)}") from None


@contextlib.contextmanager
def files_of(source: Path) -> Iterator[Path]:
    """Gives the directory of a model's tokenizer files; for a GGUF file one that lasts as long as the context."""
    if not is_gguf(source):
        yield source
        return
    with tempfile.TemporaryDirectory() as directory:
        copy_files(source, directory)
        yield Path(directory)


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document], bos: int | None, eos: int
) -> list[Encoded]:
    """Tokenises documents, `bos` (if any) before and `eos` after each, and marks the tokens to be learned.

    A document is encoded whole, as it will be read; a token that reaches over a span's border belongs to the
    span in which it ends. A document whose text spells out its beginning or its end gets no second one.
    """
    made = []
    encoded = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    for document, whole in zip(documents, encoded, strict=True):
        ids = list(whole.ids)
        borders = np.cumsum([len(span.text) for span in document.spans])
        last = [max(0, end - 1) for _, end in whole.offsets]
        learn = [document.spans[index].learn for index in np.searchsorted(borders, last, side="right")]
        # A chat template may spell out the marks that every document gets.
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
            learn.insert(0, document.spans[0].learn)
        if ids[-1] != eos:
            ids.append(eos)
            learn.append(document.spans[-1].learn)
        made.append(Encoded(np.array(ids, np.int32), np.array(learn, bool)))
    return made
