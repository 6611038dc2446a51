"""Tokens of one row become text: incremental decoding and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.io.tokenizer import Detokenizer


class StopStrings:
    """Finds the first of several strings in text that arrives piece by piece.

    Args:
      stops: strings that end the text; may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes new text; returns what is certainly before any stop string, and whether one was found."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            before, self._held = self._held[: min(found)], ""
            return before, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` might begin with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class RowText:
    """The text of one row.

    Args:
      detokenizer: None for a model without a tokenizer: no text then.
      stops: stop strings.
      silent: ids of tokens that stop the text and are not part of it.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, stops: Sequence[str], silent: Sequence[int] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._silent = frozenset(silent)
        self._stops = StopStrings(stops)
        self._watched = bool(stops)
        self.text = ""

    @property
    def has_text(self) -> bool:
        """Whether tokens become text at all."""
        return self._detokenizer is not None

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, int, bool]:
        """Takes new tokens, `last` if no more will come.

        Returns:
          New text that is final, how many of the tokens belong to the row, and whether a stop string ended
          it.
        """
        if self._detokenizer is None:
            return "", len(tokens), False
        gained = ""
        # A stop string ends the row at the token that completes it, so then tokens go one by one.
        steps = [[token] for token in tokens] if self._watched else [list(tokens)]
        used = 0
        for step in steps:
            certain, stopped = self._stops.push(
                self._detokenizer.push([token for token in step if token not in self._silent])
            )
            gained += certain
            used += len(step)
            if stopped:
                self.text += gained
                return gained, used, True
        if last:
            certain, stopped = self._stops.push(self._detokenizer.flush())
            gained += certain if stopped else certain + self._stops.flush()
            self.text += gained
            return gained, used, stopped
        self.text += gained
        return gained, used, False
