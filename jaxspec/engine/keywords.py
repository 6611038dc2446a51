"""The keyword arguments of a call: their types for editors and type checkers, and what is wrong with them."""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.engine.requests import flag, real, shown, whole
from jaxspec.method_options import AcceptorName, GammaEdge, Match, MethodOptions, StopName
from jaxspec.protocol import Drafter

if typing.TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel


# What other libraries call our arguments, where the spelling is too far from ours to be a guess.
_ELSEWHERE = {"stop_sequences": "stop", "stop_strings": "stop"}


class MethodKeywords(TypedDict, total=False):
    """The fields of `MethodOptions` as keyword arguments."""

    draft: str | os.PathLike | LanguageModel | None
    draft_exit: int | None
    num_draft_tokens: int | None
    stop_rule: StopName | Sequence[StopName]
    gamma: float | None
    adaptive_gamma: bool
    gamma_alpha: float | None
    gamma_beta1: float | None
    gamma_beta2: float | None
    gamma_epsilon: float | None
    gamma_edge: GammaEdge | None
    alpha: float | None
    every: int | None
    keep_last: int | None
    asd_numbers: str | os.PathLike | None
    shared_mask: bool
    plan: str | os.PathLike | None
    static: bool
    exit_layer: int | None
    probe: str | os.PathLike | None
    thresholds: str | os.PathLike | None
    ngram_max: int | None
    ngram_min: int | None
    match: Match | None
    reference: str | os.PathLike | Sequence[str | os.PathLike]
    acceptor: AcceptorName | None


class Keywords(MethodKeywords, total=False):
    """What `LanguageModel.generate` takes beside prompts and `stream`."""

    method: str | Drafter | tuple[Drafter, Any]
    max_new_tokens: int | Sequence[int | None] | None
    temperature: float | Sequence[float | None] | None
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float | None] | None
    min_p: float | Sequence[float | None] | None
    seed: int | Sequence[int]
    stop: str | Sequence[str] | None
    ignore_eos: bool
    logprobs: bool
    chat: bool
    max_batch: int


def method_options(given: Mapping[str, Any]) -> MethodOptions:
    """The options of a method from keyword arguments: numbers may be NumPy's, lists and paths what tuples and strings
    are.

    Raises:
      ValueError: there is no such option, or it takes something else.
    """
    kinds = typing.get_type_hints(MethodOptions)
    for name in given:
        if name not in kinds:
            raise ValueError(
                unknown(name, [*kinds, *Keywords.__annotations__, "prompts", "messages", "stream"])
            )
    return MethodOptions(**{name: _taken(name, value, kinds[name]) for name, value in given.items()})


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of an argument that does not exist, with the one that was perhaps meant."""
    guess = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, list(known), n=1)
    remedy = f"perhaps you meant {guess[0]}" if guess else "see help(jaxspec.LanguageModel.generate)"
    return f"unknown option {name}; {remedy}"


def _taken(name: str, value: Any, kind: Any) -> Any:
    """The value as a field of type `kind` has it."""
    if typing.get_origin(kind) is tuple:
        values = [value] if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray)):
            raise ValueError(f"{name} is {shown(value)}; give a text or several")
        return tuple(_text(f"{name}[{index}]", one) for index, one in enumerate(values))
    if kind is bool:
        return flag(name, value)
    if value is None:
        return None
    number = {int: whole, float: real}.get(typing.get_args(kind)[0])
    return number(name, value) if number is not None else _text(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name} is {shown(value)}; give a text")
    return os.fspath(value)
