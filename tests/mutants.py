"""Checks that a test detects every small change of the acceptors: `python -m tests.mutants`.

Each mutant is `jaxspec/acceptance.py` with one operator, number, comparison, call or argument changed or removed.
The fast tests of the acceptors run on each, in one process, until one of them fails.

`python -m tests.mutants --search N` searches N seeds for tables that reveal errors in block verification which most
tables hide. It prints, by seed, the total variation between the distribution of each wrong mutant and the right one.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from jaxspec import acceptance

TESTS = "tests/core/test_acceptance.py"
# (part of the line, change) → the reason why no test can detect the mutant: it is equivalent.
_ZERO = "the same: it guards against 0 ÷ 0, and no number is below NaN either"
_STREAM = "as good: another stream of numbers, apart from the others too"
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "inner = excess /",
        "jnp.maximum(excess + 1.0 - weight[:, :-1], 1e-38) → excess + 1.0 - weight[:, :-1]",
    ): _ZERO,
    ("inner = excess /", "1e-38 → 0.0"): _ZERO,
    ("weights.append", "jnp.maximum(q[:, i], 1e-38) → q[:, i]"): _ZERO,
    ("weights.append", "1e-38 → 0.0"): _ZERO,
    (
        "> 0, residual, p)",
        "jnp.sum(residual, axis=-1, keepdims=True) → jnp.max(residual, axis=-1, keepdims=True)",
    ): "the same: nothing of it is negative",
    ("jax.random.fold_in(key, 0), jnp.arange(count)", "0 → 1"): _STREAM,
    ("lambda key: jax.random.fold_in(key, 1)", "1 → 2"): _STREAM,
    ("lambda key: jax.random.fold_in(key, 1)", "1 → 0"): _STREAM,
    ("lambda key: jax.random.fold_in(key, 1)", "jax.random.fold_in(key, 1) → key"): _STREAM,
}
# Mutants that the rules below do not generate.
BY_HAND = [
    ("_redraw(keys, weighted, draft", "_redraw(keys, target, draft"),
    ("weighted[:, :-1] - draft", "target[:, :-1] - draft"),
    (
        "_redraw(keys, weighted, draft, count, count < proposal.count)",
        "_redraw(keys, weighted, draft, count, count < 0)",
    ),
]
# Block verification with one wrong term that few tables reveal.
HIDDEN = [
    BY_HAND[0],
    ("draft, count, count < proposal.count)", "draft, count, count <= proposal.count)"),
    ("jnp.sum(jnp.maximum(weighted", "jnp.max(jnp.maximum(weighted"),
    ("inner = excess / jnp.maximum(excess + 1.0 - weight[:, :-1], 1e-38)", "inner = excess"),
    ("/ jnp.maximum(q[:, i], 1e-38), 1.0)", "/ jnp.maximum(q[:, i], 1e-38), 9.0)"),
]
_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_TWINS = {"max": "min", "ones": "zeros", "ones_like": "zeros_like", "argmax": "argmin", "sum": "max"}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Returns the replacements of an expression, each with one change."""
    if isinstance(node, ast.BinOp):
        yield node.left
        yield node.right
        if type(node.op) in _SWAPS:
            yield ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [_SWAPS[type(node.ops[0])]()], node.comparators)
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            yield ast.Compare(node.comparators[0], node.ops, [node.left])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        if not isinstance(node.value, bool):
            yield ast.Constant(node.value + 1)
        if node.value:
            yield ast.Constant(type(node.value)(0))
    elif isinstance(node, ast.Slice) and (node.lower is None) != (node.upper is None):
        yield ast.Slice(lower=ast.Constant(1)) if node.lower is None else ast.Slice(upper=ast.Constant(-1))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        named = node.func.attr
        if named in ("where", "maximum", "minimum"):
            yield from node.args[-2:]
        elif node.args:
            yield node.args[0]
        if named in _TWINS:
            twin = copy.deepcopy(node)
            twin.func.attr = _TWINS[named]  # type: ignore[attr-defined]
            yield twin


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the source of each mutant; the name has the line, the original and the replacement."""
    tree = ast.parse(source)
    annotations = {id(n) for a in ast.walk(tree) for n in _annotations(a)}

    def fields() -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
        for parent in ast.walk(tree):
            if id(parent) in annotations:
                continue
            for name, value in ast.iter_fields(parent):
                for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    if isinstance(child, (ast.expr, ast.Slice)) and id(child) not in annotations:
                        yield parent, name, at, child

    def put(parent: ast.AST, name: str, at: int | None, child: ast.AST) -> None:
        if at is None:
            setattr(parent, name, child)
        else:
            getattr(parent, name)[at] = child

    for parent, name, at, child in list(fields()):
        for variant in variants(child):
            put(parent, name, at, variant)
            changed = ast.unparse(ast.fix_missing_locations(tree))
            put(parent, name, at, child)
            yield f"{child.lineno}: {ast.unparse(child)} → {ast.unparse(variant)}", changed  # type: ignore[attr-defined]


def by_hand(source: str) -> Iterator[tuple[str, str]]:
    """Yields the mutants of `BY_HAND` in the form of `mutants`."""
    for old, new in BY_HAND:
        assert source.count(old) == 1, f"{old} is no longer there; change BY_HAND"
        yield f"{source[: source.index(old)].count(chr(10)) + 1}: {old} → {new}", source.replace(old, new)


def search(seeds: int) -> None:
    """Prints how clearly the tables of each seed reveal the errors of `HIDDEN`."""
    from tests import tiny
    from tests.core import test_acceptance

    source, patch = _source(), pytest.MonkeyPatch()
    test_acceptance.GRID = 32
    for seed in range(seeds):
        target, draft = test_acceptance.table(seed, 3), test_acceptance.table(seed + 1000, 1)
        test_acceptance.LIKELY = max(
            range(test_acceptance.V), key=lambda token, distribution=draft[()]: distribution[token]
        )
        shown = []
        for old, new in HIDDEN:
            mutant = test_acceptance.acceptance = ModuleType("mutant")  # type: ignore[assignment]
            exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
            distributions = [
                test_acceptance.enumerated(patch, mutant.BlockAcceptor(), target, draft, ending)[0]
                for ending in map(test_acceptance.ENDINGS.__getitem__, ("all", "stopped"))
            ]
            shown.append(
                max(
                    tiny.distance(distribution, tiny.text_distribution(target.__getitem__, 3))
                    for distribution in distributions
                )
            )
        print(seed, *(f"{distance:.3f}" for distance in shown), flush=True)


def _source() -> str:
    with open(str(acceptance.__file__), encoding="utf-8") as file:
        return file.read()


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        if getattr(node, name, None) is not None:
            yield from ast.walk(getattr(node, name))


class _Failed:
    """A pytest plugin that records the first failed test."""

    def __init__(self) -> None:
        self.name: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See pytest."""
        if report.failed and self.name is None:
            self.name = report.nodeid.split("::")[-1]


