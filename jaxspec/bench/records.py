"""What a benchmark writes down: one record per prompt, turn of its conversation, and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.engine.executables import VariantCounts
from jaxspec.engine.results import Result, Statistics, Token


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a greedy text first differs from plain decoding's.

    Attributes:
      repeat: of the text, from 0.
      position: in tokens of the text, from 0.
      tokens: plain decoding's token there and the other; None where a text has ended.
      margin: how far the model prefers the first to the second, a difference of logits; None where there are not two.
    """

    repeat: int
    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None


@dataclasses.dataclass(frozen=True)
class Record:
    """The texts of one run after one prompt.

    Attributes:
      id, category: of the prompt.
      turn: of its conversation, from 0.
      batch: which prompts were generated together: those of one number.
      run: the method in words.
      prompt_tokens: how many tokens stand before the text.
      texts: repeat by repeat.
      difference: from plain decoding; None where there is none, or where tokens are drawn at random.
      right: by repeat, whether the text ends with the answer; None where none is known.
    """

    id: str
    category: str
    turn: int
    batch: int
    run: str
    prompt_tokens: int
    texts: tuple[Result, ...]
    difference: Difference | None = None
    right: tuple[bool, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it; of the tokens their ids alone."""
        texts = [
            {
                "text": one.text,
                "tokens": one.tokens,
                "finish_reason": one.finish_reason,
                "gamma": one.gamma,
                "statistics": dataclasses.asdict(one.statistics),
            }
            for one in self.texts
        ]
        difference = None if self.difference is None else dataclasses.asdict(self.difference)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"texts": texts, "difference": difference}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        """The record that `to_json` wrote.

        Raises:
          KeyError, TypeError: it is none.
        """
        difference, right = entry["difference"], entry["right"]
        if difference is not None:
            difference = Difference(**{**difference, "tokens": tuple(difference["tokens"])})
        return cls(
            **{
                **entry,
                "texts": tuple(map(_text, entry["texts"])),
                "difference": difference,
                "right": None if right is None else tuple(right),
            }
        )


def _text(entry: Mapping[str, Any]) -> Result:
    counts = {
        **entry["statistics"],
        "acceptance_histogram": tuple(entry["statistics"]["acceptance_histogram"]),
        "static_plans": VariantCounts(**entry["statistics"]["static_plans"]),
    }
    tokens = [Token(index) for index in entry["tokens"]]
    return Result(entry["text"], tokens, entry["finish_reason"], Statistics(**counts), entry["gamma"])
