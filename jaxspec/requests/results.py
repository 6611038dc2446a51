"""The results of a generation: tokens, statistics, texts and their pieces."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from jaxspec.programs.executables import VariantCounts
from jaxspec.requests.text import RowText, Token

# Readable on a light and on a dark page.
_DRAFTED = "rgba(46, 160, 67, 0.35)"
FinishReason = Literal["eos", "stop", "length", "error"]


class Score(NamedTuple):
    """The scores of the tokens of a continuation, each given all tokens before it.

    Attributes:
      tokens: the token ids.
      log_probs: their log-probabilities under the model's own distribution (temperature 1, no filter).
      top_tokens: the most likely token in place of each one.
      top_log_probs: the log-probabilities of the most likely tokens.

    Examples:
      >>> score = Score([7, 8], [-0.5, -1.0], top_tokens=[7, 9], top_log_probs=[-0.5, -0.75])
      >>> score.log_prob, score.is_greedy
      (-1.5, False)
    """

    tokens: list[int]
    log_probs: list[float]
    top_tokens: list[int]
    top_log_probs: list[float]

    @property
    def log_prob(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.log_probs)

    @property
    def greedy(self) -> list[bool]:
        """Whether each token is the most likely one."""
        return [token == top for token, top in zip(self.tokens, self.top_tokens, strict=True)]

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding generates the continuation."""
        return self.tokens == self.top_tokens


def played_rounds(tokens: Iterable[Token]) -> list[tuple[int, int]]:
    """Returns a pair for each round of the tokens: the draft tokens it verified, and those of them that are included.

    The prefill is not a round. If the text was cut before a round's own token, draft tokens after the cut do not count
    as verified.

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
    """The counts and times of one text; tokens past its end are not counted.

    Attributes:
      num_tokens: tokens emitted, the prefill's first one included.
      num_rounds: target passes after the prefill.
      num_drafts: rounds with at least one draft token.
      num_draft_tokens: draft tokens verified.
      num_accepted_tokens: draft tokens emitted.
      acceptance_histogram: drafting rounds by the number of accepted tokens, 0 … K.
      elapsed_ms: from the start of its batch to this row's end, compilation included.
      decode_ms: from its first token to its last, a part of `elapsed_ms`.
      compile_ms: the part of `elapsed_ms` spent waiting for compilation.
      decode_compile_ms: the part of `decode_ms` spent waiting for compilation.
      num_prompt_tokens: tokens of the prompt.
      num_reused_tokens: those of them that were not fed, because the caches of an earlier text held them.
      queue_ms: the part of `elapsed_ms` before it got a row.
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
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    queue_ms: float = 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, bonus included, as Spec-Bench counts; plain decoding has 1. None before the first round."""
        return (self.num_tokens - 1) / self.num_rounds if self.num_rounds else None

    @property
    def mean_acceptance_length_drafting(self) -> float | None:
        """1 + accepted draft tokens ÷ drafting rounds, as vLLM counts; None without draft tokens."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted tokens; None without draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, without compilation; None for a single token."""
        running = self.decode_ms - self.decode_compile_ms
        return 1e3 * (self.num_tokens - 1) / running if self.num_tokens > 1 and running > 0 else None


