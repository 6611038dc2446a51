"""Reads data sets of the Hugging Face hub: the Parquet and JSON files of a split, in the order of their names.

With the package `datasets`, it loads data sets by name; without it, their files are downloaded and read here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.console.errors import one_line
from training.data.records import Record, checked, of_file

PREFIX = "hf:"
# File types in order of preference: a data set that has several of them contains the same records in each.
_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json")
_OTHER_SPLIT = "test|valid|validation|dev|eval"


def records(path: str) -> Iterator[Record]:
    """Yields the records of `hf:NAME[/SUBSET][:SPLIT]`; the split is `train` by default.

    NAME is a hub id, a directory with the files of a data set, or one that `datasets` saved to disk.

    Raises:
      ValueError: the data set cannot be found or read, or does not have the split.
    """
    name, _, split = path.removeprefix(PREFIX).partition(":")
    split = split or "train"
    if (Path(name) / "dataset_info.json").is_file():
        return _loaded(path, lambda datasets: datasets.load_from_disk(name))
    if Path(name).is_dir():
        return _of_files(path, Path(name), split)
    owner_and_name, subset = "/".join(name.split("/")[:2]), name.split("/")[2:]
    try:
        import datasets  # noqa: F401
    except ImportError:
        return _of_files(path, _downloaded(path, owner_and_name, split).joinpath(*subset), split)
    return _loaded(path, lambda datasets: datasets.load_dataset(owner_and_name, *subset, split=split))


def _loaded(path: str, load: Any) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path} needs the package `datasets`; pip install datasets") from None
    try:
        found = load(datasets)
    except Exception as error:  # one line for any error of the hub, the network or the files
        raise ValueError(f"cannot load {path}: {one_line(error)}") from None
    for number, record in enumerate(found):
        yield f"{path} record {number}", functools.partial(checked, record)


def _downloaded(path: str, name: str, split: str) -> Path:
    """Downloads the files whose names contain the split, or all if there are none; returns their directory."""
    import huggingface_hub  # slow to import, and needed only here

    try:
        for part in (f"*{split}*", "*"):
            patterns = [part + ending for ending in _ENDINGS]
            found = Path(
                huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
            )
            if _files(found):
                break
    except Exception as error:
        raise ValueError(
            f"cannot load {path} from the hub: {one_line(error)[:120]}; download its files and give hf:DIRECTORY, or "
            "pip install datasets"
        ) from None
    return found


def _files(directory: Path) -> list[str]:
    """Returns the data files below a directory, of the first of `_ENDINGS` that it has, by name."""
    found = (one for one in directory.rglob("*") if not one.name.startswith((".", "dataset_info")))
    every = sorted(one.relative_to(directory).as_posix() for one in found)
    return next(filter(None, ([name for name in every if name.endswith(end)] for end in _ENDINGS)), [])


def _of_files(path: str, directory: Path, split: str) -> Iterator[Record]:
    names, word = _files(directory), re.escape(split)
    # `train-00000-of-00002.parquet`, `data/train.jsonl` and `train/a.json`; else a name that contains the word.
    for form in (rf"((?:.*/)?){word}(?:-\d+-of-\d+.*|[./].*)", rf"((?:.*/)?)(?:[^/]*[\W_])?{word}[\W_].*"):
        if chosen := {name: found[1] for name in names if (found := re.fullmatch(form, name))}:
            break
    if not chosen and split == "train" and not any(re.search(_OTHER_SPLIT, name) for name in names):
        chosen = dict.fromkeys(names, "")  # no file names a split, as in `load_dataset`
    if len(subsets := {subset.strip("/") or "." for subset in chosen.values()}) > 1:
        raise ValueError(
            f"{path} has the subsets {', '.join(sorted(subsets))[:120]}; give one of them as hf:NAME/SUBSET"
        )
    if not chosen:
        listed = ", ".join(names[:4])[:120] or "no .parquet, .jsonl or .json file"
        raise ValueError(
            f"{path}: no file of the split {split} in {directory} ({listed}); give hf:NAME:SPLIT"
        )
    for name in chosen:
        yield from of_file(str(directory / name))
