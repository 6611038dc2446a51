"""A run's best checkpoint as a Hugging Face directory: `python -m training.export --run DIR --output DIR`.

Works beside a run in progress, on the checkpoints it has finished.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console

from jaxspec.engine.language_model import load
from jaxspec.io import files, huggingface, processes
from jaxspec.io.tokenizer import copy_files
from jaxspec.tuning import fitness
from jaxspec.tuning import fitness_report as fitness_bench
from training import command, outputs
from training.data import packing, tokenizer
from training.loop.checkpoints import Checkpoints
from training.parsing import parse_plain
from training.reports import card, metrics
from training.run import CHECKPOINTS, read_run


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes the best checkpoint of a run as a Hugging Face directory, with a card.

    Attributes:
      run: the run directory of a training command, finished or in progress.
      output: the directory to write.
      samples: texts to write into the card after each prompt.
    """

    run: Path
    output: Path
    samples: int = 2


def export(run: Path, output: Path, samples: int, report: Callable[[str], None]) -> tuple[int, float]:
    """Writes config, bfloat16 weights, tokenizer and card of the best checkpoint.

    A checkpoint from before the model was grown to its full depth is written as the shallower model it is.

    Args:
      run: the run directory.
      output: the directory to write.
      samples: texts to write into the card after each prompt.
      report: is given a line for damaged checkpoints, which are passed over.

    Returns:
      its step and held-out loss (nats per token).

    Raises:
      ValueError: `run` is no run directory, or has no checkpoint yet.
    """
    record = read_run(run, ("commands", "options", "parameters", "documents", "tokens"))
    outputs.refuse_another(output, run, record.get("identity", {}))
    config = huggingface.read_config(run)
    with Checkpoints(run / CHECKPOINTS, read_only=True) as checkpoints:
        state, step, measured = checkpoints.best(report)
    if not processes.is_first():
        return step, measured["held_out_loss"]
    params = state["params"]
    config = config.truncated(len(params["layers"]))
    exits = huggingface.read_exits(run, config.num_layers)
    outputs.claim(output, run, record.get("identity", {}))
    huggingface.save(output, config, params, dtype=jnp.bfloat16, exits=exits)
    copy_files(run, output)
    rounded = huggingface.load_params(output, config, jnp.float32)
    words = tokenizer.load(output)
    held_out = held_out_texts(run, record["options"]["data"]["held_out_rows"])
    texts = {
        prompt: card.sample(config, rounded, words, samples, prompt)
        for prompt in card.prompts_for(held_out, words)
    }
    fit = fitness_bench.measure(load(output, dtype="float32"), held_out)
    files.write_json(output / fitness_bench.FITNESS_NAME, fit)
    text = card.write(output.name, config, record, metrics.read(run), step, measured, texts, fit)
    files.write_atomic(output / "README.md", text)
    return step, measured["held_out_loss"]


def held_out_texts(run: Path, rows: int) -> dict[str, fitness.Texts]:
    """Reads at most `rows` windows of each kind of a run's held-out text."""
    parts, _ = packing.stored(run / packing.TOKENS_FILE)
    return {
        kind: fitness.Texts(**packing.spread(windows, rows)) for kind, windows in parts["held_out"].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(given: list[str], prog: str, console: Console) -> int:
        options = parse_plain(Options, given, prog)
        step, loss = export(options.run, options.output, options.samples, console.print)
        console.print(f"wrote step {step}, held-out loss {loss:.4f}, to {options.output}")
        return 0

    return command.run("training.export", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
