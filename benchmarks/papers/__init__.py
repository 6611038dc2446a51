"""Measures the tables of the papers again: one module per paper, by its name.

Each has `measure(lm, options, on_progress)`, which returns a `tables.Report`: the paper's figures, this model's beside
them, and the claims of the paper that hold here. Modules are imported on demand, so that the command line needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    from benchmarks.papers.options import PaperOptions
    from benchmarks.papers.tables import Report
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.host.progress import OnProgress

# The modules of this package that measure a paper.
PaperName = Literal["asd", "adaspeed", "s2d", "sampling"]
PAPERS: tuple[PaperName, ...] = get_args(PaperName)
# The options of each paper beside the numbers of `PaperOptions`. Papers without prompt_file use the project's prompts.
TAKES: dict[PaperName, tuple[str, ...]] = {
    "asd": ("prompt_file", "counts", "untuned"),
    "adaspeed": ("prompt_file", "counts"),
    "s2d": ("prompt_file", "counts", "draft", "runs", "targets", "sorted_target"),
}


class Measure(Protocol):
    """Measures the tables of one paper."""

    def __call__(self, lm: LanguageModel, options: PaperOptions, on_progress: OnProgress) -> Report: ...


def find(name: str) -> Measure:
    """Returns the `measure` of a paper.

    Raises:
      ValueError: there is no such paper.

    Examples:
      >>> find("sampling").__module__
      'benchmarks.papers.sampling'
    """
    if name not in PAPERS:
        raise ValueError(f"unknown paper {name!r}; give one of {', '.join(PAPERS)}")
    measure: Measure = importlib.import_module(f"{__name__}.{name}").measure
    return measure
