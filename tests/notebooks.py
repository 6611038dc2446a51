"""Runs a notebook's code cells as Jupyter would, without it: `python -m tests.notebooks FILE ...` stores outputs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells that run everywhere: code, but for what installs the package."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            yield cell


def run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Runs the code cells in order, in one namespace; yields each with its outputs, in the notebook format: what it
    printed to standard output, and the figures that it leaves open."""
    namespace: dict[str, Any] = {}
    for cell in code_cells(notebook):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), namespace)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        yield cell, outputs + [_image(figure) for figure in _figures()]


def _figures() -> list[Any]:
    """Those that Matplotlib has open, if it was imported; they are closed when the next cell runs."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures


def _image(figure: Any) -> dict[str, Any]:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=80)
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main(paths: list[str]) -> None:
    """Runs the notebooks and stores what they print in them."""
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for number, (cell, outputs) in enumerate(run(notebook), 1):
            cell["outputs"], cell["execution_count"] = outputs, number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
