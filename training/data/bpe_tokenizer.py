"""A byte-level BPE tokenizer, trained on plain text and saved in the format of transformers."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxspec.console.errors import one_line
from jaxspec.host import files
from jaxspec.io.gguf.container import is_gguf
from jaxspec.io.tokenizers.tokenizer import copy_files
from training.data.formats import Document
from training.data.packing import Encoded

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
# The token that begins a document, or None, and the tokens that end texts; the first one ends documents without one.
Marks = tuple[int | None, tuple[int, ...]]
# 256 bytes and two special tokens; a smaller vocabulary cannot encode every text.
SMALLEST_VOCABULARY = 258
# Characters on which a tokenizer is trained, divided over the task types by weight.
TOKENIZER_CHARACTERS = 12_000_000
# Documents that are tokenised together.
_AT_ONCE = 1000
# The number of documents of a task type that are tokenised for an estimate, and the characters of each.
_SAMPLE, _SAMPLE_CHARACTERS = 200, 10_000


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns at most `vocab_size` tokens. Decoding its tokens restores any UTF-8 text exactly.

    Encoding prepends `<s>` (id 0). `</s>` (id 1) ends a document; the packing code adds it.

    Raises:
      ValueError: the vocabulary is too small for all bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    # Digits are split one by one, so that all numbers are tokenised alike. Then GPT-2's regular expression keeps a word
    # with the space before it.
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
    """Learns a tokenizer from a share of the documents of each task type, in proportion to the weights."""
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
    # Written last: if this file exists, the tokenizer is complete.
    files.write_atomic(directory / "tokenizer.json", tokenizer.to_str(pretty=True))


def load(source: Path) -> Tokenizer:
    """Reads the tokenizer of a model's directory, a run directory, or a GGUF file.

    Raises:
      ValueError: it is missing or damaged.
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
    """Yields the directory of a model's tokenizer files; for a GGUF file, a temporary directory."""
    if not is_gguf(source):
        yield source
        return
    with tempfile.TemporaryDirectory() as directory:
        copy_files(source, directory)
        yield Path(directory)


def estimated_tokens(tokenizer: Tokenizer, kinds: Mapping[str, Sequence[Document]]) -> int:
    """Estimates the number of tokens of documents, from the beginnings of some of each task type."""
    total = 0.0
    for documents in kinds.values():
        every = max(1, -(-len(documents) // _SAMPLE))
        some = [document.text[:_SAMPLE_CHARACTERS] for document in documents[::every]]
        encoded = tokenizer.encode_batch(some, add_special_tokens=False)
        rate = sum(len(one.ids) for one in encoded) / max(1, sum(map(len, some)))
        # And the token that ends each document.
        total += len(documents) + rate * sum(len(document.text) for document in documents)
    return int(total)


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[Document], bos: int | None, ends: Sequence[int]
) -> Iterator[Encoded]:
    """Tokenises documents, with `bos` (if any) before and `ends[0]` after each, and marks the learned tokens.

    A document is encoded as a whole, as it is at inference. A token that crosses a span's border belongs to the span
    in which it ends. `bos` is not added to a document that begins with it, and `ends[0]` not to one that has its end:
    a conversation with a token of `ends` in or after its last answer, or another text with nothing but white space
    after such a token. The model stops at such a token, so what follows it in an answer of a conversation, or as white
    space at the end of a text, is not learned.
    """
    left = iter(documents)
    while some := list(itertools.islice(left, _AT_ONCE)):
        encoded = tokenizer.encode_batch([document.text for document in some], add_special_tokens=False)
        yield from (_marked(*pair, bos, ends) for pair in zip(some, encoded, strict=True))


def _marked(document: Document, whole: Encoding, bos: int | None, ends: Sequence[int]) -> Encoded:
    """Adds the marks to the tokens of a document."""
    borders = np.cumsum([len(span.text) for span in document.spans])
    last = [max(0, end - 1) for _, end in whole.offsets]
    within = np.searchsorted(borders, last, side="right")
    learn = np.array([span.learn for span in document.spans], bool)[within]
    stops = np.isin(np.array(whole.ids, np.int32), ends)
    if document.chat:
        answers = [number for number, span in enumerate(document.spans) if span.learn]
        for number in answers:
            own = np.flatnonzero(within == number)
            found = np.flatnonzero(stops[own])
            if len(found):
                learn[own[found[0] + 1 :]] = False
        ended = bool(stops[within >= answers[-1]].any())
    else:
        at = int(max(np.flatnonzero(stops), default=-1))
        ended = at >= 0 and not document.text[whole.offsets[at][1] :].strip()
        learn[at + 1 :] &= not ended
    ids, learned = list(whole.ids), learn.tolist()
    if bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
        learned.insert(0, document.spans[0].learn)
    if not ended:
        ids.append(ends[0])
        learned.append(document.spans[-1].learn)
    return Encoded(np.array(ids, np.int32), np.array(learned, bool))
