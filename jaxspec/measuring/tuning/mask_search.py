"""Searches for the mask of Draft & Verify and records the trials in a log."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io import records
from jaxspec.io.methods.method_files import Kind
from jaxspec.measuring.line_log import LineLog
from jaxspec.measuring.tuning.kinds import MOST_CENTRES, groups, k_means
from jaxspec.measuring.tuning.masks import MaskSpace
from jaxspec.measuring.tuning.objectives import Agreement
from jaxspec.measuring.tuning.proposals import Proposer, propose_bayesian, propose_random
from jaxspec.measuring.tuning.round_costs import Costs, measure_costs
from jaxspec.measuring.tuning.texts import continuations, prepare_texts
from jaxspec.measuring.tuning.tuning_options import SearchOptions
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import fetched

# Format of the trial log.
FORMAT = "jaxspec.search/1"
_PROPOSERS: dict[str, Proposer] = {
    "bayesian": propose_bayesian,
    "random": propose_random,
    # Used if there are at most as many masks as trials.
    "exhaustive": propose_random,
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mask and its score.

    Attributes:
      plan: the mask.
      score: the value to maximise.
      measured: the figures behind the score, by name, as in `jaxspec search --json`.
    """

    plan: LayerPlan
    score: float
    measured: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      trials: the trials of each strategy (bayesian, random, exhaustive), in order; the requested strategy is first.
        A mask has the same score in all of them.
      seconds: time of each strategy for proposals and evaluations, including earlier sessions. An evaluation shared
        by two strategies counts only for the first.
      budget: the number of different masks that each strategy tries.
      interrupted: whether the search ended early.
      costs: costs of the parts of a round; None if the search ended before they were measured.
    """

    trials: dict[str, list[Trial]]
    seconds: dict[str, float]
    budget: int
    interrupted: bool
    costs: Costs | None

    @property
    def best(self) -> Trial:
        """The best of all trials."""
        return self.best_of(self.best_kind)

    @property
    def best_kind(self) -> str:
        """The strategy that found the best trial."""
        return max(
            (kind for kind, trials in self.trials.items() if trials), key=lambda k: self.best_of(k).score
        )

    def best_of(self, kind: str) -> Trial:
        """The best trial of a strategy with at least one trial."""
        return max(self.trials[kind], key=lambda trial: trial.score)


class Watcher(Protocol):
    """Called after every trial with the strategy, its number of trials, their maximum, and its best trial."""

    def __call__(self, kind: str, done: int, budget: int, best: Trial) -> None: ...


@shows_progress
def search(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: SearchOptions,
    log: Path,
    *,
    resume: bool = True,
    costs: Costs | None = None,
    on_progress: OnProgress = lambda step: None,
    on_trial: Watcher = lambda kind, done, budget, best: None,
) -> Search:
    """Tries masks until the budget is used or the search is interrupted (Ctrl-C).

    No mask is evaluated twice. Every trial is logged before the next begins, so a later call with the same model,
    prompts and options resumes after the last trial; it may have a larger `options.trials`.

    Args:
      lm: the model.
      prompts: token ids.
      options: the options of the search.
      log: the log file of trials.
      resume: whether to continue the log; otherwise it starts empty.
      costs: costs of the parts of a round, e.g. from another search that is compared with this one; None to measure
        them.
      on_progress: called with a description of the current step.
      on_trial: called after each trial.

    Raises:
      ValueError: the log belongs to another search, or the options do not suit the model.
      OSError: the log cannot be written.
      KeyboardInterrupt: interrupted before the first trial.
    """
    space = MaskSpace(lm.config.num_layers, options.keep_first_last)
    record = LineLog(log, _header(lm, prompts, options), of="search", resume=resume)
    budget = min(options.trials, space.size)
    kinds = _kinds(options, space)
    found = _Record(record, space.num_layers)
    trials = {kind: found.trials(kind) for kind in kinds}
    seconds = {kind: found.seconds(kind) for kind in kinds}
    interrupted = False
    if costs is not None and found.costs is None:
        found.add_costs(costs)
    try:
        evaluate: Callable[[LayerPlan], dict[str, Any]] | None = None
        for kind in kinds:
            while len(trials[kind]) < budget:
                began = time.perf_counter()
                tried = [(trial.plan, trial.score) for trial in trials[kind]]
                plan = _PROPOSERS[kind](space, tried, options.seed)
                trial, new = found.known(plan), False
                if trial is None:
                    if evaluate is None:
                        waited = time.perf_counter()
                        evaluate = _evaluator(lm, prompts, options, found, on_progress)
                        began += time.perf_counter() - waited
                    measured = evaluate(plan)
                    trial, new = Trial(plan, measured["score"], measured), True
                taken = time.perf_counter() - began
                found.add(kind, trial, 1e3 * taken, new)
                trials[kind].append(trial)
                seconds[kind] += taken
                on_trial(kind, len(trials[kind]), budget, max(trials[kind], key=lambda trial: trial.score))
    except KeyboardInterrupt:
        interrupted = True
        trials = {kind: found.trials(kind) for kind in kinds}
        seconds = {kind: found.seconds(kind) for kind in kinds}
        if not any(trials.values()):
            raise
    return Search(trials, seconds, budget, interrupted, found.costs)


def search_kinds(
    lm: LanguageModel,
    prompts: Sequence[tuple[str, Sequence[int]]],
    log: Path,
    run: Callable[..., Search],
) -> list[tuple[Kind, Search]]:
    """Searches a mask for each kind of prompts; returns nothing if a search is interrupted.

    Args:
      lm: the model.
      prompts: the kind of each prompt, see `texts.read_kinds`, and its token ids.
      log: the log of the search over all prompts; that of a kind has the number of the kind in its name.
      run: `search` with its other arguments given, but for the prompts and their `log`.
    """
    kinds, tokens = zip(*prompts, strict=True)
    # Only the vectors are used, so any two tokens serve as the texts after the prompts.
    vectors = np.asarray(fetched(prepare_texts(lm, tokens, [[0, 0]] * len(tokens))[2]))
    found = []
    for number, (kind, members) in enumerate(groups(kinds, vectors).items(), 1):
        try:
            result = run([tokens[at] for at in members], log=log.with_suffix(f".{number}{log.suffix}"))
        except KeyboardInterrupt:
            return []
        if result.interrupted:
            return []
        # Five digits: a file of text has to hold them.
        centres = tuple(
            tuple(float(f"{x:.5g}") for x in one) for one in k_means(vectors[members], MOST_CENTRES)[0]
        )
        plan = result.best.plan
        found.append((Kind(kind, plan.skip_attention, plan.skip_mlp, centres), result))
    return found


def _kinds(options: SearchOptions, space: MaskSpace) -> tuple[str, ...]:
    if space.size <= options.trials:
        return ("exhaustive",)
    # The random baseline costs only seconds.
    return ("random",) if options.random else ("bayesian", "random")


def _header(lm: LanguageModel, prompts: Sequence[Sequence[int]], options: SearchOptions) -> dict[str, Any]:
    """The inputs that every trial depends on."""
    return {
        "format": FORMAT,
        "model": lm.fingerprint,
        "dtype": lm.precision,
        "device": lm.device_kind,
        "keep_first_last": options.keep_first_last,
        "max_new_tokens": options.tokens,
        "seed": options.seed,
        "prompts": hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16],
    }


class _Record:
    """The log's entries as trials and costs."""

    def __init__(self, log: LineLog, num_layers: int) -> None:
        self._log, self._num_layers = log, num_layers
        try:
            self._read = [(entry, self._trial(entry)) for entry in log.entries if "search" in entry]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{log.path} has a trial that cannot be read; add resume=False to begin again"
            ) from None
        self._by_plan = {trial.plan: trial for _, trial in self._read}

    def trials(self, kind: str) -> list[Trial]:
        """The trials of one strategy, in order."""
        return [trial for entry, trial in self._read if entry["search"] == kind]

    def seconds(self, kind: str) -> float:
        """The total time of the trials of one strategy."""
        seconds: float = sum(1e-3 * entry["elapsed_ms"] for entry, _ in self._read if entry["search"] == kind)
        return seconds

    def known(self, plan: LayerPlan) -> Trial | None:
        """The trial of a mask, evaluated by any strategy; None for an untried mask."""
        return self._by_plan.get(plan)

    @property
    def costs(self) -> Costs | None:
        """The costs measured at the start of the search and used for all its trials; None if the log has none."""
        for entry in self._log.entries:
            if "costs" in entry:
                return records.record(Costs, entry["costs"], str(self._log.path))
        return None

    def add_costs(self, costs: Costs) -> None:
        """Appends the costs to the log."""
        self._log.add({"costs": dataclasses.asdict(costs)})

    def add(self, kind: str, trial: Trial, elapsed_ms: float, new: bool) -> None:
        """Appends a trial to the log."""
        entry = {
            "search": kind,
            "evaluated": new,
            "elapsed_ms": elapsed_ms,
            "skip_attention": trial.plan.skip_attention,
            "skip_mlp": trial.plan.skip_mlp,
            **trial.measured,
        }
        self._log.add(entry)
        self._read.append((entry, trial))
        self._by_plan[trial.plan] = trial

    def _trial(self, entry: dict[str, Any]) -> Trial:
        plan = LayerPlan.skipping(self._num_layers, entry["skip_attention"], entry["skip_mlp"])
        own = ("search", "evaluated", "elapsed_ms", "skip_attention", "skip_mlp")
        return Trial(plan, float(entry["score"]), {k: v for k, v in entry.items() if k not in own})


