"""Writes a run's best checkpoint as a Hugging Face directory: `python -m training.export --run DIR --output DIR`.

This also works during a run, on its finished checkpoints.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console

from jaxspec.engine.language_model import load
from jaxspec.host import files, processes
from jaxspec.host.progress import duration
from jaxspec.io.hf import huggingface
from jaxspec.io.tokenizers.tokenizer import copy_files
from training import command, outputs
from training.data import bpe_tokenizer, packing
from training.loop import state_sharding
from training.loop.checkpoints import Checkpoints
from training.option_files import parse_plain
from training.reports import card, metrics
from training.run import CHECKPOINTS, read_run
from training.run_options import SCRATCH, Written


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes the best checkpoint of a run as a Hugging Face directory, with a card.

    Attributes:
      run: the run directory of a training command, finished or in progress.
      output: the directory to write.
      samples: number of texts to write into the card after each prompt.
      dtype: dtype of the written weights. Default: that of the run, for which its held-out loss is measured.
    """

    run: Path
    output: Path
    samples: int = 2
    dtype: Written | None = None


def export(
    run: Path, output: Path, samples: int, report: Callable[[str], None], dtype: str | None = None
) -> str:
    """Writes config, generation config, weights, tokenizer and card of the best checkpoint.

    Args:
      run: the run directory.
      output: the directory to write.
      samples: number of texts to write into the card after each prompt.
      report: receives a line for each damaged checkpoint, which is skipped, and one when the weights are written.
      dtype: dtype of the written weights; None for that of the run.

    Returns:
      one line for the user: the step, the dtype, and the held-out loss (nats per token) with the dtype of the weights
      for which it was measured, if that is another one.

    Raises:
      ValueError: `run` is not a run directory, or has no checkpoint yet.
    """
    begin = time.monotonic()
    record = read_run(run, ("commands", "options", "parameters", "documents", "tokens"))
    outputs.refuse_another(output, run, record.get("identity", {}))
    config = huggingface.read_config(run)
    with Checkpoints(run / CHECKPOINTS, read_only=True) as checkpoints:
        params, step, measured = checkpoints.best(report)
    # Earlier versions wrote bfloat16, and measured the weights before they were rounded.
    options = record["options"]
    measured_in, usual = options.get("dtype", options["weights"]), options.get("dtype", "bfloat16")
    dtype = dtype or usual
    of = "" if measured_in == dtype else f" in {measured_in}"
    loss = f"{measured['held_out_loss']:.4f}{of}"
    line = f"wrote step {step} in {dtype}, held-out loss {loss}, to {output}"
    if not processes.is_first():
        return line
    trained_for = huggingface.read_trained_for(run, config)
    outputs.claim(output, run, record.get("identity", {}))
    generation = huggingface.generation_defaults(run)
    huggingface.save(
        output, config, params, dtype=jnp.dtype(dtype), generation=generation, trained_for=trained_for
    )
    copy_files(run, output)
    report(
        f"wrote the weights to {output} in {duration(time.monotonic() - begin)}; samples and card follow. If they are "
        f"interrupted: python -m training.export --run {run} --output {output}"
    )
    del params  # its devices are needed for the model that was written
    lm = load(output, dtype="float32", mesh=state_sharding.decoding_mesh(config))
    words = bpe_tokenizer.load(output)
    held_out = held_out_texts(run, options["data"]["held_out_rows"])
    texts = {
        prompt: card.sample(lm.config, lm.params, words, samples, prompt)
        for prompt in card.prompts_for(held_out, words)
    }
    weights = f"{dtype}, trained in {options['weights']}"
    if of:
        weights += f"; the held-out losses are those of the weights{of}"
    start = None if options["start"] == SCRATCH else options["start"]
    use = card.use_of_job(record, start, output)
    text = card.write(
        output.name, config, record, metrics.read_metrics(run), step, measured, texts, weights, use
    )
    files.write_atomic(output / "README.md", text)
    return f"{line} in {duration(time.monotonic() - begin)}"


def held_out_texts(run: Path, rows: int) -> dict[str, packing.Windows]:
    """Reads at most `rows` windows of each task type of a run's held-out text."""
    parts, _ = packing.stored(run / packing.TOKENS_FILE)
    return {kind: packing.spread(windows, rows) for kind, windows in parts["held_out"].items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        console.print(export(options.run, options.output, options.samples, console.print, options.dtype))

    return command.run_command("training.export", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
