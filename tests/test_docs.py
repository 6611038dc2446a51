"""The documentation's code runs, and the pages it names are there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from jaxspec.engine import requests

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of code of a page in a language."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(page: str) -> str:
    """The Python blocks of a page, one after another."""
    return "\n\n".join(blocks(page))


def run(script: str, monkeypatch) -> dict:
    """Runs a page's code as a module of its own; returns its names."""
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # where dataclasses look up their types
    exec(compile(script, "page", "exec"), vars(page))
    return vars(page)


def test_the_code_of_adding_a_drafter_runs(capsys, monkeypatch):
    from jaxspec.methods import registry

    script = code("add_a_drafter.md").replace("check_drafter(Repeat(period=2), report=print)", CHECK)
    names = run(script, monkeypatch)
    assert "check_greedy_text, greedy acceptor" in capsys.readouterr().out
    method = names["RepeatMethod"]
    monkeypatch.setattr(registry, "built_in", lambda: {"repeat": method})
    assert registry.make("repeat", {"period": 6}) == method(period=6)
    lm = names["lm"]
    typed = lm.generate("One, two,", method=method(period=6), max_new_tokens=8)
    assert typed.tokens == lm.generate("One, two,", method="repeat", period=6, max_new_tokens=8).tokens
    assert typed.tokens == lm.generate("One, two,", method=names["Repeat"](6), max_new_tokens=8).tokens


# All acceptors take two minutes; the slow tier has them.
CHECK = "check_drafter(Repeat(period=2), acceptors=['greedy'], report=print)"


@pytest.mark.slow
def test_the_drafter_of_the_page_keeps_all_contracts(capsys, monkeypatch):
    run(code("add_a_drafter.md"), monkeypatch)
    assert "check_sampled_law, block acceptor" in capsys.readouterr().out


def test_the_code_of_the_python_page_runs(monkeypatch):
    script = code("python.md").replace('load("large")', 'load("small")').replace("=64", "=8")
    script = script.replace("[60, 20]", "[8, 6]")
    monkeypatch.setattr(requests, "DEFAULT_BUDGET", 8)  # where the page gives none
    run(script, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
