"""Records of a benchmark: one per prompt, turn of its conversation, and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.programs.executables import VariantCounts
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between a greedy text and plain decoding's.

    Attributes:
      repeat: number of the repeat, from 0.
      position: in tokens of the text, from 0.
      tokens: plain decoding's token at this position and the other; None after the end of a text.
      margin: logit of the first token − logit of the second; None unless there are two tokens.
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
      turn: turn of its conversation, from 0.
      batch: number of the batch; prompts with the same number were generated together.
      run: name of the run.
      prompt_tokens: length of the prompt.
      texts: one text per repeat.
      difference: first difference from plain decoding; None for equal texts and when sampling.
      right: whether the text ends with the answer, by repeat; None without a known answer.
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
        """The record as JSON-ready values, with token ids only."""
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
        """Restores a record from the result of `to_json`.

        Raises:
          KeyError, TypeError: the entry is not a record.
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
