"""Progress: one line in a terminal and in a notebook, updated in place; elsewhere only lines of long jobs."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxspec import methods
from jaxspec.console import terminal
from jaxspec.console.terminal import tell
from jaxspec.host import progress
from jaxspec.host.progress import Progress, hidden, shows_progress
from jaxspec.measuring.bench.comparison import compare, table
from jaxspec.programs.executables import Executables
from tests import tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch):
    """What a terminal gets; the line is shown from the start."""
    written = Terminal()
    replace_stderr(monkeypatch, written)
    monkeypatch.setattr(progress, "_SECOND", 0.02)
    return written


def replace_stderr(monkeypatch, stream: io.StringIO) -> None:
    """In these modules only, because pytest sets `sys.stderr` between a fixture and its test."""
    for module in (progress, terminal):
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))


def wait_for(shown: Terminal, text: str) -> None:
    until = time.monotonic() + 20
    while text not in shown.getvalue():
        assert time.monotonic() < until, shown.getvalue()
        time.sleep(0.01)


def screen(written: str, width: int = 200) -> list[str]:
    """The lines of a terminal after this output."""
    lines, at = [[" "] * width], 0
    for character in written:
        if character == "\n":
            lines.append([" "] * width)
            at = 0
        elif character == "\r":
            at = 0
        else:
            lines[-1][at] = character
            at += 1
    return ["".join(line).rstrip() for line in lines]


def test_nested_activities_are_shown_in_place_and_removed(shown):
    with Progress("measuring") as one:
        wait_for(shown, "jaxspec: measuring: 0 s\r")
        with Progress("compiling"):
            wait_for(shown, "jaxspec: measuring: compiling: 0 s")
        one("ending")
        wait_for(shown, "jaxspec: ending: 0 s")
        assert screen(shown.getvalue()) == ["jaxspec: ending: 0 s"]
        assert "\n" not in shown.getvalue()
    assert screen(shown.getvalue()) == [""]
    written = shown.getvalue()
    time.sleep(0.1)
    assert shown.getvalue() == written


def test_short_work_is_silent(monkeypatch):
    written = Terminal()
    replace_stderr(monkeypatch, written)
    with Progress("loading"):
        pass
    assert written.getvalue() == ""


def test_a_pipe_gets_lines_of_long_work_and_what_it_contains(shown, monkeypatch):
    pipe = io.StringIO()
    replace_stderr(monkeypatch, pipe)
    with Progress("answering"), Progress("compiling"):
        time.sleep(0.1)
        assert pipe.getvalue() == ""  # before 30 seconds
        monkeypatch.setattr(progress, "_LOG_S", 0.02)
        wait_for(pipe, "\n")
    written = pipe.getvalue()
    assert re.match(r"jaxspec: answering: compiling: \d+ s\n", written)
    assert "\r" not in written


def test_a_notebook_gets_the_line(shown, monkeypatch):
    notebook = io.StringIO()
    replace_stderr(monkeypatch, notebook)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with Progress("training"):
        wait_for(notebook, "\rjaxspec: training: 0 s")
    assert screen(notebook.getvalue()) == [""]


def test_a_permanent_line_is_alone_on_its_line(shown):
    with Progress("measuring"):
        wait_for(shown, "measuring")
        tell("read")
        with hidden():
            written = shown.getvalue()
            time.sleep(0.1)
            assert shown.getvalue() == written
    assert screen(shown.getvalue()) == ["jaxspec: read", ""]


def test_a_long_line_does_not_wrap(shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with Progress("x" * 100):
        wait_for(shown, "…: 0 s")
    assert max(map(len, shown.getvalue().split("\r"))) < 40


def test_counts_have_the_time_that_is_left(shown, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = []
    monkeypatch.setattr(Progress, "__call__", lambda self, what: said.append(what))
    one = Progress()
    one.count("masks", 2, 10)
    now[0] = 4.0
    one.count("masks", 4, 10, "best 1.20")
    assert said == ["masks 2/10", "masks 4/10  best 1.20  about 12 s left"]


def test_a_function_shows_its_progress_unless_the_caller_does(shown):
    @shows_progress
    def work(number, on_progress=lambda step: None):
        on_progress(f"step {number}")
        time.sleep(0.1)

    @shows_progress
    def steps(on_progress=lambda step: None):
        on_progress("first")
        yield 1
        time.sleep(0.1)

    told = []
    work(1, told.append)
    assert list(steps(on_progress=told.append)) == [1]
    assert (told, shown.getvalue()) == (["step 1", "first"], "")
    work(2)
    assert "jaxspec: step 2" in shown.getvalue()
    assert list(steps()) == [1]
    assert "jaxspec: first" in shown.getvalue()


def test_a_wait_for_the_background_is_shown(shown):
    executables, began, ended = Executables(), threading.Event(), threading.Event()

    def traced(x):
        began.set()
        ended.wait()
        return x

    executables.prepare(jax.jit(traced), jnp.ones(2))
    began.wait()
    waiting = threading.Thread(target=executables.wait)
    waiting.start()
    wait_for(shown, "jaxspec: compiling programs: 0 s")
    ended.set()
    waiting.join()
    assert screen(shown.getvalue()) == [""]


@pytest.mark.full
def test_measurements_are_reported_as_they_come(monkeypatch):
    lm, reports = tiny.language_model(), []
    found = compare(
        lm, [3, 4, 5], {"ngram": methods.NGram()}, repeats=1, max_new_tokens=6, on_measured=reports.append
    )
    assert [len(report["results"]) for report in reports[:2]] == [1, 2]
    assert len(reports) >= 2 * 2  # a text to compile and one that counts
    assert reports[-1].keys() == found.keys()
    assert [row[0] for row in table(reports[-1]).rows] == ["autoregressive", "ngram"]
    assert "<td>ngram</td>" in table(found)._repr_html_()
    assert re.search(r"^ngram +\d+ ", repr(table(found)), re.MULTILINE)
