"""What the texts of a model find out about this machine while they choose what drafts: times, and compiled programs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from jaxspec.methods.base import Candidate


@dataclasses.dataclass
class Programs:
    """What a candidate runs in a batch of certain shapes.

    Attributes:
      shape: of its drafter's state.
      keys: of the programs, see `Executables.ready`.
      fits: whether there is memory for its state.
      there: whether all of them are compiled.
    """

    shape: Any
    keys: Sequence[Any]
    fits: bool = True
    there: bool = False


@dataclasses.dataclass
class Known:
    """What the texts of a model have found out about this machine: facts of programs and times, not of texts.

    Attributes:
      missed_ms: by candidate, what was lost so far for want of its programs.
      ratios: by candidate and rows of the batch, observed over expected times of its rounds.
      prefill_ms: of a token of a prompt; None before the first prefill.
      programs: by candidate and shapes of the batch; None while nobody knows them yet, but somebody has asked.
      begins: by candidate, shapes of the batch and piece of a prompt, the key of the program with which it begins.
      lengths: of drafts, on the device: to put one there takes as long as some rounds of a small model.
      eager: whether programs are compiled before it is known that they pay: where times are taken.
    """

    missed_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    ratios: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    prefill_ms: float | None = None
    programs: weakref.WeakKeyDictionary[Candidate, dict[Any, Programs | None]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    begins: weakref.WeakKeyDictionary[Candidate, dict[Any, Any]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    lengths: dict[int, Any] = dataclasses.field(default_factory=dict)
    eager: bool = False
