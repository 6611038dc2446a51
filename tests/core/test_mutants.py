"""The mutants of the acceptors: what the tests are worth that look at them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import acceptance
from tests import mutants


@pytest.mark.slow
def test_a_fast_test_notices_every_change_of_the_acceptors():
    """In a process of its own: it puts mutants in the module's place."""
    command = [sys.executable, "-m", "tests.mutants"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_mutant_differs_in_one_place():
    source = "def f(a, b):\n    return jnp.where(a < b, a + 1.0, g(b)[:, :-1])\n"
    made = {name.partition(": ")[2]: changed for name, changed in mutants.mutants(source)}
    assert {"a < b → a <= b", "a < b → b < a", "a + 1.0 → a", "a + 1.0 → 1.0", "a + 1.0 → a - 1.0"} <= set(
        made
    )
    assert {"1.0 → 2.0", "1.0 → 0.0", ":-1 → 1:"} <= set(made)
    assert "jnp.where(a < b, a + 1.0, g(b)[:, :-1]) → a + 1.0" in made
    assert all(changed != source for changed in made.values())
    assert made["a < b → a <= b"] == "def f(a, b):\n    return jnp.where(a <= b, a + 1.0, g(b)[:, :-1])"


@pytest.mark.full
def test_the_biases_that_most_tables_hide_are_still_among_them():
    source = Path(acceptance.__file__).read_text(encoding="utf-8")
    assert len(list(mutants.by_hand(source))) == len(mutants.BY_HAND)
    assert all(old in source for old, _ in mutants.HIDDEN)
    assert len({changed for _, changed in mutants.mutants(source)}) > 150
