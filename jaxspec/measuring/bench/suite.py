"""Measures methods on prompt sets, alternating with plain decoding, and logs the records.

The records of a unit are written as soon as it is finished.
"""

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

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io.methods.method_files import distribution_name
from jaxspec.measuring.bench.bench_records import Difference, Record
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.free_rows import FreeRows, free_rows
from jaxspec.measuring.bench.margins import first_difference, margin
from jaxspec.measuring.bench.prompt_files import Task, encoded, in_turn
from jaxspec.measuring.bench.suite_options import SuiteOptions
from jaxspec.measuring.bench.timing import measure_runs, warm_up
from jaxspec.measuring.line_log import LineLog
from jaxspec.methods import Auto, Method, registry
from jaxspec.model.sharding import fetched
from jaxspec.requests.results import Result
from jaxspec.sampling import is_greedy

FORMAT = "jaxspec.bench/1"
# Arrays of at most this size are hashed completely. For a larger array, only a part of the first row and of the last
# row is hashed.
_SAMPLED = 4096


@dataclasses.dataclass(frozen=True)
class Unit:
    """The unit of measurement: a batch of prompts at one turn of their conversations.

    Attributes:
      batch: the number of the batch.
      turn: the turn of the conversations, from 0.
      tasks: at least one task; each of them has this turn.
    """

    batch: int
    turn: int
    tasks: tuple[Task, ...]


