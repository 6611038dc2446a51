"""Reads prompt sets: Spec-Bench, MT-bench, GSM8K, HumanEval, plain lines, and the project's own."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxspec.host.files import ending, parse_json, read_text
from jaxspec.host.messages import brief_errors, shown
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.suite_options import Chat

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

_EXPECTED = (
    "give JSON lines with `turns` (Spec-Bench, MT-bench), `question` and `answer` (GSM8K) or `prompt` and "
    "`entry_point` (HumanEval), or a .txt file of one prompt a line"
)
Item = TypeVar("Item")
# A minus sign after a digit or a closing parenthesis is a subtraction, not a sign.
_NUMBER = re.compile(r"(?:(?<![\d)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclasses.dataclass(frozen=True)
class Task:
    """One entry of a prompt set.

    Attributes:
      id: unique in its set, such as "gsm8k/12".
      category: prompts of the same category are reported together.
      turns: the user's turns, at least one.
      message: whether a chat model reads it as a message; otherwise it is a text to continue.
      answer: the number that the text should end with; None without a known answer.

    Examples:
      >>> Task("lines/1", "lines", ("Once upon a time",)).turns
      ('Once upon a time',)
    """

    id: str
    category: str
    turns: tuple[str, ...]
    message: bool = False
    answer: str | None = None

    def messages(self, said: Sequence[str]) -> list[dict[str, str]]:
        """The conversation up to the user's next turn.

        Args:
          said: the model's answers to the turns before it.

        Examples:
          >>> [message["role"] for message in Task("1", "a", ("x", "y")).messages(["z"])]
          ['user', 'assistant', 'user']
        """
        spoken = itertools.chain(*zip(self.turns, said, strict=False), self.turns[len(said) : len(said) + 1])
        roles = itertools.cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, spoken, strict=False)]

    def text(self, said: Sequence[str]) -> str:
        """The same conversation as plain text; a question with a known answer is marked as a question.

        Args:
          said: the model's answers to the turns before the next.

        Examples:
          >>> Task("1", "a", ("Write a story.", "Another.")).text([" Once"])
          'Write a story. Once\\n\\nAnother.'
          >>> Task("1", "gsm8k", ("What is 1 + 1?",), answer="2").text([])
          'Question: What is 1 + 1?\\nAnswer:'
        """
        first = self.turns[0] if self.answer is None else f"Question: {self.turns[0]}\nAnswer:"
        later = zip(said, self.turns[1:], strict=False)
        return first + "".join(f"{answer}\n\n{turn}" for answer, turn in later)

    def is_right(self, text: str) -> bool:
        """Whether a text gives the answer; further questions that a model asks itself without a chat are ignored.

        Examples:
          >>> Task("1", "gsm8k", ("1 + 1?",), answer="2").is_right(" 2\\n\\nQuestion: 1 + 2?\\nAnswer: 3")
          True
        """
        return final_number(text.split("\nQuestion:")[0]) == self.answer


def own_tasks(split: prompts.Split = "reporting", directory: Path | None = None) -> list[Task]:
    """The default prompts: those in a model's directory, otherwise the project's; see `prompts.load`.

    Args:
      split: prompts for tuning or for reporting.
      directory: directory of the model.

    Raises:
      ValueError: an error of `prompts.load`.

    Examples:
      >>> own_tasks()[0].id
      'stories/1'
    """
    return [
        Task(f"{kind}/{number}", kind, (text,))
        for kind, texts in prompts.load(split, directory).items()
        for number, text in enumerate(texts, 1)
    ]


@brief_errors()
def read_tasks(paths: Sequence[str | os.PathLike[str]]) -> list[Task]:
    """Reads prompt sets; the format of a file is recognised from its fields.

    Args:
      paths: .txt files have one prompt per line (empty lines are ignored); other files are JSON, one object per line
        or a list of objects.

    Returns:
      The entries of all files, in order.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a file is empty or its format is unknown, or two prompts have one id; one line.
    """
    tasks = [task for path in paths for task in _read(Path(path))]
    first: set[str] = set()
    for task in tasks:
        if task.id in first:
            raise ValueError(
                f"two prompts are called {task.id!r}; give each file once, and each prompt an id"
            )
        first.add(task.id)
    return tasks


def encoded(lm: LanguageModel, task: Task, said: Sequence[str] = (), chat: Chat = "auto") -> list[int]:
    """Returns the token ids of a task's next turn.

    Args:
      lm: the model, with a tokenizer.
      task: the prompt.
      said: the model's answers to the turns before it.
      chat: whether to use the model's chat template: on, off, or auto, which uses it for messages if there is one.
    """
    template = lm.tokenizer is not None and lm.tokenizer.has_chat_template
    chats = (task.message and template) if chat == "auto" else chat == "on"
    return lm.encode(task.messages(said) if chats else task.text(said))


def in_turn(items: Iterable[Item], category: Callable[[Item], str]) -> list[Item]:
    """Reorders items: the first of each category, then the second of each, and so on.

    A limit or an interruption then leaves items of all categories.

    Examples:
      >>> in_turn(["a1", "a2", "b1"], lambda item: item[0])
      ['a1', 'b1', 'a2']
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(category(item), []).append(item)
    rounds = itertools.zip_longest(*groups.values())
    return [item for one in rounds for item in one if item is not None]


