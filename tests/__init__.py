"""The tests, and what many of their files share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def refused(message: str, kind: Any = ValueError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Checks that the block raises an error of this kind, in one line that matches `message`."""
    with pytest.raises(kind, match=message) as error:
        yield error
    assert "\n" not in str(error.value)


def variables(*folders: object, **more: str) -> dict[str, str]:
    """Returns the environment of a process on a CPU that imports from these folders and from the repository."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | more


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with words such as "-c" and a program to its end; by default in the environment `variables()`."""
    options = {"env": variables(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, *map(str, words)], text=True, **options)
