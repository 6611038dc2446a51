"""What a command imports before its work begins, and the table of where its seconds went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
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
)


def imported(code: str) -> set[str]:
    """The modules that a new process has after some code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code += "\nimport sys; print('modules:', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("code", ["import jaxspec", "from jaxspec.cli import main; main(['--help'])"])
def test_no_large_package_is_imported_before_it_is_needed(code):
    assert imported(code).isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "code",
    [
        "import jaxspec; jaxspec.load",
        "from jaxspec.cli import main; main(['generate', '--help'])",
        "from jaxspec.cli import main; main(['generate', 'a', '--model', 'small', '--max-new-tokens', '0'])",
    ],
)
def test_the_decoder_loads_no_wing(code):
    assert not [name for name in imported(code) if name.startswith(("jaxspec.measuring", "jaxspec.serving"))]


def test_a_command_imports_no_other_command_nor_what_it_does_not_use():
    code = (
        "from jaxspec.cli import main; main(['generate', 'a', '--model', 'small', '--max-new-tokens', '0'])"
    )
    found = imported(code)
    assert "jaxspec.cli.chat" not in found
    assert "flax.nnx" not in found  # flax before 0.12.10 cannot import it with jax from 0.11.2 on
    assert "jax" in found
    # It is in `sys.modules`, but not executed: no module of it is.
    assert not any(name.startswith("flax.linen.") for name in found)


def test_what_is_deferred_is_there_when_it_is_used():
    code = "from jaxspec.console.environment import defer_linen; defer_linen(); import flax, flax.linen as nn; nn.Dense"
    assert "flax.linen.linear" in imported(code)
