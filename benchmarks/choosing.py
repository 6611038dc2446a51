"""Does the rule of `auto` find the best candidate? `python -m benchmarks.choosing` prints a table and JSON.

Nothing is decoded. A synthetic text has, at each of its places and for each candidate, the number of draft tokens in a
row that would be accepted, and whether a draft would be found. So any candidate can be played from any place. `auto` is
`ChoiceRule`, as the compiled loop runs it, for all texts at once. The price of a round comes from a device on paper, or
from `jaxspec profile --json`. A batch is one text.

Kinds of texts: `stationary` (each text has acceptances of its own, all along), `drifting` (they walk), `adversarial`
(after 24 to 64 tokens the candidate that was the best becomes the worst, and others change), `hopeless` (no draft is
right more often than one time in five).

Policies: each candidate alone, with the length that is best for its expectation; `auto`, with acceptances fitted on
other texts; and `auto, no expectations`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks import command
from jaxspec.costs.prices import expected_speedups, measured_prices
from jaxspec.costs.rounds import DraftCost, StepCosts, kinds
from jaxspec.drafting.choice_rule import Choice, ChoiceRule, ChoiceState, Found
from jaxspec.drafting.choosing_drafter import Choosing
from jaxspec.drafting.ngram_drafter import NGram
from jaxspec.host.files import read_json
from jaxspec.host.progress import OnProgress
from jaxspec.io.methods.cost_files import parse
from jaxspec.measuring.aot.accelerators import ACCELERATORS
from jaxspec.measuring.aot.roofline import usual
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.protocol import Drafter, Outcome

KINDS = ("stationary", "drifting", "adversarial", "hopeless")
# The longest draft.
LONGEST = 10
# Acceptance of each kind of draft over texts, as Beta counts; a lookup is right where a text repeats, else hardly ever.
_USUAL = {"early exit": (6, 4), "half the layers": (8, 3), "one layer": (8, 3), "draft model": (8, 3)}
_COPIES, _COPYING, _ELSEWHERE = 0.3, (9, 1), (1, 6)
# Rounds in which a lookup finds something, where a text repeats and elsewhere.
_FOUND = {True: 0.9, False: 0.3}
_WALK = 0.08
_BLOCK = (24, 64)
_HELD_OUT = 100
# Tokens of the prompt.
_PROMPT = 256
_WIDTHS = (1, 4, 8, LONGEST + 1)
# (the state, the drafts of lookups, the lengths of the rows, their budgets) -> the choice of a round
Rule = Callable[[ChoiceState, tuple[Found, ...], jax.Array, jax.Array], Choice]


@dataclasses.dataclass(frozen=True)
class Options:
    """The rule alone on synthetic texts, beside each candidate.

    Attributes:
      texts: of each kind.
      tokens: of each text.
      device_model: on paper, see `jaxspec profile`.
      shape: of the target.
      costs: a file with what `jaxspec profile --json` printed, instead of a device on paper.
      seed: of texts.
    """

    texts: int = 200
    tokens: int = 256
    device_model: str = "h100"
    shape: str = "8b"
    costs: Path | None = None
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


@struct.dataclass
class _Model(Drafter):
    """Stands in for a drafter with a model."""

    num_draft_tokens: int = struct.field(pytree_node=False, default=LONGEST)

    def propose(self, *given: Any) -> Any:
        """Is not called."""
        raise NotImplementedError


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Plays all policies on all kinds of texts.

    Returns:
      `device`, `shape`, `texts`, `tokens`, `seed`, `seconds`, `candidates`, and by kind: `speedup` over plain decoding
      by policy (all tokens ÷ all time), `auto_over_best_fixed` (speeds), and `slowest`, the time of `auto` on the
      slowest text ÷ that of plain decoding.

    Raises:
      ValueError: unknown names, or numbers out of range.
    """
    _check(options)
    began = time.perf_counter()
    costs, drafts = _costs(options)
    names, works = [name for name, _ in drafts], [cost for _, cost in drafts]
    on_progress("fitting acceptances")
    known = _expectations(make_texts("stationary", names, _HELD_OUT, options.tokens, options.seed + 1), works)
    auto, blind = (
        _drafter(costs, works, known),
        _drafter(costs, works, [(0.5, 0.75 if w.copies else 0.5) for w in works]),
    )
    report: dict[str, Any] = {
        "device": costs.device,
        "shape": costs.model,
        "texts": options.texts,
        "tokens": options.tokens,
        "seed": options.seed,
        "candidates": names,
        "kinds": {},
    }
    players = {name: player(auto, _alone(auto, at)) for at, name in enumerate(names)}
    players |= {"auto": player(auto, auto.choose), "auto, no expectations": player(blind, blind.choose)}
    for kind in KINDS:
        texts = make_texts(kind, names, options.texts, options.tokens, options.seed)
        took = {}
        for name, play in players.items():
            on_progress(f"playing {name} on {kind} texts")
            took[name] = play(texts)
        speed = {name: float(options.tokens / one.mean()) for name, one in took.items()}
        best = max(1.0, *(speed[name] for name in names))
        report["kinds"][kind] = {
            "speedup": speed,
            "auto_over_best_fixed": speed["auto"] / best,
            "slowest": float(took["auto"].max() / options.tokens),
        }
    return report | {"seconds": time.perf_counter() - began}


