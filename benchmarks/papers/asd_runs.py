"""The runs of ASD and of Draft & Verify: their preparation on tuning prompts, and their measurement in turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import baselines
from benchmarks.papers.oracle import Oracle
from benchmarks.papers.workbench import Measured, Workbench, distribution
from jaxspec.drafting.asd_drafter import ASD as Drafting
from jaxspec.drafting.asd_drafter import admg
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.method_files import write_plan
from jaxspec.measuring.tuning.agreement import proposed
from jaxspec.measuring.tuning.asd_sweep import tune_asd
from jaxspec.measuring.tuning.inspection import inspect_model
from jaxspec.measuring.tuning.mask_search import found_by, search
from jaxspec.measuring.tuning.round_costs import Costs
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.measuring.tuning.tuning_options import ASDGrid, SearchOptions, Sweep
from jaxspec.methods import ASD, DraftVerify, Method
from jaxspec.protocol import Drafter

# The longest draft, as in Draft & Verify.
K = 12
# Masks that a search tries, by Bayesian optimisation and as many at random, and the number of its prompts; settings of
# ASD in the grid for the usual α, and the number of its prompts.
TRIALS, SEARCHED_PROMPTS = 40, 8
GRID, GRID_PROMPTS = ASDGrid(everys=(0, 3, 5), keep_lasts=(0, 2)), 4
SHORT_TEXT = 32
# Draft lengths of the best constant, of ASD's draft and of the truncations.
CONSTANTS, TRUNCATED = (1, 2, 4, 8), (1, 4)
CALIBRATED, SHIFTED = "code", "stories"

AS_PRINTED, TUNED, SEARCHED = "ASD, the paper's numbers", "ASD, tuned", "Draft & Verify"
ELSEWHERE, THERE = f"{SEARCHED}, searched on {SHIFTED}", f"{SEARCHED}, searched on {CALIBRATED}"
# The paper's claims about a search on another kind of work; the second is of one of ASD's rows.
LOSES = f"{SEARCHED} is slower after a search on another kind of work."
ADAPTS = f"After a search on another kind of work, {{run}}, is faster than {SEARCHED}."
# Suffix of the ablation's rows with tuned numbers.
OF_TUNED = ", tuned"


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a mask search.

    Attributes:
      method: Draft & Verify with the mask.
      trials: number of masks tried.
      seconds: duration of the search.
      costs: the costs with which it judged masks.
    """

    method: Method
    trials: int
    seconds: float
    costs: Costs | None


# Task types of the tuning prompts of a search (None: all), and the name of its files.
_SEARCHES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    SEARCHED: ("search", None),
    THERE: (f"search-{CALIBRATED}", (CALIBRATED,)),
    ELSEWHERE: (f"search-{SHIFTED}", (SHIFTED,)),
}


def search_masks(bench: Workbench) -> dict[str, Found]:
    """Runs the searches, by the name of their run. They use the same costs, so that only the prompts differ."""
    found: dict[str, Found] = {}
    for run, (name, kinds) in _SEARCHES.items():
        found[run] = _search(bench, name, kinds, next((one.costs for one in found.values()), None))
    return found


def _search(bench: Workbench, name: str, kinds: Sequence[str] | None, costs: Costs | None) -> Found:
    """Runs `jaxspec search` with few trials; stores the plan in the workbench's directory."""
    lm = bench.lm
    options = SearchOptions(
        trials=TRIALS,
        keep_first_last=lm.config.num_layers > 2,
        max_new_tokens=min(SearchOptions().tokens, bench.options.max_new_tokens),
        seed=bench.options.seed,
    )
    found = search(
        lm,
        bench.encoded("tuning", kinds, SEARCHED_PROMPTS),
        options,
        bench.directory / f"{name}.trials.jsonl",
        resume=bench.options.resume,
        costs=costs,
        on_progress=lambda what: bench.on_progress(f"{name}: {what}"),
        on_trial=lambda kind, done, budget, best: bench.on_progress(
            f"{name}: {kind} search, {done} of {budget}"
        ),
    )
    if found.interrupted:
        raise KeyboardInterrupt
    path = bench.directory / f"{name}.plan.json"
    write_plan(path, lm.fingerprint, found.best.plan, found_by(found, options))
    trials = sum(map(len, found.trials.values()))
    return Found(DraftVerify(plan=path, num_draft_tokens=K), trials, sum(found.seconds.values()), found.costs)


def ablation(setting: ASDNumbers) -> dict[str, ASDNumbers]:
    """The rows of the paper's ablation (Table 5) for a setting with all rules on, by name."""
    return {
        "all rules": setting,
        "cosine and rule 2": dataclasses.replace(setting, every=0),
        "cosine alone": dataclasses.replace(setting, every=0, keep_last=0),
        "rules 1 and 2": dataclasses.replace(setting, alpha=1.0),
    }


