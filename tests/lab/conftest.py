"""Settings of the tests of measurements."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_default_method(no_default_method):
    """Every measurement names its methods."""