def killer(source: str) -> str | None:
    """Returns the first fast test that fails on a mutant, or the error before any test ran; None if all pass."""
    mutant = ModuleType("jaxspec.acceptance")
    sys.modules["jaxspec.acceptance"] = sys.modules["jaxspec"].acceptance = mutant  # type: ignore[attr-defined]
    sys.modules.pop("tests.core.test_acceptance", None)
    failed = _Failed()
    try:
        exec(compile(source, "mutant", "exec"), mutant.__dict__)
        with contextlib.redirect_stdout(io.StringIO()):
            code = pytest.main(["-x", "-q", "-n", "0", "-p", "no:warnings", TESTS], plugins=[failed])
    finally:
        sys.modules["jaxspec.acceptance"] = sys.modules["jaxspec"].acceptance = acceptance  # type: ignore[attr-defined]
    return failed.name or (None if code == 0 else f"pytest ended with {code!r}")


def _why_equivalent(source: str, name: str) -> str | None:
    number, _, change = name.partition(": ")
    line = source.splitlines()[int(number) - 1]
    return next((why for (there, one), why in EQUIVALENT.items() if there in line and one == change), None)


def survivors(words: Sequence[str] = ()) -> list[str]:
    """Returns the mutants that no test detects and that are not known to be equivalent; prints each with its test.

    Args:
      words: selects the mutants whose name contains one of them; all if empty.
    """
    source, alive = _source(), []
    for name, changed in itertools.chain(by_hand(source), mutants(source)):
        if words and not any(word in name for word in words):
            continue
        by = killer(changed) or _why_equivalent(source, name)
        if by is None:
            alive.append(name)
        print(f"{name}\n    {by or 'SURVIVES'}", flush=True)
    return alive


def main() -> None:
    """Ends with status 1 if a mutant survives."""
    if sys.argv[1:2] == ["--search"]:
        search(int(sys.argv[2]))
        return
    alive = survivors(sys.argv[1:])
    print(f"{len(alive)} survive")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
