"""`jaxspec vocab`: counts the frequent tokens of a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.output import output_file
from jaxspec.console.tables import Table
from jaxspec.host.progress import Progress
from jaxspec.measuring.output import show

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Count the frequent tokens of a model, so that drafts can leave out the others (--draft-vocab N).

    Count text similar to the model's output: its own, also that of `jaxspec train own-text`, or its training data.
    Special tokens and the tokens of the chat template are always included. With --generate, the report also has the
    share of every second answer of each kind of prompts that the most frequent tokens of the others cover.

    Attributes:
      data: a text file to count; for a .jsonl file, the strings in its records.
      generate: count the model's own text after prompts.
      prompt_file: [--generate] a file with one prompt, or JSON lines in a form of `jaxspec bench`, whose categories are
        kinds. Default: a few short ones.
      max_new_tokens: [--generate] the maximum number of tokens to generate after each prompt. Default 128.
      chat: [--generate] use the model's chat template for each prompt.
      size: keep only the N most frequent tokens. Default: all tokens that occur.
      output: the file to write. Default: jaxspec.vocab.json in the model's directory or, if that is not writable or
        belongs to jaxspec, in the user's data directory; the methods find it in both.
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
          ValueError: there is no text to count, or an option of --generate is given without it.
        """
        if not (self.data or self.generate):
            raise ValueError(
                "there is no text to count; give data=FILE, or generate=True for the model's own text"
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
            from jaxspec.io.methods.vocabulary_file import VOCABULARY_NAME
            from jaxspec.measuring.tuning.texts import continuations
            from jaxspec.measuring.tuning.token_counts import coverage, encoded, held_out_coverage, rank

            lm = self.model.load()
            kinds, prompts = self._prompts(lm)
            output = output_file(self.output, lm, VOCABULARY_NAME)
            progress("counting")
            texts = continuations(lm, prompts, self._budget, progress) if prompts else []
            written = list(zip(kinds, texts, strict=True))
            own = [ids for _, ids in written]
            ranking, counts = rank(lm, itertools.chain(own, encoded(lm, self.data)), self.size)
            found_by = {
                "command": "jaxspec vocab",
                "data": [Path(path).name for path in self.data],
                "texts_generated": len(own),
                "tokens_generated": sum(map(len, own)),
            }
            ranking.write(output, lm.fingerprint, found_by)
        report = {
            "model": lm.name,
            "vocab_size": lm.config.vocab_size,
            "num_counted": ranking.num_counted,
            "always": len(ranking.always),
            "ranked": len(ranking),
            "coverage": coverage(ranking, counts),
            "held_out": held_out_coverage(lm, written),
            **found_by,
            "output": str(output),
        }
        show(report, self.json, _parts)
        return 0

    @property
    def _budget(self) -> int:
        return 128 if self.max_new_tokens is None else self.max_new_tokens

    def _prompts(self, lm: LanguageModel) -> tuple[Sequence[str], Sequence[list[int]]]:
        """Returns the kinds of the prompts, and the prompts, of --generate."""
        from jaxspec.measuring.tuning.texts import read_kinds
        from jaxspec.measuring.tuning.tuning_options import PromptOptions

        if not self.generate:
            return (), ()
        options = PromptOptions(self.prompt_file, chat="on" if self.chat else "off")
        kinds, prompts = zip(*read_kinds(lm, self._budget, options), strict=True)
        return kinds, prompts


def _parts(report: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"{report['model']}: {report['num_counted']:,} tokens counted, {report['ranked']:,} of "
        f"{report['vocab_size']:,} ranked, {report['always']} of them always included"
    )
    rows = [[str(size), f"{100 * share:.1f} %"] for size, share in report["coverage"].items()]
    yield Table(("--draft-vocab", "share of the counted tokens"), rows)
    if held := report["held_out"]:
        sizes = dict.fromkeys(size for shares in held.values() for size in shares)
        rows = [[kind, *(f"{100 * shares[size]:.1f} %" for size in sizes)] for kind, shares in held.items()]
        yield Table(("answers held out", *map(str, sizes)), rows)
    yield f"written to {report['output']}, for --draft-vocab N"
    yield (
        "On other text the share is lower, especially after a small count. `jaxspec compare --run 'asd --draft-vocab "
        "N'` measures the acceptance."
    )
