"""Settings that hold for every test."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import sys

import pytest

# The ordinary tests ask whether the mathematics is right, and compile far more than they compute.
FAST_COMPILE = "--xla_backend_optimization_level=0"
# XLA ends the process at a flag that it does not know, and these come and go.
KNOWN_IN_0_10 = (
    " --xla_cpu_use_fusion_emitters=false --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)


# The files that take longest, which begin first, so that no worker is left with one of them at the end: xdist would
# begin by those of the most tests.
LONGEST = (
    *("conformance", "notebooks", "mesh", "session", "training_run", "papers", "processes", "docs"),
    *("training_heads", "int8", "eagle", "s2d"),
)


def pytest_configure(config):
    """Compiles quickly; the slow tier and the peers get what users get."""
    if "not slow" in config.option.markexpr:
        flags = FAST_COMPILE
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            flags += KNOWN_IN_0_10
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    # Tracing makes millions of objects that live, which the collector would walk every few hundred.
    gc.set_threshold(50_000, 10, 10)
    # Tests leave nothing in the user's cache; those that try it name a directory.
    os.environ["JAXSPEC_CACHE"] = "off"
    # Nor do they read or write the user's data; those that do name a directory.
    os.environ["JAXSPEC_DATA"] = os.path.join(os.devnull, "data")
    # A shell that runs this in its background has it ignore Ctrl-C, and so every process it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Sorts the files by how long they take, as far as `LONGEST` knows; their tests stay in order."""
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """What was imported stays: no collection needs to walk it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees what a file's tests compiled: each program maps memory, and a process has only so many maps.

    Linux allows 65,530; beyond it LLVM cannot allocate, and the process ends with a segmentation fault.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def lm():
    """A tiny model with a tokenizer, whose executables all tests of the engine share."""
    from tests import tiny  # imports JAX, which must not happen before the flags are set

    return tiny.language_model()
