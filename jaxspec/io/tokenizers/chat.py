"""Reads a model's chat template and renders conversations with it.

A template is a program that came with a model. transformers' sandboxed Jinja renders it, both for inference and for
training: a template cannot reach Python's objects, files or commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.host.files import read_json, read_text
from jaxspec.host.messages import shown

# The files that transformers reads, the one with precedence first; the last belongs to its processors. A folder has
# further templates by name.
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"
# The variables that `ChatTemplate.render` itself passes to a template.
_GIVEN = frozenset(
    ("messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message")
) | {"return_assistant_tokens_mask"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins a block of an answer
# The texts around the reasoning of an answer: most families; EXAONE Deep; Seed-OSS; Magistral; Granite 3.2.
REASONING = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
# The fields of messages, their parts and their calls that chat templates read, or that are about no text, such as those
# that servers return with an answer. Another field of a message is for a template that reads it.
_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal")
) | {"annotations", "cache_control", "id", "index", "type", "text", "function", "arguments"}
_MOST_NAMES = 16  # names in a template that are tried as variables for its reasoning
_MOST = 200  # characters of a template's error message
NO_EFFECT = "has the field {}, which has no effect on the prompt; leave it out"
# OpenAI's name for the role of the system message.
_DEVELOPER = "developer"


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
      tool_use: the template for conversations with the variable `tools`, if it is another one, as in transformers.
    """

    template: str
    special_tokens: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_use: str | None = None

    def chosen(self, variables: Mapping[str, Any] | None) -> str:
        """Returns the template for these variables."""
        has_tools = self.tool_use is not None and (variables or {}).get("tools") is not None
        return self.tool_use if has_tools and self.tool_use is not None else self.template

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
          ValueError: the template refuses the conversation, is not valid Jinja, or violates the sandbox; one line.
        """
        if taken := sorted(_GIVEN & (variables or {}).keys()):
            raise ValueError(f"chat_template_kwargs has {taken[0]}, which jaxspec itself sets; leave it out")
        quiet_transformers()
        from transformers.utils.chat_template_utils import render_jinja_template

        known = self.known(messages, variables)
        given = {"conversations": [known], **self.special_tokens, **(variables or {})}
        plain = json.loads(_json(given))
        template = self.chosen(variables)
        marks_answers = not (ask or go_on) and _GENERATION.search(template) is not None
        try:
            rendered: Any = render_jinja_template(
                **plain,
                chat_template=template,
                add_generation_prompt=ask,
                continue_final_message=go_on,
                return_assistant_tokens_mask=marks_answers,
            )
            (text,), answers = rendered
        except Exception as error:  # a template can raise any exception
            raise ValueError(f"the chat template cannot render the conversation: {_line(error)}") from None
        return Rendered(text, tuple(answers[0]) if answers else ())

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Returns the text of a conversation up to the place where the model's answer begins or continues.

        If the last message is the assistant's, it is continued: the text after its content is left out.

        Raises:
          ValueError: as `render`.
        """
        go_on = bool(messages) and messages[-1].get("role") == "assistant"
        return self.render(messages, ask=not go_on, go_on=go_on, variables=variables).text

    def probe(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns `prompt` of a short conversation that shows a property of the template; "" if it is refused.

        The latest of them are kept, so that a request does not render them again.
        """
        given = (self.special_tokens, messages, variables or {})
        return _probed(self.chosen(variables), *map(_json, given))

    def known(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[Mapping[str, Any]]:
        """Returns the messages with the role `system` for OpenAI's `developer`, unless the template names that."""
        known = re.search(rf"['\"]{_DEVELOPER}['\"]", self.chosen(variables))
        role = _DEVELOPER if known else "system"
        return [{**one, "role": role} if one.get("role") == _DEVELOPER else one for one in messages]

    def check(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns `prompt` after a check that each message has an effect on it: its calls, or its text without any.

        Raises:
          ValueError: a message or a field of it has none, or as `render`; one line.
        """
        plain = self.prompt(messages, variables)
        marked = [_marked(message, f"mark{index}q") for index, message in enumerate(messages)]

        def rendered(given: Sequence[Mapping[str, Any]]) -> str:
            with contextlib.suppress(ValueError):  # of a template that reads contents
                return self.prompt(given, variables)
            return ""

        def has_effect(index: int, changed: Mapping[str, Any]) -> bool:
            return rendered([*messages[:index], changed, *messages[index + 1 :]]) != plain

        template, all_marked = self.chosen(variables), rendered(marked)
        for index, message in enumerate(messages):
            for name in unknown_fields(message):
                rest = {key: value for key, value in message.items() if key != name}
                if name not in template and not has_effect(index, rest):
                    raise ValueError(f"messages[{index}] {NO_EFFECT.format(shown(name))}")
            calls = message.get("tool_calls")
            if f"mark{index}q" in all_marked or not (calls or str(message.get("content") or "").strip()):
                continue
            if not has_effect(index, marked[index]):
                raise ValueError(
                    f"the chat template leaves out messages[{index}], of role {shown(message.get('role'))}: its "
                    f"{'calls' if calls else 'text'} would not reach the model; give it another role, such as user"
                )
        return plain

    @property
    def thought(self) -> tuple[str, str]:
        """The texts around reasoning that the template names; if it names none, those of most families."""
        texts = f"{self.template}{self.tool_use or ''}"
        return next((pair for pair in REASONING if any(one in texts for one in pair)), REASONING[0])

    def reasoning(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str | tuple[str, str] | None:
        """Returns how the answer to a conversation reasons, from the prompt that the template makes of it.

        Returns:
          The text that ends the reasoning, if the prompt begins it. The texts before and after it, if the answer may
          begin it: the prompt names them, or the template does and no variable or system message is missing for it.
          None: the prompt ends the reasoning, or there is none.

        Raises:
          ValueError: as `render`.

        Examples:
          >>> chat = ChatTemplate("{{ messages[0].content }}{{ '<think>' if thinking else '' }}{# </think> #}")
          >>> ask = [{"role": "user", "content": "Hi"}]
          >>> chat.reasoning(ask), chat.reasoning(ask, {"thinking": True})
          (None, '</think>')
        """
        begin, end = pair = self.thought
        template = self.chosen(variables)
        if begin not in template and end not in template:
            return None
        text = self.prompt(messages, variables)
        last = messages[-1] if messages else {}
        said = str(last.get("content") or "").strip() if last.get("role") == "assistant" else None
        if said:
            return end if said.rfind(begin) > said.rfind(end) else None
        if text.rstrip().endswith((begin, end)):
            return end if text.rstrip().endswith(begin) else None
        # Seed-OSS begins the reasoning with more than that text.
        before = text if said is not None else self.render(messages, ask=False, variables=variables).text
        begun, ended = (text.count(one) - before.count(one) for one in pair)
        if begun or ended:
            return end if begun > ended else None
        hello = {"role": "user", "content": "Hi"}
        system = [one for one in messages if one.get("role") in ("system", _DEVELOPER)]
        if end in self.probe([*system, hello], variables):
            return pair
        # Names that may be variables for it, such as Qwen3's `enable_thinking`. Tools may replace what they add.
        words = dict.fromkeys(re.findall(r"[\w.'\"]+", template))
        names = [one for one in words if one.isidentifier() and re.search("think|reason", one)][:_MOST_NAMES]
        alone = {name: value for name, value in (variables or {}).items() if "tools" not in name}
        on, off = ([self.probe([hello], alone | {name: value}) for name in names] for value in (True, False))
        shown = [self.probe([hello], alone), *on]
        if any(one.rstrip().endswith(end) for one in off):
            return pair
        return None if any(end in one or one.rstrip().endswith(begin) for one in shown) else pair


def quiet_transformers() -> Any:
    """Returns the package transformers, imported without notices, such as that PyTorch is missing."""
    name = "TRANSFORMERS_VERBOSITY"
    if "transformers" not in sys.modules and name not in os.environ:
        os.environ[name] = "error"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="IProgress not found")  # from tqdm in notebooks
                import transformers
        finally:
            del os.environ[name]
        transformers.logging.set_verbosity_warning()  # the default
    import transformers

    return transformers


def _json(value: Any) -> str:
    """Returns JSON. A template gets its values; another value becomes a placeholder, as in transformers."""
    return json.dumps(value, default=lambda value: f"<{type(value).__name__}>")


@functools.lru_cache(maxsize=64)
def _probed(template: str, tokens: str, messages: str, variables: str) -> str:
    """Returns the prompt of values in JSON, see `ChatTemplate.probe`."""
    try:
        return ChatTemplate(template, json.loads(tokens)).prompt(json.loads(messages), json.loads(variables))
    except ValueError:
        return ""


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Returns a message with a mark as its calls, or as its text if it has no calls."""
    if not message.get("tool_calls"):
        return {**message, "content": mark}
    named = {"name": mark, "arguments": {mark: mark}}
    calls = [
        {**call, **({"function": {**call["function"], **named}} if "function" in call else named)}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def unknown_fields(given: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a message, a part or a call that may have no effect; one that is empty asks for nothing."""
    return [str(name) for name, value in given.items() if value and name not in _FIELDS]


def text_of(content: Any) -> Any:
    """Returns the content of a message; the texts of several parts are joined by line ends, as in llama.cpp.

    Args:
      content: a list of parts, or anything else, which is returned unchanged.

    Raises:
      ValueError: a part is not text, or has another field; the caller puts the name of the message before the error.
    """
    if not isinstance(content, (list, tuple)) or not content:
        return content
    for part in content:
        texts = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not texts:
            raise ValueError(
                f'has the part {shown(part)}; give a text, or parts such as {{"type": "text", "text": "Hi"}}'
            )
        for name in unknown_fields(part):
            raise ValueError(NO_EFFECT.format(f"{shown(name)} in a part"))
    return "\n".join(part["text"] for part in content)


def stored_template(directory: Path) -> Any:
    """Returns the chat template in the files of a tokenizer, see `templates_of`; None if there is none.

    Raises:
      ValueError: a file is damaged; one line.
    """
    found: Any = None
    for path in (directory / name for name in TEMPLATE_FILES):
        if found is None and path.is_file():
            jinja = path.suffix == ".jinja"
            found = _jinja(path) if jinja else read_json(path).get("chat_template")
    named = {path.stem: _jinja(path) for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    if named and (found is None or isinstance(found, str)):
        found = named if found is None else {"default": found, **named}
    return found


def _jinja(path: Path) -> str:
    return read_text(path, "a chat template is Jinja")


def templates_of(template: Any) -> Mapping[str, str]:
    """Returns the templates by name, of which one is called default; {} if there is none.

    Args:
      template: a text, a list of objects with `name` and `template`, or an object of templates by name.

    Raises:
      ValueError: there are several templates and none is called default, or the value has another form.
    """
    if template is None or isinstance(template, str):
        return {"default": template} if template else {}
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
    return template


def _line(error: Exception) -> str:
    """Returns the first line of an error's message, cut to a bounded length and without control characters."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = "".join(one if one.isprintable() else "?" for one in line[: _MOST + 1])
    return line if len(line) <= _MOST else line[:_MOST] + "…"
