"""The documentation's code runs, and the pages it names are there."""

from __future__ import annotations

import functools
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec.heads
from jaxspec.heads import kinds
from jaxspec.heads.files import read_head
from jaxspec.heads.writer import write_head
from jaxspec.methods import registry
from jaxspec.testing import TARGET, contracts, params
from jaxspec.texts import requests
from tests import tiny
from training.losses.base import next_token

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of code of a page in a language."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no block of {language}"
    return found


def code(page: str) -> str:
    """The Python blocks of a page, one after another."""
    return "\n\n".join(blocks(page))


def run(script: str, monkeypatch) -> dict:
    """Runs a page's code as a module of its own; returns its names."""
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # where dataclasses look up their types
    exec(compile(script, "page", "exec"), vars(page))
    return vars(page)


@pytest.mark.full
def test_the_code_of_the_extend_page_runs(capsys, monkeypatch):
    script = code("extend.md").replace("check_drafter(Repeat(period=2), report=print)", CHECK)
    names = run(script, monkeypatch)
    said = capsys.readouterr().out
    assert "check_greedy_text, greedy acceptor" in said
    assert "Repeat passed 8 checks with the acceptors greedy" in said
    method = names["RepeatMethod"]
    monkeypatch.setattr(registry, "built_in", lambda: {"repeat": method})
    assert registry.make("repeat", {"period": 6}) == method(period=6)
    lm = names["lm"]
    typed = lm.generate("One, two,", method=method(period=6), max_new_tokens=8)
    assert typed.tokens == lm.generate("One, two,", method="repeat", period=6, max_new_tokens=8).tokens
    assert typed.tokens == lm.generate("One, two,", method=names["Repeat"](6), max_new_tokens=8).tokens
    check_objective(names["objective"])


def check_objective(objective):
    """The page's loss is that of next-token prediction plus its penalty."""
    options, start = types.SimpleNamespace(recompute=False, shrink=0.5), types.SimpleNamespace(config=TARGET)
    batch = {name: jnp.arange(6)[None] % 3 for name in ("tokens", "positions")}
    batch |= {"segments": jnp.ones((1, 6), jnp.int32), "learn": jnp.ones((1, 6), bool)}
    total, weight = objective(options, start).loss(params(), batch, None)
    plain, same = next_token(TARGET)(params(), batch, None)
    squares = sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(params()))
    assert weight == same
    assert total == pytest.approx(float(plain + 0.5 * weight * squares), rel=1e-5)


# All acceptors take two minutes; the slow tier has them.
CHECK = "check_drafter(Repeat(period=2), acceptors=['greedy'], report=print)"


@pytest.mark.slow
def test_the_drafter_of_the_page_keeps_all_contracts(capsys, monkeypatch):
    run(code("extend.md"), monkeypatch)
    assert "check_sampled_distribution, block acceptor" in capsys.readouterr().out


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Adds the head of the page `add_a_head.md` to the package, with its rows, for one test."""
    text = (ROOT / "docs/add_a_head.md").read_text("utf-8")
    files = dict(re.findall(r'^```python title="(\S+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for path, script in files.items():
        if path.startswith("jaxspec/heads/toy/"):
            (folder / Path(path).name).write_text(script)
    monkeypatch.setattr(jaxspec.heads, "__path__", [*jaxspec.heads.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "built_in", functools.cache(registry.built_in.__wrapped__))
    rows = {"jaxspec/heads/kinds.py": (kinds, "KINDS"), "tests/tiny.py": (tiny, "DRAFTERS")}
    for path, (module, table) in rows.items():
        names = dict(vars(module))
        exec(compile(files[path], path, "exec"), names)
        monkeypatch.setitem(getattr(module, table), "toy", names[table]["toy"])
    yield
    for name in [name for name in sys.modules if name.startswith("jaxspec.heads.toy")]:
        del sys.modules[name]


@pytest.mark.full
def test_the_head_of_the_page_is_written_and_read_and_drafts(toy, tmp_path):
    lm = tiny.language_model()
    head = kinds.KINDS["toy"].usual(lm.config)
    write_head(tmp_path / "head", head, tiny.head_params(head), lm.fingerprint)
    found = read_head(tmp_path / "head", lm.config)
    assert (found.config, found.target) == (head, lm.fingerprint)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.load(np.float32), tiny.head_params(head)))
    drafted = lm.generate([1, 2, 3], method="toy", draft=tmp_path / "head", max_new_tokens=12)
    assert drafted.tokens == lm.generate([1, 2, 3], max_new_tokens=12).tokens
    assert drafted.statistics.num_draft_tokens > 0
    contracts.check_greedy_text(tiny.loop(tiny.Combination("toy", "constant", "greedy")))


@pytest.mark.full
def test_the_code_of_the_python_page_runs(monkeypatch):
    script = code("python.md").replace('load("large")', 'load("small")').replace("=64", "=8")
    script = script.replace("[60, 20]", "[8, 6]")
    monkeypatch.setattr(requests, "DEFAULT_BUDGET", 8)  # where the page gives none
    run(script, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
        # The site has no other files.
        assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), target
