"""Time and size of the tables of grammars: `python -m benchmarks.grammars --tokenizer MODEL` prints them as JSON.

The time is the processor's, the best of three, without the bytes of the tokens, which are read once for a tokenizer.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import command
from jaxspec.grammar import Grammar, compile_grammar
from jaxspec.host.progress import OnProgress
from jaxspec.io.tokenizers.tokenizer import load_tokenizer

# A record of 30 properties, of the shapes that extraction uses.
_SHAPES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer", "minimum": 0, "maximum": 150},
    {"type": "string", "format": "email"},
    {"type": "string", "maxLength": 60},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    {"type": ["number", "null"]},
    {"enum": ["a", "b", "c"]},
]
_NAMES = [f"property_{at}" for at in range(30)]
RECORD = {
    "type": "object",
    "properties": {name: _SHAPES[at % len(_SHAPES)] for at, name in enumerate(_NAMES)},
    "required": _NAMES,
}
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
}
GRAMMARS = {
    "30 properties": Grammar.json_schema(RECORD),
    "30 properties after </think>": Grammar.json_schema(RECORD, after="</think>"),
    "json_object": Grammar.json_object(),
    "recursive tree": Grammar.json_schema(TREE),
    "1000 choices": Grammar.choices([f"choice number {at * 7919}" for at in range(1000)]),
    "string of at most 1000 characters": Grammar.json_schema({"type": "string", "maxLength": 1000}),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures the tables of some grammars.

    Attributes:
      tokenizer: directory or GGUF file of a model.
      tiktoken: a file of tokens in the format of tiktoken, instead of the tokenizer.
    """

    tokenizer: str | None = None
    tiktoken: str | None = None


class _Ranks:
    """The tokens of a file of tiktoken's format, as `compile_grammar` uses a tokenizer."""

    special_tokens: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, path: str) -> None:
        lines = Path(path).read_bytes().splitlines()
        self._tokens = [base64.b64decode(line.split()[0]) for line in lines]
        self.vocab_size = len(self._tokens)

    def token_bytes(self) -> tuple[list[bytes], dict[str, int]]:
        return self._tokens, {}


def measure(options: Options, on_progress: OnProgress) -> command.Report:
    """Returns states, classes, bytes and seconds of each grammar."""
    if (options.tokenizer is None) == (options.tiktoken is None):
        raise ValueError("give --tokenizer or --tiktoken")
    tokenizer: Any = _Ranks(options.tiktoken) if options.tiktoken else load_tokenizer(str(options.tokenizer))
    report: command.Report = {"vocabulary": tokenizer.vocab_size}
    compile_grammar(Grammar.regex("a"), tokenizer, tokenizer.vocab_size)
    for name, grammar in GRAMMARS.items():
        on_progress(name)
        seconds = []
        for padding in range(1, 4):  # tables of other sizes are not kept ones
            begin = time.process_time()
            table = compile_grammar(grammar, tokenizer, tokenizer.vocab_size + padding)
            seconds.append(round(time.process_time() - begin, 3))
        states, classes = table.next.shape
        report[name] = {"states": states, "classes": classes, "bytes": table.nbytes, "seconds": min(seconds)}
    return report


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.grammars", Options, measure))
