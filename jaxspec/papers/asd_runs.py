"""The runs of ASD and of Draft & Verify: what is made ready on tuning prompts, and what is measured in turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.oracle import Oracle
from jaxspec.drafting.asd import ASD as Drafting
from jaxspec.drafting.asd import admg
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.asd_numbers import ASDNumbers
from jaxspec.io.method_files import write_plan
from jaxspec.methods import ASD, DraftVerify, Method
from jaxspec.papers import baselines
from jaxspec.papers.workbench import Measured, Workbench, law
from jaxspec.protocol import Drafter
from jaxspec.tuning.agreement import proposed
from jaxspec.tuning.asd import ablation, tune_asd
from jaxspec.tuning.costs import Costs
from jaxspec.tuning.inspect import inspect_model
from jaxspec.tuning.options import ASDGrid, SearchOptions, Sweep
from jaxspec.tuning.search import found_by, search
from jaxspec.tuning.texts import prepare_texts

# The longest draft, as in Draft & Verify.
K = 12
# Masks that a search tries, by Bayesian optimisation and as many at random, and prompts that it tries them on; settings
# of ASD that the grid holds besides the usual α, and prompts of that.
TRIALS, SEARCHED_PROMPTS = 40, 8
GRID, GRID_PROMPTS = ASDGrid(everys=(0, 3, 5), keep_lasts=(0, 2)), 4
SHORT_TEXT = 32
# Draft lengths of the best constant, of ASD's draft and of the truncations.
CONSTANTS, TRUNCATED = (1, 2, 4, 8), (1, 4)
CALIBRATED, SHIFTED = "code", "stories"

AS_PRINTED, TUNED, SEARCHED = "ASD, the paper's numbers", "ASD, tuned", "Draft & Verify"
ELSEWHERE, THERE = f"{SEARCHED}, searched on {SHIFTED}", f"{SEARCHED}, searched on {CALIBRATED}"
# After the names of the ablation's rows.
OF_TUNED = ", tuned"


@dataclasses.dataclass(frozen=True)
class Found:
    """The mask that a search has found.

    Attributes:
      method: Draft & Verify with it.
      trials: masks that were tried.
      seconds: that it took.
      costs: by which it judged masks.
    """

    method: Method
    trials: int
    seconds: float
    costs: Costs | None


# Which kinds of tuning prompts a mask is searched on (None: all), and the name of its files.
_SEARCHES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    SEARCHED: ("search", None),
    THERE: (f"search-{CALIBRATED}", (CALIBRATED,)),
    ELSEWHERE: (f"search-{SHIFTED}", (SHIFTED,)),
}


def search_masks(bench: Workbench) -> dict[str, Found]:
    """What the searches find, by the name of their run; they judge by the same costs, so that only prompts differ."""
    found: dict[str, Found] = {}
    for run, (name, kinds) in _SEARCHES.items():
        found[run] = _search(bench, name, kinds, next((one.costs for one in found.values()), None))
    return found


def _search(bench: Workbench, name: str, kinds: Sequence[str] | None, costs: Costs | None) -> Found:
    """What `jaxspec search` finds in few trials; the plan lies in the workbench's directory."""
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


def tune_numbers(bench: Workbench) -> dict[str, Any]:
    """ASD's numbers by a small grid: the fastest, and the ablation of a setting whose rules all count."""

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
        return {
            "best": found["results"][0],
            "ablation": found["ablation"],
            "settings": found["settings"],
            "distinct": found["distinct"],
            "seconds": time.perf_counter() - began,
        }

    return bench.once("grid", compute, grid=dataclasses.asdict(GRID), prompts=GRID_PROMPTS)


def cosines(bench: Workbench) -> dict[str, Any]:
    """Of `jaxspec inspect`: similarities and times of the sublayers."""

    def compute() -> dict[str, Any]:
        found = inspect_model(
            bench.lm,
            bench.encoded("tuning"),
            max_new_tokens=min(SHORT_TEXT, bench.options.max_new_tokens),
            on_progress=lambda what: bench.on_progress(f"cosines: {what}"),
        )
        return {name: found[name] for name in ("similarity", "time_ms", "live_tokens")}

    return bench.once("cosines", compute)


def _fitting(lm: LanguageModel, numbers: ASDNumbers) -> ASDNumbers:
    return dataclasses.replace(numbers, keep_last=min(numbers.keep_last, lm.config.num_layers))


def asd(lm: LanguageModel, numbers: ASDNumbers, **options: Any) -> ASD:
    """ASD with these numbers, as far as the model has layers to keep, and K as usual if no other is given."""
    return ASD(**{"num_draft_tokens": K, **dataclasses.asdict(_fitting(lm, numbers)), **options})


def chosen(bench: Workbench, tuned: ASDNumbers) -> dict[str, Method]:
    """The baselines that have numbers, by the name of their run: the fastest on the tuning prompts."""
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
        sampling=law(temperature),
        carry_gamma=True,
        peers=peers,
        models=short.models,
    )


def _ideal(bench: Workbench, tuned: ASDNumbers) -> Any:
    """ASD's draft under a stop rule that knows where it goes wrong, as far as one pass over the text tells.

    In that pass the draft reads its own keys and values of the text; in a round, the model's own up to where it begins.
    """
    lm, size = bench.lm, bench.options.max_new_tokens
    numbers = _fitting(lm, tuned)
    own = Drafting(
        lm.config,
        jnp.float32(numbers.alpha),
        jnp.int32(numbers.every),
        jnp.int32(numbers.keep_last),
        num_draft_tokens=K,
    )
    say = jax.jit(proposed, static_argnames="config")

    def drafter(prompt: Sequence[int], text: Sequence[int]) -> Drafter:
        padded = [*text, *[0] * (size - len(text))]
        texts, similarities = prepare_texts(lm, [prompt], [padded])
        with jax.default_device(lm.device):
            plan = admg(similarities[0, :, 0], own.alpha, own.every, own.keep_last)
            said = np.asarray(say(lm.config, lm.params, texts, plan))[0]
        right = np.append(True, said == np.asarray(padded)[1:])
        right[len(text) :] = False
        return dataclasses.replace(own, rule=Oracle(jnp.asarray(right)))

    return baselines.ideal(bench, drafter)


def rules_apart(bench: Workbench, grid: dict[str, Any]) -> Measured:
    """The rows of the ablation, of the paper's numbers and of tuned ones."""
    methods: dict[str, Method] = {
        name: asd(bench.lm, numbers) for name, numbers in ablation(ASDNumbers()).items()
    }
    for row in grid["ablation"]:
        numbers = ASDNumbers(*(row[name] for name in ("alpha", "every", "keep_last")))
        methods[row["rules"] + OF_TUNED] = asd(bench.lm, numbers)
    return bench.measure("ablation", "reporting", methods, carry_gamma=True)
