"""Reads a model's chat template and renders conversations with it.

A template is a program that came with a model. Each is rendered by transformers' sandboxed Jinja in a separate process,
whose time and, on Linux, memory are bounded, both for inference and for training.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.host.files import read_json, read_text
from jaxspec.host.messages import shown

# The files that transformers reads, the one with precedence first; the last belongs to its processors.
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
# The time limit of one rendering; a typical one takes less than a millisecond.
SECONDS = 20.0
# The variables that `ChatTemplate.render` itself passes to a template.
_GIVEN = frozenset(
    ("messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message")
) | {"return_assistant_tokens_mask"}
_MOST = 200  # characters of a template's error message


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Attributes:
      text: the whole text.
      answers: start and end of each `{% generation %}` block in the text; empty for a template without such blocks.
    """

    text: str
    answers: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may use.

    Attributes:
      template: Jinja, as in a tokenizer's `chat_template`.
      special_tokens: by name, such as bos_token.
    """

    template: str
    special_tokens: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ask: bool = False,
        go_on: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Renders a conversation.

        Args:
          messages: each with `role` and `content`.
          ask: add the text that precedes an answer of the assistant.
          go_on: leave out the text after the content of the last message, so that the message can be continued.
          variables: variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
          ValueError: the template refuses the conversation, is not valid Jinja, violates the sandbox, or exceeds its
            time or memory; one line.
        """
        if taken := sorted(_GIVEN & (variables or {}).keys()):
            raise ValueError(f"chat_template_kwargs has {taken[0]}, which jaxspec itself sets; leave it out")
        arguments = {
            **self.special_tokens,
            **(variables or {}),
            "chat_template": self.template,
            "add_generation_prompt": ask,
            "continue_final_message": go_on,
            "return_assistant_tokens_mask": not (ask or go_on),
        }
        reply = _render({"messages": list(messages), "arguments": arguments, "seconds": SECONDS})
        if "error" in reply:
            raise ValueError(f"the chat template cannot render the conversation: {_line(reply['error'])}")
        return Rendered(reply["text"], tuple((begin, end) for begin, end in reply["answers"]))


def prepare() -> None:
    """Starts the process that renders, which takes a moment, so that the first conversation need not wait for it."""
    _worker(os.getpid())


def text_of(content: Any) -> Any:
    """Returns the content of a message; the texts of several parts are joined by line ends, as in llama.cpp.

    Args:
      content: a list of parts, or anything else, which is returned unchanged.

    Raises:
      ValueError: a part is not text; the caller puts the name of the message before the error.
    """
    if not isinstance(content, (list, tuple)) or not content:
        return content
    for part in content:
        texts = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not texts:
            raise ValueError(
                f'has the part {shown(part)}; give a text, or parts such as {{"type": "text", "text": "Hi"}}'
            )
    return "\n".join(part["text"] for part in content)


def stored_template(directory: Path) -> Any:
    """Returns the chat template in the files of a tokenizer, see `default_template`; None if there is none.

    Raises:
      ValueError: a file is damaged; one line.
    """
    for name in TEMPLATE_FILES:
        path = directory / name
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return read_text(path, "a chat template is Jinja")
        if (template := read_json(path).get("chat_template")) is not None:
            return template
    return None


def default_template(template: Any) -> str | None:
    """Returns the template itself, or the template called default if there are several; None if there is none.

    Args:
      template: a text, a list of objects with `name` and `template`, or an object of templates by name.

    Raises:
      ValueError: there are several templates and none is called default, or the value has another form.
    """
    if template is None or isinstance(template, str):
        return template or None
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):
        template = {one.get("name"): one.get("template") for one in template}
    if not isinstance(template, dict) or not all(isinstance(one, str) for one in template.values()):
        raise ValueError("the model's chat_template is neither a text nor a list of `name` and `template`")
    if "default" not in template:
        names = ", ".join(map(str, template))[:_MOST]
        raise ValueError(
            f"the model has several chat templates ({names}), none of which is called default; give the one to use "
            "with chat_template=FILE"
        )
    found: str = template["default"]
    return found


def _line(reason: str) -> str:
    """Returns the first line of an error message, cut to a bounded length and without control characters."""
    line = (reason.strip().splitlines() or [""])[0]
    line = "".join(one if one.isprintable() else "?" for one in line[: _MOST + 1])
    return line if len(line) <= _MOST else line[:_MOST] + "…"


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    # A value that JSON cannot express becomes a placeholder, as in transformers; a template cannot use it.
    line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>")
    worker = _worker(os.getpid())
    try:
        return worker.ask(line)
    except _Ended as ended:
        _worker.cache_clear()
        status = ended.args[0]
        if status == -getattr(signal, "SIGALRM", 0):
            return {"error": f"it takes more than {request['seconds']:g} seconds"}
        return {"error": f"the process that rendered it ended with status {status}"}
    except BaseException:  # interrupted: the next request would read this reply
        _worker.cache_clear()
        worker.stop()
        raise


class _Ended(Exception):
    """The process has ended; the argument is its exit status."""


class _Worker:
    """A process that renders conversations one after another; see `chat_worker`."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"},
            start_new_session=True,  # only this process gets Ctrl-C; it then stops the worker
            encoding="ascii",
        )
        atexit.register(self.stop)

    def ask(self, line: str) -> dict[str, Any]:
        """Returns the reply to a request; raises `_Ended` if the process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
                reply = self._process.stdout.readline()
            except BrokenPipeError:
                reply = ""
        if not reply:
            raise _Ended(self._process.wait())
        found: dict[str, Any] = json.loads(reply)
        return found

    def stop(self) -> None:
        """Ends the process, unless this one was forked from its owner, which may still need it."""
        atexit.unregister(self.stop)
        if os.getpid() != self._pid:
            return
        self._process.kill()
        self._process.communicate()


@functools.cache
def _worker(pid: int) -> _Worker:
    """Returns the worker of process `pid`: a forked process must start its own."""
    del pid
    return _Worker()
