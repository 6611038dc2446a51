"""Chat templates: where a model keeps them, and how a conversation becomes text by one.

A template is a program that came with a model. Every one is rendered by transformers' sandboxed Jinja, in a process
of its own that has a bound on its time and, on Linux, on its memory; for inference and training alike.
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

from jaxspec.io.files import read_json, read_text

# Where transformers looks, the file that counts first; the last is that of its processors.
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
# How long one rendering may take, in seconds; a usual one takes less than a millisecond.
SECONDS = 20.0
# What `ChatTemplate.render` itself gives to a template.
_GIVEN = frozenset(
    ("messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message")
) | {"return_assistant_tokens_mask"}
_MOST = 200  # characters of what a template says


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: the whole of it.
      answers: begin and end of each `{% generation %}` block in it; none where the template has no such blocks.
    """

    text: str
    answers: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may write.

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
          messages: with `role` and `content` each.
          ask: add the text that precedes an answer of the assistant.
          go_on: leave out the text that follows the content of the last message, so that it can be continued.
          variables: of the template, such as Qwen3's `enable_thinking`.

        Raises:
          ValueError: the template refuses the conversation, is no Jinja, does what the sandbox forbids, or needs more
            time or memory than it may use; one line.
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


def stored_template(directory: Path) -> Any:
    """What the files of a tokenizer hold as its chat template; see `default_template`. None if there is nothing.

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
    """The template to use of one, or of several by name; None if there is none.

    Args:
      template: a text, a list of objects with `name` and `template`, or an object of templates by name.

    Raises:
      ValueError: none of several is called default, or it is something else.
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
    """The first line of a reason, of a bounded length and without control characters."""
    line = (reason.strip().splitlines() or [""])[0]
    line = "".join(one if one.isprintable() else "?" for one in line[: _MOST + 1])
    return line if len(line) <= _MOST else line[:_MOST] + "…"


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    # What is no JSON is no matter of a template: transformers gives it a placeholder too.
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
    except BaseException:  # interrupted: its reply would be taken for the next one's
        _worker.cache_clear()
        worker.stop()
        raise


class _Ended(Exception):
    """The process has ended; its status."""


class _Worker:
    """A process that renders one conversation after the other; see `chat_worker`."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"},
            start_new_session=True,  # Ctrl-C is for this process, which then stops the other
            encoding="ascii",
        )
        atexit.register(self.stop)

    def ask(self, line: str) -> dict[str, Any]:
        """The reply to a request; raises `_Ended` where the process ends instead."""
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
        """Ends the process."""
        atexit.unregister(self.stop)
        self._process.kill()
        self._process.communicate()


@functools.cache
def _worker(pid: int) -> _Worker:
    """The process of this process: one that was forked has none yet."""
    del pid
    return _Worker()
