"""Tools of a chat: how a model is told of them, and how its calls are read from the text of its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxspec.grammar.calls import ARGS, Form
from jaxspec.host.files import check_depth
from jaxspec.io.tokenizers.chat import REASONING, ChatTemplate
from jaxspec.requests.text import overlap

Message = Mapping[str, Any]

# Numbers may have any length; `int` refuses NaN and Infinity, which are no JSON.
_JSON = json.JSONDecoder(parse_int=str, parse_constant=int)
# The name of a `named` call, and all beginnings of such a text.
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*)?\[ARGS\]\s*(?=\{)")
_BEGUN_NAME = re.compile(r"[\w.-]*\s*(?:\[[A-Z_]*\]?\s*\w*\s*){0,2}")
# The key of an item of a JSON object.
_KEY = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
# Signs between two calls.
_COMMAS = re.compile(r"[,;\[\]]")
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
    # The template of Phi-4-mini may show the end of the tools only.
    Form("<|tool_call|>", "<|/tool_call|>", "<|/tool", "list"),
    Form("<|tool_call|>", "", "<|tool_call|>", "list"),
    Form("[TOOL_CALLS]", "", ARGS, "named"),
    Form("[TOOL_CALLS]", "", "[TOOL_CALLS]", "list"),
    Form("<|python_tag|>", "", '"parameters": ', "bare", "parameters"),
)


# A conversation and a tool that show whether a template has a place for tools.
_ASK: Message = {"role": "user", "content": "Hi"}
_TOOL = {
    "type": "function",
    "function": {"name": "toolxq", "description": "", "parameters": {"type": "object"}},
}


def told(
    messages: Sequence[Message],
    tools: Sequence[Message],
    chat: ChatTemplate,
    variables: Mapping[str, Any] | None = None,
) -> tuple[Form | None, list[Message], dict[str, Any]]:
    """Returns the form of a model's calls, and the messages and the variables with which its template has the tools.

    A template has the tools as a variable or in the system message. One that has no place for them gets them in the
    system prompt, or in the first turn of the user if it has no system prompt. Calls and their results that a template
    leaves out are texts.

    Args:
      messages, tools: of the request. Without tools the messages may have calls of earlier turns.
      chat: the template.
      variables: its variables.

    Raises:
      ValueError: the template has tools, and calls in a form that is not read.

    Examples:
      >>> tools = [{"type": "function", "function": {"name": "now"}}]
      >>> told([], tools, ChatTemplate("{{ tools }}…<tool_call>"))[2].keys()
      dict_keys(['tools', 'xml_tools'])
    """
    given, messages = dict(variables or {}), chat.known(messages, variables)
    way, more = _way(chat, given) if tools else 0, dict[str, Any]()
    if way is None:
        form, (before, rest) = FORMS[0], _system(messages)
        system = _TOLD.format("\n".join(map(json.dumps, tools)))
        all_told = [{"role": "system", "content": "\n\n".join(filter(None, (before, system)))}, *rest]
        several = [_as_texts(all_told, form, results=True)]
    else:
        if tools:
            messages, more = _ways(messages, tools)[way]
        form = _form(chat.chosen(given | more), refuses=bool(tools))
        several = [messages, _as_texts(messages, form), _as_texts(messages, form, results=True)]
    for one in itertools.chain.from_iterable((one, _without_system(one)) for one in several):
        with contextlib.suppress(ValueError):
            chat.check(one, given | more)
            break
    else:
        one = several[0]
    return form if tools else None, one, more


def _ways(
    messages: Sequence[Message], tools: Sequence[Message]
) -> list[tuple[list[Message], dict[str, Any]]]:
    """Returns the messages and variables of all ways in which templates have tools: as a variable, or in the system
    message, as JSON text (Phi-4-mini) or as a list (GLM-4 9B)."""
    before, rest = _system(messages)
    in_system: list[Any] = [json.dumps([tool.get("function", tool) for tool in tools]), list(tools)]
    first = ({"role": "system", "content": before, "tools": one} for one in in_system)
    return [
        (list(messages), {name: list(tools) for name in ("tools", "xml_tools")}),
        *(([one, *rest], {}) for one in first),
    ]


def _way(chat: ChatTemplate, variables: Mapping[str, Any]) -> int | None:
    """Returns the index of the template's way in `_ways`; None if it renders no tool in any."""
    for index, (messages, more) in enumerate(_ways([_ASK], [_TOOL])):
        # A list that is printed as Python's, or a text that is quoted again, is not meant.
        if ("toolxq" if more else '"toolxq"') in chat.probe(messages, {**variables, **more}):
            return index
    return None


def _form(template: str, refuses: bool) -> Form:
    for form in FORMS:
        if form.mark in template and not any(text in template for text in _XML):
            return form
    if not refuses:
        return FORMS[0]
    raise ValueError(
        "tools are in the chat template of this model, but its calls have a form that is not read; the forms are "
        "<tool_call>, <|tool_call|>, [TOOL_CALLS] and Llama 3's JSON"
    )


