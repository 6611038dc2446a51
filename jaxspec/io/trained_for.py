"""The record of a draft's training in its own config.json: exits, draft vocabulary, thresholds and target."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxspec.host.messages import shown


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
        names = [field.name for field in dataclasses.fields(cls) if field.name in own]
        parts: dict[str, Any] = {name: own[name] or None for name in names}
        return cls(**parts).checked(num_layers, vocab_size)

    def checked(self, num_layers: int, vocab_size: int) -> TrainedFor:
        """Returns the same with tuples for lists.

        Raises:
          ValueError: as `read`.
        """
        exits = _rising("exits", self.exits, 1, num_layers, "layers")
        tokens = _rising("tokens of draft_vocab", self.draft_vocab, 0, vocab_size - 1, "tokens")
        limits: Any = self.thresholds
        numbers = isinstance(limits, (list, tuple)) and all(
            type(one) in (int, float) and 0 <= one <= 1 for one in limits
        )
        if not numbers or (limits and len(limits) != len(exits) - 1):
            raise ValueError(
                f"the thresholds are {shown(limits)}; expected a number from 0 to 1 for each of the exits "
                f"{shown(exits)} but the last"
            )
        if self.target is not None and not isinstance(self.target, str):
            raise ValueError(f"the target is {shown(self.target)}; expected the fingerprint of a model")
        return TrainedFor(exits, tokens, tuple(map(float, limits)), self.target)

    def content(self) -> dict[str, Any]:
        """Returns the entry, without the missing parts."""
        return {name: part if name == "target" else list(part) for name, part in vars(self).items() if part}


def _rising(name: str, given: Any, least: int, most: int, unit: str) -> tuple[int, ...]:
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [None]
    whole = all(type(one) is int and least <= one <= most for one in listed)
    if not whole or any(later <= earlier for earlier, later in itertools.pairwise(listed)):
        raise ValueError(
            f"the {name} are {shown(given)}; expected a rising list of {unit} from {least} to {most}"
        )
    return tuple(listed)
