"""Which method is how fast on which prompts, beside plain decoding: prompt sets in turns, written down as they go."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench import free_rows
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.free_rows import Passes
from jaxspec.bench.margins import first_difference, margin
from jaxspec.bench.prompt_files import Task, encoded, in_turn
from jaxspec.bench.records import Difference, Record
from jaxspec.bench.suite_options import SuiteOptions
from jaxspec.bench.timing import OnProgress, measure_runs, warm_up
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result
from jaxspec.io.line_log import LineLog
from jaxspec.io.method_files import law_name
from jaxspec.methods import Auto, Method, registry
from jaxspec.model.sharding import fetched

FORMAT = "jaxspec.bench/1"
# Numbers of an array up to which all of them tell what a method was made of; of a larger one its first and last row do.
_SAMPLED = 4096
# Another way to generate, such as another program's: token ids of one prompt and a seed → the text.
Peer = Callable[[Sequence[int], int], Result]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Prompts that are generated together, at one turn of their conversations.

    Attributes:
      batch: its number.
      turn: from 0.
      tasks: at least one; all have this turn.
    """

    batch: int
    turn: int
    tasks: tuple[Task, ...]


def plan(tasks: Iterable[Task], options: SuiteOptions) -> list[Unit]:
    """What is generated one after another: a batch of each category, then the next of each.

    Examples:
      >>> tasks = [Task("1", "a", ("x", "y")), Task("2", "a", ("x",)), Task("3", "b", ("x",))]
      >>> [(unit.turn, [task.id for task in unit.tasks]) for unit in plan(tasks, SuiteOptions(batch=2))]
      [(0, ['1', '2']), (1, ['1']), (0, ['3'])]
    """
    groups: dict[str, list[Task]] = {}
    for task in in_turn(tasks, lambda task: task.category)[: options.limit]:
        groups.setdefault(task.category, []).append(task)
    size = options.batch
    batches = [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]
    units = []
    for number, batch in enumerate(in_turn(batches, lambda batch: batch[0].category)):
        for turn in range(max(len(task.turns) for task in batch)):
            present = tuple(task for task in batch if len(task.turns) > turn)
            units.append(Unit(number, turn, present))
    return units


def check_tokenizer(lm: LanguageModel) -> None:
    """Refuses a model that cannot read prompts of text."""
    if lm.tokenizer is None:
        raise ValueError(f"{lm.name} has no tokenizer; prompts of text need one")


def _digest(made: Any) -> str:
    """Names a drafter and its parameters by their numbers, of large arrays by a sample."""
    numbers = [
        leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, (int, float, jax.Array, np.ndarray))
    ]
    digest = hashlib.sha256()
    for sample in fetched(_samples(numbers)):
        digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()[:16]


@jax.jit
def _samples(leaves: list[jax.Array]) -> list[jax.Array]:
    arrays = map(jnp.asarray, leaves)
    ends = (0, -1)
    return [
        one if one.size <= _SAMPLED else jnp.stack([one[(at,) * (one.ndim - 1)][:_SAMPLED] for at in ends])
        for one in arrays
    ]


