"""Names and options of the methods, as plain data.

Nothing here needs JAX, so that a command line can be made of it without waiting for one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Method = Literal["autoregressive", "draft-model", "ngram"]
StopName = Literal["constant", "confidence", "adaptive-length"]
Match = Literal["latest", "earliest", "longest", "random"]
AcceptorName = Literal["greedy", "rejection", "block"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of the methods that stand in brackets; another method does not know them.

    Attributes:
      draft: [draft-model] the draft: a directory or a hub id.
      draft_exit: [draft-model] run only its first N layers; without a draft, the model's own.
      num_draft_tokens: [draft-model, ngram] the most tokens drafted in a round, K. Default 5, with a
        stop rule 12; ngram 10, with a reference 20.
      stop_rule: [draft-model] when to stop before K: constant (never), confidence (a token's raw draft
        probability is below gamma), adaptive-length (5, + 2 after a round fully accepted, else − 1).
        Several stop at the first of them.
      gamma: [draft-model] the γ of confidence, 0 to 1. Default 0.6.
      ngram_max: [ngram] longest run of tokens looked for. Default 3, with a reference 5.
      ngram_min: [ngram] shortest. Default 1.
      match: [ngram] which of several places: latest, earliest, longest continuation, or random among those.
      reference: [ngram] text files in which alone to search (LLMA), instead of prompt and output.
      acceptor: how drafts are accepted; the text keeps its law with each. Default greedy at temperature 0,
        else block.
    """

    draft: str | None = None
    draft_exit: int | None = None
    num_draft_tokens: int | None = None
    # In a call, `stop` has stop strings; on a command line those are --stop-string.
    stop_rule: tuple[StopName, ...] = dataclasses.field(default=(), metadata={"option": "--stop"})
    gamma: float | None = None
    ngram_max: int | None = None
    ngram_min: int | None = None
    match: Match | None = None
    reference: tuple[str, ...] = ()
    acceptor: AcceptorName | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            *(("stop_rule", rule, get_args(StopName)) for rule in self.stop_rule),
            ("match", self.match, get_args(Match)),
            ("acceptor", self.acceptor, get_args(AcceptorName)),
        ):
            if value is not None and value not in known:
                raise ValueError(f"unknown {name} {value!r}; give one of {', '.join(known)}")


# What each method reads; `acceptor` belongs to all.
_OPTIONS: dict[Method, tuple[str, ...]] = {
    "autoregressive": (),
    "draft-model": ("draft", "draft_exit", "num_draft_tokens", "stop_rule", "gamma"),
    "ngram": ("num_draft_tokens", "ngram_max", "ngram_min", "match", "reference"),
}


def check_method(method: str) -> Method:
    """The name, if it is one.

    Raises:
      ValueError: it is not; the message lists those that are.
    """
    for known in METHODS:
        if method == known:
            return known
    raise ValueError(f"unknown method {method!r}; the methods are {', '.join(METHODS)}")


def options_for(method: str, options: MethodOptions) -> MethodOptions:
    """The options that `method` reads, the others unset; for giving one set of options to several methods."""
    known = {*_OPTIONS[check_method(method)], "acceptor"}
    names = {field.name for field in dataclasses.fields(MethodOptions)} - known
    defaults = MethodOptions()
    return dataclasses.replace(options, **{name: getattr(defaults, name) for name in names})


def option_name(name: str) -> str:
    """How a field of `MethodOptions` is called on a command line, dashes included."""
    field = next(field for field in dataclasses.fields(MethodOptions) if field.name == name)
    return field.metadata.get("option", "--" + name.replace("_", "-"))


def options_given(options: MethodOptions) -> dict[str, Any]:
    """The options that were set, by name of field."""
    names = [field.name for field in dataclasses.fields(MethodOptions)]
    unset = MethodOptions()
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(unset, name)}
