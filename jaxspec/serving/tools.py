"""Tools of a chat: how a model is told of them, and how its calls are read from the text of its answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.grammar.calls import ARGS, Form
from jaxspec.texts.text import overlap

_SPACE = re.compile(r"[\s,;\[]*")
_HEAD = re.compile(
    r'[\s,;\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*)?\[ARGS\]\s*(?=\{)")
# Templates with one of these texts have calls in XML, which are not read.
_XML = ("<arg_key>", "<function=")
# A system prompt for chat templates without tools, in the form of the first of `FORMS`.
_TOLD = """You may call the functions whose signatures are in <tools></tools>:
<tools>
{}
</tools>

For each call, write a JSON object with the name and the arguments of the function in <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


# Hermes, Qwen 2.5 and 3, SmolLM, EXAONE 4, Granite 4; Phi-4-mini; Granite 3; Ministral 3; Mistral; Llama 3.
FORMS = (
    Form("<tool_call>", "</tool_call>", "<tool_call>"),
    Form("<|tool_call|>", "<|/tool_call|>", "<|/tool_call|>", "list"),
    Form("<|tool_call|>", "", "<|tool_call|>", "list"),
    Form("[TOOL_CALLS]", "", ARGS, "named"),
    Form("[TOOL_CALLS]", "", "[TOOL_CALLS]", "list"),
    Form("<|python_tag|>", "", '"parameters": ', "bare", "parameters"),
)


def told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
) -> tuple[Form, list[Mapping[str, Any]], dict[str, Any]]:
    """Returns the form of a model's calls, and the messages and the variables with which its template has the tools.

    A template without tools gets them in the system prompt, and calls and their results as texts.

    Raises:
      ValueError: the template has tools, and calls in a form that is not read.

    Examples:
      >>> tools = [{"type": "function", "function": {"name": "now"}}]
      >>> told([], tools, "{% if tools %}…<tool_call>")[2].keys()
      dict_keys(['tools'])
    """
    if "tools" in template:
        variables = {name: list(tools) for name in ("tools", "xml_tools") if name in template}
        for form in FORMS:
            if form.mark in template and not any(text in template for text in _XML):
                return form, list(messages), variables
        raise ValueError(
            "tools are in the chat template of this model, but its calls have a form that is not read; the forms are "
            "<tool_call>, <|tool_call|>, [TOOL_CALLS] and Llama 3's JSON"
        )
    system = _TOLD.format("\n".join(map(json.dumps, tools)))
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    texts = [{"role": "system", "content": system if first is None else f"{first}\n\n{system}"}]
    for message in messages[first is not None :]:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            content += f"{content and chr(10)}<tool_call>\n{written}\n</tool_call>"
        texts.append({"role": role, "content": content})
    return FORMS[0], list(texts), {}


@dataclasses.dataclass(frozen=True)
class Call:
    """New text of a call.

    Attributes:
      index: the number of the call in the answer.
      arguments: new text of the JSON object of its arguments.
      name: the function, at the beginning of a call; else None.
    """

    index: int
    arguments: str = ""
    name: str | None = None


