"""Ctrl-C gives one line at any moment, and so does a full disk."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
import types
import warnings
import weakref

import pytest

from jaxspec.console import interrupts
from jaxspec.console.errors import Failed, Guard
from jaxspec.host import files
from jaxspec.measuring import line_log
from tests import python, variables
from tests.commands import called, write_model, write_tokenizer
from training.loop import checkpoints, training_loop
from training.loop.signals import StopSignal

FULL = "No space left on device"


def process(*words: str, path: str = "") -> subprocess.Popen:
    pipe = subprocess.PIPE
    command, environment = [sys.executable, *words], variables(*filter(None, [path]))
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.parametrize("module", ["jaxspec", "training.heads"])
def test_an_interrupt_while_libraries_are_imported_is_one_line(tmp_path, module):
    stub = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    (tmp_path / "jax.py").write_text(stub)
    given = ["inspect", "small"] if module == "jaxspec" else ["--data", "x.txt", "--output", "y"]
    running = process("-m", module, *given, path=str(tmp_path))
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", f"{module}: interrupted\n")


BUSY = """
import hashlib, sys, threading
from jaxspec.console import interrupts
interrupts.at_start("program")
interrupts._BUSY_S = interrupts._SAME_S = 0.1
from jaxspec.console.errors import Guard
def work():
    # From another thread, so that the call below has begun.
    threading.Timer(1, lambda: print("ready", flush=True)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # takes many minutes and does not react to signals
sys.exit(Guard("program")(work))
"""


@pytest.mark.full
def test_a_busy_process_says_so_and_a_second_interrupt_ends_it():
    running = process("-c", BUSY)
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    said = "program: interrupted; it ends after what runs now, a second Ctrl-C ends it at once\n"
    assert running.stderr.readline() == said
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=60) == ("", "")
    assert running.returncode == 130


TERMINATED = """
import hashlib, os, signal, sys, threading
from jaxspec.console import interrupts
from jaxspec.console.errors import Guard
if sys.argv[1] == "background":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
def work():
    with interrupts.ends_at_sigterm("program: kept"):
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
Guard("program")(work)
"""


@pytest.mark.parametrize("place", ["foreground", "background"])
def test_sigterm_ends_work_that_may_be_killed_at_once(place):
    running = process("-c", TERMINATED, place)
    assert running.communicate(timeout=60) == ("", "program: kept\n")
    assert running.returncode == 128 + signal.SIGTERM


DONE = """
import os, signal, sys
from jaxspec.console import interrupts
interrupts.at_start("program")
from jaxspec.console.errors import Guard
def work():
    if sys.argv[1] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    return 0
print(Guard("program")(work), flush=True)
os.kill(os.getpid(), signal.SIGINT)
while True:
    pass
"""


@pytest.mark.parametrize(("how", "status"), [("interrupted", "130\n"), ("whole", "0\n")])
def test_an_interrupt_after_the_work_is_one_line_in_all(how, status):
    running = process("-c", DONE, how)
    assert running.communicate(timeout=60) == (status, "program: interrupted\n")
    assert running.returncode == 130


def test_a_guard_puts_the_handler_back_and_ignores_what_the_process_ignores():
    def interrupted() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return 0

    before = signal.getsignal(signal.SIGINT)
    assert Guard("program")(interrupted) == 130
    assert signal.getsignal(signal.SIGINT) == before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.at_start("program")
        assert Guard("program")(interrupted) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def waited(heard: list) -> None:
    end = time.monotonic() + 30
    while not heard and time.monotonic() < end:
        time.sleep(0.005)


def test_training_answers_the_first_signal_at_once_and_ends_at_the_second(monkeypatch):
    said, ended = [], []
    monkeypatch.setattr(interrupts, "leave_at_once", lambda program, status: ended.append(status))
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(say=lambda number: said.append(interrupts.signal_name(number))) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        waited(said)
        assert (said, stop.received, ended) == (["SIGTERM"], signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)  # `timeout` signals the process and also its group
        monkeypatch.setattr(interrupts, "_SAME_S", -1.0)
        os.kill(os.getpid(), signal.SIGINT)
        waited(ended)
    assert ended[-1] == 130
    assert said == ["SIGTERM"]
    loop = types.SimpleNamespace(done=4, say=said.append)
    for number in (signal.SIGTERM, signal.SIGINT):
        training_loop.Loop._stopping(None, loop, number)
    lines = [
        f"finishing step 5, checkpoint follows; a second {name} ends at once"
        for name in ("SIGTERM", "Ctrl-C")
    ]
    assert said[1:] == lines
    assert stop.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_training_releases_what_the_line_about_a_signal_refers_to():
    loop = type("Loop", (), {"say": lambda self, number: None})()
    kept = weakref.ref(loop)
    gc.disable()
    try:
        with StopSignal(say=loop.say):
            pass
        del loop
        assert kept() is None
    finally:
        gc.enable()


# A full disk


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("full") / "m")
    write_tokenizer(directory)
    return directory


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_for_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = python("-m", "jaxspec", "--version", stdout=full)
    assert done.returncode == 1
    said = rf"jaxspec: error: [^\n]*{FULL}; make room and give the same command again\n"
    assert re.fullmatch(said, done.stderr), done.stderr


def test_a_full_disk_ends_a_conversion_in_one_line(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", no_room)
    status, out, err = called(capsys, "convert", model, tmp_path / "new")
    assert (status, out) == (1, "")
    assert FULL in err
    assert str(tmp_path / "new") in err
    assert err.count(FULL) == 1
    assert "Traceback" not in err


def test_a_full_disk_ends_a_measurement_in_one_line(tmp_path, capsys, monkeypatch):
    log = line_log.LineLog(tmp_path / "records.jsonl", {"format": "1"}, of="benchmark")
    monkeypatch.setattr(line_log.os, "fsync", no_room)
    assert Guard("jaxspec")(lambda: log.add({"records": []})) == 1
    said = f"jaxspec: error: {log.path}: {FULL}; make room and give the same command again\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_is_known_by_the_words_of_other_libraries(capsys):
    def failing():
        raise RuntimeError(f"INTERNAL: write failed: {FULL} [x.cc:3]")

    assert Guard("program")(failing) == 1
    assert capsys.readouterr().err.endswith("make room and give the same command again\n")


def test_warnings_of_a_full_disk_are_one_line(capsys):
    def warning() -> int:
        for name in ("prefill", "rounds"):
            warnings.warn(f"Error writing cache entry for {name}: OSError: {FULL}", stacklevel=1)
        return 0

    assert Guard("program")(warning) == 0
    said = f"program: warning: Error writing cache entry for prefill: OSError: {FULL}\n"
    assert capsys.readouterr().err == said


def test_a_checkpoint_on_a_full_disk_is_one_short_line(tmp_path):
    with (
        checkpoints.Checkpoints(tmp_path / "checkpoints") as kept,
        pytest.raises(Failed, match=rf"a checkpoint could not be written: {FULL}\. Training") as refused,
        training_loop._clear_errors(kept, "a checkpoint"),
    ):
        raise ValueError(f"RESOURCE_EXHAUSTED: {'x' * 900}: {FULL}")
    assert len(str(refused.value)) < 300