def _system(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """Returns the text of a first system message, or "", and the other messages."""
    has = bool(messages) and messages[0]["role"] == "system"
    return messages[0]["content"] if has else "", list(messages[has:])


def _as_texts(messages: Sequence[Message], form: Form, results: bool = False) -> list[Message]:
    """Returns messages with calls as texts of a form, and with `results` the results of calls as turns of the user."""
    texts: list[Message] = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        if calls:
            content = message["content"]
            kept["content"] = f"{content}{content and chr(10)}{_written(calls, form)}"
        elif results and message["role"] == "tool":
            kept = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if texts and texts[-1]["content"].startswith("<tool_response>"):
                kept["content"] = f"{texts.pop()['content']}\n{kept['content']}"
        texts.append(kept)
    return texts


def _written(calls: Sequence[Mapping[str, Any]], form: Form) -> str:
    """Returns calls in a form."""
    if form.written == "named":
        return "".join(f"{form.begin}{one['name']}{ARGS}{json.dumps(one['arguments'])}" for one in calls)
    texts = [json.dumps({"name": one["name"], form.arguments: one["arguments"]}) for one in calls]
    if form.written == "objects":
        return "\n".join(f"{form.begin}\n{one}\n{form.end}" for one in texts)
    return f"{form.begin}[{', '.join(texts)}]{form.end}" if form.written == "list" else "; ".join(texts)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the system prompt at the beginning of the first turn of the user, and alternating turns."""
    system, rest = _system(messages)
    first = next((index for index, one in enumerate(rest) if one["role"] == "user"), 0)
    if system:
        rest.insert(first, {"role": "user", "content": system})
    joined: list[Message] = []
    for message in rest:
        if joined and joined[-1]["role"] == message["role"] == "user":
            message = {**message, "content": f"{joined.pop()['content']}\n\n{message['content']}"}
        joined.append(message)
    return joined


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
      index: the number of the call in the answer.
      name: the function.
      arguments: the JSON object of its arguments, as the model has written it.
    """

    index: int
    name: str
    arguments: str


@dataclasses.dataclass
class Read:
    """New parts of an answer: reasoning, content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)


class Reader:
    """Separates the text of an answer, which comes in pieces, into reasoning, content and calls of tools.

    A call is held back until its JSON is complete. It counts if it names a tool and has an object of arguments; other
    text is content. The result does not depend on the pieces.

    Args:
      form: the form of calls; None for no tools.
      names: the names of the tools.
      after: how the answer reasons, see `ChatTemplate.reasoning`.
      most: the most calls; further ones are dropped.
      document: whether the answer is calls or a document, in which there are no calls.

    Attributes:
      num_calls: the number of calls so far.

    Examples:
      >>> reader = Reader(FORMS[0], ["now"])
      >>> reader.push('Well.<tool_call>{"name": "now", "arguments": {}}</tool_call>', True)
      Read(reasoning='', content='Well.', calls=[Call(index=0, name='now', arguments='{}')])
    """

    def __init__(
        self,
        form: Form | None = None,
        names: Collection[str] = (),
        after: str | tuple[str, str] | None = None,
        most: int | None = None,
        document: bool = False,
    ) -> None:
        self._form, self._names, self._most, self._document = form, names, most, document
        self._opened = isinstance(after, str)
        self._thought = next((pair for pair in REASONING if after in (pair, pair[1])), REASONING[0])
        self._state = self._content if after is None else self._start
        # The text that is not read yet, how much of it is no whole call, and what is content unless a call follows.
        self._text, self._tried, self._space, self._marker = "", 0, "", ""
        # Whether space before content is dropped, and whether the content may begin with a call without a marker.
        self._blank, self._bare = False, form is not None and form.written == "bare"
        # Whether a call is directly before the text, and whether calls without a marker may follow, after a wrong one.
        self._called = self._listed = False
        self.num_calls = 0

    def push(self, text: str, last: bool) -> Read:
        """Takes new text, `last` if no more will come, and returns what is certain."""
        self._text += text
        found = Read()
        while self._state(found, last):
            pass
        if last and not self._called:
            found.content += self._space
        if self._most is not None:
            found.calls = [call for call in found.calls if call.index < self._most]
        return found

    def _start(self, found: Read, last: bool) -> bool:
        begin, text = self._thought[0], self._text.lstrip()
        if not last and len(text) < len(begin) and begin.startswith(text):
            return False
        self._state = self._content
        if self._opened or text.startswith(begin):
            self._text, self._state = text.removeprefix(begin), self._reasoning
        return True

    def _reasoning(self, found: Read, last: bool) -> bool:
        before, marker, rest = self._text.partition(self._thought[1])
        kept = 0 if last or marker else overlap(before, self._thought[1])
        found.reasoning += before[: len(before) - kept]
        self._text = rest if marker else before[len(before) - kept :]
        if marker:
            self._state, self._blank = self._content, True
        return bool(marker)

    def _say(self, found: Read, text: str) -> None:
        """Adds content. Space at its end waits: before a call, and after a call at the end, it is no content."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        found.content += content
        self._called = self._called and not content

    def _content(self, found: Read, last: bool) -> bool:
        stripped = self._text.lstrip()
        if self._blank:
            self._text, self._blank = stripped, not stripped
        form, text, call = self._form, self._text, self._bare and stripped.startswith("{")
        if form is not None and (self._bare or self._document):
            if not last and form.begin.startswith(stripped):
                return False
            self._bare = False
            if self._document and not call and not stripped.startswith(form.begin):
                self._form = form = None
        at = 0 if call else len(text)
        if form is not None and not call:
            again = rf"|[,;\n]\s*(?=\{{)|{re.escape(form.end or form.begin)}" if self._listed else ""
            place = re.search(re.escape(form.begin) + again, text)
            at, call = (place.start(), True) if place else (at if last else at - self._num_open(form), False)
        self._say(found, text[:at])
        self._text = text[at:]
        if call:
            self._state = self._calls
        return call

    def _num_open(self, form: Form) -> int:
        """Returns the number of letters at the end of the text that may begin a marker or a call."""
        comma = re.search(r"[,;\n]\s*\Z" if self._listed else r"\Z", self._text)
        return max(
            len(comma[0]) if comma else 0, *(overlap(self._text, one) for one in (form.begin, form.end))
        )

    def _calls(self, found: Read, last: bool) -> bool:
        form, text, tried, self._tried = self._form, self._text, self._tried, 0
        assert form is not None
        between = re.compile(rf"(?:(?!{re.escape(form.begin)})[\s,;\[\]])*")
        if not last and between.fullmatch(text, 0, len(text) - self._num_open(form)):
            return False
        at = between.match(text).end()  # type: ignore[union-attr]
        follows = self._called and not self._marker
        before = _COMMAS.sub("", text[:at]) if follows else self._marker + text[:at]
        for marker in filter(None, (form.begin, form.end)):
            if text.startswith(marker, at):
                begins = marker == form.begin
                self._say(found, before if begins else "" if follows else before + marker)
                self._marker, self._listed, self._text = marker * begins, False, text[at + len(marker) :]
                self._state = self._calls if begins else self._content
                return True
        head = _NAME.match(text, at) if form.written == "named" else None
        if form.written == "named" and not head and not last and _BEGUN_NAME.fullmatch(text, at):
            return False
        start, call = head.end() if head else at, None
        end = start
        if text.startswith("{", start) and (head or form.written != "named"):
            whole = _end(text, start) if "}" in text[max(tried, start) :] else None
            if whole is None and not last:
                self._tried = len(text)
                return False
            call = _call(text[start:whole], head and head[1]) if whole else None
            end = whole or start + 1
        self._text, self._marker = text[end:], ""
        if call and call[0] in self._names:
            found.calls.append(Call(self.num_calls, *call))
            self.num_calls += 1
            self._space, self._called = "", True
        else:
            self._say(found, before + text[at:end])
            self._state, self._listed = self._content, end > start
        return True


def _end(text: str, start: int) -> int | None:
    """Returns the end of a JSON object; 0 if it is wrong, None if more text may complete it."""
    try:
        return _JSON.raw_decode(text, start)[1]
    except json.JSONDecodeError as error:  # the longest word, -Infinity, has nine letters
        return None if error.msg.startswith("Unterminated") or error.pos + 9 >= len(text) else 0
    except (ValueError, RecursionError):
        return 0


def _call(text: str, name: str | None) -> tuple[str, str] | None:
    """Returns the name and the arguments in a JSON object, which with `name` are all of it; None if it is no call."""
    given: dict[str, tuple[Any, str]] = (
        {"name": (name, ""), "arguments": (_JSON.decode(text), text)} if name else {}
    )
    at = 0
    while not name and (key := _KEY.match(text, at)):
        value, at = _JSON.raw_decode(text, key.end())
        given[json.loads(key[1])] = value, text[key.end() : at]
    called, _ = given.get("name", ("", ""))
    arguments, written = given.get("arguments", given.get("parameters", ("", "")))
    if isinstance(arguments, str):  # JSON in JSON
        written = arguments
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _JSON.decode(arguments)
    with contextlib.suppress(ValueError):  # half a surrogate is no text
        check_depth(arguments)  # as `parse_json` does where a client returns the call
        json.dumps(arguments, ensure_ascii=False).encode()
        return (called, written) if isinstance(called, str) and isinstance(arguments, dict) else None
    return None
