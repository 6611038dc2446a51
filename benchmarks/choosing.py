"""Does the chooser find the best candidate? A simulation: `python -m benchmarks.choosing` prints a table and JSON.

Nothing is decoded. A synthetic text says at each of its places, for each candidate, whether the draft token for it
would be right, given the right ones before, and whether a draft would be found at all; so any candidate can be played
on it from any place on, and all policies are played on the same texts. What rounds cost comes from a device on paper,
or from `jaxspec profile --costs --json`. Rows are independent texts of a batch of one.

Kinds of texts: `stationary` (each text has acceptances of its own, all along), `drifting` (they walk), `adversarial`
(after 24 to 64 tokens the candidate that was the best becomes the worst, and others change), `hopeless` (no draft is
right more often than one time in five).

Policies: each candidate alone, with the length that is the best one for the prior; `auto`, with the prior fitted on
other texts; `auto, flat prior`; and the `oracle`, which chooses as `auto` does, as often, and knows the acceptances.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.bench.profile import SHAPES
from jaxspec.bench.timing import OnProgress
from jaxspec.choosing import acceptance, chooser
from jaxspec.choosing.acceptance import Prior
from jaxspec.choosing.chooser import OFF, Choice, Chooser, Prices
from jaxspec.choosing.costs import DraftCost, StepCosts, kinds
from jaxspec.deviceless.accelerators import ACCELERATORS
from jaxspec.deviceless.roofline import usual
from jaxspec.io.cost_files import parse
from jaxspec.io.files import read_json

KINDS = ("stationary", "drifting", "adversarial", "hopeless")
# The draft lengths that may be chosen.
LENGTHS = (1, 2, 3, 4, 6, 8, 10)
# Acceptance of each kind of draft over texts, as Beta counts; a lookup is right where a text repeats, else hardly ever.
_USUAL = {"early exit": (6, 4), "half the layers": (8, 3), "one layer": (8, 3), "draft model": (8, 3)}
_COPIES, _COPYING, _ELSEWHERE = 0.3, (9, 1), (1, 6)
# Rounds in which a lookup finds something, where a text repeats and elsewhere.
_FOUND = {True: 0.9, False: 0.3}
_WALK = 0.08
_BLOCK = (24, 64)
_HELD_OUT = 400
# Tokens of the prompt, which a draft's own state has not absorbed.
_PROMPT = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """The chooser alone on synthetic texts, beside an oracle and beside each candidate.

    Attributes:
      texts: of each kind.
      tokens: of each text.
      device_model: on paper, see `jaxspec profile`.
      shape: of the target.
      costs: a file with what `jaxspec profile --costs --json` printed, instead of a device on paper.
      rounds_per_choice: between two choices.
      forgetting: what is left of a count after a round.
      exploration: 1 draws acceptances from the whole of their law, 0 takes its mean.
      seed: of texts and choices.
    """

    texts: int = 10_000
    tokens: int = 256
    device_model: str = "h100"
    shape: str = "8b"
    costs: Path | None = None
    rounds_per_choice: int = 2
    forgetting: float = 0.995
    exploration: float = 0.5
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Texts:
    """T synthetic texts of N tokens for M candidates, K places more than a text has.

    Attributes:
      right: float32[T, M, N + K], the probability that a draft token for a place is right.
      found: float32[T, M], the share of places at which a draft is found.
      run: int8[T, M, N], how many draft tokens in a row are right from a place on, at most K.
      drafts: bool[T, M, N], whether a draft is found at a place.
    """

    right: np.ndarray
    found: np.ndarray
    run: np.ndarray
    drafts: np.ndarray


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Plays all policies on all kinds of texts.

    Returns:
      `device`, `shape`, `texts`, `tokens`, `seed`, `seconds`, `candidates`, `lengths` (of each alone), and by kind:
      `speedup` over plain decoding by policy (all tokens ÷ all time), `auto_over_best_fixed` (speeds),
      `slower_than_off` (the share of texts on which `auto` takes more than 3 % longer than plain decoding), `regret` by
      policy: at each of the `at` tokens, the mean time so far less the oracle's, in steps of plain decoding.

    Raises:
      ValueError: unknown names, or numbers out of range.
    """
    _check(options)
    began = time.perf_counter()
    costs, drafts = _costs(options)
    table = chooser.prices(costs, drafts, LENGTHS, live=costs.live)
    names, longest = [name for name, _ in drafts], max(LENGTHS)
    on_progress("fitting the prior")
    other = make_texts("stationary", names, _HELD_OUT, options.tokens, options.seed + 1)
    prior = _prior(table, other, options)
    accept, drafted = acceptance.mean(prior, acceptance.nothing_seen(prior, 1))
    fixed = _lengths(table, accept, drafted)
    report: dict[str, Any] = {
        "device": costs.device,
        "shape": costs.model,
        "texts": options.texts,
        "tokens": options.tokens,
        "seed": options.seed,
        "candidates": list(table.names),
        "lengths": {name: int(fixed[at]) for at, name in enumerate(table.names)},
        "kinds": {},
    }
    for kind in KINDS:
        on_progress(f"making {kind} texts")
        texts = make_texts(kind, names, options.texts, options.tokens, options.seed)
        policies = {name: _alone(at, int(fixed[at])) for at, name in enumerate(table.names)}
        flat = acceptance.flat_prior(len(table.names), longest)
        policies |= {
            "auto": _auto(table, prior, options),
            "auto, flat prior": _auto(table, flat, options),
            "oracle": _oracle(table, texts, options),
        }
        played = {}
        for name, policy in policies.items():
            on_progress(f"playing {name} on {kind} texts")
            learns = {"auto": prior, "auto, flat prior": flat}.get(name)
            played[name] = play(table, texts, policy, options, learns or prior, learning=learns is not None)
        report["kinds"][kind] = _row(played, table, options)
    return report | {"seconds": time.perf_counter() - began}


