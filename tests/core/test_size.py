"""Ceilings for the size of the package: lines of code by folder, methods by class, branches by function.

A ceiling falls with the code: the tests fail if it is higher than the code needs. It rises only in a commit of its own,
whose body names the feature and the lines that went elsewhere.
"""

from __future__ import annotations

import ast
import functools
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxspec"
# Lines of code by folder, without docstrings, comments and blank lines. A folder may have up to `SLACK` fewer.
LINES = {
    ".": 1098,
    "cli": 810,
    "console": 916,
    "costs": 240,
    "decoding": 544,
    "drafting": 1748,
    "engine": 1337,
    "grammar": 1248,
    "heads": 2663,
    "host": 657,
    "io": 3880,
    "loading": 492,
    "measuring": 4918,
    "methods": 1446,
    "model": 2168,
    "programs": 1045,
    "serving": 2462,
    "session": 1194,
    "testing": 655,
    "texts": 887,
}
SLACK = 25
MOST_METHODS, MOST_BRANCHES = 25, 20
# The classes and functions that have more, with their numbers.
METHODS: dict[str, int] = {}
BRANCHES: dict[str, int] = {}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler, ast.match_case),
    *(ast.IfExp, ast.BoolOp, ast.comprehension),
)
_SILENT = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """Yields the folder, the path and the syntax tree of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        yield place.parts[0] if len(place.parts) > 1 else ".", path, ast.parse(path.read_text("utf-8"))


def num_lines(path: Path, tree: ast.Module) -> int:
    """Returns the number of lines with code."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
            if token.type not in _SILENT and not is_docstring:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def num_branches(function: ast.AST) -> int:
    """Returns the number of branches of a function, without those of functions inside it."""
    inside = [
        one for one in ast.iter_child_nodes(function) if not isinstance(one, (*FUNCTIONS, ast.ClassDef))
    ]
    return sum(isinstance(one, _BRANCHES) + num_branches(one) for one in inside)


@functools.cache
def found() -> tuple[Counter[str], dict[str, int], dict[str, int]]:
    """Returns the lines of each folder, and the methods and branches of all classes and functions."""
    lines: Counter[str] = Counter()
    methods, branches = {}, {}
    for folder, path, tree in modules():
        lines[folder] += num_lines(path, tree)
        for node in ast.walk(tree):
            name = f"{path.relative_to(PACKAGE)}:{getattr(node, 'name', '')}"
            if isinstance(node, ast.ClassDef):
                methods[name] = sum(isinstance(one, FUNCTIONS) for one in node.body)
            elif isinstance(node, FUNCTIONS):
                branches[name] = max(num_branches(node), branches.get(name, 0))
    return lines, methods, branches


def test_no_folder_has_more_lines():
    lines = found()[0]
    assert lines.keys() == LINES.keys()
    assert {name: (lines[name], most) for name, most in LINES.items() if lines[name] > most} == {}


def test_ceilings_fall_with_the_code():
    lines = found()[0]
    assert {name: (lines[name], most) for name, most in LINES.items() if lines[name] < most - SLACK} == {}


@pytest.mark.parametrize(
    ("which", "most", "above"),
    [(1, MOST_METHODS, METHODS), (2, MOST_BRANCHES, BRANCHES)],
    ids=["methods", "branches"],
)
def test_no_class_or_function_is_larger(which, most, above):
    assert {name: number for name, number in found()[which].items() if number > most} == above


def test_code_is_counted_without_words(tmp_path):
    words, code = '"""A module.\n\nMore.\n"""\n\n# A comment.\n', 'X = """a\nb"""\n\n\ndef f(x):\n'
    (path := tmp_path / "one.py").write_text(
        f'{words}{code}    """Does."""\n    return (\n        x\n    )\n'
    )
    assert num_lines(path, ast.parse(path.read_text())) == 6


def test_branches_are_those_of_the_function_alone():
    tree = ast.parse(
        "def f(x):\n if x and 1:\n  return [y for y in x]\n def g():\n  if x: pass\n return 1 if x else 2"
    )
    assert num_branches(tree.body[0]) == 4
