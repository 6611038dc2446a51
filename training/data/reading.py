"""Data sources become documents: files, Hugging Face data sets, and tasks made by rule.

A record that does not fit its format is reported with its place; `training.data.records` gives the places in files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from training.data import records, tasks
from training.data.conversations import Chat
from training.data.formats import AUTO, FORMATS, Document, recognise
from training.data.records import SEPARATOR, Malformed, Record

# The number of malformed records that are named one by one; the others are only counted.
_NAMED = 5


def read(
    path: str, form: str, chat: Chat, skip: bool, report: Callable[[str], None] = print
) -> list[Document]:
    """All documents of a file or a Hugging Face data set; empty ones are dropped.

    Args:
      path: a file of text with `<|endoftext|>` between documents, or of JSON records; `hf:NAME[:SPLIT]`; or
        `tasks:FAMILY[:COUNT]`, generated tasks, see `training.data.tasks`. The content of a file decides its kind.
      form: one of `FORMATS`, or `auto`, which judges each record by its keys.
      chat: how conversations become text.
      skip: whether a malformed record is reported and left out instead of ending it all.
      report: where it is reported.

    Raises:
      ValueError: there is nothing to read, or (`Malformed`) a record does not fit.
    """
    if form != AUTO and form not in FORMATS:
        raise ValueError(f"no data format {form!r}; choose one of {', '.join([AUTO, *FORMATS])}")
    documents: list[Document] = []
    skipped = total = 0
    for place, load in _records(path):
        total += 1
        try:
            record = load()
            documents += FORMATS[recognise(record) if form == AUTO else form](record, chat)
        except ValueError as error:
            said = f"{place}: {error}"
            if not skip:
                raise Malformed(
                    f"{said}; fix the record, or skip such records with --skip-malformed"
                ) from None
            skipped += 1
            if skipped <= _NAMED:
                report(f"skipped {said}")
    if skipped > 1:
        report(f"skipped {skipped:,} malformed records of {total:,} in {path}")
    if not documents:
        left = f" ({skipped} malformed records skipped)" if skipped else ""
        raise ValueError(f"no document in {path}{left}; expected text with {SEPARATOR} between documents, "
                         "or records in JSON")  # fmt: skip
    return documents


def _records(path: str) -> Iterator[Record]:
    if path.startswith("hf:"):
        yield from _hugging_face(path)
    elif path.startswith(tasks.PREFIX):
        for place, record in tasks.records(path):
            yield place, functools.partial(dict, record)
    else:
        yield from records.of_file(path)


def _hugging_face(path: str) -> Iterator[Record]:
    """`hf:NAME`, `hf:NAME:SPLIT` (split `train` if not given), or `hf:` and a directory saved to disk."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path} needs the package `datasets`; pip install datasets") from None
    name, _, split = path.removeprefix("hf:").partition(":")
    try:
        saved = Path(name).is_dir() and (Path(name) / "dataset_info.json").is_file()
        found = (
            datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split or "train")
        )
    except Exception as error:  # one line for whatever the hub, the network or the files say
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load {path}: {reason}") from None
    for number, record in enumerate(found):
        yield f"{path} record {number}", functools.partial(records.checked, record)
