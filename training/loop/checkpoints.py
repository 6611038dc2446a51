"""Checkpoints of a run: asynchronous, atomic, and with checksums, so that damaged ones are found and skipped.

The checksums are written into a checkpoint before it gets its final name. So every checkpoint with a final name is
complete, and later changes are detected. A damaged checkpoint is renamed, not deleted, so that its step can be trained
and saved again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxspec.console.errors import Failed, one_line
from jaxspec.host import files, processes
from jaxspec.host.files import read_json, write_json
from jaxspec.model.llama import Params
from jaxspec.model.sharding import fetched
from training.loop import state_sharding
from training.loop.step import TrainState

CHECKSUMS = "checksums.json"
SET_ASIDE = ".damaged"
# Orbax writes the completion time into this file after all others, the checksums included.
_STEP_METADATA = "_CHECKPOINT_METADATA"
_METRICS = "metrics"


class Resumed(NamedTuple):
    """A checkpoint from which a run resumes.

    Attributes:
      step: number of finished steps in the checkpoint.
      state: the training state.
      position: the data iterator's record.
      said: one line for the user: the resumed step, and the damaged checkpoints.
    """

    step: int
    state: TrainState
    position: dict[str, Any]
    said: str


class WrongState(ValueError):
    """An intact checkpoint of another model or optimiser."""


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a finished checkpoint; an unfinished one has a longer name."""
    return bool(_steps(directory))


