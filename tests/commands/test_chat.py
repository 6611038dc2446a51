"""`jaxspec chat`: lines of a pipe and of a terminal."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

import jaxspec
from jaxspec.engine.conversation import Conversation
from tests import variables
from tests.commands import called, one_error

TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}</s>{% endfor %}<assistant>"
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def run(capsys, model, template, monkeypatch):
    def chat(lines: str | bytes, *options: object, arguments=("--chat-template", template)):
        given = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        common = ("--model", model, "--max-new-tokens", 12, "--ignore-eos", "--method", "ngram")
        return called(capsys, "chat", *common, *arguments, *options)

    return chat


@functools.cache
def loaded(model, template) -> jaxspec.LanguageModel:
    return jaxspec.load(model, chat_template=template, device="cpu")


def answers(model, template, *texts: str, system: str | None = None, **options) -> str:
    """Returns the answers of fresh texts, each with a line end."""
    lm = loaded(model, template)
    messages = [] if system is None else [{"role": "system", "content": system}]
    written = ""
    for text in texts:
        messages.append({"role": "user", "content": text})
        answer = lm.generate(messages=messages, **OPTIONS | options).text
        messages.append({"role": "assistant", "content": answer})
        written += answer + "\n"
    return written


def test_each_line_of_a_pipe_is_a_turn(run, model, template):
    status, out, err = run("Once\n\nupon a\n/stats\n/exit\nnever\n", "--system", "Be brief")
    assert (status, out) == (0, answers(model, template, "Once", "upon a", system="Be brief"))
    last, both = err.splitlines()
    found = re.fullmatch(
        r"last turn: 12 tokens · .* tokens/s · .* · (\d+) of (\d+) prompt tokens reused", last
    )
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])
    assert both.startswith("all 2 turns: 24 tokens")


def test_commands(run, model, template):
    status, out, err = run(
        "/stats\n/help\nOnce\n/method layerskip --exit-layer 1\nupon\n/clear\n/system Be brief\na time\n/system\n"
    )
    expected = answers(model, template, "Once", "upon") + answers(
        model, template, "a time", system="Be brief"
    )
    assert (status, out) == (0, expected)
    lines = err.splitlines()
    assert lines[0] == "no turn yet"
    names = "/set /retry /save /load /stats /method /system /clear /help /exit"
    assert " ".join(line.split()[0] for line in lines[1:11]) == names
    assert lines[11:] == [
        "method: layerskip exit_layer=1",
        "the conversation begins anew",
        "the system prompt is changed",
        "there is no system prompt now",
    ]


def test_settings_another_answer_and_a_file(run, model, template, tmp_path):
    """A message of several lines; each answer is that of `generate` with the options so far."""
    lines = ['"""Once', "  upon", '/time"""', "/set temp 0.9", "/set max_new_tokens 5", "/retry"]
    status, out, err = run("\n".join([*lines, f"/save {tmp_path / 'a.json'}", ""]))
    text, sampled = "Once\n  upon\n/time", {"temperature": 0.9, "max_new_tokens": 5, "seed": 1}
    again = answers(model, template, text, **sampled)
    assert (status, out) == (0, answers(model, template, text) + again)
    assert err.splitlines()[:2] == ["temperature is 0.9", "max_new_tokens is 5"]
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved == [{"role": "user", "content": text}, {"role": "assistant", "content": again[:-1]}]
    status, out, err = run(
        f"a\n/load {tmp_path / 'a.json'}\n/set temperature 0.9\n/set max-new-tokens 5\n/retry\n"
    )
    assert (status, out) == (0, answers(model, template, "a") + again)
    message = one_error(run, f"/save {tmp_path / 'a.json'}\n")
    assert "a.json exists; give another file" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/stat", "unknown command '/stat'; perhaps you meant /stats; /help lists the commands"),
        ("/set temperatur 1", "unknown option --temperatur; perhaps you meant --temperature\n"),
        ("/set temperature -1", "temperature is -1"),
        ("/retry", "no message to answer again"),
        ("/load nowhere.json", "nowhere.json"),
        ('"""a\nb', 'a message begins with """ and does not end with it'),
        ("/method ngrm", "unknown method 'ngrm'; perhaps you meant ngram"),
        ("/method ngram --exit-layer 3", "--exit-layer"),
        (b"\xff", "standard input is not text in UTF-8"),
        ("x " * 600, "the model's context is 512"),
    ],
)
def test_a_wrong_line_of_a_pipe_is_one_error(run, monkeypatch, line, message):
    monkeypatch.setattr(Conversation, "warm_up", lambda self: None)  # no line is answered
    assert message in one_error(lambda given: run(given), line)


def test_a_model_without_a_template(run):
    message = one_error(lambda: run("Once\n", arguments=()))
    assert "no chat template; give one with --chat-template FILE" in message
    assert "--system is not text" in one_error(lambda: run("Once\n", "--system", "\ud83d"))


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self._master, terminal = pty.openpty()
        self._unread = ""
        command = [sys.executable, "-m", "jaxspec", "chat", *map(str, words)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        given = {"env": variables(TERM="xterm"), "start_new_session": True}
        self.process = subprocess.Popen(command, **streams, **given)
        os.close(terminal)

    def read(self, until: str, seconds: float = 120) -> str:
        """Returns what the command writes, up to and with a text."""
        end = time.monotonic() + seconds
        while until not in self._unread:
            assert time.monotonic() < end, self._unread
            if select.select([self._master], [], [], 1)[0]:
                self._unread += os.read(self._master, 65536).decode(errors="replace")
        before, _, self._unread = self._unread.partition(until)
        return before + until

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        time.sleep(0.4)  # a signal that follows at once counts as the same
        self.process.send_signal(signal.SIGINT)


@pytest.mark.full
def test_ctrl_c_at_the_prompt_of_a_terminal(model, template):
    terminal = Terminal("--model", model, "--chat-template", template, "--max-new-tokens", 4, "--ignore-eos")
    try:
        assert "/help lists commands" in terminal.read("> ")
        terminal.write("Once\n")
        terminal.read("has reached the token budget")
        terminal.read("> ")
        terminal.write("/stats\n")
        assert "last turn: 4 tokens" in terminal.read("all 1 turns")
        terminal.read("> ")
        terminal.interrupt()
        terminal.read("so does a second Ctrl-C")
        terminal.read("> ")
        terminal.write("/ex\n")  # the error ends nothing, and the next Ctrl-C counts as the first again
        terminal.read("unknown command '/ex'")
        terminal.read("> ")
        terminal.interrupt()
        terminal.read("so does a second Ctrl-C")
        terminal.read("> ")
        terminal.interrupt()
        assert terminal.process.wait(60) == 130
    finally:
        terminal.process.kill()


def test_ctrl_c_stops_an_answer_and_not_the_command(run, model, template, monkeypatch):
    """The text so far stays in the conversation."""
    said: list[str] = []
    stream = Conversation.stream

    def interrupted(conversation, text):
        pieces = stream(conversation, text)
        if text == "Once":
            piece = next(pieces)
            said.append(piece.text)
            yield piece
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        yield from pieces

    def typed(prompt="", lines=iter(["Once", "upon", "/stats"])):  # noqa: B008
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr(Conversation, "stream", interrupted)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("jaxspec.cli.chat._is_terminal", lambda stream: True)
    status, out, err = run("")
    lm = loaded(model, template)
    roles = zip(("user", "assistant", "user"), ("Once", *said, "upon"), strict=True)
    second = lm.generate(messages=[{"role": role, "content": text} for role, text in roles], **OPTIONS).text
    assert (status, out) == (0, f"{said[0]}\n{second}\n\n")
    assert re.search(r"12 tokens · .* tokens/s · .* · ngram$", err, re.MULTILINE)  # of the whole answer
    assert "all 2 turns" in err
