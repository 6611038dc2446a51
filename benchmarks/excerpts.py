"""Prompts that hand a model a long text: `python -m benchmarks.excerpts --text books.txt > summaries.jsonl`.

A summary quotes what it is of, so that copying drafts should pay; and with a text of thousands of tokens before it,
a step spends its time on attention, which is what drafts without attention leave out. The lines are in the form that
`jaxspec bench --prompt-file` reads.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.console.errors import Guard, option_names
from jaxspec.console.parsing import parse_as


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes questions about passages of a text, one JSON record per line.

    Attributes:
      text: a file of running text in UTF-8, paragraphs apart by empty lines.
      words: at least so many in each passage, which ends with its paragraph.
      count: passages, spread evenly over the text.
      category: the kind of work that reports name.
      question: what is asked, before the passage.
    """

    text: Path
    words: int = 300
    count: int = 20
    category: str = "summary"
    question: str = "Summarize the following text in a few sentences."

    def __post_init__(self):
        for name in ("words", "count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")


def passages(text: str, words: int, count: int) -> Iterator[str]:
    """Passages of whole paragraphs that do not overlap.

    Args:
      text: paragraphs apart by empty lines.
      words: the least number of words of each.
      count: how many, each from an equal part of the text.

    Raises:
      ValueError: a part of the text has too few words.

    Examples:
      >>> list(passages("One two.\\n\\nThree.\\n\\nFour five\\nsix.\\n\\nSeven.", words=2, count=2))
      ['One two.', 'Four five six.']
    """
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    for number in range(count):
        part = paragraphs[len(paragraphs) * number // count : len(paragraphs) * (number + 1) // count]
        taken: list[str] = []
        for paragraph in part:
            taken.append(paragraph)
            if sum(len(one.split()) for one in taken) >= words:
                break
        else:
            raise ValueError(
                f"part {number + 1} of {count} of the text has fewer than {words} words; give fewer `words`, or a "
                "smaller `count`"
            )
        yield "\n\n".join(taken)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work() -> int:
        options = parse_as(Options, "python -m benchmarks.excerpts", sys.argv[1:] if argv is None else argv)
        found = passages(options.text.read_text(encoding="utf-8"), options.words, options.count)
        for number, passage in enumerate(list(found), 1):
            turns = [f"{options.question}\n\n{passage}"]
            print(json.dumps({"question_id": number, "category": options.category, "turns": turns}))
        return 0

    return Guard("jaxspec", option_names(Options))(work)


if __name__ == "__main__":
    sys.exit(main())
