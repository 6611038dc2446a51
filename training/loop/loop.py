"""The one training loop: steps, held-out loss, checkpoints, progress; a killed run resumes exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import grain.python as grain
import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxspec.console.errors import one_line
from jaxspec.io import processes
from jaxspec.io.files import full_reason
from training.data import sizing
from training.data.sizing import AUTO, Sized
from training.loop import growth, sharding
from training.loop.checkpoints import Checkpoints
from training.loop.progress import Pace, Progress, duration
from training.loop.signals import StopSignal
from training.loop.step import TrainState
from training.losses.base import Batch
from training.reports.metrics import Metrics

# (state, batch on the devices) -> (state, metrics); the state given is donated
StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long to train, and how often a checkpoint is written.

    Attributes:
      steps: the last step; the learning rate's cosine ends there. `auto` follows the size of the data.
      minutes: stop with a checkpoint after so much time in this process, None for no limit. The schedule
        follows the steps, not the clock: the same command goes on from there.
      every: steps between checkpoints; each carries the held-out loss measured there. `auto`: a tenth of the
        steps, from 10 to 200.
      keep: how many of the latest checkpoints are kept; the best one by held-out loss always is.
    """

    steps: Sized = AUTO
    minutes: float | None = None
    every: Sized = AUTO
    keep: int = 2

    def __post_init__(self):
        sizing.check(self, steps=1, every=1, keep=1)
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; give a time above 0, or leave it out")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      state: after its last step.
      reason: all steps done, out of minutes, or interrupted by a signal.
      seconds: of training in this process.
      signal: the number of the signal that interrupted it; None if none did.
    """

    state: TrainState
    reason: Literal["steps", "minutes", "interrupted"]
    seconds: float
    signal: int | None = None


@dataclasses.dataclass
class Loop:
    """A run of training steps, which goes on from the newest intact checkpoint where there is one.

    State and data are restored then, so that every later loss is what it would have been without the break.

    Attributes:
      options: how long, without `auto`.
      directory: where metrics.jsonl is written.
      checkpoints: of the run.
      step_fn: see `training.loop.step.make_step`.
      batches: endless training batches with `get_state` and `set_state`.
      vocab_size: tokens of a batch are below it.
      measure: what is measured at each checkpoint: `held_out_loss`, nats per token, and more by name.
      console: where progress is shown.
      stages: how the depth grows; None where it does not.
      mesh: over which state and batches are divided; by default all devices.
    """

    options: LoopOptions
    directory: Path
    checkpoints: Checkpoints
    step_fn: StepFn
    batches: grain.DatasetIterator
    vocab_size: int
    measure: Callable[[TrainState], dict[str, float]]
    console: Console
    stages: growth.Stages | None = None
    mesh: Mesh = dataclasses.field(default_factory=sharding.make_mesh)

    def __post_init__(self) -> None:
        self._pace = Pace(self.options.every)
        self._compiled = False  # the step of the present depth
        self._start_s = time.monotonic()

    def run(self, state: TrainState) -> Result:
        """Takes steps until the last one, the time limit or a signal; every way ends with a checkpoint.

        Args:
          state: the initial one, donated; unused where a checkpoint is resumed.

        Raises:
          ValueError: there are checkpoints, but none is intact; the loss or the held-out loss is no longer finite, a
            batch does not fit the model, or a checkpoint or figures could not be written. Nothing more is saved
            then; the last good checkpoint stands.
        """
        options = self.options
        state = self._begin(state)
        self._start_s = time.monotonic()
        step = int(state.step)
        log = Metrics(self.directory, step)
        reason: Literal["steps", "minutes", "interrupted"] = "steps"
        try:
            progress = Progress(self.console, "step", options.steps, step)
            with StopSignal(say=lambda: self._stopping(progress)) as stop, progress:
                while step < options.steps and reason == "steps":
                    state, record = self._step(state, step, progress)
                    step += 1
                    # The same in all processes, of which one may be slower, or alone have got the signal.
                    signal, seconds = processes.largest(self.mesh, stop.received or 0, self._seconds())
                    out_of_time = options.minutes is not None and seconds >= 60 * options.minutes
                    if signal or out_of_time:
                        stop.received = int(signal) or None
                        reason = "interrupted" if signal else "minutes"
                    last = reason != "steps" or step == options.steps
                    if step % options.every == 0 or last:
                        record |= self._checkpoint(state, step, record["loss"], last, progress)
                    with _clear_errors(self.checkpoints, "metrics"):
                        log.write(step, record)
                    ahead = "" if last else _ahead(step, options, self._pace)
                    progress.update(step, _joined(f"loss {record['loss']:.3f}", _rate(self._pace), ahead))
                with _clear_errors(self.checkpoints, "a checkpoint"):
                    self.checkpoints.wait()
        finally:
            log.close()
        return Result(state, reason, self._seconds(), stop.received)

    def _stopping(self, progress: Progress) -> None:
        """Reports the effect of a signal before the step is over."""
        progress.say(f"finishing step {progress.done + 1}, checkpoint follows; a second Ctrl-C ends at once")

    def _seconds(self) -> float:
        """Seconds of training in this process."""
        return time.monotonic() - self._start_s

    def _begin(self, state: TrainState) -> TrainState:
        """Resumes the newest intact checkpoint, or places the initial state on the devices."""
        if not self.checkpoints.steps():
            return sharding.place_state(self.mesh, state)

        def shapes_after(finished: int) -> TrainState:
            # A checkpoint is written after the step, at that step's depth.
            return sharding.placed_shapes(
                self.mesh, jax.eval_shape(lambda: self._deepened(state, max(0, finished - 1)))
            )

        resumed = self.checkpoints.resume(shapes_after)
        self.batches.set_state(resumed.position)
        self.console.print(resumed.said, markup=False)
        return resumed.state

    def _deepened(self, state: TrainState, finished: int) -> TrainState:
        """The state as deep as the step after `finished` ones needs it."""
        if self.stages is None or self.stages.layers_at(finished) == len(state.params["layers"]):
            return state
        return growth.grow(state, self.stages.layers_at(finished))

    def _step(
        self, state: TrainState, finished: int, progress: Progress
    ) -> tuple[TrainState, dict[str, float]]:
        """One step after `finished` ones, at that step's depth: the state after it, and its record."""
        begin = time.monotonic()
        grown = self._deepened(state, finished)
        if grown is not state:
            state = sharding.place_state(self.mesh, grown)
            self.console.print(f"{len(state.params['layers'])} layers from step {finished + 1} on")
            self._compiled = False
            self._pace.forget()
        if not self._compiled:
            progress.doing("compiling")
        batch = next(self.batches)
        _check_batch(batch, self.vocab_size, finished + 1, self.checkpoints)
        state, measured = self.step_fn(state, sharding.place_batch(self.mesh, batch, rows_axis=1))
        record = {name: float(value) for name, value in measured.items()}
        if not math.isfinite(record["loss"]) or not math.isfinite(record["gradient_norm"]):
            raise ValueError(
                f"loss {record['loss']} and gradient norm {record['gradient_norm']} at step {finished + 1}; "
                f"{_diverged(self.checkpoints)}"
            )
        record["step_seconds"] = time.monotonic() - begin
        if self._compiled:
            self._pace.add(record["tokens"], record["step_seconds"])
        self._compiled = True
        return state, record

    def _checkpoint(
        self, state: TrainState, step: int, loss: float, last: bool, progress: Progress
    ) -> dict[str, float]:
        """Measures the held-out text, begins to write a checkpoint, and reports both; returns what was measured."""
        begin = time.monotonic()
        held_out = self.measure(state)
        if not math.isfinite(held_out["held_out_loss"]):
            raise ValueError(
                f"held-out loss {held_out['held_out_loss']} at step {step}; {_diverged(self.checkpoints)}"
            )
        with _clear_errors(self.checkpoints, "a checkpoint"):
            self.checkpoints.save(step, state, self.batches.get_state(), held_out)
        self._pace.pause(time.monotonic() - begin)
        shown = f"loss {loss:.4f}  held-out {held_out['held_out_loss']:.4f}"
        ahead = f"{duration(self._seconds())} in all" if last else _ahead(step, self.options, self._pace)
        progress.say(_joined(f"step {step}/{self.options.steps}", shown, _rate(self._pace), ahead))
        rate = self._pace.tokens_per_second
        return held_out if rate is None else held_out | {"tokens_per_second": rate}


