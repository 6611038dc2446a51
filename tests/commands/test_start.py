"""What a command imports before its work begins, and the table of where its seconds went."""

from __future__ import annotations

import pytest

from tests import python

HEAVY = [
    "jax",
    "flax",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "torch",
    "gguf",
    "orbax",
    "fastapi",
    "rich",
]


def imported(code: str) -> set[str]:
    """The modules that a new process has after some code."""
    done = python("-c", f"{code}\nimport sys; print('modules:', *sys.modules)", check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import jaxspec",
        "from jaxspec.cli import main; main(['--help'])",
        "from jaxspec.cli import main; main(['generate', '--help'])",
    ],
)
def test_neither_large_packages_nor_wings_are_imported_before_they_are_needed(code):
    found = imported(code)
    assert found.isdisjoint(HEAVY)
    # The program's own help shows the commands of the wings.
    assert not wings(found) or "(['--help'])" in code


def wings(found: set[str]) -> list[str]:
    return [name for name in found if name.startswith(("jaxspec.measuring", "jaxspec.serving"))]


def test_a_command_imports_no_other_command_nor_what_it_does_not_use():
    code = (
        "from jaxspec.cli import main; main(['generate', 'a', '--model', 'small', '--max-new-tokens', '0'])"
    )
    found = imported(code)
    assert "jaxspec.cli.chat" not in found
    assert wings(found | imported("import jaxspec; jaxspec.load")) == []
    assert "flax.nnx" not in found  # flax before 0.12.10 cannot import it with jax from 0.11.2 on
    assert "jax" in found
    # It is in `sys.modules`, but not executed: no module of it is.
    assert not any(name.startswith("flax.linen.") for name in found)


def test_what_is_deferred_is_there_when_it_is_used():
    code = "from jaxspec.console.environment import defer_linen; defer_linen(); import flax, flax.linen as nn; nn.Dense"
    assert "flax.linen.linear" in imported(code)
