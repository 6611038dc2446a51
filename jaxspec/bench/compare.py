"""The same prompt by several methods, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.bench.carry import carrying
from jaxspec.bench.speed import acceptance, first_token_ms, speed_ratio, tokens_per_second
from jaxspec.bench.timing import OnProgress, Run, measure_runs
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.requests import Conversation, Prompt
from jaxspec.engine.results import Result
from jaxspec.methods import Method, registry

BASELINE = "autoregressive"


def compare(
    lm: LanguageModel,
    prompt: Prompt | Conversation,
    methods: Sequence[str | Method],
    options: Mapping[str, Any] | None = None,
    *,
    repeats: int = 3,
    carry_gamma: bool = False,
    on_progress: OnProgress = lambda what: None,
    **generation: Any,
) -> dict[str, Any]:
    """Times methods on one prompt, warm and in turns, against plain decoding.

    Each method generates once before anything is timed, which compiles it. Speeds and speed-ups are those of
    `bench.speed`.

    Args:
      lm: the model.
      prompt: the text to go on from, token ids or messages.
      methods: names, or methods with their options; autoregressive, the baseline, comes first whether named or not.
      options: of the methods that are named, by name; each takes those it reads.
      repeats: how often each generates, timed.
      carry_gamma: each text of a method starts from the γ that its last text ended with, as Draft & Verify's authors
        evaluate; else every text starts from γ0.
      on_progress: called with what is being done.
      **generation: arguments of `lm.generate`, such as max_new_tokens.

    Returns:
      `model`, `device`, `dtype`, and `results`: a list of `method`, `text` (null where the model has no tokenizer),
      `tokens` (how many were generated), `first_token_ms` (from the call to the first token, nothing compiling, the
      median over the repeats), `tokens_per_second`, `speedup` over autoregressive, what `speed.acceptance` gives, and
      `identical_to_autoregressive` (null where tokens are drawn at random, as then only the distributions are
      equal), and `lossy` (true where not even these are, see `engine.results.Result`). A number that is not defined,
      such as the acceptance rate of no drafts, is null.

    Raises:
      ValueError: unknown method, `repeats` below 1, an option that none of the methods knows, or what
        `lm.generate` raises.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    named = registry.share([name for name in methods if isinstance(name, str)], options or {})
    chosen: dict[str, Method] = {BASELINE: registry.find(BASELINE)()}
    for one in methods:
        chosen[str(one)] = named[one] if isinstance(one, str) else one
    names = list(chosen)

    generate = carrying(lm.generate) if carry_gamma else lm.generate

    def run_of(method: Method) -> Run:
        return lambda prompt, turn: generate(prompt, method=method, **generation)

    # Asked for all together, so that what is wrong with any of them is known before the first one compiles.
    for method in chosen.values():
        lm.stream(prompt, method=method, **generation)
    runs = {name: run_of(method) for name, method in chosen.items()}
    (results,) = measure_runs([lm], runs, [prompt], repeats, on_progress=on_progress)
    given = generation.get("temperature")
    sampling = (lm.defaults.get("temperature", 0.0) if given is None else given) > 0
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "dtype": lm.precision,
        "results": [_entry(name, results[name], results[BASELINE], sampling) for name in names],
    }


def _entry(name: str, results: list[Result], baseline: list[Result], sampling: bool) -> dict[str, Any]:
    first = results[0]
    return {
        "method": name,
        "text": first.text,
        "tokens": first.statistics.num_tokens,
        "first_token_ms": statistics.median(map(first_token_ms, results)),
        "tokens_per_second": tokens_per_second([results]),
        "speedup": speed_ratio([results], [baseline])[0],
        **acceptance([results]),
        "identical_to_autoregressive": None if sampling else first.tokens == baseline[0].tokens,
        "lossy": first.lossy,
    }
