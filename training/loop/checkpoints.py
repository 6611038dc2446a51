"""Checkpoints of a run: asynchronous, atomic, and with checksums, so that a damaged one is noticed and passed over.

The checksums are written into a checkpoint before it takes its final name: a checkpoint that is there is whole,
and what changes in it afterwards shows. A damaged one is never deleted: it is renamed, so that its step can be
trained and saved again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxspec.console.errors import one_line
from jaxspec.io import files, processes
from jaxspec.io.files import read_json, write_json
from jaxspec.model.sharding import fetched
from training.loop import sharding
from training.loop.step import TrainState

CHECKSUMS = "checksums.json"
SET_ASIDE = ".damaged"
# Orbax writes the time of completion into this one after all others, the checksums included.
_STEP_METADATA = "_CHECKPOINT_METADATA"
_NO_CHECKSUMS = "has no checksums (an earlier version wrote it), so it could not be checked"


class Resumed(NamedTuple):
    """A checkpoint from which a run goes on.

    Attributes:
      step: after which the checkpoint was written.
      state: of the training.
      position: the data iterator's record.
      said: one line for the user: what was resumed, and which checkpoints were damaged.
    """

    step: int
    state: TrainState
    position: dict[str, Any]
    said: str


class WrongState(ValueError):
    """An intact checkpoint of another model or optimiser."""


def has_checkpoint(directory: Path) -> bool:
    """Whether a finished checkpoint lies there; one that is being written has a longer name."""
    return bool(_steps(directory))


class Checkpoints:
    """The checkpoints of a run: the `keep` latest, and the best by held-out loss.

    Args:
      directory: of the checkpoints, one directory per step.
      keep: how many of the latest are kept.
      read_only: only read, beside a run in progress; nothing is written, renamed or deleted.
    """

    def __init__(self, directory: Path, keep: int = 1, read_only: bool = False) -> None:
        # It warns of every default, and logs whole tracebacks of what it raises anyway, such as a full disk.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.directory = directory.absolute()
        self._saving = 0
        policies = checkpoint_managers
        self._manager = ocp.CheckpointManager(
            self.directory,
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
                # Else it reads the metrics of all checkpoints here, and fails at a damaged one.
                lightweight_initialize=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Orbax raises here what a write in its thread raised; it must not hide the error that ends the run.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self._manager.close()

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, rising, as they are on the disk now."""
        return _steps(self.directory)

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], measured: dict[str, float]
    ) -> None:
        """Begins to write a checkpoint, once the one before is written.

        Args:
          step: after which it is.
          state: copied before this returns.
          position: the data iterator's record.
          measured: what was measured there; `held_out_loss` says which checkpoint is the best.

        Raises:
          Exception: this one or the one before cannot be written, as Orbax has it.
        """
        self._manager.wait_until_finished()
        self._saving = step
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(position))
        self._manager.save(step, args=items, metrics=measured)

    def wait(self) -> None:
        """Waits until all checkpoints are written.

        Raises:
          Exception: something could not be, as Orbax has it.
        """
        self._manager.wait_until_finished()

    def resume(self, wanted: Callable[[int], TrainState]) -> Resumed:
        """Reads the newest intact checkpoint; damaged ones are renamed to end in `SET_ASIDE`.

        Args:
          wanted: the shapes (and shardings) of the state after a step.

        Raises:
          ValueError: no checkpoint is intact, or the newest intact one is of another model or optimiser or cannot
            be read. Nothing is renamed then.
        """
        problems: dict[int, str] = {}
        for step in reversed(self.steps()):
            problem = damage(self.directory / str(step))
            if problem is None:
                try:
                    state, position = self._restore(step, wanted(step))
                    break
                except WrongState:
                    raise
                except Exception as error:  # Orbax raises whatever its libraries raise
                    problem = one_line(error)[:300]
                    if (self.directory / str(step) / CHECKSUMS).is_file():
                        # Out of memory, another version of Orbax: an older one would fare no better, or lose steps.
                        raise ValueError(
                            f"the checkpoint of step {step} in {self.directory} is intact, but could not be read: "
                            f"{problem}"
                        ) from error
            problems[step] = problem
        else:
            raise ValueError(
                f"no checkpoint in {self.directory} is intact: {_listed(problems)}. Give another --run, or remove "
                "that directory to train from the first step"
            )
        for older in self.steps():
            if older < step and (problem := damage(self.directory / str(older))) is not None:
                problems[older] = problem
        processes.wait_for_all("all have looked at the checkpoints")
        for number in problems if files.written_here() else ():
            _set_aside(self.directory / str(number))
        processes.wait_for_all("damaged checkpoints are set aside")
        self._manager.reload()
        said = f"resumed from step {step}"
        if not (self.directory / str(step) / CHECKSUMS).is_file():
            said += f", whose checkpoint {_NO_CHECKSUMS}"
        if problems:
            said += f"; damaged and renamed to STEP{SET_ASIDE}: {_listed(problems)}"
        return Resumed(step, state, position, said)

    def _restore(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint: the state, shaped and placed as `state` says, and the data iterator's record."""
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
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore())
        got = self._manager.restore(step, args=args)
        return got["state"], got["data"]

    def best(self, report: Callable[[str], None]) -> tuple[Any, int, dict[str, float]]:
        """Reads the best intact checkpoint: its state, `params` as NumPy arrays, its step, and what was measured.

        Args:
          report: is given a line for each damaged checkpoint that is passed over.

        Raises:
          ValueError: no checkpoint is intact and has a finite held-out loss.
        """
        measured: dict[int, dict[str, float]] = {}
        problems: dict[int, str] = {}
        for step in self.steps():
            problem = damage(self.directory / str(step))
            if problem is None:
                measured[step] = dict(self._manager.metrics(step))
            else:
                problems[step] = problem
        try:
            while (best := best_step(measured)) is not None:
                try:
                    args = ocp.args.Composite(state=ocp.args.StandardRestore(self._placed(best)))
                    state = self._manager.restore(best, args=args)["state"]
                    # Gathered one by one; what the optimiser keeps is not asked for.
                    return state | {"params": fetched(state["params"])}, best, measured[best]
                except Exception as error:  # without checksums damage shows only here
                    problems[best] = one_line(error)[:300]
                    del measured[best]
        finally:
            if problems:
                report(f"checkpoints that are damaged, and left out: {_listed(problems)}")
        found = "no intact checkpoint" if problems else "no checkpoint"
        found += " with a finite held-out loss" if measured else ""
        raise ValueError(f"{found} in {self.directory}; train first")

    def _placed(self, step: int) -> Any:
        """Where the state of a step is read to: None for as it lies, or over all processes, which read it together."""
        if not processes.several():
            return None
        return sharding.placed_shapes(sharding.make_mesh(), self._manager.item_metadata(step)["state"])

    def standing(self) -> str:
        """Says which checkpoint a run can go on from, once the one being written is finished or has failed."""
        with contextlib.suppress(Exception):  # it was not written; the others are looked at
            self._manager.wait_until_finished()
        steps = self.steps()
        for step in reversed(steps):
            if damage(self.directory / str(step)) is None:
                checked = (self.directory / str(step) / CHECKSUMS).is_file()
                return f"the checkpoint of step {step} {'is intact' if checked else _NO_CHECKSUMS}"
        return "no checkpoint is intact" if steps else "there is no checkpoint yet"

    def _write_checksums(self) -> None:
        """Called by Orbax in its thread when all files of a checkpoint are written, before its last renaming."""
        for entry in self.directory.glob(f"{self._saving}.*tmp*"):
            write_json(entry / CHECKSUMS, {name: _checksum(entry / name) for name in _files(entry)})


