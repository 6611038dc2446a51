"""Method names and options become parts: the one place that knows them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.ngram import BREAK, NGram
from jaxspec.io.files import read_text
from jaxspec.method_options import (
    METHODS,
    Method,
    MethodOptions,
    check_method,
    option_name,
    options_for,
    options_given,
)
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Acceptor, Drafter, StopRule
from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant

__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Model",
    "Resources",
    "build",
    "build_acceptor",
    "check_method",
    "options_for",
    "options_given",
]


# Longer drafts only compile longer: every width of a verification is compiled.
MOST_DRAFT_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's config and parameters."""

    config: LlamaConfig
    params: Params


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a method may need from outside; each is called only if the method does.

    Attributes:
      load_draft: name of a model → the model, checked to share the target's vocabulary.
      encode: text → token ids, for references.
    """

    load_draft: Callable[[str], Model]
    encode: Callable[[str], Sequence[int]]


def build(method: str, options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    """The drafter of a method and its parameters (None if it has none).

    Raises:
      ValueError: unknown method, an option that is not the method's or outside its range.
    """
    name = check_method(method)
    foreign = options_given(options).keys() - options_given(options_for(name, options)).keys()
    if foreign:
        names = ", ".join(sorted(option_name(field) for field in foreign))
        raise ValueError(f"method {name} has no option {names}; leave it out or choose another method")
    return _BUILDERS[name](options, target, resources)


def build_acceptor(options: MethodOptions, sampling: bool) -> Acceptor:
    """The acceptor: as asked, else greedy for greedy text and block for sampled.

    Raises:
      ValueError: the greedy acceptor is asked for where texts are drawn at random.
    """
    name = options.acceptor or ("block" if sampling else "greedy")
    if name == "greedy":
        if sampling:
            raise ValueError(
                "--acceptor greedy would not follow the law at a temperature above 0; choose rejection or block"
            )
        return GreedyAcceptor()
    return RejectionAcceptor() if name == "rejection" else BlockAcceptor()


def _autoregressive(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    return Autoregressive(), None


def _draft_model(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    if options.draft is None and options.draft_exit is None:
        raise ValueError(
            "method draft-model needs a draft; give --draft DIR, or --draft-exit N for the model's own first N layers"
        )
    draft = target if options.draft is None else resources.load_draft(options.draft)
    if options.draft_exit is not None:
        draft = Model(
            draft.config.truncated(options.draft_exit), llama.truncate(draft.params, options.draft_exit)
        )
    # A rule that ends drafts early wants room for those that go well.
    most = _num_draft_tokens(options, 5 if set(options.stop_rule) <= {"constant"} else 12)
    return DraftModel(draft.config, _stop_rule(options, most), most), draft.params


def _ngram(options: MethodOptions, target: Model, resources: Resources) -> tuple[Drafter, Any]:
    reference = None
    if options.reference:
        joined: list[int] = []
        for path in options.reference:
            joined += [*resources.encode(read_text(path, "--reference wants a text file")), BREAK]
        reference = jnp.asarray(np.array(joined, np.int32))
    longest = options.ngram_max if options.ngram_max is not None else (3 if reference is None else 5)
    shortest = options.ngram_min if options.ngram_min is not None else 1
    if not 1 <= shortest <= longest <= MOST_DRAFT_TOKENS:
        raise ValueError(
            f"--ngram-min {shortest} and --ngram-max {longest} do not fit; "
            f"give 1 <= min <= max <= {MOST_DRAFT_TOKENS}"
        )
    drafter = NGram(
        reference=reference,
        match=options.match or "latest",
        ngram_max=longest,
        ngram_min=shortest,
        num_draft_tokens=_num_draft_tokens(options, 10 if reference is None else 20),
    )
    return drafter, None


_BUILDERS: dict[Method, Callable[[MethodOptions, Model, Resources], tuple[Drafter, Any]]] = {
    "autoregressive": _autoregressive,
    "draft-model": _draft_model,
    "ngram": _ngram,
}


def _stop_rule(options: MethodOptions, most: int) -> StopRule:
    if options.gamma is not None and "confidence" not in options.stop_rule:
        raise ValueError("--gamma belongs to --stop confidence; add that or leave --gamma out")
    rules: list[StopRule] = []
    for name in options.stop_rule:
        if name == "confidence":
            gamma = 0.6 if options.gamma is None else options.gamma
            if not 0 <= gamma <= 1:
                raise ValueError(f"--gamma is {gamma}; give a probability from 0 to 1")
            rules.append(ConfidenceBelow(jnp.float32(gamma)))
        elif name == "adaptive-length":
            rules.append(AdaptiveLength(jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(most)))
    if not rules:
        return Constant()
    return rules[0] if len(rules) == 1 else AnyOf(tuple(rules))


def _num_draft_tokens(options: MethodOptions, default: int) -> int:
    count = default if options.num_draft_tokens is None else options.num_draft_tokens
    if count < 1:
        raise ValueError(f"--num-draft-tokens is {count}; a drafting method needs at least 1")
    if count > MOST_DRAFT_TOKENS:
        raise ValueError(f"--num-draft-tokens is {count}; give at most {MOST_DRAFT_TOKENS}")
    return count