def player(drafter: ChoiceRule, rule: Rule) -> Callable[[Texts], np.ndarray]:
    """Returns a function that plays a rule on all texts, and returns the time of each, in plain steps.

    Args:
      drafter: the candidates and prices.
      rule: makes the choices.
    """

    @jax.jit
    def go_on(run: jax.Array, found: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        place, took, state = carry
        count, _, tokens = run.shape
        rows = jnp.arange(count)
        live, here = place < tokens, jnp.minimum(place, tokens - 1)
        drafts = []
        for at in drafter.lookups:
            size = jnp.where(found[rows, at + 1, here], LONGEST, 0)
            tiled = jnp.tile(jnp.arange(LONGEST), (count, 1))
            drafts.append(Found(tiled, size, size.astype(jnp.float32)))
        budget = jnp.where(live, tokens - place, 0)
        choice = rule(state, tuple(drafts), _PROMPT + place, budget)
        drafted = jnp.where(choice.candidate >= 0, choice.length, 0)
        accepted = jnp.minimum(run[rows, choice.candidate + 1, here], drafted)
        gained = jnp.where(live, jnp.minimum(accepted + 1, tokens - place), 0)
        # The text has the tokens of a lookup's draft as far as this is right.
        column, text = jnp.arange(LONGEST + 1), jnp.full((count, LONGEST + 1), -1)
        for at in drafter.lookups:
            text = jnp.where(column < run[rows, at + 1, here][:, None], column, text)
        outcome = Outcome(text, gained, jnp.where(live, drafted, 0), jnp.where(live, accepted, 0))
        state = drafter.observe(state._replace(choice=choice, found=tuple(drafts)), outcome)
        return place + gained, took + jnp.where(live, choice.cost, 0.0), state

    def play(texts: Texts) -> np.ndarray:
        count, _, tokens = texts.run.shape
        run, found = jnp.asarray(texts.run, jnp.int32), jnp.asarray(texts.drafts)
        carry = jnp.zeros(count, jnp.int32), jnp.zeros(count), drafter.init(count)
        while bool(jnp.any(carry[0] < tokens)):
            carry = go_on(run, found, carry)
        return np.asarray(carry[1])

    return play


def _alone(drafter: ChoiceRule, at: int) -> Rule:
    """Returns the rule that always uses one candidate, with drafts of the length that is best for its expectation."""
    lookup = at in drafter.lookups
    lengths = range(1, LONGEST + 1)
    length = int(expected_speedups(drafter.prices, at, lookup, _WIDTHS, lengths, _PROMPT).argmax()) + 1

    def rule(state: ChoiceState, found: tuple[Found, ...], lengths: jax.Array, budget: jax.Array) -> Choice:
        size = jnp.minimum(length, budget)
        if lookup:
            size = jnp.minimum(size, found[drafter.lookups.index(at)].count)
        verify, draft = drafter.prices.of(jnp.int32(1), jnp.mean(lengths.astype(jnp.float32)))
        width = jnp.searchsorted(jnp.array(_WIDTHS), size, side="right")
        return Choice(jnp.full_like(size, at), size, verify[width] + draft[at, size])

    return rule


def _drafter(costs: StepCosts, works: Sequence[DraftCost], accept: Sequence[Sequence[float]]) -> ChoiceRule:
    """Returns the rule of these candidates, with which each row chooses for itself."""
    candidates = tuple(NGram(num_draft_tokens=LONGEST) if one.copies else _Model() for one in works)
    prices = measured_prices(costs, works, [0] * len(works), _WIDTHS, LONGEST, accept)
    return ChoiceRule(candidates, prices, jnp.float32(Choosing.memory), _WIDTHS, joint=False)


def make_texts(kind: str, names: Sequence[str], count: int, tokens: int, seed: int) -> Texts:
    """Synthetic texts of a kind, for plain decoding and the named kinds of drafts.

    Args:
      kind: one of `KINDS`.
      names: of `costs.rounds.kinds`.
      count, tokens: T, N.
      seed: with the same, the same texts.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    longest = LONGEST
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
    right[:, 0] = 0
    true = rng.random(right.shape, np.float32) < right
    run = np.zeros((*shape, tokens), np.int8)
    ongoing = np.ones(run.shape, bool)
    for ahead in range(longest):
        ongoing &= true[:, :, ahead : ahead + tokens]
        run += ongoing
    drafts = rng.random(run.shape, np.float32) < found[:, :, None]
    drafts[:, 0] = False
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


def _expectations(texts: Texts, works: Sequence[DraftCost]) -> list[tuple[float, ...]]:
    """Returns the acceptance by position over texts; of a lookup that of the first and of further tokens."""
    known: list[tuple[float, ...]] = []
    for at, one in enumerate(works, 1):
        run = texts.run[:, at][texts.drafts[:, at]]
        reached = [(run >= place).sum() for place in range(LONGEST + 1)]
        if one.copies:
            known.append((reached[1] / reached[0], sum(reached[2:]) / max(sum(reached[1:-1]), 1)))
        else:
            known.append(tuple(reached[at + 1] / max(reached[at], 1) for at in range(LONGEST)))
    return known


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
    for name in ("texts", "tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; give at least 1")


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
    return command.run("benchmarks.choosing", Options, measure, argv, _print)


if __name__ == "__main__":
    sys.exit(main())
