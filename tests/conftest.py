"""Settings of all tests."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

from jaxspec.host import progress
from jaxspec.methods import registry
from tests import data, xla

# The slowest files run first, so that no worker runs one of them alone at the end. By default xdist begins with the
# files with the most tests.
LONGEST = (
    *("conformance", "notebooks", "auto", "exact", "training_run", "choosing_drafter"),
    *("prefix", "session", "self_speculation", "conversation", "docs", "training_memory"),
    *("compiled", "processes", "eagle", "training_elastic", "training_precision"),
)


# The variable that names the method of the tests that name none. Without it, the folders that test what users call have
# the default of users, and the others decode plainly.
METHOD, USERS, FRONT = "JAXSPEC_TEST_METHOD", registry.DEFAULT, ("commands", "engine", "server")
# With this variable, a skipped test fails unless its reason is here: CI has all packages and the shared data.
NO_SKIPS = "JAXSPEC_TEST_NO_SKIPS"
MAY_SKIP = set() if data.DATA.is_dir() else {"the shared data is not here"}
_PROGRAMS = pytest.StashKey[str]()


def pytest_configure(config):
    """Sets XLA's flags and the environment; the slow tier and the peers compile as users do."""
    if "not slow" in config.option.markexpr or config.option.markexpr == "full":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla.flags()}".strip()
        if xla.PROGRAMS not in os.environ:  # else another run or this worker's controller made it
            os.environ[xla.PROGRAMS] = config.stash[_PROGRAMS] = tempfile.mkdtemp(prefix="jaxspec-programs-")
        os.environ.update(xla.shared_programs())
    # Tracing creates millions of live objects, which the collector would traverse too often.
    gc.set_threshold(50_000, 10, 10)
    # Tests write nothing to the user's cache; tests of the cache set a directory.
    os.environ["JAXSPEC_CACHE"] = "off"
    # They neither read nor write the user's data; tests of it set a directory.
    os.environ["JAXSPEC_DATA"] = os.path.join(os.devnull, "data")
    # An example that takes long on a busy machine is no failure.
    hypothesis.settings.register_profile("jaxspec", deadline=None)
    hypothesis.settings.load_profile("jaxspec")
    registry.DEFAULT = os.environ.get(METHOD, "autoregressive")
    # A line of the log would stand between expected ones wherever a compilation takes long.
    progress._LOG_S = math.inf
    # In the background of a shell, this process and its children would ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config):
    """Removes the shared programs of this run."""
    if (made := config.stash.get(_PROGRAMS, None)) is not None:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def default_method(request):
    """Sets the method of the tests of a file that name none, see `METHOD`."""
    with pytest.MonkeyPatch.context() as patch:
        if METHOD not in os.environ and request.path.parent.name in FRONT:
            patch.setattr(registry, "DEFAULT", USERS)
        yield


@pytest.fixture
def no_default_method(monkeypatch):
    """Refuses texts without a method: code that measures names its baseline, because the default may change."""
    monkeypatch.setattr(registry, "DEFAULT", "no default in this test")


def _refuse_skip(report):
    """Makes a skip a failure where `NO_SKIPS` is set: a test that looks in the wrong place would skip for ever."""
    if report.skipped and not hasattr(report, "wasxfail") and NO_SKIPS in os.environ:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in MAY_SKIP:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} skips, which {NO_SKIPS} forbids: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    """Refuses skips of tests."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    """Refuses skips of whole files."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Marks as `slow` all rows of a test but those that `@pytest.mark.representatives(*ids)` names.

    Raises:
      pytest.UsageError: a name that is no row's, so that renaming a row cannot remove it from the ordinary tests.
    """
    made = yield
    for item in made if isinstance(made, list) else []:
        if kept := item.get_closest_marker("representatives"):
            rows = {one.callspec.id for one in made if one.originalname == item.originalname}
            if missing := set(kept.args) - rows:
                raise pytest.UsageError(f"{item.nodeid}: no row is named {', '.join(sorted(missing))}")
            if item.callspec.id not in kept.args:
                item.add_marker("slow")
    return made


def pytest_collection_modifyitems(items):
    """Moves the files in `LONGEST` to the front; the tests of a file keep their order. A slow test is not full."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "full"]
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """Excludes imported objects from later garbage collections, and processes of tests from the shared programs.

    Some of them test what a user's process compiles and keeps.
    """
    for name in xla.shared_programs():
        os.environ.pop(name, None)
    gc.collect()
    gc.freeze()


# Linux allows 65,530 maps per process; beyond that LLVM cannot allocate, and a segmentation fault ends the process.
MOST_MAPS, MAPS = 40_000, Path("/proc/self/maps")


def _forget_programs():
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Frees the programs of a file's tests, with those in its EXECUTABLES, which its models share."""
    yield
    if shared := getattr(request.module, "EXECUTABLES", None):
        request.module.EXECUTABLES = type(shared)()
    _forget_programs()


@pytest.fixture(autouse=True)
def few_maps():
    """Frees the programs of tests before they map too much memory: each one maps some."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        _forget_programs()


@pytest.fixture(scope="session")
def lm():
    """A tiny model with a tokenizer; all tests of the engine share its executables."""
    from tests import tiny  # imports JAX, after the flags are set

    return tiny.language_model()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny model and a tokenizer, as a user would give it to a command."""
    from tests.commands import write_tiny  # imports JAX, after the flags are set

    return write_tiny(tmp_path_factory)