def _evaluator(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: SearchOptions,
    record: _Record,
    on_progress: OnProgress,
) -> Callable[[LayerPlan], dict[str, Any]]:
    on_progress("generating the model's own text")
    texts, *_ = prepare_texts(lm, prompts, continuations(lm, prompts, options.tokens, on_progress))
    costs = record.costs
    if costs is None:
        costs = measure_costs(lm, on_progress=on_progress)
        record.add_costs(costs)
    on_progress("compiling")
    return Agreement(lm, texts, costs)


def report(
    lm: LanguageModel,
    found: Search,
    options: SearchOptions,
    kinds: Sequence[tuple[Kind, Search]] = (),
) -> dict[str, Any]:
    """The report of a search, as printed by `jaxspec search --json`.

    Returns:
      `model`, `device`, `dtype`, the options, `num_masks` (the size of the search space), `budget`, `interrupted`,
      `costs` (see `round_costs.Costs`); `searches`, each with `search` (bayesian, random,
      exhaustive), `trials`, `seconds`, `best_trial` (1-based), and its `skip_attention`, `skip_mlp`, `score` and
      the figures behind the score; `best`, the best of them; `kinds`, the best of the search for each kind of prompts.
    """
    space = MaskSpace(lm.config.num_layers, options.keep_first_last)
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "dtype": lm.precision,
        **_chosen(options),
        "num_masks": space.size,
        "budget": found.budget,
        "interrupted": found.interrupted,
        "costs": None if found.costs is None else dataclasses.asdict(found.costs),
        "searches": [_entry(found, kind) for kind, trials in found.trials.items() if trials],
        "best": _entry(found, found.best_kind),
        "kinds": [{"kind": kind.kind, **_entry(own, own.best_kind)} for kind, own in kinds],
    }


def found_by(found: Search, options: SearchOptions) -> dict[str, Any]:
    """The origin of a plan, for its file."""
    entry = _entry(found, found.best_kind)
    masks = {"skip_attention", "skip_mlp"}
    return {
        "command": "jaxspec search",
        "options": _chosen(options),
        "interrupted": found.interrupted,
        **{name: value for name, value in entry.items() if name not in masks},
    }


def _chosen(options: SearchOptions) -> dict[str, Any]:
    return {
        "keep_first_last": options.keep_first_last,
        "seed": options.seed,
        "max_new_tokens": options.tokens,
    }


def _entry(found: Search, kind: str) -> dict[str, Any]:
    best = found.best_of(kind)
    return {
        "search": kind,
        "trials": len(found.trials[kind]),
        "seconds": found.seconds[kind],
        "best_trial": 1 + found.trials[kind].index(best),
        "skip_attention": list(best.plan.skip_attention),
        "skip_mlp": list(best.plan.skip_mlp),
        **best.measured,
    }