class Checkpoints:
    """The checkpoints of a run: the `keep` latest, and the best by held-out loss.

    Args:
      directory: directory of the checkpoints, one directory per step.
      keep: number of latest checkpoints to keep.
      read_only: write, rename and delete nothing, for use beside a run in progress.
    """

    def __init__(self, directory: Path, keep: int = 1, read_only: bool = False) -> None:
        # Orbax logs a warning for every default, and whole tracebacks of exceptions that it raises anyway.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.directory = directory.absolute()
        self._saving = 0
        policies = checkpoint_managers
        self._manager = ocp.CheckpointManager(
            self.directory,
            # Named here, so that a new process can read a checkpoint's shapes before its arrays.
            item_handlers={"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                best_fn=_held_out_loss,
                best_mode="min",
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(n=keep),
                        policies.BestN(
                            get_metric_fn=_held_out_loss,
                            reverse=True,
                            n=1,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                # Without this, Orbax reads the metrics of all checkpoints here, and fails at a damaged one.
                lightweight_initialize=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Orbax raises here the error of its writing thread; it must not hide the error that ends the run.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self._manager.close()

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints on the disk, ascending."""
        return _steps(self.directory)

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], measured: dict[str, float] | None
    ) -> None:
        """Starts to write a checkpoint after the previous one is written.

        Args:
          step: number of finished steps.
          state: the training state; copied before this returns.
          position: the data iterator's record.
          measured: the measurements; `held_out_loss` decides which checkpoint is the best. None for a checkpoint that
            is only there to resume from.

        Raises:
          Exception: Orbax's error for this or the previous checkpoint.
        """
        self._manager.wait_until_finished()
        self._saving = step
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(position))
        self._manager.save(step, args=items, metrics=measured)

    def wait(self) -> None:
        """Waits until all checkpoints are written.

        Raises:
          Exception: Orbax's error for a checkpoint.
        """
        self._manager.wait_until_finished()

    def resume(self, wanted: TrainState) -> Resumed:
        """Reads the newest intact checkpoint; damaged ones are renamed to end in `SET_ASIDE`.

        Args:
          wanted: the shapes (and shardings) of the state.

        Raises:
          ValueError: no checkpoint is intact, or the newest intact one belongs to another model or optimiser.
            Then none is renamed.
          Failed: the newest intact one cannot be read, for example for lack of memory. Then none is renamed.
        """
        problems: dict[int, str] = {}
        for step in reversed(self.steps()):
            problem = damage(self.directory / str(step))
            if problem is None:
                break
            problems[step] = problem
        else:
            raise ValueError(
                f"no checkpoint in {self.directory} is intact: {_listed(problems)}. Give another --run, or remove "
                "that directory to train from the first step"
            )
        try:
            state, position = self._restore(step, wanted)
        except WrongState:
            raise
        except Exception as error:  # Orbax passes on the exceptions of its libraries
            # For example out of memory or another version of Orbax: an older checkpoint would fail too, or lose steps.
            raise Failed(
                f"the checkpoint of step {step} in {self.directory} is intact, but could not be read: "
                f"{one_line(error)[:300]}"
            ) from error
        for older in self.steps():
            if older < step and (problem := damage(self.directory / str(older))) is not None:
                problems[older] = problem
        processes.wait_for_all("all have looked at the checkpoints")
        for number in problems if files.written_here() else ():
            _set_aside(self.directory / str(number))
        processes.wait_for_all("damaged checkpoints are set aside")
        self._manager.reload()
        said = f"resumed from step {step}"
        if problems:
            said += f"; damaged and renamed to STEP{SET_ASIDE}: {_listed(problems)}"
        return Resumed(step, state, position, said)

    def _restore(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint: the state, with the shapes and shardings of `state`, and the data iterator's record."""
        stored = sorted(
            tuple(leaf.shape) for leaf in jax.tree.leaves(self._manager.item_metadata(step)["state"])
        )
        if not stored:
            raise ValueError(f"{self.directory / str(step) / 'state'} names no arrays")
        if stored != sorted(leaf.shape for leaf in jax.tree.leaves(state)):
            raise WrongState(
                f"the checkpoint of step {step} in {self.directory} holds another model or optimiser; "
                "give the options it was started with, or another run directory"
            )
        found: TrainState = _read_tree(self.directory / str(step) / "state", state)
        args = ocp.args.Composite(data=ocp.args.JsonRestore())
        return found, self._manager.restore(step, args=args)["data"]

    def best(self, report: Callable[[str], None]) -> tuple[Params, int, dict[str, float]]:
        """Reads the parameters of the best intact checkpoint, its step, and its measurements.

        The parameters are divided over the devices. With several processes they are whole NumPy arrays, because one
        process writes them.

        Args:
          report: receives a line for each damaged checkpoint, which is skipped.

        Raises:
          ValueError: no checkpoint is intact and has a finite held-out loss.
        """
        measured: dict[int, dict[str, float]] = {}
        problems: dict[int, str] = {}
        for step in self.steps():
            problem = damage(self.directory / str(step))
            if problem is not None:
                problems[step] = problem
            elif (found := self._manager.metrics(step)) is not None:
                measured[step] = dict(found)
        if problems:
            report(f"damaged checkpoints were skipped: {_listed(problems)}")
        if (best := best_step(measured)) is not None:
            params = self.params(best)
            return fetched(params) if processes.several() else params, best, measured[best]
        said = "no intact checkpoint" if problems else "no checkpoint"
        said += " with a finite held-out loss" if len(problems) < len(self.steps()) else ""
        raise ValueError(f"{said} in {self.directory}; train first")

    def measured(self) -> bool:
        """Whether a checkpoint has measurements, so that `best` may find it."""
        return any((self.directory / str(step) / _METRICS).is_dir() for step in self.steps())

    def params(self, step: int) -> Params:
        """Reads the parameters of a checkpoint straight into their shards on all devices."""
        stored = self._manager.item_metadata(step)["state"]["params"]
        wanted = {"params": state_sharding.placed_shapes(state_sharding.make_mesh(), stored)}
        params: Params = _read_tree(self.directory / str(step) / "state", wanted)["params"]
        return params

    def standing(self) -> str:
        """Describes the checkpoint from which a run can resume, after the current write has finished or failed."""
        with contextlib.suppress(Exception):  # the write failed; look at the other checkpoints
            self._manager.wait_until_finished()
        steps = self.steps()
        for step in reversed(steps):
            if damage(self.directory / str(step)) is None:
                return f"the checkpoint of step {step} is intact"
        return "no checkpoint is intact" if steps else "there is no checkpoint yet"

    def _write_checksums(self) -> None:
        """Called by Orbax in its thread after all files of a checkpoint are written, before the final renaming."""
        for entry in self.directory.glob(f"{self._saving}.*tmp*"):
            names = list(_files(entry))
            # In threads: hashing releases the GIL, and a large checkpoint has many files.
            with ThreadPoolExecutor() as pool:
                sums = list(pool.map(_checksum, [entry / name for name in names]))
            write_json(entry / CHECKSUMS, dict(zip(names, sums, strict=True)))


def best_step(measured: dict[int, dict[str, float]]) -> int | None:
    """Returns the step with the lowest finite held-out loss; None if there is none."""
    losses = {step: one["held_out_loss"] for step, one in measured.items()}
    finite = [step for step, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda step: losses[step], default=None)


def damage(checkpoint: Path) -> str | None:
    """Describes the damage to a checkpoint's files, which are compared with their checksums; None if none is found."""
    try:
        read_json(checkpoint / _STEP_METADATA)
        for name, expected in read_json(checkpoint / CHECKSUMS).items():
            file = checkpoint / name
            if not file.is_file():
                return f"{checkpoint}: {name[:100]} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{file} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            if _checksum(file) != expected:
                return f"{file} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = one_line(error)[:300]
        return problem if str(checkpoint) in problem else f"{checkpoint}: {problem}"
    return None


def _held_out_loss(metrics: Any) -> float:
    return metrics["held_out_loss"]


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def _files(checkpoint: Path) -> Iterator[str]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name not in (_STEP_METADATA, CHECKSUMS):
            yield path.relative_to(checkpoint).as_posix()


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _set_aside(checkpoint: Path) -> None:
    place = checkpoint.with_name(checkpoint.name + SET_ASIDE)
    shutil.rmtree(place, ignore_errors=True)  # an earlier damaged checkpoint of the same step
    checkpoint.rename(place)


def _listed(problems: dict[int, str]) -> str:
    return "; ".join(f"step {step} ({problem})" for step, problem in sorted(problems.items()))


def _read_tree(directory: Path, wanted: Any) -> Any:
    """Reads a part of a tree that Orbax wrote, straight into its shards.

    The host holds at most about 1 GB at a time, or the largest array.

    Args:
      directory: Orbax's directory, absolute.
      wanted: a tree of `jax.ShapeDtypeStruct` with shardings. Keys of the stored tree that it lacks are not read.
    """
    args = ocp.args.PyTreeRestore(
        wanted, ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    limit = 1 + max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(wanted)), default=0) // 10**9
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as reader:
        return reader.restore(directory, args=args)
