"""The documentation's code runs, and the pages it names are there."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxspec.heads
import training.heads
from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads import kinds
from jaxspec.methods import registry
from jaxspec.model import llama
from jaxspec.requests import reading
from jaxspec.testing import TARGET, contracts, params
from tests import ROOT, tiny
from training.losses.base import next_token

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


@pytest.fixture
def shallow(monkeypatch):
    """Loads four layers, until a trained exit of `sorted`, in place of each model: most of the time is compilation."""
    model = jaxspec.load("sorted")
    weights = llama.truncate(model.params, 4)
    cut = LanguageModel(model.config.truncated(4), weights, model.tokenizer, name="small")
    monkeypatch.setattr(jaxspec, "load", lambda name: cut)


@pytest.mark.full
def test_the_code_of_the_extend_page_runs(capsys, monkeypatch, shallow):
    script = code("extend.md").replace("check_drafter(Repeat(period=2), report=print)", CHECK)
    script = script.replace("exit_layer=6", "exit_layer=2")
    names = run(script, monkeypatch)
    said = capsys.readouterr().out
    assert "check_greedy_text, greedy acceptor" in said
    assert (
        names["result"].statistics.mean_acceptance_length > 2
    )  # the example shows that its drafts are accepted
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
    """Adds the head of the page `add_a_head.md` to the package, with its rows, for one test; yields its files."""
    files = titled("add_a_head.md")
    for path, script in files.items():
        if "toy" in path:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(script)
    (tmp_path / "jaxspec/heads/toy/__init__.py").touch()
    for package in (jaxspec.heads, training.heads):
        own = str(tmp_path / package.__name__.replace(".", "/"))
        monkeypatch.setattr(package, "__path__", [*package.__path__, own])
    monkeypatch.setattr(registry, "built_in", functools.cache(registry.built_in.__wrapped__))
    rows = {"jaxspec/heads/kinds.py": (kinds, "KINDS"), "tests/tiny.py": (tiny, "DRAFTERS")}
    for path, (module, table) in rows.items():
        names = dict(vars(module))
        exec(compile(files[path], path, "exec"), names)
        monkeypatch.setitem(getattr(module, table), "toy", names[table]["toy"])
    yield files
    for name in [
        name for name in sys.modules if name.startswith(("jaxspec.heads.toy", "training.heads.toy"))
    ]:
        del sys.modules[name]


def titled(page: str) -> dict[str, str]:
    """Returns the Python files of a page by their paths."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return dict(re.findall(r'^```python title="(\S+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))


@pytest.mark.full
def test_the_head_of_the_page_is_written_and_read_and_drafts(toy, tmp_path, monkeypatch):
    """By the page's own test, and as training finds it."""
    names = run(toy["tests/heads/test_toy.py"], monkeypatch)
    names["test_a_head_is_written_and_read_and_drafts_what_it_learned"](tmp_path / "head")
    assert names["KINDS"] == importlib.import_module(kinds.known()["toy"].training).KINDS
    contracts.check_greedy_text(tiny.loop(tiny.Combination("toy", "constant", "greedy")))


@pytest.mark.full
def test_the_code_of_the_python_page_runs(monkeypatch, shallow):
    script = code("python.md").replace("=64", "=8").replace("[60, 20]", "[8, 6]")
    script = script.replace("exit_layer=6", "exit_layer=2")
    monkeypatch.setattr(reading, "DEFAULT_BUDGET", 8)  # where the page gives none
    run(script, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
        # The site has no other files.
        assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), target
