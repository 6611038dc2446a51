"""A process that ends while something is compiled in the background leaves it."""

from __future__ import annotations

import signal
import sys

import pytest

from tests import python

WORK = """
import sys, threading, time
from jaxspec.programs.background import Worker

begun, worker = threading.Event(), Worker("work")

def first():
    begun.set()
    time.sleep(0.2)
    print("first")

worker.submit(first)
for _ in range(9):
    worker.submit(print, "later")
begun.wait()
"""
FOREVER = """
import os, signal, threading
from jaxspec.programs import background

begun, worker = threading.Event(), background.Worker("work")

def forever():
    begun.set()
    background._leaving.wait()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

worker.submit(forever)
begun.wait()
"""
MODEL = """
from jaxspec.programs import background
from jaxspec.testing import language_model

background._SILENT = 600
lm = language_model()
for _ in range(2):
    text = lm.generate("ab", method="auto", max_new_tokens=6).text
print(text)
assert any(not one.done() for one in lm.executables._futures.values())
"""


def ended(program):
    return python("-c", program, timeout=60)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_what_has_begun_is_waited_for_and_nothing_else(end, status):
    process = ended(WORK + end)
    assert (process.stdout, process.returncode) == ("first\n", status)


def test_a_long_wait_at_the_end_is_told():
    process = ended(WORK + "from jaxspec.programs import background\nbackground._SILENT = 0\n")
    assert process.stdout == "first\n"
    assert process.stderr == "jaxspec: the process ends after a compilation; Ctrl-C ends it now\n"


def test_a_worker_that_nobody_holds_any_more_is_waited_for_too():
    process = ended(WORK + "del worker")
    assert process.stdout.startswith("first\n")
    assert (process.stderr, process.returncode) == ("", 0)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize("when", ["raise KeyboardInterrupt", ""])
def test_ctrl_c_waits_for_nothing(when):
    """While the program runs, and while it waits at its end."""
    process = ended(FOREVER + when)
    assert process.returncode == -signal.SIGINT
    assert "Exception ignored" not in process.stderr


@pytest.mark.full
def test_a_process_ends_while_programs_are_compiled():
    process = ended(MODEL)
    assert (process.stdout, process.stderr, process.returncode) == ("ab adeab a\n", "", 0)
