"""Prompts with a long text: `python -m benchmarks.excerpts --text books.txt > summaries.jsonl`.

A summary quotes its text, so that copying drafts should be accepted. With thousands of tokens of context, attention
takes most of a step, so that drafts without attention should be cheap. The lines are in the form of
`jaxspec bench --prompt-file`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.console import frame
from jaxspec.host.files import read_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes questions about passages of a text, one JSON record per line.

    Attributes:
      text: a file of running text in UTF-8, with empty lines between paragraphs.
      words: least number of words of a passage, which ends with its paragraph.
      count: number of passages, spread evenly over the text.
      category: task type, for reports.
      question: the question before the passage.
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
    """Yields passages of whole paragraphs that do not overlap.

    Args:
      text: paragraphs separated by empty lines.
      words: least number of words of each passage.
      count: number of passages, each from an equal part of the text.

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

    def work(options: Options) -> None:
        found = passages(read_text(options.text, "`text` must be a text file"), options.words, options.count)
        for number, passage in enumerate(list(found), 1):
            turns = [f"{options.question}\n\n{passage}"]
            print(json.dumps({"question_id": number, "category": options.category, "turns": turns}))

    return frame.run("benchmarks.excerpts", Options, work, argv)


if __name__ == "__main__":
    sys.exit(main())