def final_number(text: str) -> str | None:
    """The number that a text gives as its answer: the one after its last `####`, otherwise its last one.

    Returns:
      The number in canonical form; None without a number.

    Examples:
      >>> final_number("so 3 + 4 = 7.00 #### 1,007.50"), final_number("She has $18.")
      ('1007.5', '18')
      >>> final_number("none") is None
      True
    """
    _, mark, after = text.rpartition("####")
    found = (_NUMBER.findall(after)[:1] if mark else []) or _NUMBER.findall(text)[-1:]
    if not found:
        return None
    try:
        number = Decimal(found[0].replace(",", "")).normalize()
    except DecimalException:  # the number has more than a million digits
        return None
    return f"{number + 0:f}"


def _read(path: Path) -> list[Task]:
    text = read_text(path, "`prompt_file` must be a prompt set")
    if not text.strip():
        raise ValueError(f"{path} is empty; {_EXPECTED}")
    if ending(path) == ".txt":
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [Task(f"{path.stem}/{number}", path.stem, (line,)) for number, line in lines]
    return [_task(path.stem, number, where, entry) for number, where, entry in _entries(path, text)]


def _entries(path: Path, text: str) -> list[tuple[int, str, Any]]:
    """The objects of a JSON list or of JSON lines, each with its number and location."""
    if text.lstrip().startswith("["):
        try:
            content = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); {_EXPECTED}") from None
        if not content:
            raise ValueError(f"{path} is empty; {_EXPECTED}")
        return [(number, f"{path}, entry {number}", entry) for number, entry in enumerate(content, 1)]
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                entries.append((number, where, parse_json(line)))
            except ValueError as error:
                raise ValueError(f"{where} is not valid JSON ({error}); {_EXPECTED}") from None
    return entries


def _task(name: str, number: int, where: str, entry: Any) -> Task:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {shown(entry)}; {_EXPECTED}")
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns or not all(prompts.is_text(turn) for turn in turns):
            raise ValueError(f"{where} has the turns {shown(turns)}; give a list of at least one text")
        category = str(entry.get("category", name))
        return Task(f"{name}/{entry.get('question_id', number)}", category, tuple(turns), message=True)
    if {"question", "answer"} <= entry.keys():
        question, answer = _text(where, entry, "question"), _text(where, entry, "answer")
        wanted = final_number(answer)
        if wanted is None:
            raise ValueError(f"{where} has an answer without a number: {shown(answer)}; end it with #### N")
        return Task(f"{name}/{number}", "gsm8k", (question,), message=True, answer=wanted)
    if {"prompt", "entry_point"} <= entry.keys():
        prompt = _text(where, entry, "prompt")
        return Task(f"{name}/{entry.get('task_id', number)}", "humaneval", (prompt,))
    raise ValueError(f"{where} has the fields {shown(sorted(entry))}; {_EXPECTED}")


def _text(where: str, entry: Mapping[str, Any], field: str) -> str:
    value = entry[field]
    if not prompts.is_text(value):
        raise ValueError(f"{where} has the {field} {shown(value)}; give a text")
    return str(value)
