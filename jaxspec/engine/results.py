"""What a generation returns."""

from __future__ import annotations

import dataclasses
import itertools
import reprlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxspec.engine.executables import VariantCounts

FinishReason = Literal["eos", "stop", "length", "error"]


class Token(NamedTuple):
    """One generated token, and how it came about.

    Attributes:
      id: the token id.
      drafted: whether it was an accepted draft; else the target's own: the last token of its round.
      proposed: how many draft tokens its round verified.
      round: the number of its round, from 1; 0 for the first token, which the prefill gives.
      log_prob: its log-probability under the model's raw law (temperature 1, no filter); None if not asked for.

    Examples:
      >>> Token(7, drafted=True, proposed=3, round=1).drafted
      True
    """

    id: int
    drafted: bool = False
    proposed: int = 0
    round: int = 0
    log_prob: float | None = None


def played_rounds(tokens: Iterable[Token]) -> list[tuple[int, int]]:
    """Returns how many draft tokens each round verified, and how many of those are among the tokens, as pairs.

    A round is listed if some of the tokens come from it; the prefill is none. Where a round's own token is missing,
    since the text was cut before it, the drafts after the cut do not count as verified.

    Examples:
      >>> played_rounds([Token(7), Token(8, drafted=True, proposed=3, round=1), Token(9, proposed=3, round=1)])
      [(3, 1)]
    """
    rounds = []
    for number, group in itertools.groupby(tokens, key=lambda token: token.round):
        of_round = list(group)
        last, accepted = of_round[-1], sum(token.drafted for token in of_round)
        if number:
            rounds.append((accepted if last.drafted else last.proposed, accepted))
    return rounds


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The counts and times of one text, in the field's names; tokens past its end are not counted.

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
      decode_compile_ms: of `decode_ms`, spent waiting for programs that were being compiled.
      static_plans: host polls (of the whole batch) that found a program for the rows' mask, or did not.

    Examples:
      >>> counts = {"num_tokens": 9, "num_rounds": 4, "num_drafts": 4, "num_draft_tokens": 8}
      >>> times = {"elapsed_ms": 30.0, "decode_ms": 20.0, "compile_ms": 0.0}
      >>> statistics = Statistics(**counts, num_accepted_tokens=4, acceptance_histogram=(1, 2, 1), **times)
      >>> statistics.mean_acceptance_length, statistics.draft_acceptance_rate, statistics.tokens_per_second
      (2.0, 0.5, 400.0)
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
        """Accepted ÷ drafted tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, compilation left out; None for a single token."""
        running = self.decode_ms - self.decode_compile_ms
        return 1e3 * (self.num_tokens - 1) / running if self.num_tokens > 1 and running > 0 else None


class Expected(NamedTuple):
    """What `auto` expected of a candidate before a batch's first round.

    Attributes:
      name: of the candidate, `off` for plain decoding.
      length: of the drafts that would give the most tokens per millisecond.
      acceptance: the share of first draft tokens that are accepted; None of plain decoding.
      round_ms: of a round; None where nothing was measured yet, so that only ratios are guessed.
      speedup: over plain decoding.
      ready: whether its programs were there.

    Examples:
      >>> Expected("ngram", 4, 0.5, 11.0, 1.2, True).name
      'ngram'
    """

    name: str
    length: int
    acceptance: float | None
    round_ms: float | None
    speedup: float
    ready: bool


class Chosen(NamedTuple):
    """What `auto` chose for some rounds of a batch, and what came of it.

    Attributes:
      round: how many rounds of the batch were over.
      name: of the candidate, `off` for plain decoding.
      length: of its drafts at most.
      num_rounds, num_tokens: until the next choice, of all rows.
      expected_ms: by the costs of its steps, for the drafts that there were, and of bringing its state up where that
        was done first; None where nothing was measured yet.
      took_ms: as the host saw it.

    Examples:
      >>> Chosen(8, "ngram", 4, 8, 20, 80.0, 84.0).num_tokens
      20
    """

    round: int
    name: str
    length: int
    num_rounds: int
    num_tokens: int
    expected_ms: float | None
    took_ms: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One generated text.

    Attributes:
      text: the text without prompt and end-of-text; None where the model has no tokenizer.
      token_records: its tokens, end-of-text included, each with the details of its round.
      finish_reason: `eos`, `stop` (a stop string or a token of `stop_token_ids`, which is not part of the text),
        `length`, or `error` (see `error`).
      statistics: counts and times.
      gamma: the γ of its adaptive stop rule when the text ended, cut to [0, 1]; of several such rules that of the
        first; None where there is none. Each text starts from the γ given (`gamma=`), in a batch too: to go on from
        text to text as Draft & Verify does, generate one after another with `gamma=result.gamma`. The rounds that ran
        before the host found a stop string have moved it too.
      lossy: whether the text follows another law than the model's: it was drawn at random, and its drafts were accepted
        by an acceptor that changes the law (`acceptor="typical"`).
      expected, choices: with `method="auto"` and `explain`, what was expected of each candidate, the fastest first, and
        what was chosen, of the whole batch up to this text's end; else ().

    Examples:
      >>> statistics = Statistics(2, 1, 1, 1, 0, (1,), elapsed_ms=30.0, decode_ms=20.0, compile_ms=0.0)
      >>> Result("Hi!", [Token(7), Token(8, proposed=1, round=1)], "length", statistics)
      <Result 'Hi!': 2 tokens, length, 50.0 tokens/s>
    """

    text: str | None
    token_records: list[Token]
    finish_reason: FinishReason
    statistics: Statistics
    gamma: float | None = None
    lossy: bool = False
    expected: tuple[Expected, ...] = ()
    choices: tuple[Chosen, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The token ids of the text, end-of-text included."""
        return [token.id for token in self.token_records]

    def __str__(self) -> str:
        return self.text if self.text is not None else " ".join(map(str, self.tokens))

    def __repr__(self) -> str:
        speed = self.statistics.tokens_per_second
        rate = "" if speed is None else f", {speed:.1f} tokens/s"
        kind = ", lossy" if self.lossy else ""
        return (
            f"<Result {reprlib.repr(str(self))}: {len(self.tokens)} tokens, {self.finish_reason}{rate}{kind}>"
        )

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
        """The number of draft tokens that each round after the prefill verified."""
        return [verified for verified, _ in played_rounds(self.token_records)]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a stream yields: the next piece of one text.

    Attributes:
      index: which prompt.
      text: new text that is final; "" where a character or a stop string may still be incomplete.
      token_records: the new tokens, each with how it came about.
      statistics: of this text up to here.
      result: the whole, once this text has ended.

    Examples:
      >>> statistics = Statistics(1, 0, 0, 0, 0, (0,), elapsed_ms=30.0, decode_ms=0.0, compile_ms=0.0)
      >>> Piece(0, "Hi", [Token(7)], statistics).tokens
      [7]
    """

    index: int
    text: str
    token_records: list[Token]
    statistics: Statistics
    result: Result | None = None

    @property
    def tokens(self) -> list[int]:
        """The ids of the new tokens."""
        return [token.id for token in self.token_records]