class Suite:
    """Generates after each prompt by plain decoding and by every method, in turns.

    The turns of a conversation follow one another: later ones hold the answers of plain decoding, the same for all
    runs. A turn that does not fit into the model's context, with the new tokens, is left out, and those after it.

    Args:
      lm: the model, with a tokenizer.
      tasks: the prompts.
      methods: by the name of their run.
      options: see `SuiteOptions`.
      law: temperature, top_k, top_p and min_p.
      seed: of the first repeat.
      peers: other ways to generate, such as another program's, by the name of their run.
      models: those that peers generate with, if they compile as `lm` does: what compiles in a turn does not count.

    Attributes:
      records: what was measured so far.
      left_out: by the id of a prompt, its first turn that did not fit.
      units: what is generated, see `plan`.
      passes: by method, what its drafts read, see `free_rows.passes`.

    Raises:
      ValueError, FileNotFoundError: there is no prompt that fits, or what `generate` raises for a method; before
        anything is measured.
    """

    def __init__(
        self,
        lm: LanguageModel,
        tasks: Sequence[Task],
        methods: Mapping[str, Method],
        options: SuiteOptions,
        *,
        law: Mapping[str, float],
        seed: int = 0,
        peers: Mapping[str, Peer] | None = None,
        models: Sequence[LanguageModel] = (),
    ) -> None:
        self._models = [lm, *models]
        self._lm, self._options, self._seed = lm, options, seed
        self._law: dict[str, Any] = dict(law)
        self._methods: dict[str, Method] = {BASELINE: registry.find(BASELINE)(), **methods}
        self._peers = dict(peers or {})
        if self._peers and options.batch > 1:
            raise ValueError(f"batch is {options.batch}, and peers generate one prompt at a time; give 1")
        self._log: LineLog | None = None
        self._said: dict[str, list[str]] = {}
        self._made: dict[str, str] = {}
        self.passes: dict[str, Passes | None] = {}
        self.records: list[Record] = []
        self.left_out: dict[str, int] = {}
        self.units = plan(tasks, options)
        check_tokenizer(lm)
        self._check()

    @property
    def runs(self) -> list[str]:
        """The names of all runs; plain decoding is the first."""
        return [*self._methods, *self._peers]

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn at random, so that texts differ."""
        return bool(self._law["temperature"] > 0)

    def header(self) -> dict[str, Any]:
        """What every record depends on."""
        tasks = list(dict.fromkeys(task for unit in self.units for task in unit.tasks))
        # In tokens too: another chat template makes other prompts of the same texts.
        first = [self._prompts(unit) for unit in self.units if not unit.turn]
        texts = json.dumps([[dataclasses.asdict(task) for task in tasks], first])
        return {
            "format": FORMAT,
            "model": self._lm.fingerprint,
            "dtype": self._lm.precision,
            "device": self._lm.device_kind,
            "runs": {name: str(method) for name, method in self._methods.items()},
            # What the options do not say: the draft, plan, thresholds or probe that lay where a method looks.
            "drafts": self._made,
            "peers": list(self._peers),
            "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
            **dataclasses.asdict(self._options),
            **self._law,
            "seed": self._seed,
        }

    def resume(self, log: LineLog) -> int:
        """Takes over what a log holds, and adds to it from now on; returns how many units are done.

        Args:
          log: made with this suite's header.

        Raises:
          ValueError: it holds something else than records.
        """
        self._log = log
        try:
            found = [Record.from_json(one) for entry in log.entries for one in entry["records"]]
        except (KeyError, TypeError):
            raise ValueError(f"{log.path} holds a record that cannot be read; add resume=False") from None
        done = 0
        by_unit: dict[tuple[int, int], list[Record]] = {}
        for record in found:
            by_unit.setdefault((record.batch, record.turn), []).append(record)
        for unit in self.units:
            if (unit.batch, unit.turn) in by_unit:
                self._prompts(unit)  # what did not fit is known again
                done += 1
            for record in by_unit.get((unit.batch, unit.turn), []):
                self._keep(record)
        return done

    def measure(self, on_progress: OnProgress = lambda what: None) -> None:
        """Measures what is not measured yet. Interrupted (Ctrl-C), it leaves what was done in `records`."""
        done = {(record.batch, record.turn) for record in self.records}
        todo = [unit for unit in self.units if (unit.batch, unit.turn) not in done]
        runs = {name: self._by(name, method) for name, method in self._methods.items()}
        runs |= {name: self._by_peer(peer) for name, peer in self._peers.items()}
        warm = False
        # What drafts changes from text to text: a program's first run, which takes longer, may be in any of them.
        changing = {name: run for name, run in runs.items() if isinstance(self._methods.get(name), Auto)}
        if changing:
            first = [prompts for unit in todo if not unit.turn and (prompts := self._prompts(unit))]
            warm_up(self._models, changing, first, on_progress)
        for unit in todo:
            prompts = self._prompts(unit)
            if not prompts:
                continue
            # One call for each, as what a later one asks hangs on what an earlier one was answered.
            (taken,) = measure_runs(
                self._models,
                dict(reversed(runs.items())) if unit.batch % 2 else runs,
                [prompts],
                self._options.repeats,
                warm=warm,
                on_progress=functools.partial(self._say, on_progress, unit),
            )
            warm = True
            records = [record for name in runs for record in self._records(unit, prompts, name, taken)]
            if self._log is not None:
                # One line: of a unit that was half written nothing would be left to compare with.
                self._log.add({"records": [record.to_json() for record in records]})
            for record in records:
                self._keep(record)

    def _say(self, on_progress: OnProgress, unit: Unit, what: str) -> None:
        together = "prompt" if self._options.batch == 1 else "batch"
        on_progress(f"{what}, {together} {unit.batch + 1} of {self.units[-1].batch + 1}")

    def _check(self) -> None:
        """Finds out what fits, and has every method say what is wrong before anything runs."""
        first = [prompt for unit in self.units if not unit.turn for prompt in self._prompts(unit).values()]
        if not first:
            raise ValueError(
                f"none of the prompts fits into the context of {self._lm.config.context_length} tokens with "
                f"max_new_tokens={self._options.max_new_tokens}; give shorter ones"
            )
        for name, method in self._methods.items():
            self._lm.stream(first, method=method, **self._given())
            made = self._lm.drafter(method, laws=(law_name(**self._law),))
            self._made[name], self.passes[name] = _digest(made), free_rows.passes(self._lm, method, *made)

    def _given(self) -> dict[str, Any]:
        return {
            **self._law,
            "max_new_tokens": self._options.max_new_tokens,
            "max_batch": self._options.batch,
        }

    def _prompts(self, unit: Unit) -> dict[str, list[int]]:
        """The prompts of a unit that fit, in tokens, by the ids of their tasks."""
        room = self._lm.config.context_length - self._options.max_new_tokens
        found = {}
        for task in unit.tasks:
            if self.left_out.get(task.id, unit.turn) < unit.turn:
                continue
            said = self._said.get(task.id, [])[: unit.turn]
            prompt = encoded(self._lm, task, said, self._options.chat)
            if len(prompt) <= room:
                found[task.id] = prompt
            else:
                self.left_out[task.id] = unit.turn
        return found

    def _by(self, run: str, method: Method) -> Callable[[dict[str, list[int]], int], list[Result]]:
        return lambda prompts, turn: self._lm.generate(
            [*prompts.values()], seed=self._seed + turn, method=self._started(run, method), **self._given()
        )

    def _started(self, run: str, method: Method) -> Method:
        """The method with the γ that a text starts from: where it is carried, that of the run's last record.

        So all repeats of a prompt, and calls that do not count, start from the same.
        """
        if not self._options.carry_gamma or "gamma" not in method.options():
            return method
        ended = [record.texts[-1].gamma for record in self.records if record.run == run]
        known: dict[str, Any] = {"gamma": ended[-1]} if ended and ended[-1] is not None else {}
        return dataclasses.replace(method, **known)

    def _by_peer(self, peer: Peer) -> Callable[[dict[str, list[int]], int], list[Result]]:
        return lambda prompts, turn: [peer(prompt, self._seed + turn) for prompt in prompts.values()]

    def _records(
        self,
        unit: Unit,
        prompts: Mapping[str, list[int]],
        run: str,
        taken: Mapping[str, list[list[Result]]],
    ) -> list[Record]:
        tasks = {task.id: task for task in unit.tasks}
        records = []
        for row, (name, prompt) in enumerate(prompts.items()):
            texts, plain = (tuple(batch[row] for batch in taken[one]) for one in (run, BASELINE))
            task = tasks[name]
            right = None
            if task.answer is not None:
                right = tuple(task.is_right(text.text or "") for text in texts)
            difference = None if self.sampling else self._difference(prompt, plain, texts)
            records.append(
                Record(name, task.category, unit.turn, unit.batch, run, len(prompt), texts, difference, right)
            )
        return records

    def _difference(
        self, prompt: list[int], plain: Sequence[Result], texts: Sequence[Result]
    ) -> Difference | None:
        for repeat, (one, other) in enumerate(zip(plain, texts, strict=True)):
            at = first_difference(one.tokens, other.tokens)
            if at is None:
                continue
            mine, its = (text.tokens[at] if at < len(text.tokens) else None for text in (one, other))
            gap = None
            if mine is not None and its is not None:
                gap = margin(self._lm, [*prompt, *one.tokens[:at]], mine, its)
            return Difference(repeat, at, (mine, its), gap)
        return None

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        if record.run == BASELINE:
            # Of answers drawn at random the first repeat's is gone on from.
            self._said.setdefault(record.id, []).append(record.texts[0].text or "")
