"""What a generation returns."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Literal

from jaxspec.engine.executables import VariantCounts

FinishReason = Literal["eos", "stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How one text came about, in the field's names; tokens past its end are not counted.

    Attributes:
      num_tokens: tokens emitted, the prefill's first one included.
      num_rounds: target passes after the prefill.
      num_drafts: rounds with at least one draft token.
      num_draft_tokens: draft tokens verified.
      num_accepted_tokens: draft tokens emitted.
      acceptance_histogram: drafting rounds by how many tokens were accepted, 0 … K.
      elapsed_ms: from the start of its batch to this row's end, compilation included.
      decode_ms: of that, from its first token to its last.
      compile_ms: of `elapsed_ms`, spent waiting for programs that were being compiled.
      decode_compile_ms: of `decode_ms`, the same.
      static_plans: looks of the host (of the whole batch) that found a program for the rows' mask, or did not.
    """

    num_tokens: int
    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    elapsed_ms: float
    decode_ms: float
    compile_ms: float
    static_plans: VariantCounts = VariantCounts()  # noqa: RUF009
    decode_compile_ms: float = 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, bonus included, as Spec-Bench counts; plain decoding has 1. None before the first round."""
        return (self.num_tokens - 1) / self.num_rounds if self.num_rounds else None

    @property
    def mean_acceptance_length_drafting(self) -> float | None:
        """1 + accepted draft tokens ÷ drafting rounds, as vLLM counts; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, compilation left out; None for a single token."""
        running = self.decode_ms - self.decode_compile_ms
        return 1e3 * (self.num_tokens - 1) / running if self.num_tokens > 1 and running > 0 else None


@dataclasses.dataclass(frozen=True)
class Result:
    """One generated text.

    Attributes:
      text: the text without prompt and end-of-text; None where the model has no tokenizer.
      tokens: its token ids, end-of-text included.
      finish_reason: `eos`, `stop` (a stop string; the text ends before it), `length`, or `error` (see `error`).
      statistics: counts and times.
      drafted: for each token, whether it was an accepted draft.
      log_probs: for each token, under the model's raw law; None if not asked for.
      proposed: for each token, how many draft tokens its round verified.
      gamma: the γ of its adaptive stop rule when the text ended, cut to [0, 1]; of several such rules that of the
        first; None where there is none. Each text starts from the γ given (`gamma=`), in a batch too: to go on from
        text to text as Draft & Verify does, generate one after another with `gamma=result.gamma`. The rounds that ran
        before the host found a stop string have moved it too.
    """

    text: str | None
    tokens: list[int]
    finish_reason: FinishReason
    statistics: Statistics
    drafted: list[bool]
    log_probs: list[float] | None = None
    proposed: list[int] = dataclasses.field(default_factory=list)
    gamma: float | None = None

    def __str__(self) -> str:
        return self.text if self.text is not None else " ".join(map(str, self.tokens))

    def __repr__(self) -> str:
        speed = self.statistics.tokens_per_second
        rate = "" if speed is None else f", {speed:.1f} tokens/s"
        return f"<Result {reprlib.repr(str(self))}: {len(self.tokens)} tokens, {self.finish_reason}{rate}>"

    @property
    def error(self) -> str | None:
        """Why the text ended where it should not, in one line; None if it did not."""
        if self.finish_reason != "error":
            return None
        return (
            f"the model's logits after {len(self.tokens)} tokens of output are not finite; its weights or its "
            "config are damaged, or float16 overflows (then use float32 or bfloat16)"
        )

    @property
    def draft_lengths(self) -> list[int]:
        """Of each round after the prefill, how many draft tokens it verified."""
        rest = list(zip(self.drafted, self.proposed, strict=True))[1:]
        # A round ends with a token that is no draft, unless the text was cut before it.
        return [length for at, (drafted, length) in enumerate(rest) if not drafted or at == len(rest) - 1]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream yields: the next piece of one text.

    Attributes:
      index: which prompt.
      text: new text that is final; "" where a character or a stop string may still be incomplete.
      tokens: new token ids.
      drafted: for each, whether it was an accepted draft.
      statistics: of this text up to here.
      result: the whole, once this text has ended.
    """

    index: int
    text: str
    tokens: list[int]
    drafted: list[bool]
    statistics: Statistics
    result: Result | None = None
