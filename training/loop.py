"""The one training loop: steps, held-out loss, checkpoints, progress; a killed run resumes exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import grain.python as grain
import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training import growth, sharding
from training.losses import Batch
from training.metrics import Metrics
from training.step import TrainState

# (state, batch on the devices) -> (state, metrics); the state given is donated
StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long to train, and what is written down on the way.

    Attributes:
      steps: the last step; the learning rate's cosine ends there.
      minutes: stop with a checkpoint after so much time in this process, None for no limit. The schedule
        follows the steps, not the clock: the same command goes on from there.
      every: steps between checkpoints; each carries the held-out loss measured there.
      keep: how many of the latest checkpoints are kept; the best one by held-out loss always is.
    """

    steps: int = 4000
    minutes: float | None = None
    every: int = 200
    keep: int = 2

    def __post_init__(self):
        for name in ("steps", "every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; give a time above 0, or leave it out")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      state: after its last step.
      reason: all steps done, out of minutes, or interrupted by a signal.
      seconds: of training in this process.
    """

    state: TrainState
    reason: Literal["steps", "minutes", "interrupted"]
    seconds: float


def checkpoint_manager(directory: Path, keep: int, read_only: bool = False) -> ocp.CheckpointManager:
    """Asynchronous, atomic checkpoints: the `keep` latest, and the best by held-out loss."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every default
    policies = checkpoint_managers
    return ocp.CheckpointManager(
        directory.absolute(),
        # Named here so that a fresh process can look at a checkpoint's shapes before it reads it.
        item_handlers={"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(
            best_fn=_held_out_loss,
            best_mode="min",
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(n=keep),
                    policies.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1),
                ]
            ),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        ),
    )


def has_checkpoint(directory: Path) -> bool:
    """Whether a finished checkpoint lies there; one that is being written has a longer name."""
    return directory.is_dir() and any(entry.name.isdigit() for entry in directory.iterdir())


def _held_out_loss(metrics: Any) -> float:
    return metrics["held_out_loss"]


def with_shardings(mesh: Mesh, shapes: TrainState) -> TrainState:
    """The shapes of a state, each with where it belongs on the mesh."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        sharding.state_shardings(mesh, shapes),
    )


def restore(
    manager: ocp.CheckpointManager, step: int, state: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint: the state, shaped and placed as `state` says, and the data iterator's record.

    Raises:
      ValueError: the checkpoint was made with another model or optimiser.
    """
    stored = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(manager.item_metadata(step)["state"]))
    if stored != sorted(leaf.shape for leaf in jax.tree.leaves(state)):
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} holds another model or optimiser; "
            "give the options it was started with, or another run directory"
        )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore())
    got = manager.restore(step, args=args)
    return got["state"], got["data"]