def tune_numbers(bench: Workbench) -> dict[str, Any]:
    """Finds ASD's numbers on a small grid: the fastest, and the ablation of the fastest setting with all rules on."""

    def compute() -> dict[str, Any]:
        began = time.perf_counter()
        found = tune_asd(
            bench.lm,
            bench.encoded("tuning", most=GRID_PROMPTS),
            GRID,
            Sweep(min(SHORT_TEXT, bench.options.max_new_tokens), repeats=1),
            on_progress=lambda what: bench.on_progress(f"grid: {what}"),
            on_measured=lambda done, total, best: bench.on_progress(f"grid: {done} of {total} turns"),
        )
        if found["interrupted"]:
            raise KeyboardInterrupt
        numbers = (ASDNumbers(row["alpha"], row["every"], row["keep_last"]) for row in found["results"])
        base = next((one for one in numbers if one.rules == 3), None)
        rows = {} if base is None else ablation(base)
        return {
            "best": found["results"][0],
            "ablation": [{"rules": name, **dataclasses.asdict(one)} for name, one in rows.items()],
            "settings": found["settings"],
            "distinct": found["distinct"],
            "seconds": time.perf_counter() - began,
        }

    # The baseline is recorded, because earlier versions ranked settings by their speed relative to `auto`.
    known = {"grid": dataclasses.asdict(GRID), "prompts": GRID_PROMPTS, "baseline": "autoregressive"}
    return bench.once("grid", compute, **known)


def cosines(bench: Workbench) -> dict[str, Any]:
    """Returns similarities and times of the sublayers, from `jaxspec inspect`."""

    def compute() -> dict[str, Any]:
        found = inspect_model(
            bench.lm,
            bench.encoded("tuning"),
            max_new_tokens=min(SHORT_TEXT, bench.options.max_new_tokens),
            on_progress=lambda what: bench.on_progress(f"cosines: {what}"),
        )
        return {name: found[name] for name in ("similarity", "time_ms", "live_tokens")}

    return bench.once("cosines", compute)


def fitting(lm: LanguageModel, numbers: ASDNumbers) -> ASDNumbers:
    """Returns the numbers, limited to the model's layers."""
    return dataclasses.replace(numbers, keep_last=min(numbers.keep_last, lm.config.num_layers))


def asd(lm: LanguageModel, numbers: ASDNumbers, **options: Any) -> ASD:
    """Makes ASD with these numbers, limited to the model's layers, with the usual K by default."""
    return ASD(**{"num_draft_tokens": K, **dataclasses.asdict(fitting(lm, numbers)), **options})


def chosen(bench: Workbench, tuned: ASDNumbers) -> dict[str, Method]:
    """Returns the baselines with tuned numbers, by the name of their run: the fastest on the tuning prompts."""
    constant = {
        f"best constant: {TUNED}, K {count}": asd(
            bench.lm, tuned, stop_rule=("constant",), num_draft_tokens=count
        )
        for count in CONSTANTS
    }
    truncated = {
        f"untrained: {name}": method for name, method in baselines.truncations(bench.lm, TRUNCATED).items()
    }
    both: dict[str, Method] = {**truncated, **constant}
    measured = bench.measure("tuning", "tuning", both)
    best = [measured.best([*group]) for group in (truncated, constant) if group]
    return {run: both[run] for run in best}


def against_plain(
    bench: Workbench,
    temperature: float,
    kinds: Sequence[str] | None,
    methods: dict[str, Method],
    tuned: ASDNumbers,
) -> Measured:
    short = baselines.cut(bench, temperature)
    peers = dict(short.peers)
    if not temperature:
        peers[baselines.ORACLE] = _ideal(bench, tuned)
    return bench.measure(
        f"temperature-{temperature:g}",
        "reporting",
        methods,
        kinds=kinds,
        sampling=distribution(temperature),
        carry_gamma=True,
        peers=peers,
        models=short.models,
    )


def _ideal(bench: Workbench, tuned: ASDNumbers) -> Any:
    """Returns ASD's draft under a stop rule that stops at its first error, as found by one pass over the text.

    This is approximate: in that pass the draft reads its own keys and values of the text; in a round it reads the
    model's own, up to the beginning of the draft.
    """
    lm, size = bench.lm, bench.options.max_new_tokens
    numbers = fitting(lm, tuned)
    own = Drafting(
        lm.config,
        jnp.float32(numbers.alpha),
        jnp.int32(numbers.every),
        jnp.int32(numbers.keep_last),
        num_draft_tokens=K,
    )
    propose = jax.jit(proposed, static_argnames="config")

    def drafter(prompt: Sequence[int], text: Sequence[int]) -> Drafter:
        padded = [*text, *[0] * (size - len(text))]
        texts, similarities = prepare_texts(lm, [prompt], [padded])
        with jax.default_device(lm.device):
            plan = admg(similarities[0, :, 0], own.alpha, own.every, own.keep_last)
            tokens = np.asarray(propose(lm.config, lm.params, texts, plan))[0]
        right = np.append(True, tokens == np.asarray(padded)[1:])
        right[len(text) :] = False
        return dataclasses.replace(own, rule=Oracle(jnp.asarray(right)))

    return baselines.ideal(bench, drafter)


def rules_apart(bench: Workbench, grid: dict[str, Any]) -> Measured:
    """Measures the rows of the ablation, with the paper's numbers and with tuned ones."""
    methods: dict[str, Method] = {
        name: asd(bench.lm, numbers) for name, numbers in ablation(ASDNumbers()).items()
    }
    for row in grid["ablation"]:
        numbers = ASDNumbers(*(row[name] for name in ("alpha", "every", "keep_last")))
        methods[row["rules"] + OF_TUNED] = asd(bench.lm, numbers)
    return bench.measure("ablation", "reporting", methods, carry_gamma=True)
