"""Damaged checkpoints are noticed and passed over; one training per run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.console.errors import Failed
from jaxspec.host import lock
from tests import refused, variables
from tests.training.test_training_run import arguments, metrics
from training import sft
from training.loop import checkpoints
from training.loop.checkpoints import CHECKSUMS, Checkpoints, damage
from training.loop.step import TrainState


def state_of(step: int) -> TrainState:
    """A state whose numbers name their step; large enough for its arrays to have files of their own."""
    rng = np.random.default_rng(step)
    params = {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), "b": jnp.full(3, step, jnp.float32)}
    return TrainState(jnp.int32(step), params, {"m": jnp.ones(5)})


SHAPES = jax.eval_shape(lambda: state_of(0))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three checkpoints, of which the second is the best."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    with Checkpoints(directory, keep=3) as kept:
        for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0)):
            kept.save(step, state_of(step), {"at": step}, {"held_out_loss": loss})
        kept.wait()
    return directory


@pytest.fixture
def directory(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def largest(checkpoint: Path) -> Path:
    """The file with most of the arrays' bytes."""
    return max((checkpoint / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)


def truncate_array(checkpoint: Path) -> Path:
    file = largest(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


def empty_array(checkpoint: Path) -> Path:
    largest(checkpoint).write_bytes(b"")
    return largest(checkpoint)


def remove_state(checkpoint: Path) -> Path:
    shutil.rmtree(checkpoint / "state")
    return checkpoint / "state"


def remove_checksums(checkpoint: Path) -> Path:
    (checkpoint / CHECKSUMS).unlink()
    return checkpoint / CHECKSUMS


def truncate(name: str):
    def cut(checkpoint: Path) -> Path:
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return file

    return cut


def flip_byte(checkpoint: Path) -> Path:
    file = largest(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    return file


# The metadata of the arrays, of the whole checkpoint, of what was measured, of the data iterator.
METADATA = ("state/_METADATA", "_CHECKPOINT_METADATA", "metrics/metrics", "data/metadata")
DAMAGES = {
    "a truncated array": truncate_array,
    "an empty array": empty_array,
    "no state": remove_state,
    "no checksums": remove_checksums,
    **{f"truncated {name}": truncate(name) for name in (*METADATA, CHECKSUMS)},
}


def test_an_intact_checkpoint_comes_back(directory):
    assert [damage(directory / str(step)) for step in (5, 10, 15)] == [None] * 3
    with Checkpoints(directory, keep=3) as kept:
        got = kept.resume(SHAPES)
    assert (got.step, got.position, got.said) == (15, {"at": 15}, "resumed from step 15")
    jax.tree.map(np.testing.assert_array_equal, got.state, state_of(15))


@pytest.mark.parametrize("do", [*DAMAGES.values(), flip_byte], ids=[*DAMAGES, "a flipped byte"])
def test_a_damaged_checkpoint_is_passed_over_and_said_in_one_line(directory, do):
    file = do(directory / "15")
    with Checkpoints(directory, keep=3) as kept:
        got = kept.resume(SHAPES)
        assert (got.step, got.position) == (10, {"at": 10})
        jax.tree.map(np.testing.assert_array_equal, got.state, state_of(10))
        assert got.said.startswith("resumed from step 10; damaged and renamed to STEP.damaged: step 15 (")
        # The path tells which file it was, if only its checkpoint's where the whole state is gone.
        assert str(file if file.exists() else directory / "15") in got.said
        assert "\n" not in got.said
        # Its step can be saved again, and is intact then.
        kept.save(15, state_of(15), {"at": 15}, {"held_out_loss": 2.0})
        assert kept.standing() == "the checkpoint of step 15 is intact"
    assert (directory / "15.damaged").is_dir()


def test_an_older_damaged_checkpoint_does_not_stop_a_run(directory):
    flip_byte(directory / "5")
    with Checkpoints(directory, keep=3) as kept:
        got = kept.resume(SHAPES)
        assert got.step == 15
        assert "step 5 (" in got.said
        kept.save(20, state_of(20), {"at": 20}, {"held_out_loss": 4.0})
        kept.wait()
        assert kept.steps() == [10, 15, 20]


def test_if_none_is_intact_one_line_says_so_and_nothing_is_renamed(directory):
    for step, do in ((5, flip_byte), (10, empty_array), (15, remove_state)):
        do(directory / str(step))
    with Checkpoints(directory, keep=3) as kept:
        with refused(r"no checkpoint in .* is intact: step 5 .*step 10 .*step 15") as error:
            kept.resume(SHAPES)
        assert kept.standing() == "no checkpoint is intact"
    assert "Give another --run" in str(error.value)
    assert sorted(path.name for path in directory.iterdir()) == ["10", "15", "5"]


def test_the_best_intact_checkpoint_is_exported(directory):
    """Read only: beside a run in progress nothing is renamed."""
    truncate_array(directory / "10")
    said: list[str] = []
    with Checkpoints(directory, read_only=True) as kept:
        params, step, measured = kept.best(said.append)
    assert (step, measured) == (15, {"held_out_loss": 2.0})
    np.testing.assert_array_equal(params["w"], state_of(15).params["w"])
    assert len(said) == 1
    assert "damaged checkpoints were skipped: step 10 (" in said[0]
    assert (directory / "10").is_dir()


def test_without_a_best_one_the_reason_is_told(directory, tmp_path):
    said: list[str] = []
    for step in (5, 10, 15):
        flip_byte(directory / str(step))
    with (
        Checkpoints(directory, read_only=True) as kept,
        refused("no intact checkpoint in"),
    ):
        kept.best(said.append)
    (tmp_path / "none").mkdir()
    empty = Checkpoints(tmp_path / "none", read_only=True)
    with empty as kept, refused("no checkpoint in"):
        kept.best(said.append)


def test_another_model_is_not_taken_for_damage(directory):
    another = TrainState(jnp.int32(0), {"w": jnp.zeros((32, 32))}, {"m": jnp.ones(5)})
    with (
        Checkpoints(directory, keep=3) as kept,
        refused("holds another model or optimiser"),
    ):
        kept.resume(another)
    assert not list(directory.glob("*.damaged"))


def test_what_cannot_be_read_for_another_reason_is_not_taken_for_damage(directory, monkeypatch):
    """Such as too little memory: the checksums say that the checkpoint is whole."""

    def full(*_, **__):
        raise MemoryError("out of memory")

    with Checkpoints(directory, keep=3) as kept:
        monkeypatch.setattr(kept._manager, "restore", full)
        with pytest.raises(Failed, match=r"step 15 in .* is intact, but could not be read: out of memory$"):
            kept.resume(SHAPES)
    assert sorted(path.name for path in directory.iterdir()) == ["10", "15", "5"]


def test_what_closing_raises_does_not_hide_why_the_run_ended(directory, monkeypatch):
    def full():
        raise OSError(errno.EFBIG, "File too large")

    def leave(error: Exception | None) -> None:
        with Checkpoints(directory, keep=3) as kept:
            close = kept._manager.close
            monkeypatch.setattr(kept._manager, "close", lambda: (close(), full()))
            if error is not None:
                raise error

    with refused("the checkpoint of step 5 is intact"):
        leave(ValueError("the checkpoint of step 5 is intact"))
    with pytest.raises(OSError, match="File too large"):
        leave(None)


def test_a_full_disk_is_an_error_without_a_logged_traceback(directory, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(directory, keep=3) as kept:
        monkeypatch.setattr(checkpoints, "write_json", full)
        kept.save(20, state_of(20), {"at": 20}, {"held_out_loss": 1.0})
        with pytest.raises(OSError, match="No space left"):
            kept.wait()
        assert kept.standing() == "the checkpoint of step 15 is intact"
    assert not caplog.records
    monkeypatch.undo()
    with Checkpoints(directory, keep=3) as kept:
        assert kept.resume(SHAPES).step == 15


# As a user meets them


def test_a_run_goes_on_from_the_intact_checkpoint_with_the_losses_it_had(folder, capsys):
    assert sft.main(arguments(folder, "run", "--steps", "10")) == 0
    before = [record["loss"] for record in metrics(folder, "run")]
    flip_byte(folder / "run-run" / "checkpoints" / "10")
    capsys.readouterr()
    assert sft.main(arguments(folder, "run", "--steps", "10")) == 0
    said = capsys.readouterr().err
    assert "resumed from step 5; damaged and renamed to STEP.damaged: step 10 (" in said
    assert [record["loss"] for record in metrics(folder, "run")] == before
    for step in (5, 10):
        flip_byte(folder / "run-run" / "checkpoints" / str(step))
    assert sft.main(arguments(folder, "run", "--steps", "10")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("training.sft: error: no checkpoint in ")


HOLD = """
import sys, time
from pathlib import Path
from jaxspec.host import lock
with lock.exclusive(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(300)
"""


def holding(run: Path) -> subprocess.Popen:
    """A process that holds the lock of a run directory."""
    command = [sys.executable, "-c", HOLD, str(run)]
    process = subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.full
def test_a_second_training_in_a_run_directory_is_refused_until_the_first_is_gone(folder, capsys):
    run = folder / "run-shared"
    process = holding(run)
    try:
        assert sft.main(arguments(folder, "shared", "--steps", "2")) == 2
        said = capsys.readouterr().err
        assert f"training.sft: error: {run} is in use by process {process.pid} on " in said
        assert ", since 20" in said
        assert "give another --run" in said
        assert [path.name for path in run.iterdir()] == [lock.FILE]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (run / lock.FILE).read_text()  # what a killed process leaves does not matter
    assert sft.main(arguments(folder, "shared", "--steps", "2")) == 0
    assert not (run / lock.FILE).exists()


def test_a_lock_is_released_by_an_error(tmp_path):
    with pytest.raises(KeyError), lock.exclusive(tmp_path, pytest.fail):
        raise KeyError
    with lock.exclusive(tmp_path, pytest.fail):
        assert f"process {os.getpid()} on " in (tmp_path / lock.FILE).read_text()


def test_a_lock_leaves_no_file_and_is_not_one_on_a_removed_file(tmp_path, monkeypatch):
    calls, flock = [], fcntl.flock

    def after_the_end_of_the_former_holder(file, how):
        if not calls:
            (tmp_path / lock.FILE).unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_end_of_the_former_holder)
    with lock.exclusive(tmp_path, pytest.fail):
        assert (tmp_path / lock.FILE).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_checksums_name_every_file_but_their_own(written):
    named = json.loads((written / "15" / CHECKSUMS).read_text())
    files = {str(path.relative_to(written / "15")) for path in (written / "15").rglob("*") if path.is_file()}
    missing = files - set(named)
    assert {Path(name).name for name in missing} <= {CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt"}
    assert any("state/" in name for name in named)
