"""The notebooks run from top to bottom, their install cells aside."""

import json
import tempfile
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, capsys, monkeypatch, tmp_path):
    """Code cells run in order in one namespace and print something, in any folder, where they leave nothing."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("MPLBACKEND", "agg")  # no window, where there is a screen
    namespace: dict = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), namespace)
    assert capsys.readouterr().out
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    """What a notebook prints belongs to whoever runs it."""
    code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if "outputs" in cell]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_there_are_notebooks():
    """An empty folder would pass the test above."""
    assert NOTEBOOKS
