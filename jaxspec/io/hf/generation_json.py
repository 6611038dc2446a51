"""Reads `generation_config.json`: sampling parameters, penalties, bans, and the settings that are not applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.host.messages import shown
from jaxspec.io.hf.values import flag, number, token_ids, whole

# Bounds, because the compiled program has one comparison for each token of an n-gram and of a bad word.
_MOST_NGRAM, _MOST_WORD = 64, 64
# The sampling parameters, which have an effect only if do_sample is true.
SAMPLING: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "temperature": lambda values: number(values, "temperature", 0, 1e6),
    "top_k": lambda values: whole(values, "top_k", 0),
    "top_p": lambda values: number(values, "top_p", 1e-30, 1),
    "min_p": lambda values: number(values, "min_p", 0, 1),
}
# The settings that a caller may also give for a text.
PENALTIES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "repetition_penalty": lambda values: number(values, "repetition_penalty", 1e-6, 1e6),
    "presence_penalty": lambda values: number(values, "presence_penalty", -1e6, 1e6),
    "frequency_penalty": lambda values: number(values, "frequency_penalty", -1e6, 1e6),
}
_RULES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "suppress_tokens": lambda values: token_ids(values, "suppress_tokens"),
    "begin_suppress_tokens": lambda values: token_ids(values, "begin_suppress_tokens"),
    "bad_words_ids": lambda values: _words(values["bad_words_ids"]),
    "no_repeat_ngram_size": lambda values: whole(values, "no_repeat_ngram_size", 0, _MOST_NGRAM),
    "min_new_tokens": lambda values: whole(values, "min_new_tokens", 0),
    "min_length": lambda values: whole(values, "min_length", 0),
}
# Settings of transformers that change a text and are not applied here, with their neutral values besides null; first
# those that have an effect only if do_sample is true.
_UNAPPLIED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}
_UNAPPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "forced_decoder_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "dola_layers": (),
    "stop_strings": ([], ""),
}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The bans of a model's `generation_config.json`, as transformers defines them.

    Attributes:
      suppress_tokens: tokens that never occur.
      begin_suppress_tokens: tokens that do not begin a text.
      bad_words_ids: sequences of tokens that do not occur.
      no_repeat_ngram_size: n; no n tokens in a row occur twice; 0 for no ban.
      min_new_tokens: no end of text before this number of tokens; None to use `min_length`.
      min_length: the same, but counting the prompt's tokens too.
    """

    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    min_new_tokens: int | None = None
    min_length: int = 0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Rules:
        """Returns the rules among the keys of a `generation_config.json`; null counts as absent.

        Raises:
          ValueError: a value is invalid for its key; one line.
        """
        return cls(**{name: read(values) for name, read in _RULES.items() if values.get(name) is not None})

    @property
    def bad_tokens(self) -> tuple[int, ...]:
        """Returns the bad words that consist of one token."""
        return tuple(word[0] for word in self.bad_words_ids if len(word) == 1)

    @property
    def longer_words(self) -> tuple[tuple[int, ...], ...]:
        """Returns the bad words that consist of several tokens."""
        return tuple(word for word in self.bad_words_ids if len(word) > 1)


NO_RULES = Rules()


def defaults_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the applied keys of a `generation_config.json`; null is left out.

    Raises:
      ValueError: do_sample is not true or false, or a value is invalid; one line.
    """
    applied = ("do_sample", *SAMPLING, *PENALTIES, *_RULES)
    given = {key: content[key] for key in applied if content.get(key) is not None}
    # Without sampling these keys have no effect, and some repositories have invalid values for them.
    for key in SAMPLING.keys() & given.keys() if flag(given, "do_sample") else ():
        SAMPLING[key](given)
    for key in PENALTIES.keys() & given.keys():
        PENALTIES[key](given)
    Rules.from_values(given)
    return given


def unapplied(content: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a `generation_config.json` that would change a text and are not applied."""
    settings = _UNAPPLIED | (_UNAPPLIED_SAMPLING if content.get("do_sample") is True else {})
    return [
        key
        for key, neutral in settings.items()
        if content.get(key) is not None and content[key] is not False and content[key] not in neutral
    ]


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    words: list[Any] = value if isinstance(value, list) else [None]
    for word in words:
        whole_ids = isinstance(word, list) and all(
            type(token) is int and 0 <= token < 2**31 for token in word
        )
        if not whole_ids or not 0 < len(word) <= _MOST_WORD:
            raise ValueError(
                f"bad_words_ids is {shown(value)}; expected a list of lists of 1 to {_MOST_WORD} token ids"
            )
    return tuple(dict.fromkeys(tuple(word) for word in words))