class Expected(NamedTuple):
    """What method `auto` expects of a candidate before a text's first round, alone in a batch.

    Attributes:
      name: the candidate's name.
      length: the draft length with the most tokens per time.
      acceptance: the share of first draft tokens that are accepted.
      speedup: the speed-up over plain decoding, in rounds in which it drafts.

    Examples:
      >>> Expected("ngram", 4, 0.5, 1.2).name
      'ngram'
    """

    name: str
    length: int
    acceptance: float
    speedup: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One generated text.

    Attributes:
      text: the text without prompt and end-of-text; None where the model has no tokenizer.
      token_records: its tokens, end-of-text included, each with the details of its round.
      finish_reason: `eos`, `stop` (a stop string or a token of `stop_token_ids`, which is not part of the text),
        `length`, or `error` (see `error`).
      statistics: counts and times.
      gamma: the γ of its adaptive stop rule (the first, if there are several) at the end of the text, clipped to
        [0, 1]; None without such a rule. Each text starts from `gamma=`, also in a batch. To carry γ from text to text
        as Draft & Verify does, generate one after another with `gamma=result.gamma`. Rounds that ran before the host
        found a stop string have changed γ too.
      lossy: whether the text follows another distribution than the model's: it was sampled, and its draft tokens were
        accepted by an acceptor that changes the distribution (`acceptor="typical"`).
      expected, prices: with `method="auto"` and `explain`, the estimates of the candidates, the fastest first, and
        the prices as in the file of `prices`; else () and None.
      drafted_by: the name of the method, and that it did not draft; with method `auto`, also the rounds of each
        candidate, or why none drafted.
      new_text: returns a new converter of the tokens to text, for `spans`; None for a result that was read from a file.

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
    prices: dict[str, Any] | None = None
    drafted_by: str = ""
    new_text: Callable[[], RowText] | None = dataclasses.field(default=None, repr=False, compare=False)

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
    def spans(self) -> list[tuple[str, bool]]:
        """The text in parts: those that each token completes, and whether the token was an accepted draft token."""
        if self.text is None or self.new_text is None:
            return [(str(self), False)]
        return self.new_text().spans(self.token_records, True)

    def _repr_html_(self) -> str:
        """Returns the text for a notebook, with accepted draft tokens on a green background."""
        return _html(self.spans, self.statistics, self.finish_reason)

    @property
    def error(self) -> str | None:
        """The error that ended the text, in one line; None without an error."""
        if self.finish_reason != "error":
            return None
        return (
            f"the model's logits after {len(self.tokens)} tokens of output are not finite; its weights or its "
            "config are damaged, or float16 overflows (then use float32, or bfloat16 where the device has it)"
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """The next piece of one text in a stream.

    Attributes:
      index: the index of the prompt.
      text: new text that is final; "" while a character or a stop string may be incomplete.
      token_records: the new tokens, each with the details of its round.
      statistics: counts and times of this text so far.
      result: the complete result, in the last piece of the text; else None.
      written: the tokens of the text, of which the first `statistics.num_tokens` are those so far, for `spans`.
      new_text: returns a new converter of the tokens to text, for `spans`.

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
    written: Sequence[Token] = dataclasses.field(default=(), repr=False, compare=False)
    new_text: Callable[[], RowText] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> list[int]:
        """The ids of the new tokens."""
        return [token.id for token in self.token_records]

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """The whole text so far, as `Result.spans`."""
        tokens = self.written[: self.statistics.num_tokens]
        text = None if self.new_text is None else self.new_text()
        if text is None or not text.has_text:
            return [(" ".join(str(token.id) for token in tokens), False)]
        return text.spans(tokens, self.result is not None)

    def __repr__(self) -> str:
        text = reprlib.repr("".join(part for part, _ in self.spans))
        return (
            f"<Piece {text}: {self.statistics.num_tokens} tokens so far>"
            if self.result is None
            else repr(self.result)
        )

    def _repr_html_(self) -> str:
        """Returns the whole text so far for a notebook, as that of a `Result`."""
        return _html(self.spans, self.statistics, "…" if self.result is None else self.result.finish_reason)


def _html(spans: Iterable[tuple[str, bool]], counts: Statistics, end: str) -> str:
    shown = []
    for text, drafted in spans:
        escaped = html.escape(text)
        shown.append(f'<span style="background: {_DRAFTED}">{escaped}</span>' if drafted else escaped)
    caption = f"{counts.num_tokens} tokens in {counts.num_rounds} rounds, {counts.num_accepted_tokens} of "
    caption += f"{counts.num_draft_tokens} draft tokens accepted (green), {end}"
    body = f'<div style="white-space: pre-wrap; font-family: monospace">{"".join(shown)}</div>'
    return f"{body}<small>{caption}</small>"
