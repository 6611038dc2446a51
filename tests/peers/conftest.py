"""Settings that hold for the comparisons with transformers."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """On a small machine PyTorch's threads would wait for those of XLA, and those of one worker for another's."""
    pytest.importorskip("torch").set_num_threads(1)


@pytest.fixture
def fast_compile():
    """For tiny models whose compilation takes longer than all that they compute."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
