"""Reads data sources as documents: files and Hugging Face data sets.

A malformed record is reported with its place; `training.data.records` finds the places in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from training.data import hub_data, records
from training.data.conversations import Chat
from training.data.formats import AUTO, FORMATS, Document, recognise
from training.data.records import SEPARATOR, Malformed, Record
from training.data.spool import Spool

# The number of malformed records that are reported individually; the others are counted.
_NAMED = 5


def read_source(
    path: str, form: str, chat: Chat, skip: bool, report: Callable[[str], None] = print
) -> Sequence[Document]:
    """Reads all documents of a file or a Hugging Face data set, in order; empty ones are dropped.

    Args:
      path: a file of text with `<|endoftext|>` between documents, of JSON records, or Parquet, as its content
        shows; or `hf:NAME[:SPLIT]`.
      form: one of `FORMATS`, or `auto`, which recognises each record by its keys.
      chat: the chat template for conversations.
      skip: report and leave out malformed records instead of raising.
      report: receives the messages.

    Returns:
      the documents, which are in a temporary file if they are large.

    Raises:
      ValueError: there is nothing to read, or (`Malformed`) a record does not fit its format.
    """
    if form != AUTO and form not in FORMATS:
        raise ValueError(f"no data format {form!r}; choose one of {', '.join([AUTO, *FORMATS])}")
    return Spool(_documents(path, form, chat, skip, report))


def _documents(
    path: str, form: str, chat: Chat, skip: bool, report: Callable[[str], None]
) -> Iterator[Document]:
    found = skipped = total = 0
    for place, load in _records(path):
        total += 1
        try:
            record = load()
            documents = FORMATS[recognise(record) if form == AUTO else form](record, chat)
        except ValueError as error:
            said = f"{place}: {error}"
            if not skip:
                raise Malformed(
                    f"{said}; fix the record, or skip such records with --skip-malformed"
                ) from None
            skipped += 1
            if skipped <= _NAMED:
                report(f"skipped {said}")
        else:
            found += len(documents)
            yield from documents
    if skipped > 1:
        report(f"skipped {skipped:,} malformed records of {total:,} in {path}")
    if not found:
        left = f" ({skipped} malformed records skipped)" if skipped else ""
        raise ValueError(f"no document in {path}{left}; expected text with {SEPARATOR} between documents, "
                         "or records in JSON")  # fmt: skip


def _records(path: str) -> Iterator[Record]:
    if path.startswith(hub_data.PREFIX):
        yield from hub_data.records(path)
    else:
        yield from records.of_file(path)
