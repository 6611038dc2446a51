"""The types of the keyword arguments of `LanguageModel.generate` and `stream`, for type checkers.

They repeat the fields of `GenerationOptions` and of the methods' classes: a type checker reads no fields at run time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jaxspec.grammar import Grammar, TokenTable
from jaxspec.methods.acceptors import AcceptorName
from jaxspec.methods.base import Method
from jaxspec.methods.resources import HasModel
from jaxspec.requests.reading import Integers, Numbers

MethodName = Literal[
    "adaspeed",
    "adaspeed-probe",
    "asd",
    "auto",
    "autoregressive",
    "clasp",
    "dflash",
    "draft-model",
    "draft-verify",
    "dspark",
    "eagle",
    "eagle3",
    "grammar",
    "hybrid",
    "hydra",
    "kangaroo",
    "knapspec",
    "layerskip",
    "medusa",
    "ngram",
    "quantised",
    "s2d",
    "suffix",
    "token-recycling",
    "uno",
]


class Keywords(TypedDict, total=False):
    """The fields of `GenerationOptions`, followed by the options of all methods."""

    acceptor: AcceptorName | None
    exact: bool
    max_new_tokens: Integers
    min_new_tokens: Integers
    n: int
    temperature: Numbers
    top_k: Integers
    top_p: Numbers
    min_p: Numbers
    repetition_penalty: Numbers
    presence_penalty: Numbers
    frequency_penalty: Numbers
    logit_bias: Mapping[int, float] | None
    grammar: Grammar | TokenTable | Sequence[Grammar | TokenTable | None] | None
    json_schema: Any
    choices: Sequence[str] | None
    regex: str | None
    seed: Integers
    stop: str | Sequence[str] | None
    stop_token_ids: Integers
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    chat: bool
    chat_template_kwargs: Mapping[str, Any] | None
    max_batch: int
    adaptive_gamma: bool
    alpha: float | None
    among: Method | Sequence[Method | str] | str
    asd_numbers: os.PathLike[str] | str | None
    draft: HasModel | os.PathLike[str] | str | None
    draft_bits: Literal[8, 4] | None
    draft_exit: int | None
    draft_vocab: int | os.PathLike[str] | str | None
    draft_window: Sequence[int]
    drawn_tree: bool
    every: int | None
    exit_layer: int | None
    explain: bool
    first: Method | str | None
    gamma: float | None
    keep_last: int | None
    ngram_max: int | None
    ngram_min: int | None
    no_tree: bool
    num_draft_tokens: int | None
    plan: os.PathLike[str] | str | None
    probe: os.PathLike[str] | str | None
    reference: Sequence[str] | str
    refresh: int | None
    second: Method | str | None
    shared_mask: bool
    single_pass: bool
    skip_layers: int | None
    static: bool | None
    stop_rule: (
        Literal["constant", "confidence", "product", "probe", "adaptive-length"]
        | Sequence[Literal["constant", "confidence", "product", "probe", "adaptive-length"]]
    )
    suffix_factor: float | None
    suffix_max: int | None
    suffix_min_prob: float | None
    thresholds: os.PathLike[str] | str | None
    tree: str | None
