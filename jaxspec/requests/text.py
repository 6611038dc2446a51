"""Converts the tokens of one row to text: incremental decoding, and stop strings that cross token boundaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.io.tokenizers.tokenizer import REPLACEMENT, Detokenizer, Tokenizer


class Token(NamedTuple):
    """One generated token, with the details of its round.

    Attributes:
      id: the token id.
      drafted: whether it was an accepted draft token; otherwise the target's own token, the last of its round.
      proposed: the number of draft tokens that its round verified.
      round: the number of its round, from 1; 0 for the first token, which comes from the prefill.
      log_prob: its log-probability under the model's raw distribution (temperature 1, no filter); None if not
        requested.
      top: the ids of the likeliest tokens in its place, as many as were requested, each with its log-probability.

    Examples:
      >>> Token(7, drafted=True, proposed=3, round=1).drafted
      True
    """

    id: int
    drafted: bool = False
    proposed: int = 0
    round: int = 0
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def likeliest(token: Token, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Returns `token.top` as JSON objects with `id`, `text` (see `Tokenizer.alone`; None without one) and `logprob`."""
    return [
        {"id": id, "text": tokenizer and tokenizer.alone(id)[0], "logprob": number}
        for id, number in token.top
    ]


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces.

    The first is the one that ends first, and of those that end at the same character the one that begins first. Another
    rule, such as the first to begin, would depend on the pieces: a string that is complete cannot wait for another that
    began before it.

    Args:
      stops: strings that end the text; may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes new text; returns the text that is before any possible stop string, and whether one was found."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            before, self._held = self._held[: min(found)[1]], ""
            return before, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def flush(self) -> str:
        """Returns the text that was held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class RowText:
    """The text of one row.

    Args:
      detokenizer: None for a model without a tokenizer; there is then no text.
      stops: stop strings.
      silent: ids of the tokens that end the text and are not part of it.
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
        """Whether tokens are converted to text."""
        return self._detokenizer is not None

    def by_token(self) -> TokenTexts | None:
        """Returns a converter of the same tokens, one by one, before the first is pushed; None without a tokenizer."""
        return None if self._detokenizer is None else TokenTexts(self._detokenizer, self._silent)

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, int, bool]:
        """Takes new tokens, `last` if no more will come.

        Returns:
          New text that is final, how many of the tokens belong to the row, and whether a stop string ended it.
        """
        if self._detokenizer is None:
            return "", len(tokens), False
        gained = ""
        # A stop string ends the row at the token that completes it, so the tokens are pushed one at a time.
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

    def spans(self, tokens: Sequence[Token], last: bool) -> list[tuple[str, bool]]:
        """Takes new tokens one by one, `last` if no more will come.

        Returns:
          The new text that each token makes final, and whether the token was an accepted draft token.
        """
        found = [
            (self.push([token.id], last and at == len(tokens))[0], token.drafted)
            for at, token in enumerate(tokens, 1)
        ]
        return found if tokens or not last else [(self.push([], True)[0], False)]


class TokenText(NamedTuple):
    """The text of one token of a row.

    Attributes:
      text: the text that the token completes; "" for the first bytes of a character.
      log_prob: see `Token`; None for the first token of a prompt.
      raw: the bytes of the token.
      top: the likeliest tokens in its place. Their texts are those of `Tokenizer.alone`, except that of this token.
      offset: the number of characters before the text.
    """

    text: str
    log_prob: float | None
    raw: bytes = b""
    top: tuple[TokenText, ...] = ()
    offset: int = 0


class _Waiting(NamedTuple):
    """A token whose text is not certain yet, because it may belong to a stop string."""

    text: str
    token: Token
    raw: bytes
    num_held: int  # the characters at its end that a later token completes
    num_open: int  # the bytes of them


class TokenTexts:
    """The texts of the tokens of one row; together they are the row's text.

    The text of a token does not depend on stop strings, except that the one that is found cuts it.

    Args:
      detokenizer: at the beginning of the text.
      silent: as in `RowText`.
    """

    def __init__(self, detokenizer: Detokenizer, silent: frozenset[int]) -> None:
        self._detokenizer, self._silent = detokenizer, silent
        self._waiting: deque[_Waiting] = deque()
        self._room = 0  # the number of characters of the row's text that belong to waiting tokens

    def push(self, tokens: Sequence[Token], text: str, last: bool) -> list[TokenText]:
        """Takes new tokens and the new text of the row, `last` if no more will come.

        Returns:
          The tokens whose characters are in the row's text so far, in order; at the end all that are left.
        """
        self._waiting += map(self._waiting_token, tokens)
        self._room += len(text)
        rest = self._detokenizer.flush() if last else ""
        for at in reversed(range(len(self._waiting) if rest else 0)):
            end = self._waiting[at]
            if end.num_held:  # the last token that has text
                self._waiting[at] = end._replace(text=end.text + rest, num_held=0, num_open=0)
                break
        found, alone = [], self._detokenizer.tokenizer.alone
        while self._waiting:
            own, token, raw, num_held, num_open = self._waiting[0]
            # A token that begins a character waits for its end.
            if not last and len(own) + min(num_held, 1) > self._room:
                break
            self._waiting.popleft()
            cut = own[self._room :]
            self._room -= len(own) - len(cut)
            if cut or (num_held and not self._room):
                raw = raw[: max(len(raw) - len(cut.encode()) - num_open, 0)]
            written = TokenText(own.removesuffix(cut), token.log_prob, raw)
            top = (
                written._replace(log_prob=number)
                if id == token.id
                else TokenText(alone(id)[0], number, alone(id)[1])
                for id, number in token.top
            )
            found.append(written._replace(top=tuple(top)))
        return found

    def _waiting_token(self, token: Token) -> _Waiting:
        if token.id in self._silent:
            return _Waiting("", token, b"", 0, 0)
        before = self._detokenizer.num_held
        text = self._detokenizer.push([token.id])
        part = self._detokenizer.tokenizer.part(token.id)
        # Bytes before this token that form no character are those of other tokens.
        raw = part or text.removeprefix(REPLACEMENT * before).encode()
        return _Waiting(text, token, raw, self._detokenizer.num_held, self._detokenizer.num_open)


def row_text(
    tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str], silent: Sequence[int] = ()
) -> RowText:
    """Returns the empty text after a prompt's tokens; see `RowText`."""
    return RowText(None if tokenizer is None else tokenizer.stream(prompt), stops, silent)
