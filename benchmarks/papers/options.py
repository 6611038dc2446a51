"""The amount of a paper's measurement; a module without JAX, so that the command line needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.measuring.bench.suite_options import Amount


@dataclasses.dataclass(frozen=True)
class TargetOptions:
    """The models for which a paper's drafts are measured, beside the model itself.

    Attributes:
      targets: for paper s2d, a further target of the same draft: a directory, a hub id or an embedded name. All are
        in memory together.
      sorted_target: for paper s2d, a model of the target's size that drafts with its own sorted exits, made by
        `python -m training.soft`; without one its Table 1 is left out.
    """

    targets: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--target", "metavar": "DIR|ID"}
    )
    sorted_target: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})


@dataclasses.dataclass(frozen=True)
class PaperOptions(TargetOptions, Amount):
    """The amount of measurement, and its directory. `limit` applies to tuning and reporting prompts separately.

    Attributes:
      seed: seed of the first repeat, for sampled tokens.
      prompt_file: prompt sets in place of the project's own, see `bench.prompt_files.read_tasks`. The prompts of each
        category go to tuning and to reporting by turns; a conversation gives its first turn.
      draft: for a paper about drafts, the draft: a directory, a hub id or an embedded name.
      runs: for a paper about drafts, methods beside its own, by the name of their row.
      counts: whether to count rounds and draft passes, and to measure no times.
      untuned: whether the counts of paper asd leave out its tuned numbers, whose grid is most of the work.
      directory: directory for every text, written at once, so that an interrupted measurement can be resumed; None to
        store nothing.
      resume: resume from the directory, else start again.

    Raises:
      ValueError: a number is outside its range.

    Examples:
      >>> PaperOptions(limit=4).max_new_tokens
      128
    """

    seed: int = 0
    prompt_file: tuple[str, ...] = ()
    draft: str | None = None
    runs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    counts: bool = False
    untuned: bool = False
    directory: Path | None = None
    resume: bool = True
