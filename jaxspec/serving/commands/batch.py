"""`jaxspec batch`: answers the prompts of a file."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxspec.cli.methods import method_field
from jaxspec.cli.options import AnswerOptions
from jaxspec.console import interrupts
from jaxspec.console.parsing import Positional
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import tell
from jaxspec.host.arguments import whole
from jaxspec.host.progress import Progress, duration

if TYPE_CHECKING:
    from jaxspec.methods import Method
    from jaxspec.serving.batch import Counts
    from jaxspec.serving.batch_files import Shard


@dataclasses.dataclass(frozen=True)
class Batch(AnswerOptions):
    """Answer the prompts of a file.

    Each line of the file is a JSON object: {"prompt": "..."} or {"messages": [...]}, with an `id` and options of its
    own if needed, or a line of OpenAI's batch format. Results are appended to the output as they come. A command that
    was stopped or killed goes on when it is given again: each prompt gets one result, which may be an error. Errors of
    prompts do not change the exit status: it is 0 when each prompt has a result.

    Attributes:
      prompts: the file with one JSON object per line, also packed by gzip; - for standard input.
      output: the file of results.
      max_batch: texts generated at once.
      shard: the part of the prompts for this process, such as 0/8; auto for the number of this process in SLURM, or in
        an Indexed Job of Kubernetes with the variable JOB_COMPLETIONS. Each part has a file of results of its own.
      prefix_cache: the memory for caches of texts, such as 512MB. Prompts that begin alike are then fed once.
      method: how to decode lines that name no method. The text, or its distribution, is that of plain decoding.
    """

    prompts: Annotated[str | None, Positional] = dataclasses.field(
        default=None, metadata={"metavar": "PROMPTS"}
    )
    output: str = dataclasses.field(default="results.jsonl", metadata={"metavar": "FILE"})
    max_batch: int = 8
    shard: str | None = dataclasses.field(default=None, metadata={"metavar": "I/N"})
    prefix_cache: str | None = dataclasses.field(default=None, metadata={"metavar": "SIZE"})
    method: str = method_field()
    drafting: Any = None

    def run(self) -> int:
        """Answers the prompts; returns the exit status."""
        from jaxspec.host.files import as_file
        from jaxspec.serving.batch_files import shard_of

        method = self.drafting
        self.check_texts()
        if whole("max_batch", self.max_batch) < 1:
            raise ValueError(f"max_batch is {self.max_batch}; give at least 1")
        if not self.prompts:
            raise ValueError("no prompts; give a file with one JSON object per line")
        shard = shard_of(self.shard, os.environ)
        with as_file(self.prompts) as prompts:
            return self._answer(method, prompts, shard)

    def _answer(self, method: Method, prompts: Path, shard: Shard) -> int:
        from jaxspec.serving.batch_files import Results, count_prompts, read_lines

        lines = read_lines(prompts, shard)
        output = shard.path(Path(self.output))
        if output.exists() and not output.is_file():  # such as a directory or /dev/stdout
            raise ValueError(f"`output` {output} is not a file; give the name of a file")
        status = 0
        kept = "jaxspec: terminated; the results so far are kept, and the same command goes on from here"
        with interrupts.ends_at_sigterm(kept), Progress("loading the model") as progress:
            lm = self.model.load(self.chat_template, self.prefix_cache)
            from jaxspec.serving.batch import Batch as Answering

            answering = Answering(
                lm, method=method, options=self.generation(), system=self.system, max_batch=self.max_batch
            )
            count, size = count_prompts(prompts)
            shown = _Shown(progress, size)
            with Results(output, answering.job) as results:
                part = f"part {self.shard} of " if self.shard else ""
                exist = f"; {output} has {len(results.done)} results" if results.done else ""
                tell(
                    f"answering {part}{count} prompts by {method.name}{exist}; the programs are "
                    "compiled first"
                )
                progress("the first texts")
                try:
                    answering.run(lines, results, shown)
                except KeyboardInterrupt:
                    status = INTERRUPTED
        print(f"jaxspec: {shown.summary(answering.counts)}: {output}", file=sys.stderr)
        if status and interrupts.is_first_line():
            print("jaxspec: interrupted; the same command goes on from here", file=sys.stderr)
        return status


class _Shown:
    """Shows the progress of a batch.

    Args:
      progress: the line.
      size: the bytes of the prompts.
    """

    def __init__(self, progress: Progress, size: int) -> None:
        self._progress, self._size = progress, size
        self._began = time.monotonic()
        # The bytes of the prompts that had been read when the first of them had to be answered.
        self._first: int | None = None

    def __call__(self, counts: Counts) -> None:
        if self._first is None:
            self._first, self._began = counts.read, time.monotonic()
        seconds = max(time.monotonic() - self._began, 1e-9)
        words = f"{counts.answered + counts.skipped} prompts answered  {counts.tokens / seconds:.0f} tokens/s"
        read = counts.read - self._first
        if read > 0:
            left = seconds * (self._size - counts.read) / read
            words += f"  about {duration(left)} left"
        self._progress(words)

    def summary(self, counts: Counts) -> str:
        """Returns the figures of a batch that has ended."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        words = f"{counts.answered} prompts answered" + _with_errors(counts.errors)
        if counts.skipped:
            words += f", {counts.skipped} had a result" + _with_errors(counts.skipped_errors)
        return f"{words}; {counts.tokens} tokens, {counts.tokens / seconds:.1f} tokens/s"


def _with_errors(count: int) -> str:
    return f" ({count} of them with an error)" if count else ""
