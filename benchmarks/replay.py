"""Which stop rule is best? `python -m benchmarks.replay --model DIR` counts rounds exactly and prices them.

Early-exit drafts under each stop rule of AdaSPEED's comparison (Table I of its paper), as in `benchmarks.stop_rules`,
but without a clock in the comparison: what every exit would say along greedy texts is recorded once, each rule is
replayed on the records (`jaxspec.bench.replay`, whose counts are the engine's), and rounds are priced with times of
their parts, measured once, or with rows that cost nothing, as on an accelerator. So every rule is tuned over all exits
and numbers, γ carried from text to text or not, on tuning prompts, and reported on others.

Ratios between rules have no noise but that of the prices, which they share; a speed-up over plain decoding is a
prediction, without the loop's own overhead (`benchmarks.prediction` measures that).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import command, exit_costs
from benchmarks.replay_report import show
from jaxspec.bench import prompts as prompt_set
from jaxspec.bench import replay
from jaxspec.bench.suite_options import check_budget
from jaxspec.bench.timing import OnProgress
from jaxspec.cli.options import ModelOptions
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import method_files
from jaxspec.model import llama
from jaxspec.protocol import StopRule, rising_widths
from jaxspec.stopping import (
    AdaptiveGamma,
    ConfidenceBelow,
    Constant,
    DraftProbability,
    Estimate,
    Probe,
    ProductBelow,
)
from training.data import tasks

CONSTANTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
GAMMAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Rule → how it is made of γ and the records' estimates (0: the draft's probability, 1: the probe's).
THRESHOLDS: dict[str, Callable[[Any], StopRule]] = {
    "confidence": lambda gamma: ConfidenceBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "product": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(0)),
    "probe": lambda gamma: ProductBelow(AdaptiveGamma(gamma), replay.Recorded(1)),
}
# The papers' own numbers, untuned: K of LayerSkip, γ0 of AdaSPEED (Table I) for its rules and Draft & Verify's.
PAPER = {"constant": 5, "confidence": 0.8, "product": 0.8, "probe": 0.8}


@dataclasses.dataclass(frozen=True)
class Options:
    """Stop rules of early exits, replayed on greedy texts and priced.

    Attributes:
      exit_layers: an exit to try. Default: an eighth, a quarter, three eighths and half of the layers.
      num_draft_tokens: K of the rules other than the constant one.
      tasks: prompts are tasks of the kinds that `python -m training.layerskip` trains the project's targets on, none of
        them trained on; else the project's prompts.
      kinds: a kind of prompts. Default: all.
      num_prompts: how many of each kind to tune with, and how many others to report on.
      max_new_tokens: of each text, which may end before.
      repeats: turns in which the parts of rounds are timed.
      json: print one JSON object and nothing else.
    """

    exit_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--exit-layer"})
    num_draft_tokens: int = 16
    tasks: bool = False
    kinds: tuple[str, ...] = dataclasses.field(default=(), metadata={"option": "--kind"})
    num_prompts: int = 10
    max_new_tokens: int = 128
    repeats: int = 9
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_budget(self.max_new_tokens)
        for name in ("num_draft_tokens", "num_prompts", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


class Case(NamedTuple):
    """A rule at an exit with its number: K, or the γ that it starts from and whether γ goes from text to text."""

    rule: str
    exit_layer: int
    number: float | None
    carried: bool = False


# Of one case: by text, its tokens after the first and its rounds by drafted tokens int[K + 1], drafted, accepted.
Rounds = list[tuple[int, np.ndarray, int, int]]
# By exit, a record of every text.
Records = dict[int, list[replay.Record]]


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Records texts, replays every case on them, and prices the rounds.

    Returns:
      `model`, `device`, `plain_ms` per token, and by pricing ("measured", "free_rows") `rules`: by rule the `case`
      that was fastest in tuning and, on the reporting prompts, its `speedup` over plain decoding, `over_constant` and
      `over_paper_constant` (the tuned constant rule, and K = 5 at the same exit), each with a 95 % bootstrap interval
      over prompts, and `mean_draft_length` and `draft_acceptance_rate`; `untuned`: the same for the papers' numbers at
      the constant rule's exit; `tuning`: of every case its speed-up there.

    Raises:
      ValueError, FileNotFoundError: an unknown kind of prompt, a number outside its range, or what `load` raises.
    """
    lm = options.model.load()
    depth = lm.config.num_layers
    exits = options.exit_layers or tuple(sorted({max(1, depth * part // 8) for part in (1, 2, 3, 4)}))
    for layer in exits:
        if not 1 <= layer < depth:
            raise ValueError(f"exit_layers is {layer}; the model has {depth} layers, give 1 to {depth - 1}")
    splits = _prompts(lm, options)
    longest = max(options.num_draft_tokens, *CONSTANTS)
    records: dict[str, Records] = {}
    for split, prompts in splits.items():
        on_progress(f"writing {len(prompts)} {split} texts")
        texts = lm.generate(prompts, max_new_tokens=options.max_new_tokens, ignore_eos=True)
        records[split] = {layer: [] for layer in exits}
        for layer in exits:
            draft = (lm.config.truncated(layer), llama.truncate(lm.params, layer))
            estimates = _estimates(lm, layer)
            for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                on_progress(f"recording exit {layer}, {split} text {number + 1} of {len(prompts)}")
                records[split][layer].append(
                    replay.record(lm, prompt, text.tokens, draft, estimates, longest)
                )
    rounds: dict[Case, dict[str, Rounds]] = {}
    for layer in exits:
        on_progress(f"replaying exit {layer}")
        rounds |= _cases(lm, layer, {split: some[layer] for split, some in records.items()}, options)
    live = statistics.median(len(prompt) for prompt in splits["reporting"]) + options.max_new_tokens // 2
    costs = exit_costs.measure(
        lm, exits, CONSTANTS, options.num_draft_tokens, int(live), options.repeats, on_progress=on_progress
    )
    return {
        "model": lm.name,
        "device": lm.device.device_kind,
        "num_prompts": {split: len(prompts) for split, prompts in splits.items()},
        "plain_ms": costs.plain,
        "costs": {"draft_ms": costs.draft, "last_ms": costs.last,
                  "verify_ms": {f"{layer}/{rows}": ms for (layer, rows), ms in costs.verify.items()}},
        "pricing": {
            name: _priced(rounds, costs, options.num_draft_tokens, free)
            for name, free in (("measured", False), ("free_rows", True))
        },
    }  # fmt: skip


def _prompts(lm: LanguageModel, options: Options) -> dict[str, list[list[int]]]:
    """Tuning and reporting prompts; no prompt is among both."""
    each = options.num_prompts
    if options.tasks:
        kinds = options.kinds or tuple(tasks.FAMILIES)
        # Behind those that models are trained on; no two tasks of a family have one prompt.
        made = {kind: list(tasks.tasks(kind, tasks.USUAL_COUNT + 2 * each))[-2 * each :] for kind in kinds}
        split = {kind: [task.prompt for task in some] for kind, some in made.items()}
        known = {
            "tuning": {kind: some[:each] for kind, some in split.items()},
            "reporting": {kind: some[each:] for kind, some in split.items()},
        }
    else:
        known = {name: dict(prompt_set.load(name)) for name in ("tuning", "reporting")}  # type: ignore[arg-type]
    kinds = options.kinds or tuple(known["tuning"])
    for kind in kinds:
        if kind not in known["tuning"]:
            raise ValueError(f"unknown kind of prompt {kind!r}; give some of {', '.join(known['tuning'])}")
    most = min(len(some[kind]) for some in known.values() for kind in kinds)
    if each > most:
        raise ValueError(f"num_prompts is {each}; give 1 to {most}")
    return {
        # One of each kind, then the next of each: a carried γ is that of all kinds.
        split: [lm.encode(some[kind][number]) for number in range(each) for kind in kinds]
        for split, some in known.items()
    }


def _estimates(lm: LanguageModel, exit_layer: int) -> tuple[Estimate, ...]:
    """The draft's own probability, and that of the exit's probe where the model has one for greedy texts."""
    path = _probe(lm, exit_layer)
    if path is None:
        return (DraftProbability(),)
    read = method_files.read_probe(path, lm.fingerprint, lm.config.hidden_size, exit_layer, "greedy")
    direction = jnp.asarray(read.v) * lm.params["norm"].astype(jnp.float32)
    return DraftProbability(), Probe(direction, jnp.float32(read.b), jnp.float32(lm.config.rms_norm_eps))


def _probe(lm: LanguageModel, exit_layer: int) -> Path | None:
    """The file of an exit's probe for greedy texts, if the model has one."""
    path = None if lm.directory is None else method_files.probe_path(lm.directory, exit_layer, "greedy")
    return path if path is not None and path.is_file() else None


def _cases(
    lm: LanguageModel, layer: int, records: dict[str, list[replay.Record]], options: Options
) -> dict[Case, dict[str, Rounds]]:
    """Every rule with every number at one exit, replayed on both splits."""
    found: dict[Case, dict[str, Rounds]] = {}
    for number in CONSTANTS:
        found[Case("constant", layer, number)] = {
            split: _rounds([replay.replay(one, Constant(), number) for one in some], 0)
            for split, some in records.items()
        }
    oracles = {
        split: [replay.replay(one, replay.KnowsText(), options.num_draft_tokens) for one in some]
        for split, some in records.items()
    }
    found[Case("oracle", layer, None)] = {split: _rounds(some, 0) for split, some in oracles.items()}
    rules = [rule for rule in THRESHOLDS if rule != "probe" or _probe(lm, layer)]
    for rule, carried in itertools.product(rules, (False, True)):
        gamma = np.array(GAMMAS, np.float32)
        taken: dict[str, list[replay.Counts]] = {}
        # Where γ is carried, it goes through the tuning prompts first, and then on through the reporting ones.
        for split in ("tuning", "reporting"):
            taken[split] = []
            for one in records[split]:
                made = THRESHOLDS[rule](jnp.asarray(gamma))
                counts = replay.replay(one, made, options.num_draft_tokens, len(GAMMAS))
                taken[split].append(counts)
                if carried and counts.gamma is not None:
                    gamma = np.clip(counts.gamma, 0.0, 1.0)
        for row, first in enumerate(GAMMAS):
            found[Case(rule, layer, first, carried)] = {
                split: _rounds(some, row) for split, some in taken.items()
            }
    return found


def _rounds(counts: Sequence[replay.Counts], row: int) -> Rounds:
    return [(one.tokens, one.rounds[row], int(one.drafted[row]), int(one.accepted[row])) for one in counts]


def _priced(
    rounds: dict[Case, dict[str, Rounds]], costs: exit_costs.ExitCosts, longest: int, free: bool
) -> dict[str, Any]:
    """The fastest case of each rule in tuning, and its figures on the reporting prompts."""

    def ms(case: Case, split: str) -> np.ndarray:
        """float[texts]: what each text takes."""
        length = int(case.number or 0) if case.rule == "constant" else longest
        widths = (length + 1,) if case.rule == "constant" else rising_widths(length)
        price = costs.price(case.exit_layer, widths, free)
        return np.array(
            [sum(n * price[d] for d, n in enumerate(one)) for _, one, _, _ in rounds[case][split]]
        )

    def plain(split: str) -> np.ndarray:
        return np.array([tokens * costs.plain for tokens, *_ in next(iter(rounds.values()))[split]])

    tuned = {case: float(plain("tuning").sum() / ms(case, "tuning").sum()) for case in rounds}
    best = {
        rule: max((case for case in rounds if case.rule == rule), key=tuned.__getitem__)
        for rule in dict.fromkeys(case.rule for case in rounds)
    }
    constant = best["constant"]
    paper_constant = Case("constant", constant.exit_layer, PAPER["constant"])

    def figures(case: Case) -> dict[str, Any]:
        taken = rounds[case]["reporting"]
        drafted, accepted = (sum(one[at] for one in taken) for at in (2, 3))
        return {
            "case": case._asdict(),
            "speedup": _ratio(plain("reporting"), ms(case, "reporting")),
            "over_constant": _ratio(ms(constant, "reporting"), ms(case, "reporting")),
            "over_paper_constant": _ratio(ms(paper_constant, "reporting"), ms(case, "reporting")),
            "mean_draft_length": drafted / max(1, sum(int(one[1].sum()) for one in taken)),
            "draft_acceptance_rate": accepted / max(1, drafted),
        }

    untuned = [Case("constant", constant.exit_layer, PAPER["constant"])] + [
        Case(rule, constant.exit_layer, PAPER[rule], carried)
        for rule in THRESHOLDS
        for carried in (False, True)
        if Case(rule, constant.exit_layer, PAPER[rule], carried) in rounds
    ]
    return {
        "rules": {rule: figures(case) for rule, case in best.items()},
        "untuned": [figures(case) for case in untuned],
        "tuning": [{**case._asdict(), "speedup": speedup} for case, speedup in tuned.items()],
    }


def _ratio(above: np.ndarray, below: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """The ratio of two sums over texts, and its 95 % interval by the bootstrap over texts."""
    drawn = np.random.default_rng(0).integers(len(above), size=(resamples, len(above)))
    low, high = np.quantile(above[drawn].sum(axis=1) / below[drawn].sum(axis=1), (0.025, 0.975))
    return float(above.sum() / below.sum()), float(low), float(high)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints tables, or JSON; returns the exit status."""
    return command.run("benchmarks.replay", Options, measure, show, argv)


if __name__ == "__main__":
    sys.exit(main())