class _StopSignal:
    """Within it, the first SIGINT or SIGTERM only sets `received`; a second one acts as usual."""

    def __enter__(self) -> _StopSignal:
        self.received = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    options: LoopOptions,
    directory: Path,
    manager: ocp.CheckpointManager,
    state: TrainState,
    step_fn: StepFn,
    batches: grain.DatasetIterator,
    measure: Callable[[TrainState], dict[str, float]],
    console: Console,
    stages: growth.Stages | None = None,
    mesh: Mesh | None = None,
) -> Result:
    """Runs steps until `options.steps`, the time limit or a signal; every way ends with a checkpoint.

    Where the manager holds a checkpoint, training goes on from the latest: state and data are restored, so
    that every later loss is what it would have been without the break.

    Args:
      options: how long.
      directory: where metrics.jsonl is written.
      manager: of the checkpoints; see `checkpoint_manager`.
      state: the initial state; donated.
      step_fn: see `training.step.make_step`.
      batches: endless training batches with `get_state` and `set_state`.
      measure: what is measured at each checkpoint: `held_out_loss`, nats a token, and more by name.
      console: where progress is shown.
      stages: how the depth grows; None where it does not.
      mesh: over which state and batches are divided; None for all devices.

    Raises:
      ValueError: the loss or the held-out loss is no longer finite, a batch does not fit the model, or a
        checkpoint or figures could not be written. Nothing more is saved then; the last good checkpoint stands.
    """
    mesh = sharding.make_mesh() if mesh is None else mesh

    def deepened(state: TrainState, finished: int) -> TrainState:
        """As deep as the step after `finished` ones wants it."""
        if stages is None or stages.layers_at(finished) == len(state.params["layers"]):
            return state
        return growth.grow(state, stages.layers_at(finished))

    latest = manager.latest_step()
    if latest is None:
        state = sharding.place_state(mesh, state)
    else:
        # Written after the step before, at that step's depth.
        wanted = jax.eval_shape(lambda: deepened(state, max(0, latest - 1)))
        state, position = restore(manager, latest, with_shardings(mesh, wanted))
        batches.set_state(position)
        console.print(f"resumed from step {latest}")
    begin = time.monotonic()
    step = first = int(state.step)
    log = Metrics(directory, step)
    reason: Literal["steps", "minutes", "interrupted"] = "steps"
    progress = Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"), console=console, disable=not console.is_terminal,
    )  # fmt: skip

    def save(measured: dict[str, float]) -> None:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(batches.get_state())
        )
        with _clear_errors(manager, "a checkpoint"):
            manager.save(step, args=items, metrics=measured)

    try:
        with _StopSignal() as stop, progress:
            task = progress.add_task("", total=options.steps, completed=step, figures="")
            recent_tokens, recent_begin = 0.0, begin
            while step < options.steps:
                step_begin = time.monotonic()
                grown = deepened(state, step)
                if grown is not state:
                    state = sharding.place_state(mesh, grown)
                    console.print(f"{len(state.params['layers'])} layers from step {step + 1} on")
                batch = next(batches)
                _check_batch(batch, state.params["embed"].shape[0], step + 1, manager)
                state, measured = step_fn(state, sharding.place_batch(mesh, batch, rows_axis=1))
                step += 1
                record = {name: float(value) for name, value in measured.items()}
                if not math.isfinite(record["loss"]) or not math.isfinite(record["gradient_norm"]):
                    raise ValueError(
                        f"loss {record['loss']} and gradient norm {record['gradient_norm']} at step {step}; "
                        f"{_diverged(manager)}"
                    )
                now = time.monotonic()
                recent_tokens += record["tokens"]
                record["step_seconds"] = now - step_begin
                out_of_time = options.minutes is not None and now - begin >= 60 * options.minutes
                if stop.received or out_of_time:
                    reason = "interrupted" if stop.received else "minutes"
                last = reason != "steps" or step == options.steps
                if step % options.every == 0 or last:
                    held_out = measure(state)
                    if not math.isfinite(held_out["held_out_loss"]):
                        raise ValueError(
                            f"held-out loss {held_out['held_out_loss']} at step {step}; {_diverged(manager)}"
                        )
                    record |= held_out
                    record["tokens_per_second"] = recent_tokens / (now - recent_begin)
                    save(held_out)
                    left = (options.steps - step) * (now - begin) / (step - first)
                    console.print(_line(step, options.steps, record, left))
                    recent_tokens, recent_begin = 0.0, time.monotonic()
                with _clear_errors(manager, "metrics"):
                    log.write(step, record)
                rate = recent_tokens / max(now - recent_begin, 1e-9)
                progress.update(task, completed=step, figures=f"loss {record['loss']:.3f}  {rate:,.0f} tok/s")
                if last:
                    break
            with _clear_errors(manager, "a checkpoint"):
                manager.wait_until_finished()
    finally:
        log.close()
    return Result(state, reason, time.monotonic() - begin)


def _intact(manager: ocp.CheckpointManager) -> str:
    """Which checkpoint stands, once the one on its way is written or has failed."""
    with contextlib.suppress(Exception):
        manager.wait_until_finished()
    steps = manager.all_steps(read=True)
    return f"the checkpoint of step {max(steps)} is intact" if steps else "there is no checkpoint yet"


def _diverged(manager: ocp.CheckpointManager) -> str:
    return f"training stops, {_intact(manager)}. Lower --learning-rate or look at the data"


@contextlib.contextmanager
def _clear_errors(manager: ocp.CheckpointManager, what: str) -> Iterator[None]:
    """One clear line for whatever the storage below raises, of this checkpoint or of the one before."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{what} could not be written: {said}. Training stops, {_intact(manager)}. Make room and give "
            "the same command again"
        ) from None


def _check_batch(batch: Batch, vocab_size: int, step: int, manager: ocp.CheckpointManager) -> None:
    """Refuses tokens that the model does not have: JAX would read another row in their place."""
    least, most = int(batch["tokens"].min()), int(batch["tokens"].max())
    if least < 0 or most >= vocab_size:
        raise ValueError(
            f"the batch of step {step} holds tokens from {least} to {most}, the vocabulary has {vocab_size}; "
            f"training stops, {_intact(manager)}. Is the data packed with another tokenizer?"
        )


def _line(step: int, steps: int, record: dict[str, float], left: float) -> str:
    return (
        f"step {step}/{steps}  loss {record['loss']:.4f}  held-out {record['held_out_loss']:.4f}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  about {left / 60:.0f} min left"
    )
