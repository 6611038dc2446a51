"""Names and options of the methods, as plain data.

Nothing here needs JAX, so that a command line can be made of it without waiting for one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Method = Literal[
    "autoregressive",
    "ngram",
    "draft-model",
    "asd",
    "draft-verify",
    "layerskip",
    "adaspeed",
    "adaspeed-probe",
    "s2d",
]
StopName = Literal["constant", "confidence", "product", "probe", "adaptive-length"]
GammaEdge = Literal["paper", "code"]
Match = Literal["latest", "earliest", "longest", "random"]
AcceptorName = Literal["greedy", "rejection", "block"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of the methods that stand in brackets; another method does not know them.

    Attributes:
      draft: [draft-model, s2d] the draft: a directory, a .gguf file or a hub id. s2d wants one with sorted
        exits, made by `python -m training.soft`; without one, a model with sorted exits drafts for itself.
      draft_exit: [draft-model] run only its first N layers; without a draft, the model's own.
      num_draft_tokens: [all that draft] the most tokens drafted in a round, K. Default 5, with a
        stop rule 12; ngram 10, with a reference 20.
      stop_rule: [all but ngram] when to stop before K: constant (never), confidence (a token's raw draft
        probability is below gamma), product (that of all the draft's tokens together is), probe (the same with
        a probe's probabilities), adaptive-length (5, + 2 after a round fully accepted, else − 1). Several stop
        at the first of them. Default: confidence for asd and draft-verify, product for adaspeed, probe for
        adaspeed-probe, adaptive-length for s2d, constant for layerskip and draft-model.
      gamma: [all but ngram] the γ of confidence, product and probe to start with, 0 to 1. Default 0.6, of product
        and probe 0.8.
      adaptive_gamma: [all but ngram] let γ follow the acceptance rate, as in Draft & Verify.
      gamma_alpha: [all but ngram] of adaptive γ: the acceptance rate aimed at. Default 0.9.
      gamma_beta1: [all but ngram] of adaptive γ: memory of the acceptance rate. Default 0.5.
      gamma_beta2: [all but ngram] of adaptive γ: memory of γ. Default 0.9.
      gamma_epsilon: [all but ngram] of adaptive γ: its step. Default 0.01.
      gamma_edge: [all but ngram] of adaptive γ: as in the paper of Draft & Verify, or as in its authors' code,
        which leaves γ where enough was accepted of a draft of K tokens. Default paper.
      alpha: [asd] skip attention whose cosine similarity is at least this, above 0; 1 switches the rule off.
        Default: as tuned (`jaxspec tune`), else 0.985.
      every: [asd] skip every m-th layer; 0 switches the rule off. Default: as tuned, else 3, for CodeLlama 4.
      keep_last: [asd] never skip the last n layers; 0 switches the rule off. Default: as tuned, else 2, for
        CodeLlama 3.
      asd_numbers: [asd] a file with these three numbers, instead of the one beside the model.
      shared_mask: [asd] one mask for all prompts of a batch, from their mean similarities.
      plan: [draft-verify] the file that says what to skip, instead of the one beside the model. Made by
        `jaxspec search`.
      static: [asd, draft-verify] compile a program for each mask, in the background, and use it once it is
        there; else one program serves all masks.
      exit_layer: [layerskip, adaspeed, adaspeed-probe] draft with the first E layers. Default: a quarter of them.
      probe: [layerskip, adaspeed, adaspeed-probe] the probe's file, instead of the one beside the model. Made
        by `python -m training.probe`.
      thresholds: [s2d] the file with the probabilities from which on each exit is taken, instead of the one beside
        the model. Made by `jaxspec tune --method s2d`. Default: as tuned, else 0.5.
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
    stop_rule: tuple[StopName, ...] = ()
    gamma: float | None = None
    adaptive_gamma: bool = True
    gamma_alpha: float | None = None
    gamma_beta1: float | None = None
    gamma_beta2: float | None = None
    gamma_epsilon: float | None = None
    gamma_edge: GammaEdge | None = None
    alpha: float | None = None
    every: int | None = None
    keep_last: int | None = None
    asd_numbers: str | None = None
    shared_mask: bool = False
    plan: str | None = None
    static: bool = False
    exit_layer: int | None = None
    probe: str | None = None
    thresholds: str | None = None
    ngram_max: int | None = None
    ngram_min: int | None = None
    match: Match | None = None
    reference: tuple[str, ...] = ()
    acceptor: AcceptorName | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            *(("stop_rule", rule, get_args(StopName)) for rule in self.stop_rule),
            ("match", self.match, get_args(Match)),
            ("gamma_edge", self.gamma_edge, get_args(GammaEdge)),
            ("acceptor", self.acceptor, get_args(AcceptorName)),
        ):
            if value is not None and value not in known:
                raise ValueError(f"unknown {name} {value!r}; give one of {', '.join(known)}")


# What only an adaptive γ has, and what any γ has; rules with a γ, and the stop rule of each method that has one.
ADAPTIVE = ("gamma_alpha", "gamma_beta1", "gamma_beta2", "gamma_epsilon", "gamma_edge")
_GAMMA = ("gamma", "adaptive_gamma", *ADAPTIVE)
_WITH_GAMMA = {"confidence", "product", "probe"}
_USUAL_RULE: dict[Method, StopName] = {
    "draft-model": "constant",
    "asd": "confidence",
    "draft-verify": "confidence",
    "layerskip": "constant",
    "adaspeed": "product",
    "adaspeed-probe": "probe",
    "s2d": "adaptive-length",
}
_EXIT = ("exit_layer", "probe")
# What else each method reads; `acceptor` belongs to all.
_OPTIONS: dict[Method, tuple[str, ...]] = {
    "autoregressive": (),
    "ngram": ("num_draft_tokens", "ngram_max", "ngram_min", "match", "reference"),
    "draft-model": ("draft", "draft_exit"),
    "asd": ("alpha", "every", "keep_last", "asd_numbers", "shared_mask", "static"),
    "draft-verify": ("plan", "static"),
    "layerskip": _EXIT,
    "adaspeed": _EXIT,
    "adaspeed-probe": _EXIT,
    "s2d": ("draft", "thresholds"),
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


def stop_rules(method: str, options: MethodOptions) -> tuple[StopName, ...]:
    """The stop rules asked for, else the method's usual one; none for a method without."""
    name = check_method(method)
    return (options.stop_rule or (_USUAL_RULE[name],)) if name in _USUAL_RULE else ()


def options_for(method: str, options: MethodOptions) -> MethodOptions:
    """The options that `method` reads, the others unset; for giving one set of options to several methods."""
    known = {*_OPTIONS[check_method(method)], "acceptor"}
    rules = stop_rules(method, options)
    if rules:
        known |= {"num_draft_tokens", "stop_rule"}
    if _WITH_GAMMA & set(rules):
        known |= set(_GAMMA)
    if "probe" not in rules:
        known -= {"probe"}
    names = {field.name for field in dataclasses.fields(MethodOptions)} - known
    defaults = MethodOptions()
    return dataclasses.replace(options, **{name: getattr(defaults, name) for name in names})


def options_given(options: MethodOptions) -> dict[str, Any]:
    """The options that were set, by name of field."""
    names = [field.name for field in dataclasses.fields(MethodOptions)]
    unset = MethodOptions()
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(unset, name)}
