"""How much of a paper's tables is measured; apart from the papers, so that a command line is made without JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bench.suite_options import Amount


@dataclasses.dataclass(frozen=True)
class TargetOptions:
    """Which models a paper's drafts serve, beside the model itself.

    Attributes:
      targets: of paper s2d, a further target of the same draft: a directory, a hub id or an embedded name. All are held
        in memory together.
      sorted_target: of paper s2d, a model as large as the target that drafts by its own sorted exits, made by
        `python -m training.soft`; without one its Table 1 is left out.
    """

    targets: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--target", "metavar": "DIR|ID"}
    )
    sorted_target: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})


@dataclasses.dataclass(frozen=True)
class PaperOptions(TargetOptions, Amount):
    """How much is measured, and where it is written down. `limit` holds for the tuning and the reporting prompts each.

    Attributes:
      seed: of the first repeat, where tokens are drawn.
      prompt_file: prompt sets in place of the project's own, see `bench.prompt_files.read_tasks`: of each category the
        prompts go to tuning and to reporting by turns; of a conversation the first turn.
      draft: of a paper about drafts, the draft: a directory, a hub id or an embedded name.
      runs: of a paper about drafts, methods that stand beside its own, by the name of their row.
      directory: where every text is written down as it comes, so that the same measurement goes on after an
        interruption; None to keep nothing.
      resume: go on with what the directory holds, else begin again.

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
    directory: Path | None = None
    resume: bool = True
