"""The papers' tables, measured again: one module per paper, by its name.

Each has `measure(lm, options, on_progress)`, which returns a `tables.Report`: the paper's figures, this model's beside
them, and which of the paper's claims hold here. Nothing is imported before it is asked for, so that a command line is
made without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    from jaxspec.bench.timing import OnProgress
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.papers.options import PaperOptions
    from jaxspec.papers.tables import Report

# The modules of this package that measure a paper.
PaperName = Literal["asd", "adaspeed", "s2d", "sampling"]
PAPERS: tuple[PaperName, ...] = get_args(PaperName)
# What a paper takes beside `PaperOptions`' numbers; where a kind of work is compared, the prompts are the project's.
TAKES: dict[PaperName, tuple[str, ...]] = {
    "adaspeed": ("prompt_file",),
    "s2d": ("prompt_file", "draft", "runs", "targets", "sorted_target"),
}


class Measure(Protocol):
    """Measures the tables of one paper."""

    def __call__(self, lm: LanguageModel, options: PaperOptions, on_progress: OnProgress) -> Report: ...


def find(name: str) -> Measure:
    """The `measure` of a paper.

    Raises:
      ValueError: there is no such paper; one line.

    Examples:
      >>> find("sampling").__module__
      'jaxspec.papers.sampling'
    """
    if name not in PAPERS:
        raise ValueError(f"unknown paper {name!r}; give one of {', '.join(PAPERS)}")
    measure: Measure = importlib.import_module(f"{__name__}.{name}").measure
    return measure
