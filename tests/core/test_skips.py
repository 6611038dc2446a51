"""No test of CI skips in silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import conftest
from tests.data import DATA

BODY = """
import pytest

@pytest.mark.skipif(True, reason="it looks in the wrong folder")
def test_marked(): ...

def test_in_its_body():
    pytest.skip("it looks in the wrong folder")

@pytest.fixture
def resource():
    pytest.skip("it looks in the wrong folder")

def test_in_a_fixture(resource): ...

@pytest.mark.xfail
def test_fails_as_expected():
    assert False

def test_passes(): ...
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("refused", "counts"),
    [(False, "1 passed, 4 skipped, 1 xfailed"), (True, "1 failed, 1 passed, 1 xfailed, 3 errors")],
)
def test_ci_refuses_skips_that_are_not_on_its_list(tmp_path, refused, counts):
    (tmp_path / "test_file.py").write_text(
        "import pytest\npytest.importorskip('a_package_that_is_not_there')\n"
    )
    (tmp_path / "test_skips.py").write_text(BODY)
    environment = {name: value for name, value in os.environ.items() if name != conftest.NO_SKIPS}
    environment |= {conftest.NO_SKIPS: "1"} if refused else {}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", "-q", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert counts in done.stdout, done.stdout + done.stderr
    assert done.returncode == refused
    assert ("could not import 'a_package_that_is_not_there'" in done.stdout) == refused


def test_missing_data_is_on_the_list_only_where_there_is_none():
    assert ("the shared data is not here" in conftest.MAY_SKIP) == (not DATA.is_dir())
