"""Trains a Llama by next-token prediction: `jaxspec train sft --data FILE --output DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import ClassVar

from training import job
from training.losses.base import next_token
from training.run_options import DraftOptions
from training.start import Objective, Start, draft_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DraftOptions):
    """Trains a Llama by next-token prediction and writes the best checkpoint as a Hugging Face directory."""

    job: ClassVar[str] = "sft"


def objective(options: Options, start: Start) -> Objective:
    """Makes the loss: cross-entropy of the last layer only."""
    part = draft_tokens(options, start.config)
    return Objective(next_token(start.config, options.recompute, part), part=part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return job.main(Options, objective, "training.sft", arguments)


if __name__ == "__main__":
    sys.exit(main())
