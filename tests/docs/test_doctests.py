"""Every public class and function shows how it is used, and its examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec import methods, testing

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A folder means all its files.
PUBLIC = (
    "jaxspec/protocol.py",
    "jaxspec/stopping.py",
    "jaxspec/acceptance.py",
    "jaxspec/sampling.py",
    "jaxspec/model/tree.py",
    "jaxspec/costs/rounds.py",
    "jaxspec/drafting/chain_drafter.py",
    "jaxspec/methods",
    "jaxspec/heads/method.py",
    *sorted(ROOT.glob("jaxspec/heads/*/method.py")),
    "jaxspec/testing",
    "jaxspec/engine/language_model.py",
    "jaxspec/engine/conversation.py",
    "jaxspec/requests/results.py",
    "jaxspec/engine/scheduler.py",
    "jaxspec/serving/batch_files.py",
)
# In these files, a class or function is public if docs/extend.md names it, or if its package lists it in `__all__`.
PARTLY = ("jaxspec/model/", "jaxspec/costs/", "jaxspec/methods/", "jaxspec/heads/", "jaxspec/testing/")
# The methods that a user calls; those of any other class share its example.
OWN = {"LanguageModel": ("generate", "stream"), "Model": ("encode",)}


def files() -> list[Path]:
    """Returns the files of the public modules, but no `__init__.py`: a package only gathers names."""
    found = (sorted(path.glob("*.py")) if path.is_dir() else [path] for path in map(ROOT.joinpath, PUBLIC))
    return [path for paths in found for path in paths if path.name != "__init__.py"]


FILES = files()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def named(page: str) -> set[str]:
    """Returns the names of classes in backquotes and of imports on a page, and those that the public packages list."""
    imports = " ".join(re.findall(r"^from [\w.]+ import (.*)$", page, re.MULTILINE))
    found = {*re.findall(r"`(?:\w+\.)*([A-Z]\w*)`", page), *re.findall(r"\w+", imports)}
    return found | {*methods.__all__, *testing.__all__}


NAMED = named((ROOT / "docs" / "extend.md").read_text("utf-8"))


def public(source: str, partly: bool = False) -> Iterator[tuple[str, str]]:
    """Yields each public class and function of a module, and the methods in `OWN`, with its docstring."""
    for node in ast.parse(source).body:
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and (node.name in NAMED or not partly)
        ):
            yield node.name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                # Of an overloaded method the last definition has the docstring.
                methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
                for name in OWN.get(node.name, ()):
                    yield f"{node.name}.{name}", ast.get_docstring(methods[name]) or ""


def of(path: Path) -> list[tuple[str, str]]:
    partly = path.relative_to(ROOT).as_posix().startswith(PARTLY)
    return list(public(path.read_text("utf-8"), partly))


def test_every_public_class_and_function_has_an_example():
    missing = [
        f"{module_name(path)}.{name}" for path in FILES for name, text in of(path) if ">>> " not in text
    ]
    assert not missing, "no example in the docstrings of:\n" + "\n".join(missing)


def test_the_page_and_the_lists_name_what_is_public():
    found = {name for path in FILES for name, _ in of(path)}
    assert {"Method", "ChainMethod", "NGram", "Eagle3", "DraftCost", "DraftingMethod", "option"} < found
    assert {"Shape", "Resources", "LoadedModel", "check_drafter", "drafter_loop", "Loop", "params"} < found


def test_a_wrong_example_fails(monkeypatch):
    from jaxspec import protocol

    monkeypatch.setattr(protocol.Prefill, "__doc__", ">>> 1\n2\n")
    with pytest.raises(AssertionError, match=r"Failed example:\s+1"):
        test_examples_run(ROOT / "jaxspec" / "protocol.py")


def test_a_missing_example_is_noticed():
    source = 'class A:\n    """Says."""\ndef f():\n    """Says.\n\n    >>> f()\n    """\ndef _g(): pass\n'
    assert [name for name, text in public(source) if ">>> " not in text] == ["A"]


LONG = (
    "jaxspec.testing.contracts",
    "jaxspec.drafting.chain_drafter",
    "jaxspec.acceptance",
)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[pytest.mark.full] if name in LONG else [])
        for path, name in zip(FILES, map(module_name, FILES), strict=True)
    ],
)
def test_examples_run(path):
    module = importlib.import_module(module_name(path))
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    expected = sum(">>> " in text for _, text in of(path))
    assert len(tests) >= expected, "an example is not found by doctest"
