"""Generates training text for a draft with its target: `python -m training.own_text --model DIR --data FILE`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.console.errors import Failed
from jaxspec.host import lock
from jaxspec.host.files import write_atomic
from jaxspec.measuring.line_log import LineLog
from training import command, outputs, prompt_options
from training.loop.progress import Progress
from training.prompt_options import PromptOptions

FORMAT = "jaxspec.own-text/1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(PromptOptions):
    """Writes a model's own texts after prompts, as records that all training commands read.

    A draft must predict its target, so the target's own text is better training data than other text. Each record has
    the `prompt`, the `completion`, whether it `ended` by itself, and the `origin` of the prompt's document, by which it
    is held out. A .txt file beside it contains the completions, for `jaxspec vocab` to count. The same command resumes
    a stopped run, and adds texts for more --prompts. Texts of prompts that are no longer selected remain in the .log
    file only.

    Attributes:
      output: the .jsonl file to write.
      resume: continue with the existing texts.
    """

    output: Path
    prompts: int = 1000
    new_tokens: int = 256
    batch: int = 8
    resume: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.output.suffix != ".jsonl":
            raise ValueError(f"output is {self.output}; give a name that ends in .jsonl")


def write_texts(options: Options, console: Console) -> int:
    """Generates texts and writes the file; returns the number of texts in it.

    Raises:
      ValueError: an argument does not fit, the file's log has other options, or this command did not write the file.
      Failed: the model's logits are not finite.
    """
    output, log = options.output, options.output.with_suffix(".log")
    written = (output, output.with_suffix(".txt"))
    outputs.check_file(output, written, log, [source.path for source in options.data])
    with lock.exclusive(output.parent, console.print, "output", f"{output.name}.lock"):
        return _write_texts(options, console)


def _write_texts(options: Options, console: Console) -> int:
    lm = prompt_options.load_model(options.model, options.mesh)
    if lm.tokenizer is None:
        raise ValueError(f"{lm.name} has no tokenizer, and prompts are texts; give a model that has one")
    training, held_out = prompt_options.read_documents(options, console.print)
    documents = {kind: [*part, *held_out[kind]] for kind, part in training.items()}
    begun, context = {}, lm.config.context_length
    chosen = prompt_options.choose(documents, options, options.prompts)
    too_long = 0
    for document in chosen:
        ids, question = prompt_options.beginning(document, options, lm), prompt_options.question_of(document)
        # A question is never cut, because its answer would not follow.
        if len(ids) + options.new_tokens <= context and (not question or lm.encode(question) == ids):
            begun[question or lm.tokenizer.decode(ids)] = (ids, document.origin)
        else:
            too_long += 1
    if too_long:
        said = (
            f"{too_long} of {len(chosen)} prompts leave no room for new_tokens {options.new_tokens} in the context of "
            f"{context} tokens"
        )
        if not begun:
            raise ValueError(f"{said}; give fewer")
        console.print(f"{said}, and are left out")
    header = {
        "format": FORMAT,
        "model": lm.fingerprint,
        "sampling": options.distribution_name,
        "seed": options.sampling.seed,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
    }
    log = LineLog(options.output.with_suffix(".log"), header, of="set of texts", resume=options.resume)
    done = {entry["prompt"] for entry in log.entries}
    left = [prompt for prompt in begun if prompt not in done]
    try:
        if left:
            _generate(lm, options, {prompt: begun[prompt] for prompt in left}, log, console)
    finally:
        # The order of the prompts, so that interruptions do not change the file.
        written = {entry["prompt"]: entry for entry in log.entries}
        entries = [written[prompt] for prompt in begun if prompt in written]
        write_atomic(options.output, "".join(json.dumps(entry) + "\n" for entry in entries))
        completions = "\n\n".join(entry["completion"] for entry in entries)
        write_atomic(options.output.with_suffix(".txt"), completions + "\n")
    return len(entries)


def _generate(
    lm: Any, options: Options, begun: dict[str, tuple[list[int], str]], log: LineLog, console: Console
) -> None:
    distribution: dict[str, Any] = options.distribution
    ids = [one for one, _ in begun.values()]
    tokens, since = 0, time.monotonic()
    with Progress(console, "text", len(begun)) as progress:
        progress.doing("compiling, then the first texts")
        pieces = lm.stream(
            ids,
            method="autoregressive",
            max_new_tokens=options.new_tokens,
            max_batch=options.batch,
            # The seed depends on the prompt only, so that a text does not depend on earlier ones.
            seed=[zlib.crc32(np.array(one, np.int32).tobytes()) // 2 + options.sampling.seed for one in ids],
            **distribution,
        )
        written = list(begun)
        done = 0
        for piece in pieces:
            if piece.result is None:
                continue
            done += 1
            if piece.result.error is not None:
                raise Failed(piece.result.error)
            if piece.result.text:
                prompt = written[piece.index]
                ended = piece.result.finish_reason == "eos"
                record = {"prompt": prompt, "completion": piece.result.text, "ended": ended}
                log.add(record | {"origin": begun[prompt][1]})
            tokens += len(piece.result.tokens)
            rate = tokens / (time.monotonic() - since)
            progress.update(done, f"{tokens:,} tokens, {rate:,.1f} tokens/s with compilation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        console.print(f"wrote {write_texts(options, console):,} texts to {options.output}")

    return command.run_command("training.own_text", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
