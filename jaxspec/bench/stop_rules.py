"""When to stop drafting? `python -m jaxspec.bench.stop_rules --model DIR` prints JSON.

Early-exit drafts under each stop rule of AdaSPEED's comparison (Table I of its paper): constant K as in
LayerSkip, the confidence of the last token as in Draft & Verify, the product over the draft, and the
product of a probe's estimates; for each exit layer, against plain decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from typing import Any

import tyro

from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.timing import check_budget, interleaved
from jaxspec.bench.totals import acceptance, tokens_per_second
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.results import Result
from jaxspec.io.method_files import law_name, probe_path

# Rule → method and options.
RULES: dict[str, dict[str, Any]] = {
    "constant": {"method": "layerskip"},
    "confidence": {"method": "layerskip", "stop_rule": "confidence"},
    "product": {"method": "adaspeed"},
    "probe": {"method": "adaspeed-probe"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Early exits under each stop rule, beside plain decoding.

    Attributes:
      model: a directory; by default the embedded model.
      exit_layers: which exits; by default all from 1 to half of the layers.
      kinds: of prompts; by default stories.
      num_prompts: of each kind.
      max_new_tokens: of each generation.
      temperature: 0 for greedy.
      top_p: of the law, where temperature is above 0.
      constant: K of the constant rule; the others have 12.
      repeats: interleaved turns.
      dtype, device: as everywhere.
    """

    model: str | None = None
    exit_layers: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ("stories",)
    num_prompts: int = 3
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    constant: int = 5
    repeats: int = 3
    dtype: str | None = None
    device: str | None = None


def measure(options: Options) -> dict[str, Any]:
    """Generates from each prompt under every rule and exit.

    Returns:
      `model`, `device`, `law`, `plain_tokens_per_second`, `rules`: by rule and exit layer `tokens_per_second`,
      `speedup` over plain decoding, `mean_acceptance_length`, `draft_acceptance_rate`,
      `mean_draft_length`; `best`: by rule the exit that was fastest, and its speed over the best of the
      constant rule. A probe's exits are those that have one for the law beside the model.

    Raises:
      ValueError, FileNotFoundError: an unknown kind of prompt, or what `load` and `generate` raise.
    """
    check_budget(options.max_new_tokens)
    known = prompt_set.load()
    for kind in options.kinds:
        if kind not in known:
            raise ValueError(f"unknown kind of prompt {kind!r}; give some of {', '.join(known)}")
    lm = load(options.model, dtype=options.dtype, device=options.device)
    prompts = [text for kind in options.kinds for text in known[kind][: options.num_prompts]]
    top_p = options.top_p if options.temperature else 1.0
    law = law_name(options.temperature, top_p=top_p)
    generate = functools.partial(
        lm.generate,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=True,
        temperature=options.temperature,
        top_p=top_p,
        # Not the model's own defaults: the law is the one that is named.
        top_k=0,
        min_p=0.0,
    )
    exits = options.exit_layers or tuple(range(1, max(2, lm.config.num_layers // 2 + 1)))
    cases: dict[tuple[str, int], dict[str, Any]] = {("plain", 0): {}} | {
        (rule, exit_layer): chosen
        | {"exit_layer": exit_layer}
        | ({"num_draft_tokens": options.constant} if rule == "constant" else {})
        for rule, chosen in RULES.items()
        for exit_layer in exits
        if rule != "probe" or _has_probe(lm, exit_layer, law)
    }
    results: dict[Any, list[list[Result]]] = {case: [] for case in cases}

    def run(case: Any) -> None:
        # One prompt after another: a batch would mix rounds of different rows.
        results[case].append([generate(prompt, **cases[case]) for prompt in prompts])

    for case in cases:
        run(case)
        results[case].clear()
    lm.executables.wait()
    interleaved({str(case): functools.partial(run, case) for case in cases}, options.repeats)
    plain = _speed(results["plain", 0])
    rules: dict[str, dict[int, dict[str, Any]]] = {}
    for rule, exit_layer in list(cases)[1:]:
        rules.setdefault(rule, {})[exit_layer] = _entry(results[rule, exit_layer], plain)
    best = {rule: max(by_exit, key=lambda e: by_exit[e]["speedup"]) for rule, by_exit in rules.items()}
    base = rules["constant"][best["constant"]]["speedup"]
    return {
        "model": lm.name,
        "device": lm.device.device_kind,
        "law": law,
        "plain_tokens_per_second": plain,
        "rules": rules,
        "best": {
            rule: {"exit_layer": exit_layer, "over_constant": rules[rule][exit_layer]["speedup"] / base}
            for rule, exit_layer in best.items()
        },
    }


def _has_probe(lm: LanguageModel, exit_layer: int, law: str) -> bool:
    return lm.directory is not None and probe_path(lm.directory, exit_layer, law).is_file()


def _speed(turns: list[list[Result]]) -> float:
    """Tokens a second over all prompts, the median of the turns."""
    return statistics.median(filter(None, map(tokens_per_second, turns)))


def _entry(turns: list[list[Result]], plain: float) -> dict[str, Any]:
    speed = _speed(turns)
    return {"tokens_per_second": speed, "speedup": speed / plain, **acceptance(turns[0])}


def main() -> None:
    """Prints the report as JSON."""
    try:
        print(json.dumps(measure(tyro.cli(Options)), indent=2))
    except (ValueError, OSError) as error:
        sys.exit(f"jaxspec: error: {error}")


if __name__ == "__main__":
    main()