def best_step(measured: dict[int, dict[str, float]]) -> int | None:
    """The step with the lowest finite held-out loss; None if there is none."""
    losses = {step: one["held_out_loss"] for step, one in measured.items()}
    finite = [step for step, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda step: losses[step], default=None)


def damage(checkpoint: Path) -> str | None:
    """Describes what is wrong with the files of a checkpoint; None if nothing is, as far as can be seen.

    All files are read and compared with their checksums. Where there are none, only what is missing altogether
    and JSON that cannot be read is noticed.
    """
    try:
        read_json(checkpoint / _STEP_METADATA)
        if not (checkpoint / CHECKSUMS).is_file():
            read_json(checkpoint / "metrics" / "metrics")
            read_json(checkpoint / "data" / "metadata")
            return None if (checkpoint / "state").is_dir() else f"{checkpoint / 'state'} is missing"
        for name, expected in read_json(checkpoint / CHECKSUMS).items():
            file = checkpoint / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{file} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            if _checksum(file) != expected:
                return f"{file} is not what was written"
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
    shutil.rmtree(place, ignore_errors=True)  # of the same step, damaged earlier
    checkpoint.rename(place)


def _listed(problems: dict[int, str]) -> str:
    return "; ".join(f"step {step} ({problem})" for step, problem in sorted(problems.items()))
