"""Does the policy of `auto` find the best candidate? `python -m benchmarks.choosing` prints a table and JSON.

Nothing is decoded. A synthetic text has, at each of its places and for each candidate, the number of draft tokens in a
row that would be accepted, and whether a draft would be found. So any candidate can be played from any place, and all
policies are played on the same texts. `auto` is `choosing.policy.Policy`, the class that the engine plays. The price of
a round comes from a device on paper, or from `jaxspec profile --costs --json`. A batch is one text.

Kinds of texts: `stationary` (each text has acceptances of its own, all along), `drifting` (they walk), `adversarial`
(after 24 to 64 tokens the candidate that was the best becomes the worst, and others change), `hopeless` (no draft is
right more often than one time in five).

Policies: each candidate alone, with the length that is best for its expectation; `auto`, with expectations fitted on
other texts; `auto, no expectations`; and the `oracle`, which is given the true acceptances and chooses every 2 rounds.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from benchmarks import command
from jaxspec.aot.accelerators import ACCELERATORS
from jaxspec.aot.roofline import usual
from jaxspec.bench.device_profile import SHAPES
from jaxspec.choosing import beliefs, policy, prices
from jaxspec.choosing.beliefs import Expectation
from jaxspec.choosing.costs import DraftCost, StepCosts, kinds
from jaxspec.choosing.lookup import ReplayedLookup
from jaxspec.choosing.policy import Choice, Policy, Times
from jaxspec.choosing.prices import OFF
from jaxspec.host.files import read_json
from jaxspec.host.progress import OnProgress
from jaxspec.io.methods.cost_files import parse

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
# Tokens of the prompt, which a draft's own state has not absorbed.
_PROMPT = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """The policy alone on synthetic texts, beside an oracle and beside each candidate.

    Attributes:
      texts: of each kind.
      tokens: of each text.
      device_model: on paper, see `jaxspec profile`.
      shape: of the target.
      costs: a file with what `jaxspec profile --costs --json` printed, instead of a device on paper.
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
    names, prices = [name for name, _ in drafts], [cost for _, cost in drafts]
    on_progress("fitting expectations")
    known = _expectations(make_texts("stationary", names, _HELD_OUT, options.tokens, options.seed + 1))
    game = Game(costs, tuple(names), tuple(prices), known)
    fixed = game.lengths()
    report: dict[str, Any] = {
        "device": costs.device,
        "shape": costs.model,
        "texts": options.texts,
        "tokens": options.tokens,
        "seed": options.seed,
        "candidates": ["off", *names],
        "lengths": dict(zip(("off", *names), fixed, strict=True)),
        "kinds": {},
    }
    for kind in KINDS:
        on_progress(f"making {kind} texts")
        texts = make_texts(kind, names, options.texts, options.tokens, options.seed)
        policies = ("off", *names, "auto", "auto, no expectations", "oracle")
        played = {}
        for name in policies:
            on_progress(f"playing {name} on {kind} texts")
            played[name] = np.array([game.play(name, texts, text) for text in range(options.texts)])
        report["kinds"][kind] = _row(played, game, options)
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


class Player(Protocol):
    """The part of `Policy` that a game needs."""

    def next(self, lengths: Any, remaining: Any, most_rounds: int, held: int | None, ready: Any) -> Any:
        """Returns a choice, and whether it is new."""


@dataclasses.dataclass(frozen=True)
class Alone:
    """One candidate and length, all along."""

    candidate: int
    length: int

    def next(
        self, lengths: Any, remaining: Any, most_rounds: int, held: int | None, ready: Any
    ) -> tuple[Choice, bool]:
        """Returns the choice."""
        return Choice(self.candidate, self.length, most_rounds), True


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The best choice for the next two rounds, with the true acceptances of one text."""

    game: Game
    right: np.ndarray
    found: np.ndarray

    def next(
        self, lengths: np.ndarray, remaining: np.ndarray, most_rounds: int, held: int | None, ready: Any
    ) -> tuple[Choice, bool]:
        """Returns the choice."""
        table = self.game.table(lengths)
        accept = np.repeat(self.right[:, int(lengths[0]) - _PROMPT][:, None], LONGEST, axis=1)
        accept[:, 0] *= self.found
        drafted = np.repeat(self.found[:, None], LONGEST, axis=1)
        state_ms = table.state_ms(float(lengths[0]))
        if held is not None:
            state_ms[held] = 0.0
        per_token = prices.times_of_rounds(table, drafted) / prices.tokens_of_rounds(accept)
        needed = state_ms[:, None] + remaining[0] * per_token
        candidate, length = np.unravel_index(needed.argmin(), needed.shape)
        return Choice(int(candidate), int(length), 2), True


class TextLookup:
    """Stands in for `choosing.lookup.ReplayedLookup` on a synthetic text: finds the drafts of its first candidate."""

    def __init__(self, texts: Texts, text: int, candidate: int) -> None:
        self._run, self._drafts = texts.run[text, candidate], texts.drafts[text, candidate]
        self._at, self._known = 0, 0

    def played(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (drafted, accepted) of the rounds that more tokens decide."""
        self._known += len(tokens)
        rounds: list[tuple[int, int]] = []
        while self._at < self._known:
            drafted = LONGEST if self._drafts[self._at] else 0
            accepted = min(int(self._run[self._at]), drafted)
            if self._at + accepted >= self._known:
                break
            rounds.append((drafted, accepted))
            self._at += accepted + 1
        return rounds