def _diverged(checkpoints: Checkpoints) -> str:
    return f"training stops, {checkpoints.standing()}. Lower --learning-rate or look at the data"


@contextlib.contextmanager
def _clear_errors(checkpoints: Checkpoints, what: str) -> Iterator[None]:
    """One clear line for whatever the storage below raises, of this checkpoint or of the one before."""
    try:
        yield
    except Exception as error:
        # A library's line about a full disk is long, and names temporary files that will be removed.
        said = full_reason(error) or one_line(error)
        raise ValueError(
            f"{what} could not be written: {said}. Training stops, {checkpoints.standing()}. Make "
            "room and give the same command again"
        ) from None


def _check_batch(batch: Batch, vocab_size: int, step: int, checkpoints: Checkpoints) -> None:
    """Refuses tokens that the model does not have: JAX would read another row in their place."""
    least, most = int(batch["tokens"].min()), int(batch["tokens"].max())
    if least < 0 or most >= vocab_size:
        raise ValueError(
            f"the batch of step {step} holds tokens from {least} to {most}, the vocabulary has {vocab_size}; "
            f"training stops, {checkpoints.standing()}. Is the data packed with another tokenizer?"
        )


def _rate(pace: Pace) -> str:
    return "" if pace.tokens_per_second is None else f"{pace.tokens_per_second:,.0f} tokens/s"


def _ahead(step: int, options: LoopOptions, pace: Pace) -> str:
    checkpoints = -(-options.steps // options.every) - step // options.every
    left = pace.seconds_left(options.steps - step, checkpoints)
    return "" if left is None else f"about {duration(left)} left"


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)
