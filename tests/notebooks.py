"""Runs a notebook's code cells without Jupyter: `python -m tests.notebooks FILE ...` stores their outputs."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
# The first code cell of each notebook. Its metadata lists the extras.
INSTALL = """\
# Installs jaxspec if it is missing: from REPOSITORY, or from the folder above (a clone, or an unpacked zip).
import importlib.util
import shutil
import subprocess
import sys
from os import environ
from pathlib import Path


def gpu(field):  # of the first NVIDIA GPU; "" if there is none, or if JAX_PLATFORMS chooses the devices
    if environ.get("JAX_PLATFORMS") or not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", f"--query-gpu={{field}}", "--format=csv,noheader"]
    return next(iter(subprocess.run(query, capture_output=True, text=True).stdout.splitlines()), "")


REPOSITORY = "{repository}"  # elsewhere, as on Colab, set: "git+https://…", the address of a .zip, or a folder
if importlib.util.find_spec("jaxspec") is None:
    if not REPOSITORY and not Path("../pyproject.toml").exists():
        raise RuntimeError("set REPOSITORY above to the source of jaxspec: a folder, or what pip can install")
    extras = [{extras}]
    if importlib.util.find_spec("libtpu"):
        extras.append("tpu")
    elif (driver := gpu("driver_version").partition(".")[0]).isdigit():
        if int(driver) < 525:
            raise RuntimeError(f"NVIDIA driver {{driver}}; update it to 525 or newer, or set JAX_PLATFORMS=cpu")
        major, _, minor = gpu("compute_cap").partition(".")
        new = int(driver) >= 580 and major.isdigit() and (int(major), int(minor or 0)) >= (7, 5)
        extras.append("cuda" if new else "cuda12")
    source, extra = str(REPOSITORY or Path("..").resolve()), f"[{{','.join(extras)}}]" if extras else ""
    package = f"jaxspec-decoding{{extra}} @ {{source}}" if "://" in source else f"{{source}}{{extra}}"
    %pip install -q "{{package}}"
    if "jax" in sys.modules:
        raise RuntimeError("JAX was imported before; restart the session, then run from the top")
# In a process of its own, because a later cell may choose the devices.
if gpu("driver_version")[:1].isdigit():
    check = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    if subprocess.run(check, capture_output=True, text=True).stdout.strip() != "gpu":
        raise RuntimeError("JAX does not see the NVIDIA GPU; read docs/install.md, or set JAX_PLATFORMS=cpu")"""


def install_cell(extras: list[str]) -> str:
    """Returns the cell that installs the package; `pyproject.toml` is the one place of the repository's address."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "")
    names = ", ".join(f'"{extra}"' for extra in extras)
    return INSTALL.format(repository=repository and f"git+{repository}", extras=names)


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the code cells, except those that install packages."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            yield cell


def run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Runs the code cells in order in one namespace, and yields each with its outputs in the notebook format.

    The outputs are the text on standard output, the displays as they are at the end of the cell, and the last
    expression if it is HTML or a chart.
    """
    namespace: dict[str, Any] = {}
    for cell in code_cells(notebook):
        printed = io.StringIO()
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed), _displays() as displayed:
            exec(compile(tree, "cell", "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace) if last else None
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        yield cell, outputs + [_output(one) for one in [*displayed, value] if _data(one)]


@contextlib.contextmanager
def _displays() -> Iterator[list[Any]]:
    """Stands in for IPython: yields the displayed objects, of which an update replaces one."""
    shown: list[Any] = []

    class Handle:
        def __init__(self, at: int) -> None:
            self._at = at

        def update(self, one: Any) -> None:
            shown[self._at] = one

    def display(one: Any, display_id: bool) -> Handle:
        shown.append(one)
        return Handle(len(shown) - 1)

    ipython = ModuleType("IPython.display")
    ipython.display = display  # type: ignore[attr-defined]
    stand_ins = {"ipykernel": ModuleType("ipykernel"), "IPython": ModuleType("IPython")}
    stand_ins["IPython.display"] = ipython
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield shown
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _data(one: Any) -> dict[str, Any]:
    """Returns an object by the type of its content; empty if a notebook would show only its `repr`."""
    forms = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
    return {kind: [getattr(one, name)()] for kind, name in forms.items() if hasattr(one, name)}


def _output(one: Any) -> dict[str, Any]:
    data = _data(one) | {"text/plain": repr(one).splitlines(keepends=True)}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main(paths: list[str]) -> None:
    """Runs the notebooks and stores their outputs in them."""
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if "extras" in cell["metadata"]:
                cell["source"] = install_cell(cell["metadata"]["extras"]).splitlines(keepends=True)
        for number, (cell, outputs) in enumerate(run(notebook), 1):
            cell["outputs"], cell["execution_count"] = outputs, number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