@dataclasses.dataclass
class Read:
    """New parts of an answer: reasoning, content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)


class Reader:
    """Separates the text of an answer, which comes in pieces, into reasoning, content and calls of tools.

    A call whose JSON is wrong is content.

    Args:
      form: the form of calls; None for no tools.
      after: the text that ends the reasoning, such as `</think>`; None for an answer without it.
      most: the most calls; further ones are dropped.

    Attributes:
      num_calls: the number of calls so far.

    Examples:
      >>> read = Reader(FORMS[0]).push('Well.<tool_call>{"name": "now", "arguments": {}}</tool_call>', True)
      >>> read.content, [call.name or call.arguments for call in read.calls]
      ('Well.', ['now', '{}'])
    """

    def __init__(self, form: Form | None, after: str | None = None, most: int | None = None) -> None:
        self._form, self._after, self._most = form, after or "", most
        # The text that is not read yet, and the text before a call, which becomes content if the call is wrong.
        self._text = self._consumed = ""
        self._state = self._reasoning if after else self._content
        self._bare, self._blank = form is not None and form.written == "bare", bool(after)
        self._named = form is not None and form.written == "named"
        self._depth, self._quoted, self._escaped = 0, False, False
        self.num_calls = 0

    def push(self, text: str, last: bool) -> Read:
        """Takes new text, `last` if no more will come, and returns what is certain."""
        self._text += text
        found = Read()
        while self._state(found, last):
            pass
        if self._most is not None:
            found.calls = [call for call in found.calls if call.index < self._most]
        return found

    def _reasoning(self, found: Read, last: bool) -> bool:
        opening = self._after.replace("/", "", 1)
        if self._blank:  # the model may write the opening marker too
            stripped = self._text.lstrip()
            if opening.startswith(stripped) and not last:
                return False
            self._text, self._blank = stripped.removeprefix(opening), False
        before, marker, rest = self._text.partition(self._after)
        kept = 0 if last or marker else overlap(before, self._after)
        found.reasoning += before[: len(before) - kept]
        self._text = rest if marker else before[len(before) - kept :]
        if marker:
            self._state, self._blank = self._content, True
        return bool(marker)

    def _content(self, found: Read, last: bool) -> bool:
        if self._blank:
            self._text = self._text.lstrip()
            self._blank = not self._text
        if self._form is None:
            found.content += self._text
            self._text = ""
            return False
        if self._bare:
            stripped = self._text.lstrip()
            if not stripped and not last:
                return False
            self._bare = False
            if stripped.startswith("{"):
                self._state = self._call
                return True
        before, marker, rest = self._text.partition(self._form.begin)
        if marker:
            # Space before a call is no content.
            content = before.rstrip()
            found.content += content
            self._text, self._consumed, self._state = rest, before[len(content) :] + marker, self._call
            return True
        kept = 0 if last else overlap(before, self._form.begin)
        certain = before[: len(before) - kept]
        certain = certain if last else certain.rstrip()
        if certain.strip() or not self.num_calls:
            found.content += certain
        self._text = before[len(certain) :]
        return False

    def _call(self, found: Read, last: bool) -> bool:
        form, text = self._form, self._text
        assert form is not None
        if form.end and (end := re.match(rf"[\s\]]*{re.escape(form.end)}", text)):
            self._text, self._state = text[end.end() :], self._content
            return True
        if text.lstrip().startswith(form.begin):
            self._text = text.lstrip().removeprefix(form.begin)
            return True
        if head := (_NAMED_HEAD if self._named else _HEAD).match(text):
            self._begin(found, head[1] if self._named else json.loads(head[1]))
            self._text, self._state = text[head.end() :], self._arguments
            return True
        body = text[_SPACE.match(text).end() :]  # type: ignore[union-attr]
        try:
            value, end_at = json.JSONDecoder().raw_decode(body)
            arguments = value.get("arguments", value.get("parameters"))
            self._begin(found, str(value["name"]))
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            found.calls.append(Call(self.num_calls - 1, arguments))
            self._text = body[end_at:]
            return True
        except json.JSONDecodeError:
            if not last and not (form.end and form.end in text):
                return False
        except (AttributeError, KeyError, RecursionError):  # JSON that is no call
            pass
        if text.strip(" \t\r\n],;"):
            found.content += self._consumed + text
        self._text, self._form, self._state = "", None, self._content
        return False

    def _begin(self, found: Read, name: str) -> None:
        found.calls.append(Call(self.num_calls, name=name))
        self.num_calls += 1
        self._consumed, self._depth = "", 0

    def _arguments(self, found: Read, last: bool) -> bool:
        text = self._text
        for at, letter in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{}":
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    text, self._state = text[: at + 1], self._after_arguments
                    break
        if text:
            found.calls.append(Call(self.num_calls - 1, text))
        self._text = self._text[len(text) :]
        return self._state == self._after_arguments

    def _after_arguments(self, found: Read, last: bool) -> bool:
        _, bracket, rest = ("", "}", self._text) if self._named else self._text.partition("}")
        if bracket:
            self._text, self._state = rest, self._call
        return bool(bracket)
