"""The record of a draft's training in its own config.json: exits, draft vocabulary, thresholds and target."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.records import record


@dataclasses.dataclass(frozen=True)
class TrainedFor:
    """The training purpose of a model, from the entry `jaxspec` of its config.json; each part may be missing.

    Attributes:
      exits: the early exits (SoFT), as ascending numbers of layers.
      draft_vocab: the tokens among which the model drafts, ascending; () for all.
      thresholds: the minimum probability at each exit but the last (S2D), tuned for `target`.
      target: the fingerprint of the model for which it drafts; None if it is not recorded.
    """

    exits: tuple[int, ...] = ()
    draft_vocab: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    target: str | None = None

    @classmethod
    def read(cls, own: Mapping[str, Any], num_layers: int, vocab_size: int) -> TrainedFor:
        """Reads the entry of a model of this size.

        Raises:
          ValueError: a part has another form, or does not fit the model.
        """
        # An empty list is no list of exits.
        given = {name: part or None for name, part in own.items()} if isinstance(own, dict) else own
        return record(cls, given, "jaxspec").checked(num_layers, vocab_size)

    def checked(self, num_layers: int, vocab_size: int) -> TrainedFor:
        """Returns the same record.

        Raises:
          ValueError: it does not fit a model of this size.
        """
        for name, given, least, most, unit in (
            ("exits", self.exits, 1, num_layers, "layers"),
            ("tokens of draft_vocab", self.draft_vocab, 0, vocab_size - 1, "tokens"),
        ):
            rises = all(earlier < later for earlier, later in itertools.pairwise(given))
            if not rises or not all(least <= one <= most for one in given):
                raise ValueError(
                    f"the {name} are {shown(given)}; expected a rising list of {unit} from {least} to {most}"
                )
        numbers = all(0 <= limit <= 1 for limit in self.thresholds)
        if not numbers or (self.thresholds and len(self.thresholds) != len(self.exits) - 1):
            raise ValueError(
                f"the thresholds are {shown(self.thresholds)}; expected a number from 0 to 1 for each of the exits "
                f"{shown(self.exits)} but the last"
            )
        return self

    def content(self) -> dict[str, Any]:
        """Returns the entry, without the missing parts."""
        return {name: part if name == "target" else list(part) for name, part in vars(self).items() if part}
