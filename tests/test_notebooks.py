"""The notebooks run from top to bottom, their install cells aside, and are stored with what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

from tests import notebooks

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
# Directories of one machine or user, which a stored output must not show.
LOCAL = re.compile(r"/(?:root|home|Users|tmp|var|work|private|content)/|[A-Z]:\\\\")


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# Simulates devices before JAX looks for any, so it needs a process of its own.
OF_ITS_OWN = "multi_device"
ALONE = """
import json, sys

from tests import notebooks

for cell, outputs in notebooks.run(json.loads(open(sys.argv[1], encoding="utf-8").read())):
    assert [one["output_type"] for one in outputs] == [one["output_type"] for one in cell["outputs"]]
"""


# What takes long in a notebook, and what stands in its place here: fewer steps and tokens through the same cells.
SMALLER = {
    "quickstart": {"max_new_tokens=96": "max_new_tokens=24", "[60, 40, 20]": "[16, 12, 8]"},
    "train_soft": {
        "NUM_STORIES = 2000": "NUM_STORIES = 400",
        "TARGET_STEPS = 240": "TARGET_STEPS = 40",
        "DRAFT_STEPS = 60": "DRAFT_STEPS = 10",
        "max_new_tokens=96": "max_new_tokens=24",
    },
}


def smaller(notebook: dict, name: str) -> dict:
    """The notebook with less to do; what is to be replaced must be there."""
    cells = list(notebooks.code_cells(notebook))
    for old, new in SMALLER.get(name, {}).items():
        assert any(old in line for cell in cells for line in cell["source"]), f"{name} has no {old!r}"
        for cell in cells:
            cell["source"] = [line.replace(old, new) for line in cell["source"]]
    return notebook


def test_every_cell_of_simulated_devices_runs(tmp_path):
    """In any folder, where they leave nothing, on the devices that the notebook says it simulates."""
    root = notebooks.FOLDER.parent
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(notebooks.FOLDER / f"{OF_ITS_OWN}.ipynb")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", [one for one in NOTEBOOKS if one.stem != OF_ITS_OWN], ids=lambda path: path.stem
)
def test_every_cell_runs(path, monkeypatch, tmp_path):
    """Code cells run in order in one namespace, in any folder, where they leave nothing; each has outputs of the kinds
    that are stored with it, though from fewer steps."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("MPLBACKEND", "agg")  # no window, where there is a screen
    ran = list(notebooks.run(smaller(read(path), path.stem)))
    assert not list(here.iterdir())
    for cell, outputs in ran:
        kinds, stored = ([one["output_type"] for one in some] for some in (outputs, cell["outputs"]))
        assert kinds == stored, "".join(cell["source"])
    assert any(outputs for _, outputs in ran)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored(path):
    """A reader sees what a notebook prints, from one run from top to bottom, and nothing of who ran it."""
    cells = list(notebooks.code_cells(read(path)))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell["outputs"]:
            shown = output.get("text") or output["data"]["text/plain"]
            assert not LOCAL.search("".join(shown))


def test_there_are_notebooks():
    """An empty folder would pass the tests above."""
    assert NOTEBOOKS