@dataclasses.dataclass(frozen=True)
class Game:
    """Prices and expectations with which all policies are played.

    Attributes:
      costs: of steps.
      names, drafts: of the candidates without plain decoding.
      known: their expectations.
    """

    costs: StepCosts
    names: tuple[str, ...]
    drafts: tuple[DraftCost, ...]
    known: list[Expectation]

    def table(self, lengths: np.ndarray) -> prices.Prices:
        """Returns the prices at a live length."""
        live = 1 << int(lengths.mean()).bit_length()
        return prices.price_table(self.costs, self.drafts, (LONGEST,) * len(self.drafts), live, 1)

    def lengths(self) -> list[int]:
        """Returns the best length of each candidate for its expectation."""
        prior = beliefs.prior_of([beliefs.UNKNOWN, *self.known], LONGEST)
        nothing = beliefs.no_counts(1, 1 + len(self.names), LONGEST)
        found: list[int] = prices.outlook(self.table(np.array([_PROMPT])), prior, nothing).length.tolist()
        return found

    def play(self, name: str, texts: Texts, text: int) -> np.ndarray:
        """Plays a policy on a text; returns milliseconds at each of `_marks`."""
        if name in ("off", *self.names):
            at = ("off", *self.names).index(name)
            return self.run(Alone(at, self.lengths()[at]), texts, text)
        if name == "oracle":
            return self.run(Oracle(self, texts.right[text], texts.found[text]), texts, text)
        known = self.known if name == "auto" else None

        def lookup(longest: int, tokens: Sequence[int]) -> ReplayedLookup:
            return cast("ReplayedLookup", TextLookup(texts, text, 1 + self.names.index("lookup")))

        longest, times = [LONGEST] * len(self.names), Times(ratios={("off", 1): 1.0})
        given = self.names, self.drafts, longest, self.costs, 1
        return self.run(Policy(*given, times=times, expectations=known, lookup=lookup), texts, text)

    def run(self, player: Player, texts: Texts, text: int) -> np.ndarray:
        """As `play`, by a policy that is given."""
        num_tokens = texts.run.shape[2]
        marks = _marks(num_tokens)
        reached = np.full(len(marks), np.nan)
        place, ms, held = 0, 0.0, None
        if isinstance(player, Policy):
            held = player.begin(np.array([_PROMPT]), np.array([num_tokens]), lambda at: True)[0] or None
            player.begin_row(0, range(_PROMPT))
        while place < num_tokens:
            lengths, remaining = np.array([_PROMPT + place]), np.array([num_tokens - place])
            (at, length, count), _ = player.next(
                lengths, remaining, policy.MOST_ROUNDS, held, lambda at: True
            )
            table, began, start = self.table(lengths), ms, place
            taken_up = at not in (OFF, held) and table.start_ms[at] > 0
            ms += table.state_ms(float(lengths[0]))[at] if taken_up else 0.0
            held = at or None
            rounds: list[tuple[int, int]] = []
            while place < num_tokens and len(rounds) < count:
                drafted = min(length if texts.drafts[text, at, place] else 0, num_tokens - place)
                accepted = min(int(texts.run[text, at, place]), drafted)
                ms += table.round_ms[at, drafted]
                place = min(place + accepted + 1, num_tokens)
                reached = np.where((place >= marks) & np.isnan(reached), ms, reached)
                rounds.append((drafted, accepted))
            if isinstance(player, Policy):
                gained = range(place - start)
                player.learn(
                    (at, length), [rounds], [gained], lengths, ms - began, not taken_up, bool(taken_up)
                )
        return reached


def _marks(num_tokens: int) -> np.ndarray:
    return np.unique(np.linspace(1, num_tokens, 17).round().astype(int)[1:])


def _expectations(texts: Texts) -> list[Expectation]:
    """Returns the expected acceptances for other texts; each candidate is played alone, with its longest draft."""
    found = []
    for at in range(1, texts.run.shape[1]):
        rounds = []
        for text in range(len(texts.run)):
            whole = TextLookup(texts, text, at)
            rounds.append(whole.played(range(texts.run.shape[2])))
        counts = beliefs.no_counts(len(rounds), 1, LONGEST)
        found += beliefs.fitted(beliefs.with_rounds(counts, 0, rounds, asked=LONGEST))
    return found


def _row(played: dict[str, np.ndarray], game: Game, options: Options) -> dict[str, Any]:
    """Returns the figures of one kind of texts, from milliseconds float[T, P] by policy."""
    total = {name: ms[:, -1] for name, ms in played.items()}
    speed = {name: float(total["off"].sum() / ms.sum()) for name, ms in total.items()}
    fixed = max(speed[name] for name in ("off", *game.names))
    step = game.table(np.array([_PROMPT])).round_ms[OFF, 0]
    return {
        "speedup": speed,
        "auto_over_best_fixed": speed["auto"] / fixed,
        "auto_over_oracle": speed["auto"] / speed["oracle"],
        "slower_than_off": float((total["auto"] > 1.03 * total["off"]).mean()),
        "slowest": float((total["auto"] / total["off"]).max()),
        "at": _marks(options.tokens).tolist(),
        "regret": {
            name: [float(at) for at in ((ms - played["oracle"]).mean(axis=0) / step).round(3)]
            for name, ms in played.items()
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
