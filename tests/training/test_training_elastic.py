"""Runs that are killed, pre-empted or diverge, and runs that resume on other devices."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import refused
from tests.core.test_mesh import on_eight_devices
from tests.training.test_training_mesh import SHAPE
from tests.training.test_training_run import arguments, best_of, losses_of, metrics, with_programs
from training import sft
from training.loop import step
from training.loop.checkpoints import Checkpoints
from training.reports import evaluation
from training.reports.metrics import Metrics

# Starts the command of each line in a process of its own, which shares the imports: prints its id, then its status.
SERVER = """
import json, os, sys

from training import sft

for line in sys.stdin:
    child = os.fork()
    if not child:
        os._exit(sft.main(json.loads(line)))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# A run of six steps, then copies of it that resume from the third in the other ways, on eight devices.
RESUME = """
import json, shutil, sys

import jax

from training import soft

folder, common, ways = json.loads(sys.argv[1])
assert jax.device_count() == 8
for name, more in ways.items():
    if name != "whole":
        shutil.copytree(f"{folder}/run-whole", f"{folder}/run-{name}")
        shutil.rmtree(f"{folder}/run-{name}/checkpoints/6")
    assert soft.main([*common, "--run", f"{folder}/run-{name}", *more]) == 0
    print(name)
"""
ROWS = ["--batch", "8", "--accumulate", "1"]
WAYS = {
    "whole": [*ROWS, "--mesh", "data=8"],
    "same": [*ROWS, "--mesh", "data=8"],
    "four": [*ROWS, "--mesh", "data=4"],
    "two-by-four": [*ROWS, "--mesh", "data=2,model=4"],
    "one-accumulated": ["--batch", "2", "--accumulate", "4", "--mesh", "data=1"],
}


def final_state(folder: Path, name: str) -> list[np.ndarray]:
    """The leaves of the parameters in the latest checkpoint of a run."""
    with Checkpoints(folder / f"run-{name}" / "checkpoints", read_only=True) as kept:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(kept.params(kept.steps()[-1]))]


@pytest.mark.full
def test_a_run_resumes_on_other_devices(folder):
    """The same mesh gives the same bits; other meshes and accumulations give the same losses to tolerance."""
    common = f"--data {folder}/text.txt {SHAPE} --window 32 --held-out 6 --steps 6 --every 3"
    said = on_eight_devices(RESUME, json.dumps([str(folder), common.split(), WAYS]))
    assert said == list(WAYS)
    expected = losses_of(metrics(folder, "whole"))
    assert losses_of(metrics(folder, "same")) == expected
    assert all(map(np.array_equal, final_state(folder, "same"), final_state(folder, "whole")))
    for name in list(WAYS)[2:]:
        found = losses_of(metrics(folder, name))
        assert len(found) == 6
        for which in range(4):
            columns = [[record[which] or 0.0 for record in records] for records in (found, expected)]
            np.testing.assert_allclose(*columns, rtol=3e-4, err_msg=name)


def steps_of(checkpoints: Path) -> list[int]:
    """The steps of the finished checkpoints of a run that may be in progress."""
    found = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return sorted(int(name) for name in found if name.isdigit())