def make_texts(kind: str, names: Sequence[str], count: int, tokens: int, seed: int) -> Texts:
    """Synthetic texts of a kind, for plain decoding and the named kinds of drafts.

    Args:
      kind: one of `KINDS`.
      names: of `choosing.costs.kinds`.
      count, tokens: T, N.
      seed: with the same, the same texts.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    longest = max(LENGTHS)
    shape = (count, 1 + len(names))
    level, found = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    for at, name in enumerate(names, 1):
        if name == "lookup":
            copies = rng.random(count) < _COPIES
            level[:, at] = np.where(copies, rng.beta(*_COPYING, count), rng.beta(*_ELSEWHERE, count))
            found[:, at] = np.where(copies, _FOUND[True], _FOUND[False])
        else:
            level[:, at] = rng.beta(*_USUAL[name], count)
    if kind == "hopeless":
        level[:, 1:] = rng.uniform(0.0, 0.2, (count, len(names)))
    places = tokens + longest
    right = np.repeat(level[:, :, None], places, axis=2)
    if kind == "drifting":
        steps = rng.standard_normal(right.shape, np.float32) * np.float32(_WALK)
        logit = np.log(np.clip(level, 0.02, 0.98) / (1 - np.clip(level, 0.02, 0.98)))
        right = 1 / (1 + np.exp(-(logit[:, :, None] + np.cumsum(steps, axis=2))))
    elif kind == "adversarial":
        right = _adversarial(rng, level, places)
    right[:, OFF] = 0
    true = rng.random(right.shape, np.float32) < right
    run = np.zeros((*shape, tokens), np.int8)
    ongoing = np.ones(run.shape, bool)
    for ahead in range(longest):
        ongoing &= true[:, :, ahead : ahead + tokens]
        run += ongoing
    drafts = rng.random(run.shape, np.float32) < found[:, :, None]
    drafts[:, OFF] = False
    return Texts(right, found, run, drafts)


def _adversarial(rng: np.random.Generator, level: np.ndarray, places: int) -> np.ndarray:
    """Acceptances that change at once, after blocks of random lengths: what was the best becomes the worst."""
    count, candidates = level.shape
    right = np.empty((count, candidates, places), np.float32)
    now = level.copy()
    left = np.asarray(rng.integers(*_BLOCK, size=count))
    for place in range(places):
        over = left == 0
        if over.any():
            before = now[over]
            new = rng.uniform(0.3, 0.95, before.shape).astype(np.float32)
            new[np.arange(len(new)), before[:, 1:].argmax(axis=1) + 1] = 0.05
            now[over] = new
            left[over] = rng.integers(*_BLOCK, size=int(over.sum()))
        left -= 1
        right[:, :, place] = now
    return right


@dataclasses.dataclass(frozen=True)
class Played:
    """What a policy took.

    Attributes:
      ms: float[T, P], the time at which a text had as many tokens as each of P marks, the last of which is all.
      counts: the chooser at the end.
    """

    ms: np.ndarray
    counts: Chooser


# (where each text is, the chooser) → the choice, and the chooser after it.
Policy = Callable[[np.ndarray, Chooser], tuple[Choice, Chooser]]


def play(
    table: Prices, texts: Texts, policy: Policy, options: Options, prior: Prior, *, learning: bool
) -> Played:
    """Plays a policy on all texts.

    Args:
      table: prices.
      texts: T of them.
      policy: what chooses.
      options: says how often, and what is forgotten.
      prior: of the chooser.
      learning: whether the chooser learns from rounds.
    """
    count, num_tokens = len(texts.run), texts.run.shape[2]
    marks, rows = _marks(num_tokens), np.arange(count)
    state = chooser.begin(prior, np.full(count, _PROMPT), options.seed)
    place, ms = np.zeros(count, int), np.zeros(count)
    reached = np.full((count, len(marks)), np.nan)
    while (place < num_tokens).any():
        choice, state = policy(place, state)
        candidate, length = choice.candidate, choice.length
        behind = state.behind[rows, candidate]
        start = np.where(behind > 0, table.start_ms[candidate] + behind * table.absorb_ms[candidate], 0.0)
        ms += np.where(place < num_tokens, start, 0.0)
        for _ in range(options.rounds_per_choice):
            live = place < num_tokens
            if not live.any():
                break
            here = np.minimum(place, num_tokens - 1)
            drafted = np.where(texts.drafts[rows, candidate, here], length, 0)
            accepted = np.minimum(texts.run[rows, candidate, here], drafted)
            committed = np.where(live, np.minimum(accepted + 1, num_tokens - place), 0)
            ms += np.where(live, table.round_ms[candidate, drafted], 0.0)
            place += committed
            new = (place[:, None] >= marks) & np.isnan(reached)
            reached = np.where(new, ms[:, None], reached)
            if learning:
                state = chooser.after_round(
                    state, table, choice, drafted, accepted, committed, options.forgetting
                )
            else:
                state.behind[...] += committed[:, None]
                state.behind[rows[live], candidate[live]] = 0
    return Played(reached, state)


def _marks(num_tokens: int) -> np.ndarray:
    return np.unique(np.linspace(1, num_tokens, 17).round().astype(int)[1:])


def _alone(candidate: int, length: int) -> Policy:
    def policy(place: np.ndarray, state: Chooser) -> tuple[Choice, Chooser]:
        return Choice(np.full(len(place), candidate), np.full(len(place), length)), state

    return policy


def _auto(table: Prices, prior: Prior, options: Options) -> Policy:
    memory = 1 / max(1 - options.forgetting, 1e-6)
    return lambda place, state: chooser.choose(
        state,
        table,
        prior,
        options.tokens - place,
        memory,
        options.exploration,
        rounds=options.rounds_per_choice,
    )


def _oracle(table: Prices, texts: Texts, options: Options) -> Policy:
    rows, longest = np.arange(len(texts.run)), table.round_ms.shape[1] - 1

    def policy(place: np.ndarray, state: Chooser) -> tuple[Choice, Chooser]:
        right = texts.right[rows, :, np.minimum(place, options.tokens - 1)]
        accept = np.repeat(right[:, :, None], longest, axis=2)
        accept[:, :, 0] *= texts.found
        remaining = np.maximum(options.tokens - place, 1)
        drafted = np.repeat(texts.found[:, :, None], longest, axis=2)
        return chooser.best(table, accept, drafted, state.behind, remaining), state

    return policy


def _prior(table: Prices, texts: Texts, options: Options) -> Prior:
    """The prior that these texts suggest: each candidate is played alone, with its longest draft."""
    longest, candidates = table.round_ms.shape[1] - 1, len(table.names)
    flat = acceptance.flat_prior(candidates, longest)
    counts = acceptance.nothing_seen(flat, len(texts.run))
    remember = dataclasses.replace(options, forgetting=1.0)
    for at in range(1, candidates):
        played = play(table, texts, _alone(at, longest), remember, flat, learning=True).counts.estimate
        counts.accept[:, at], counts.draft[:, at] = played.accept[:, at], played.draft[:, at]
    fitted = acceptance.fitted_prior(counts)
    kin = np.array([name not in ("off", "lookup") for name in table.names])
    return dataclasses.replace(fitted, strength=np.minimum(fitted.strength, 5.0), kin=kin)


def _lengths(table: Prices, accept: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """The best length of each candidate, int[M]."""
    speed = chooser.tokens_of_rounds(accept)[0] / chooser.times_of_rounds(table, drafted)[0]
    speed[1:, 0] = 0
    best: np.ndarray = speed.argmax(axis=1)
    return best


def _row(played: dict[str, Played], table: Prices, options: Options) -> dict[str, Any]:
    """What there is to say of one kind of texts."""
    total = {name: one.ms[:, -1] for name, one in played.items()}
    speed = {name: float(total["off"].sum() / ms.sum()) for name, ms in total.items()}
    fixed = max(speed[name] for name in table.names)
    oracle = played["oracle"].ms
    step = table.round_ms[OFF, 0]
    return {
        "speedup": speed,
        "auto_over_best_fixed": speed["auto"] / fixed,
        "auto_over_oracle": speed["auto"] / speed["oracle"],
        "slower_than_off": float((total["auto"] > 1.03 * total["off"]).mean()),
        "at": _marks(options.tokens).tolist(),
        "regret": {
            name: [float(at) for at in ((one.ms - oracle).mean(axis=0) / step).round(3)]
            for name, one in played.items()
            if name != "oracle"
        },
    }


def _costs(options: Options) -> tuple[StepCosts, list[tuple[str, DraftCost]]]:
    if options.costs is None:
        costs, drafts = usual(ACCELERATORS[options.device_model], options.shape)
        return costs, list(drafts.items())
    costs = parse(read_json(options.costs).get("costs"), str(options.costs))
    return costs, list(kinds(costs.num_layers).items())


def _check(options: Options) -> None:
    if options.device_model not in ACCELERATORS:
        raise ValueError(
            f"unknown device_model {options.device_model!r}; give one of {', '.join(ACCELERATORS)}"
        )
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {options.shape!r}; give one of {', '.join(SHAPES)}")
    for name in ("texts", "tokens", "rounds_per_choice"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; give at least 1")
    if not 0 < options.forgetting <= 1:
        raise ValueError(f"forgetting is {options.forgetting}; give a number above 0, at most 1")


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{report['texts']} texts of {report['tokens']} tokens, costs of {report['shape']} on {report['device']}"
    policies = list(report["kinds"]["stationary"]["speedup"])
    table = Table("kind", *policies, "auto ÷ best alone", title=f"speed-up over plain decoding: {title}")
    for kind, row in report["kinds"].items():
        cells = [f"{row['speedup'][name]:.2f}" for name in policies]
        table.add_row(kind, *cells, f"{row['auto_over_best_fixed']:.3f}")
    Console(file=sys.stderr, width=150).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table to standard error and the report as JSON; returns the exit status."""

    def measured(options: Options, on_progress: OnProgress) -> dict[str, Any]:
        report = measure(options, on_progress)
        _print(report)
        return report

    return command.run("benchmarks.choosing", Options, measured, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
