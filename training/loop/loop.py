"""The one training loop: steps, held-out loss, checkpoints, progress; a killed run resumes exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import grain.python as grain
import jax
from jax.sharding import Mesh
from rich.console import Console

from training.data import sizing
from training.data.sizing import AUTO, Sized
from training.loop import growth, sharding
from training.loop.checkpoints import Checkpoints
from training.loop.progress import Pace, Progress, duration
from training.loop.step import TrainState
from training.losses.base import Batch
from training.reports.metrics import Metrics

# (state, batch on the devices) -> (state, metrics); the state given is donated
StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long to train, and what is written down on the way.

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


def with_shardings(mesh: Mesh, shapes: TrainState) -> TrainState:
    """The shapes of a state, each with where it belongs on the mesh."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        sharding.state_shardings(mesh, shapes),
    )


class _StopSignal:
    """Within it, the first SIGINT or SIGTERM only sets `received`, its number; a second one acts as usual."""

    def __enter__(self) -> _StopSignal:
        self.received: int | None = None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    options: LoopOptions,
    directory: Path,
    checkpoints: Checkpoints,
    state: TrainState,
    step_fn: StepFn,
    batches: grain.DatasetIterator,
    measure: Callable[[TrainState], dict[str, float]],
    console: Console,
    stages: growth.Stages | None = None,
    mesh: Mesh | None = None,
) -> Result:
    """Runs steps until `options.steps`, the time limit or a signal; every way ends with a checkpoint.

    Where there are checkpoints, training goes on from the newest intact one: state and data are restored, so
    that every later loss is what it would have been without the break.

    Args:
      options: how long.
      directory: where metrics.jsonl is written.
      checkpoints: of the run.
      state: the initial state; donated.
      step_fn: see `training.loop.step.make_step`.
      batches: endless training batches with `get_state` and `set_state`.
      measure: what is measured at each checkpoint: `held_out_loss`, nats a token, and more by name.
      console: where progress is shown.
      stages: how the depth grows; None where it does not.
      mesh: over which state and batches are divided; None for all devices.

    Raises:
      ValueError: there are checkpoints, but none is intact; the loss or the held-out loss is no longer finite, a
        batch does not fit the model, or a checkpoint or figures could not be written. Nothing more is saved
        then; the last good checkpoint stands.
    """
    mesh = sharding.make_mesh() if mesh is None else mesh

    def deepened(state: TrainState, finished: int) -> TrainState:
        """As deep as the step after `finished` ones wants it."""
        if stages is None or stages.layers_at(finished) == len(state.params["layers"]):
            return state
        return growth.grow(state, stages.layers_at(finished))

    def shapes_after(finished: int) -> TrainState:
        # A checkpoint is written after the step, at that step's depth.
        return with_shardings(mesh, jax.eval_shape(lambda: deepened(state, max(0, finished - 1))))

    if checkpoints.steps():
        resumed = checkpoints.resume(shapes_after)
        state = resumed.state
        batches.set_state(resumed.position)
        console.print(resumed.said, markup=False)
    else:
        state = sharding.place_state(mesh, state)
    begin = time.monotonic()
    step = int(state.step)
    log = Metrics(directory, step)
    reason: Literal["steps", "minutes", "interrupted"] = "steps"
    pace = Pace(options.every)
    compiled = False  # the step of the present depth

    try:
        with _StopSignal() as stop, Progress(console, "step", options.steps, step) as progress:
            while step < options.steps:
                step_begin = time.monotonic()
                grown = deepened(state, step)
                if grown is not state:
                    state = sharding.place_state(mesh, grown)
                    console.print(f"{len(state.params['layers'])} layers from step {step + 1} on")
                    compiled = False
                    pace.forget()
                if not compiled:
                    progress.doing("compiling")
                batch = next(batches)
                _check_batch(batch, state.params["embed"].shape[0], step + 1, checkpoints)
                state, measured = step_fn(state, sharding.place_batch(mesh, batch, rows_axis=1))
                step += 1
                record = {name: float(value) for name, value in measured.items()}
                if not math.isfinite(record["loss"]) or not math.isfinite(record["gradient_norm"]):
                    raise ValueError(
                        f"loss {record['loss']} and gradient norm {record['gradient_norm']} at step {step}; "
                        f"{_diverged(checkpoints)}"
                    )
                now = time.monotonic()
                record["step_seconds"] = now - step_begin
                if compiled:
                    pace.add(record["tokens"], now - step_begin)
                compiled = True
                out_of_time = options.minutes is not None and now - begin >= 60 * options.minutes
                if stop.received or out_of_time:
                    reason = "interrupted" if stop.received else "minutes"
                last = reason != "steps" or step == options.steps
                if step % options.every == 0 or last:
                    held_out = measure(state)
                    if not math.isfinite(held_out["held_out_loss"]):
                        raise ValueError(
                            f"held-out loss {held_out['held_out_loss']} at step {step}; {_diverged(checkpoints)}"
                        )
                    record |= held_out
                    if pace.tokens_per_second is not None:
                        record["tokens_per_second"] = pace.tokens_per_second
                    with _clear_errors(checkpoints, "a checkpoint"):
                        checkpoints.save(step, state, batches.get_state(), held_out)
                    pace.pause(time.monotonic() - now)
                    shown = f"loss {record['loss']:.4f}  held-out {held_out['held_out_loss']:.4f}"
                    took = f"{duration(time.monotonic() - begin)} in all"
                    ahead = took if last else _ahead(step, options, pace)
                    progress.say(_joined(f"step {step}/{options.steps}", shown, _rate(pace), ahead))
                with _clear_errors(checkpoints, "metrics"):
                    log.write(step, record)
                ahead = "" if last else _ahead(step, options, pace)
                progress.update(step, _joined(f"loss {record['loss']:.3f}", _rate(pace), ahead))
                if last:
                    break
            with _clear_errors(checkpoints, "a checkpoint"):
                checkpoints.wait()
    finally:
        log.close()
    return Result(state, reason, time.monotonic() - begin, stop.received)


def _diverged(checkpoints: Checkpoints) -> str:
    return f"training stops, {checkpoints.standing()}. Lower --learning-rate or look at the data"


@contextlib.contextmanager
def _clear_errors(checkpoints: Checkpoints, what: str) -> Iterator[None]:
    """One clear line for whatever the storage below raises, of this checkpoint or of the one before."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{what} could not be written: {said}. Training stops, {checkpoints.standing()}. Make room and give "
            "the same command again"
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
