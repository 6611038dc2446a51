"""The notebooks run from top to bottom, their install cells aside."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, capsys):
    """Code cells run in order in one namespace and print something."""
    namespace: dict = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), namespace)
    assert capsys.readouterr().out


def test_there_are_notebooks():
    """An empty folder would pass the test above."""
    assert NOTEBOOKS