def plan(tasks: Iterable[Task], options: SuiteOptions) -> list[Unit]:
    """Returns the units of a suite in order: the first batch of each category, then the second of each, and so on.

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


def carried(method: Method, gamma: float | None) -> Method:
    """Returns the method for a text that starts from the γ with which the method's previous text ended.

    A method without an option `gamma` is returned unchanged.

    Args:
      method: an instance of one of `jaxspec.methods`.
      gamma: `Result.gamma` of the previous text; None before the first text, or where no stop rule has an adaptive γ.

    Examples:
      >>> from jaxspec.methods import AdaSPEED
      >>> carried(AdaSPEED(exit_layer=1), 0.7).gamma
      0.7
    """
    changes: dict[str, Any] = {} if gamma is None or "gamma" not in method.options() else {"gamma": gamma}
    return dataclasses.replace(method, **changes)


def check_tokenizer(lm: LanguageModel) -> None:
    """Raises a ValueError for a model without a tokenizer."""
    if lm.tokenizer is None:
        raise ValueError(f"{lm.name} has no tokenizer; prompts of text need one")


def _digest(made: Any) -> str:
    """Returns a hash of the numbers of a drafter and its parameters. Only samples of large arrays are read."""
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
    """Continues each prompt with plain decoding and with every method, alternately.

    The later turns of a conversation contain the answers of plain decoding in all runs, so that all runs have the same
    prompts. If the prompt of a turn plus `max_new_tokens` exceeds the model's context, this turn and all later turns of
    the conversation are left out.

    Args:
      lm: the model, with a tokenizer.
      tasks: the prompts.
      methods: the methods, by the name of the run.
      options: see `SuiteOptions`.
      distribution: the sampling distribution: temperature, top_k, top_p and min_p.
      seed: the seed of the first repeat.

    Attributes:
      records: the records so far.
      left_out: the first turn that exceeded the context, by prompt id.
      units: the units to measure, see `plan`.
      free: the rounds by method where rows are free, see `free_rows`.

    Raises:
      ValueError, FileNotFoundError: no prompt fits into the context, or `generate` would raise an error with one of the
        methods. Both are checked before the first measurement.
    """

    def __init__(
        self,
        lm: LanguageModel,
        tasks: Sequence[Task],
        methods: Mapping[str, Method],
        options: SuiteOptions,
        *,
        distribution: Mapping[str, float],
        seed: int = 0,
    ) -> None:
        self._lm, self._options, self._seed = lm, options, seed
        self._distribution: dict[str, Any] = dict(distribution)
        self._methods: dict[str, Method] = {BASELINE: registry.find(BASELINE)(), **methods}
        self._log: LineLog | None = None
        self._answers: dict[str, list[str]] = {}
        self._made: dict[str, str] = {}
        self.free: dict[str, FreeRows | None] = {}
        self.records: list[Record] = []
        self.left_out: dict[str, int] = {}
        self.units = plan(tasks, options)
        check_tokenizer(lm)
        self._check()

    @property
    def runs(self) -> list[str]:
        """The names of all runs, plain decoding first."""
        return [*self._methods]

    @property
    def sampling(self) -> bool:
        """Whether tokens are sampled; texts of different methods then differ."""
        return not is_greedy(self._distribution["temperature"])

    def header(self) -> dict[str, Any]:
        """Returns the inputs on which all records depend. A log is resumed only if its header equals this one."""
        tasks = list(dict.fromkeys(task for unit in self.units for task in unit.tasks))
        # Token ids are included because they depend on the chat template.
        first = [self._prompts(unit) for unit in self.units if not unit.turn]
        texts = json.dumps([[dataclasses.asdict(task) for task in tasks], first])
        return {
            "format": FORMAT,
            "model": self._lm.fingerprint,
            "dtype": self._lm.precision,
            "device": self._lm.device_kind,
            "runs": {name: str(method) for name, method in self._methods.items()},
            # A hash of each drafter. It detects changes of files that a method loads by default, such as a draft, plan,
            # thresholds or probe.
            "drafts": self._made,
            "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
            **dataclasses.asdict(self._options),
            **self._distribution,
            "seed": self._seed,
        }

    def resume(self, log: LineLog) -> int:
        """Reads the records of a log and appends new ones to it; returns the number of finished units.

        Args:
          log: a log with this suite's header.

        Raises:
          ValueError: an entry of the log is not a record.
        """
        self._log = log
        try:
            found = [Record.from_json(one) for entry in log.entries for one in entry["records"]]
        except (KeyError, TypeError):
            raise ValueError(f"{log.path} has a record that cannot be read; add resume=False") from None
        done = 0
        by_unit: dict[tuple[int, int], list[Record]] = {}
        for record in found:
            by_unit.setdefault((record.batch, record.turn), []).append(record)
        for unit in self.units:
            if (unit.batch, unit.turn) in by_unit:
                self._prompts(unit)  # restores `left_out`
                done += 1
            for record in by_unit.get((unit.batch, unit.turn), []):
                self._keep(record)
        return done

    @shows_progress
    def measure(self, on_progress: OnProgress = lambda step: None) -> None:
        """Measures the remaining units. After an interrupt (Ctrl-C), `records` contains those of the finished units."""
        done = {(record.batch, record.turn) for record in self.records}
        todo = [unit for unit in self.units if (unit.batch, unit.turn) not in done]
        runs = {name: self._by(name, method) for name, method in self._methods.items()}
        warm = False
        # `auto` may use any of its programs in any text. Run each of them before the measurement, because the first run
        # of a program takes longer.
        changing = {name: run for name, run in runs.items() if isinstance(self._methods[name], Auto)}
        if changing:
            first = [prompts for unit in todo if not unit.turn and (prompts := self._prompts(unit))]
            warm_up([self._lm], changing, first, on_progress)
        for unit in todo:
            prompts = self._prompts(unit)
            if not prompts:
                continue
            # Measure one unit per call, because a later turn contains the answers to earlier ones.
            (taken,) = measure_runs(
                [self._lm],
                dict(reversed(runs.items())) if unit.batch % 2 else runs,
                [prompts],
                self._options.repeats,
                warm=warm,
                on_progress=functools.partial(self._progress, on_progress, unit),
            )
            warm = True
            records = [record for name in runs for record in self._records(unit, prompts, name, taken)]
            if self._log is not None:
                # One line per unit, so that a unit is never logged in part.
                self._log.add({"records": [record.to_json() for record in records]})
            for record in records:
                self._keep(record)

    def _progress(self, on_progress: OnProgress, unit: Unit, step: str) -> None:
        noun = "prompt" if self._options.batch == 1 else "batch"
        on_progress(f"{step}, {noun} {unit.batch + 1} of {self.units[-1].batch + 1}")

    def _check(self) -> None:
        """Determines the prompts that fit, and raises the errors that a method would raise in a measurement."""
        first = [prompt for unit in self.units if not unit.turn for prompt in self._prompts(unit).values()]
        if not first:
            raise ValueError(
                f"none of the prompts fits into the context of {self._lm.config.context_length} tokens with "
                f"max_new_tokens={self._options.max_new_tokens}; give shorter ones"
            )
        for name, method in self._methods.items():
            self._lm.stream(first, method=method, **self._given())
            made = self._lm.drafter(method, distributions=(distribution_name(**self._distribution),))
            self._made[name], self.free[name] = _digest(made), free_rows(self._lm, method, *made)

    def _given(self) -> dict[str, Any]:
        return {
            **self._distribution,
            "max_new_tokens": self._options.max_new_tokens,
            "max_batch": self._options.batch,
        }

    def _prompts(self, unit: Unit) -> dict[str, list[int]]:
        """Returns the token ids of the unit's prompts that fit into the context, by task id, and updates `left_out`."""
        longest = self._lm.config.context_length - self._options.max_new_tokens
        found = {}
        for task in unit.tasks:
            if self.left_out.get(task.id, unit.turn) < unit.turn:
                continue
            answers = self._answers.get(task.id, [])[: unit.turn]
            prompt = encoded(self._lm, task, answers, self._options.chat)
            if len(prompt) <= longest:
                found[task.id] = prompt
            else:
                self.left_out[task.id] = unit.turn
        return found

    def _by(self, run: str, method: Method) -> Callable[[dict[str, list[int]], int], list[Result]]:
        return lambda prompts, turn: self._lm.generate(
            [*prompts.values()],
            seed=self._seed + turn,
            method=carried(method, self._gamma(run)),
            **self._given(),
        )

    def _gamma(self, run: str) -> float | None:
        """Returns the initial γ of a run's next text: the final γ of its last record; None for the method's default.

        All repeats of a prompt start from the same γ, because a record is added only after the last repeat.
        """
        if not self._options.carry_gamma:
            return None
        ended = [record.texts[-1].gamma for record in self.records if record.run == run]
        return ended[-1] if ended else None

    def _records(
        self, unit: Unit, prompts: Mapping[str, list[int]], run: str, taken: Mapping[str, list[list[Result]]]
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
            mine, theirs = (text.tokens[at] if at < len(text.tokens) else None for text in (one, other))
            gap = None
            if mine is not None and theirs is not None:
                gap = margin(self._lm, [*prompt, *one.tokens[:at]], mine, theirs)
            return Difference(repeat, at, (mine, theirs), gap)
        return None

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        if record.run == BASELINE:
            # When sampling, a conversation continues with the answer of the first repeat.
            self._answers.setdefault(record.id, []).append(record.texts[0].text or "")
