"""`jaxspec vocab`: which tokens of a model are frequent."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.output import output_file
from jaxspec.console.terminal import Progress

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Count which tokens of a model are frequent, so that drafts can leave out the others (--draft-vocab N).

    Count text like what the model will write: its own, or what it was trained on. Special tokens, and those that its
    chat template writes, come first, however rare.

    Attributes:
      data: a text file to count; of a .jsonl file the texts in its records.
      generate: count what the model itself writes after prompts.
      prompt_file: [--generate] a file that holds one prompt. Default: a few short ones.
      max_new_tokens: [--generate] how many tokens the model writes at most after each prompt. Default 128.
      chat: [--generate] put each prompt through the model's chat template.
      size: keep the N most frequent tokens only. Default: all that were counted.
      output: the file to write. Default: jaxspec.vocab.json beside the model or, where that cannot be written or comes
        with jaxspec, in the user's data directory; the methods find it in both.
      json: print one JSON object and nothing else.
    """

    data: tuple[str, ...] = dataclasses.field(default=(), metadata={"metavar": "FILE"})
    generate: bool = False
    prompt_file: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    chat: bool = False
    size: int | None = None
    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Counts; returns the exit status.

        Raises:
          ValueError: there is nothing to count, or an option without --generate that belongs to it.
        """
        if not (self.data or self.generate):
            raise ValueError(
                "there is nothing to count; give data=FILE, or generate=True for the model's own text"
            )
        given = {
            "--prompt-file": self.prompt_file,
            "--max-new-tokens": self.max_new_tokens,
            "--chat": self.chat,
        }
        foreign = [name for name, value in given.items() if value]
        if foreign and not self.generate:
            raise ValueError(f"{foreign[0]} belongs to --generate; give both or neither")
        with Progress() as progress:
            progress("loading the model")
            from jaxspec.io.vocabulary_file import VOCABULARY_NAME, write_vocabulary
            from jaxspec.tuning.vocabulary import coverage, encoded, rank

            lm = self.model.load()
            output = output_file(self.output, lm, VOCABULARY_NAME)
            progress("counting")
            written = self._written(lm, progress)
            ranking, counts = rank(lm, itertools.chain(written, encoded(lm, self.data)), self.size)
            found_by = {
                "command": "jaxspec vocab",
                "data": [Path(path).name for path in self.data],
                "texts_generated": len(written),
                "tokens_generated": sum(map(len, written)),
            }
            write_vocabulary(output, lm.fingerprint, lm.config.vocab_size, ranking, found_by)
        report = {
            "model": lm.name,
            "vocab_size": lm.config.vocab_size,
            "num_counted": ranking.num_counted,
            "always": len(ranking.always),
            "ranked": len(ranking),
            "coverage": coverage(ranking, counts),
            **found_by,
            "output": str(output),
        }
        if self.json:
            print(json.dumps(report))
        else:
            _print(report)
        return 0

    def _written(self, lm: LanguageModel, progress: Progress) -> list[list[int]]:
        """What the model writes after the prompts."""
        from jaxspec.tuning.options import PromptOptions
        from jaxspec.tuning.texts import continuations, read_prompts

        if not self.generate:
            return []
        options = PromptOptions(self.prompt_file, chat="on" if self.chat else "off")
        budget = 128 if self.max_new_tokens is None else self.max_new_tokens
        prompts = read_prompts(lm, budget, options)
        return continuations(lm, prompts, budget, progress)


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    console.print(
        f"{report['model']}: {report['num_counted']:,} tokens counted, {report['ranked']:,} of "
        f"{report['vocab_size']:,} ranked, {report['always']} of them always there",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("--draft-vocab", justify="right")
    table.add_column("of the counted tokens", justify="right")
    for size, share in report["coverage"].items():
        table.add_row(str(size), f"{100 * share:.1f} %")
    console.print(table)
    console.print(f"written to {report['output']}, for --draft-vocab N", highlight=False, soft_wrap=True)
    console.print(
        "Of other text the share is lower, the more so the less was counted: `jaxspec compare --draft-vocab N` shows "
        "what is accepted.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
