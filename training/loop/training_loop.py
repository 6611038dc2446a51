"""The training loop: steps, held-out loss, checkpoints, progress. A killed run resumes exactly."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxspec.console import interrupts
from jaxspec.console.errors import Failed, one_line
from jaxspec.host import processes
from jaxspec.host.files import full_reason
from jaxspec.host.progress import duration
from jaxspec.model.llama import Params
from training.data import packing, sizing
from training.data.sizing import AUTO, Auto, Sized
from training.loop import state_sharding
from training.loop.checkpoints import Checkpoints
from training.loop.progress import Pace, Progress
from training.loop.signals import StopSignal
from training.loop.step import TrainState
from training.losses.base import Batch
from training.reports import evaluation, metrics
from training.reports.metrics import Metrics

# (state, batch on the devices) -> (state, metrics); the input state is donated
StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
# A loss is compared with the mean of this number of latest losses, from the second number of them on.
_LATEST, _LEAST = 100, 10


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The length of training, and the interval between checkpoints.

    Attributes:
      steps: the last step; the learning rate's cosine ends there. `auto` follows the size of the data.
      epochs: passes over the text instead of `steps`; its number of tokens is estimated from a sample. Default: a
        number that suits the data from scratch, 3 from a pretrained model.
      minutes: stop with a checkpoint after this time in this process; None for no limit. The schedule depends on the
        steps, not on the time: the same command resumes the run.
      every: steps between checkpoints, at which the held-out loss is measured. `auto`: a tenth of the steps, from 10
        to 200.
      keep: number of latest checkpoints to keep; the best one by held-out loss is always kept.
      divergence: stop if the loss of 10 steps in a row is more than this many times its mean over the latest 100 other
        steps, or if it is not finite. No checkpoint is written during such steps.
    """

    steps: Sized = AUTO
    epochs: float | None = None
    minutes: float | None = None
    every: Sized = AUTO
    keep: int = 2
    divergence: float = 3.0

    def __post_init__(self):
        sizing.check(self, steps=1, every=1, keep=1)
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs is {self.epochs}; give a number above 0, or leave it out")
        if self.epochs is not None and not isinstance(self.steps, Auto):
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give one of them")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; give a time above 0, or leave it out")
        if not self.divergence > 1:
            raise ValueError(f"divergence is {self.divergence}; give a number above 1, or leave it out")


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
      step: number of finished steps.
      reason: all steps done, out of minutes, or interrupted by a signal.
      seconds: duration of training in this process.
      signal: number of the signal that interrupted the run; None if none did.
      saved_s: seconds from the signal until the last checkpoint was written; None without a signal.
      exports: whether the best checkpoint is exported now: one has measurements, and the run did not end by SIGTERM,
        which announces the end of the machine.
    """

    step: int
    reason: Literal["steps", "minutes", "interrupted"]
    seconds: float
    signal: int | None = None
    saved_s: float | None = None
    exports: bool = True

    @property
    def status(self) -> int:
        """The exit status: 0, or 128 plus the number of the signal."""
        return 0 if self.signal is None else 128 + self.signal


@dataclasses.dataclass
class Loop:
    """A run of training steps, which resumes from the newest intact checkpoint if there is one.

    State and data position are restored, so that the later losses equal those of an uninterrupted run.

    Attributes:
      options: length and intervals, without `auto`.
      directory: directory of metrics.jsonl.
      checkpoints: the run's checkpoints.
      init: makes the training state from parameters, see `training.loop.step.init_state`.
      step_fn: see `training.loop.step.make_step`.
      batches: endless training batches with `get_state` and `set_state`.
      vocab_size: upper bound of the token ids, exclusive.
      measure: returns the measurements of a checkpoint: `held_out_loss`, nats per token, and more by name.
      console: shows the progress.
      mesh: divides state and batches. Default: all devices.
    """

    options: LoopOptions
    directory: Path
    checkpoints: Checkpoints
    init: Callable[[Params], TrainState]
    step_fn: StepFn
    batches: packing.Batches
    vocab_size: int
    measure: Callable[[TrainState], dict[str, float]]
    console: Console
    mesh: Mesh = dataclasses.field(default_factory=state_sharding.make_mesh)

    def __post_init__(self) -> None:
        self._pace = Pace(self.options.every)
        self._compiled = False  # whether the step is compiled
        self._measured = False  # whether the program of the measurements is compiled
        self._losses: collections.deque[float] = collections.deque(maxlen=_LATEST)
        # The number of steps in a row whose losses were far above the mean.
        self._high = 0
        self._start_s = time.monotonic()

    def run(self, params: Params) -> Result:
        """Takes steps until the last one, the time limit or a signal; each of these ends with a checkpoint.

        After SIGTERM, which announces the end of the machine, the checkpoint is written without measurements.

        Args:
          params: the initial parameters, donated; their numbers are unused if a checkpoint is resumed.

        Raises:
          ValueError: there are checkpoints, but none is intact.
          Failed: the loss diverges or the held-out loss is not finite, a batch does not fit the model, or a
            checkpoint could not be written. The last good checkpoint remains, and no other is saved.
        """
        options = self.options
        state = self._begin(params)
        self._start_s = time.monotonic()
        step = int(state.step)
        log = Metrics(self.directory, step)
        # A resumed run is judged as if it had not stopped.
        earlier = (record for record in metrics.read_metrics(self.directory) if record["step"] <= step)
        self._losses.extend(record["loss"] for record in earlier if "loss" in record)
        due = False  # whether a checkpoint is to be written
        reason: Literal["steps", "minutes", "interrupted"] = "steps"
        try:
            progress = Progress(self.console, "step", options.steps, step)
            with StopSignal(say=lambda number: self._stopping(progress, number)) as stop, progress:
                while step < options.steps and reason == "steps":
                    state, record = self._step(state, step, progress)
                    step += 1
                    # All processes must decide alike, but they differ in speed, and only one may get the signal.
                    number, seconds = processes.largest(self.mesh, stop.received or 0, self._seconds())
                    out_of_time = options.minutes is not None and seconds >= 60 * options.minutes
                    if number or out_of_time:
                        stop.received = int(number) or None
                        reason = "interrupted" if number else "minutes"
                    last = reason != "steps" or step == options.steps
                    due = due or step % options.every == 0
                    if last or (due and not self._high):
                        due = False
                        measures = number != signal.SIGTERM or step == options.steps
                        shown = self._checkpoint(log, state, step, record, measures)
                        times = f"{duration(self._seconds())} in all" if last else self._ahead(step)
                        progress.say(_joined(f"step {step}/{options.steps}", shown, _rate(self._pace), times))
                    else:
                        self._write(log, step, record)
                    ahead = "" if last else self._ahead(step)
                    progress.update(step, _joined(f"loss {record['loss']:.3f}", _rate(self._pace), ahead))
                with _clear_errors(self.checkpoints, "a checkpoint"):
                    self.checkpoints.wait()
                saved_s = None if stop.at is None else time.monotonic() - stop.at
        finally:
            log.close()
        exports = stop.received != signal.SIGTERM and self.checkpoints.measured()
        return Result(step, reason, self._seconds(), stop.received, saved_s, exports)

    def _stopping(self, progress: Progress, number: int) -> None:
        """Reports a signal before the current step is finished."""
        again = f"a second {interrupts.signal_name(number)} ends at once"
        progress.say(f"finishing step {progress.done + 1}, checkpoint follows; {again}")

    def _seconds(self) -> float:
        """Seconds of training in this process."""
        return time.monotonic() - self._start_s

    def _begin(self, params: Params) -> TrainState:
        """Resumes the newest intact checkpoint, or makes the initial state on the devices."""
        if not self.checkpoints.steps():
            params = state_sharding.place_state(self.mesh, params)
            state: TrainState = state_sharding.make_sharded(self.mesh, self.init, params, donate=True)
            return state
        begun = jax.eval_shape(self.init, params)
        # The checkpoint's parameters need the memory of the initial ones.
        jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, params)
        resumed = self.checkpoints.resume(state_sharding.placed_shapes(self.mesh, begun))
        self.batches.set_state(resumed.position)
        self.console.print(resumed.said, markup=False)
        return resumed.state

    def _step(
        self, state: TrainState, finished: int, progress: Progress
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one step after `finished` steps: returns the new state and the record."""
        begin = time.monotonic()
        batch = next(self.batches)
        _check_batch(batch, self.vocab_size, finished + 1, self.checkpoints)
        placed = state_sharding.place_batch(self.mesh, batch, rows_axis=1)
        if not self._compiled:
            progress.doing("compiling the step")
        called, compile_s = time.monotonic(), 0.0
        # The call returns when the program is compiled, and the program runs on.
        state, measured = self.step_fn(state, placed)
        if not self._compiled:
            compile_s = time.monotonic() - called
            self._pace.compiled(compile_s)
            progress.doing(_joined(f"computing step {finished + 1}", f"compiled in {duration(compile_s)}"))
            self._compiled = True
        record = {name: float(value) for name, value in measured.items()}
        self._judge(finished + 1, record["loss"], record["gradient_norm"])
        record["step_seconds"] = time.monotonic() - begin
        self._pace.add(record["tokens"], record["step_seconds"] - compile_s)
        return state, record

    def _ahead(self, finished: int) -> str:
        """Returns an estimate of the time after `finished` steps: steps, checkpoints, and programs to compile."""
        options = self.options
        checkpoints = -(-options.steps // options.every) - finished // options.every
        programs = 0 if self._measured else 1
        left = self._pace.seconds_left(options.steps - finished, checkpoints, programs)
        return "" if left is None else f"about {duration(left)} left"

    def _judge(self, step: int, loss: float, gradient_norm: float) -> None:
        """Ends a run whose loss diverges: it is not finite, or stays far above the mean of the steps before.

        A single high loss is no divergence: small batches of texts of several kinds have them.
        """
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            raise Failed(
                f"loss {loss} and gradient norm {gradient_norm} at step {step}; {_diverged(self.checkpoints)}"
            )
        mean = sum(self._losses) / max(1, len(self._losses))
        if len(self._losses) < _LEAST or loss <= self.options.divergence * mean:
            self._losses.append(loss)
            self._high = 0
            return
        self._high += 1  # such a loss does not enter the mean
        if self._high >= _LEAST:
            raise Failed(
                f"loss {loss:.4g} at step {step} is more than {self.options.divergence:g} times the mean {mean:.4g} "
                f"of earlier steps, like the {_LEAST - 1} before; {_diverged(self.checkpoints)}, or raise --divergence"
            )

    def _checkpoint(
        self, log: Metrics, state: TrainState, step: int, record: dict[str, float], measures: bool
    ) -> str:
        """Measures the held-out text, writes the record, and starts to write a checkpoint; returns a line for the user.

        The record comes first, so that a killed run has the records of all steps before its checkpoint.
        """
        begin = time.monotonic()
        held_out = self.measure(state) if measures else None
        self._measured = self._measured or measures
        if held_out is not None:
            if not math.isfinite(held_out["held_out_loss"]):
                raise Failed(
                    f"held-out loss {held_out['held_out_loss']} at step {step}; {_diverged(self.checkpoints)}"
                )
            rate = self._pace.tokens_per_second
            record |= held_out if rate is None else held_out | {"tokens_per_second": rate}
        self._write(log, step, record)
        with _clear_errors(self.checkpoints, "a checkpoint"):
            self.checkpoints.save(step, state, self.batches.get_state(), held_out)
        self._pace.pause(time.monotonic() - begin)
        shown = f"loss {record['loss']:.4f}"
        if held_out is None:
            return shown
        found, uniform = held_out["held_out_loss"], math.log(self.vocab_size)
        worse = f"above {uniform:.2f}, that of equal probabilities: take more steps or raise --learning-rate"
        shown = _joined(shown, f"held-out {found:.4f}", worse if found > uniform else "")
        return _joined(shown, evaluation.acceptance_in_words(held_out))

    def _write(self, log: Metrics, step: int, record: dict[str, float]) -> None:
        with _clear_errors(self.checkpoints, "metrics"):
            log.write(step, record)


def _diverged(checkpoints: Checkpoints) -> str:
    return f"training stops, {checkpoints.standing()}. Lower --learning-rate or look at the data"


@contextlib.contextmanager
def _clear_errors(checkpoints: Checkpoints, what: str) -> Iterator[None]:
    """Converts errors of the storage, for this checkpoint or the previous one, to one line."""
    try:
        yield
    except Exception as error:
        # A library's message about a full disk is long, and names temporary files that will be removed.
        said = full_reason(error) or one_line(error)
        raise Failed(
            f"{what} could not be written: {said}. Training stops, {checkpoints.standing()}"
        ) from None


def _check_batch(batch: Batch, vocab_size: int, step: int, checkpoints: Checkpoints) -> None:
    """Refuses tokens outside the vocabulary, for which JAX would read another row of the embedding."""
    least, most = int(batch["tokens"].min()), int(batch["tokens"].max())
    if least < 0 or most >= vocab_size:
        raise Failed(
            f"the batch of step {step} holds tokens from {least} to {most}, the vocabulary has {vocab_size}; "
            f"training stops, {checkpoints.standing()}. Is the data packed with another tokenizer?"
        )


def _rate(pace: Pace) -> str:
    return "" if pace.tokens_per_second is None else f"{pace.tokens_per_second:,.0f} tokens/s"


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)
