"""The base installation decodes; whatever needs more says in one line what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec.host import extras
from tests import ROOT, python, variables

# The import name of each package of an extra.
MODULES = {
    "train": ("grain", "optax", "orbax.checkpoint", "tensorboardX", "yaml", "matplotlib"),
    "charts": ("matplotlib",),
    "search": ("bayes_opt",),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
}


def without(folder: Path, *modules: str, command: list[str]) -> subprocess.CompletedProcess:
    """Runs `python -m …` in a process of its own in which the modules cannot be imported."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in modules)]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return python("-m", *command, env=variables(folder), cwd=folder)


def test_the_metadata_has_these_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "jaxspec-decoding"  # `jaxspec` on PyPI is another project
    assert project["name"] == name
    groups = project["optional-dependencies"]
    assert {group: len(groups[group]) for group in MODULES} == {
        group: len(one) for group, one in MODULES.items()
    }
    for group in ("all", "test"):
        own = [one for one in groups[group] if one.startswith("jaxspec")]
        assert own, f"{group} lacks the project's own extras"
        assert all(one.startswith(f"{name}[") for one in own)


@pytest.mark.slow
def test_the_base_generates(tmp_path):
    missing = {name for names in MODULES.values() for name in names} - {"yaml"}  # flax brings and imports it
    command = ["jaxspec", "generate", "Once", "--max-new-tokens", "2", "--model", "small"]
    done = without(tmp_path, *missing, "transformers", command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("module", ["sft", "probe", "export"])
def test_training_names_its_extra_before_anything_else(tmp_path, module):
    done = without(tmp_path, "grain", command=[f"training.{module}", "--help"])
    line = "jaxspec: error: this needs grain, of the extra `train`: pip install '.[train]' in jaxspec's repository\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_a_command_names_its_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    assert cli.main(["search", "--model", "none"]) == 1
    remedy = "pip install '.[search]' in jaxspec's repository"
    assert (
        capsys.readouterr().err == f"jaxspec: error: this needs bayes_opt, of the extra `search`: {remedy}\n"
    )


def test_what_is_installed_is_not_complained_of():
    extras.require("train", "json", "importlib.metadata")
    with pytest.raises(extras.MissingExtra, match=r"needs no_such\.part, .*\[train\]"):
        extras.require("train", "json", "no_such.part")