def is_writing(checkpoints: Path) -> bool:
    """Whether a checkpoint is being written."""
    return checkpoints.is_dir() and any("tmp" in name for name in os.listdir(checkpoints))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 12), pytest.param(30, 100, marks=pytest.mark.slow)], ids=["2", "30"]
)
def test_kills_in_the_middle_of_checkpoints_lose_nothing(folder, tmp_path, kills, steps):
    """Each life resumes from the newest checkpoint of the previous one, and the losses are those of one life."""
    rng, name, given = random.Random(0), f"killed-{kills}", ["--every", "1", "--steps", str(steps)]
    checkpoints = folder / f"run-{name}" / "checkpoints"
    environment, log = with_programs(folder), tmp_path / "log"
    in_checkpoints = lives = 0
    with (
        log.open("a") as stream,
        subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=-1, stdout=-1, stderr=stream, text=True
        ) as server,
    ):

        def begin(run: str) -> int:
            log.write_text("")
            server.stdin.write(json.dumps([*arguments(folder, run, *given), "--samples", "0"]) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        def wait_until(reached: Callable[[], bool]) -> None:
            limit = time.monotonic() + 100
            while not reached():
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.001)

        def is_killed_in_a_checkpoint() -> bool:
            newest = steps_of(checkpoints)[-1:]
            child = begin(name)
            # By then the remains of the previous life are removed.
            wait_until(
                lambda: "resumed from step" in log.read_text() if newest else bool(steps_of(checkpoints))
            )
            goal = steps_of(checkpoints)[-1] + rng.randrange(3)
            wait_until(lambda: steps_of(checkpoints)[-1] >= goal and is_writing(checkpoints))
            time.sleep(rng.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL, log.read_text()
            said = log.read_text()
            assert "damaged" not in said
            assert not newest or f"resumed from step {newest[0]}\n" in said
            return is_writing(checkpoints)

        while in_checkpoints < kills:
            in_checkpoints += is_killed_in_a_checkpoint()
            lives += 1
        for run in (name, "uninterrupted"):
            begin(run)
            assert int(server.stdout.readline()) == 0, log.read_text()
        server.stdin.close()
    assert losses_of(metrics(folder, name)) == losses_of(metrics(folder, "uninterrupted"))
    print(f"{lives} kills, {in_checkpoints} of them in the middle of a checkpoint")


# In one process


@pytest.fixture
def signalled(monkeypatch):
    """Returns a function that sends this process a signal after a step."""
    write = Metrics.write

    def after(step: int, number: int) -> None:
        def then(log, done, record):
            write(log, done, record)
            if done == step:
                signal.raise_signal(number)

        monkeypatch.setattr(Metrics, "write", then)

    return after


@pytest.mark.full
def test_sigterm_saves_without_measuring(folder, signalled, monkeypatch, capsys):
    """Measurements and samples may take longer than a machine that is taken away leaves."""
    make_measure = evaluation.make_measure
    signalled(6, signal.SIGTERM)
    assert sft.main(arguments(folder, "term", "--steps", "12", "--every", "7")) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert "interrupted after step 7; the same command goes on from there (checkpoint written " in said
    assert not (folder / "term").exists()
    with Checkpoints(folder / "run-term" / "checkpoints", read_only=True) as kept:
        assert (kept.steps(), kept.measured()) == ([7], False)
        with refused("no checkpoint with a finite held-out loss"):
            kept.best(pytest.fail)
    monkeypatch.undo()
    assert evaluation.make_measure is make_measure
    for name in ("term", "undisturbed"):
        assert sft.main(arguments(folder, name, "--steps", "12", "--every", "7")) == 0
    assert "resumed from step 7\n" in capsys.readouterr().err
    found, expected = (losses_of(metrics(folder, name)) for name in ("term", "undisturbed"))
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    assert [one[3] for one in found if one[3] is not None] == [expected[-1][3]]
    assert best_of(folder, "term")[1] == 12


@pytest.mark.full
def test_sigterm_exports_nothing_even_if_a_checkpoint_was_measured_before(folder, signalled, capsys):
    signalled(6, signal.SIGTERM)
    assert sft.main([*arguments(folder, "late", "--steps", "12"), "--plot"]) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert "(checkpoint written " in said
    assert "wrote step" not in said
    assert "drew" not in said
    assert not (folder / "late").exists()
    assert best_of(folder, "late")[1] == 5


def test_unmeasured_checkpoints_are_kept_by_age_alone(tmp_path):
    from tests.training.test_training_checkpoints import state_of

    with Checkpoints(tmp_path, keep=1) as kept:
        for number, loss in ((1, None), (2, 1.0), (3, None), (4, 2.0), (5, None)):
            measured = None if loss is None else {"held_out_loss": loss}
            kept.save(number, state_of(number), {"at": number}, measured)
        kept.wait()
        assert kept.steps() == [2, 5]


@pytest.mark.parametrize(
    "high", [range(13, 99), pytest.param([13, 14, 16], marks=pytest.mark.full)], ids=["stays", "falls"]
)
def test_a_loss_that_stays_far_above_its_mean_ends_the_run(folder, monkeypatch, capsys, high):
    """Ten such losses in a row end it with one line; fewer do not."""
    make_step = step.make_step

    def jumping(*given):
        step_fn = make_step(*given)

        def then(state, *rest):
            state, measured = step_fn(state, *rest)
            factor = 10.0 if int(state.step) in high else 1.0
            return state, {**measured, "loss": measured["loss"] * factor}

        return then

    monkeypatch.setattr(step, "make_step", jumping)
    name = f"jump-{len(high)}"
    status = sft.main(arguments(folder, name, "--steps", "25"))
    said = capsys.readouterr().err.strip().splitlines()
    ends = len(high) > 3
    assert (status, len(metrics(folder, name))) == ((1, 21) if ends else (0, 25))
    if ends:
        assert " at step 22 is more than 3 times the mean " in said[-1]
        # No checkpoint is written during these steps, and a run that is started again is judged by the steps before.
        assert "training stops, the checkpoint of step 10 is intact. Lower --learning-rate" in said[-1]
        assert sft.main(arguments(folder, name, "--steps", "25")) == 1
        assert " at step 22 is more than 3 times the mean " in capsys.readouterr().err
        assert sft.main(arguments(folder, name, "--steps", "25", "--divergence", "1")) == 2
        assert sft.main(arguments(folder, name, "--steps", "25", "--divergence", "20")) == 0
