"""A package outside the project adds a method: the code of docs/extend.md, installed, without an edit here."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import ROOT, python, variables
from tests.docs.test_docs import blocks, titled


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An installed package: its directory, and its metadata with the page's entry point."""
    site = tmp_path_factory.mktemp("site")
    drafter, method = (code for code in blocks("extend.md") if "class Repeat" in code)
    (site / "my_package").mkdir()
    (site / "my_package" / "__init__.py").write_text("")
    (site / "my_package" / "repeat.py").write_text(drafter + "\n\n" + method)
    (project,) = map(tomllib.loads, blocks("extend.md", "toml"))
    about, ours = project["project"], tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["dependencies"] == [ours["name"]]
    assert about["requires-python"] == ours["requires-python"]
    assert site.joinpath(about["name"].replace("-", "_")).is_dir()  # which hatchling packs without being told
    metadata = site / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    entries = about["entry-points"]["jaxspec.methods"]
    lines = [f"{name} = {where}" for name, where in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[jaxspec.methods]", *lines, ""]))
    return site


def jaxspec(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "jaxspec", *arguments, env=variables(site, COLUMNS="100"))


@pytest.mark.full
def test_it_is_in_the_help(installed):
    done = jaxspec(installed, "generate", "--help")
    assert done.returncode == 0, done.stderr
    assert "repeat" in " ".join(done.stdout.split()).partition("One of ")[2].partition(".")[0]
    done = jaxspec(installed, "generate", "--help", "--method", "repeat")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "repeat: Proposes the tokens of one period earlier." in words
    assert "--period P the period of the text in tokens. Default 8." in words


# The head of the page "Add a head", in a package of its own.
KINDS = """
from jaxspec.heads.kinds import known
from jaxspec.methods import registry
from training.heads.kinds import KINDS

print(known()["toy"].usual.__module__, registry.find("toy").__module__, KINDS["toy"].loss.__module__, *known())
"""


@pytest.mark.full
def test_another_package_adds_a_head(tmp_path):
    """It is found, and trained; one that cannot be loaded is one warning."""
    page = titled("add_a_head.md")
    own = {Path(path).stem: code for path, code in page.items() if path.startswith("jaxspec/heads/toy")}
    own |= {"training": page["training/heads/toy.py"], "kind": page["toy_head/kind.py"], "__init__": ""}
    (tmp_path / "toy_head").mkdir()
    for name, code in own.items():
        code = code.replace("jaxspec.heads.toy", "toy_head").replace(
            "training.heads.toy", "toy_head.training"
        )
        (tmp_path / "toy_head" / f"{name}.py").write_text(code)
    (points,) = map(tomllib.loads, blocks("add_a_head.md", "toml"))
    lines = []
    for group, entries in points["project"]["entry-points"].items():
        entries |= {"broken": "nowhere:KIND"} if group == "jaxspec.heads" else {}
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in entries.items())]
    metadata = tmp_path / "toy_head-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-head\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    done = python("-c", KINDS, env=variables(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["toy_head.network", "toy_head.method", "toy_head.training"]
    assert done.stdout.split()[-1] == "toy"
    assert done.stderr.count("Warning") == 1
    assert "head type 'broken' of the entry point nowhere:KIND cannot be loaded" in done.stderr
