"""Counts tokens per round at each checkpoint of a run: `python -m training.acceptance --run DIR --output FILE`.

A draft that needs more training shows a rising curve; the counts do not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import vocabulary_file
from jaxspec.measuring.bench import speed
from jaxspec.measuring.bench.suite_options import Chat
from jaxspec.measuring.line_log import LineLog
from jaxspec.measuring.tuning.texts import read_prompts
from jaxspec.measuring.tuning.tuning_options import PromptOptions
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.programs.buckets import bucket
from training import command
from training.loop.checkpoints import Checkpoints
from training.losses.base import head_of, layer_outputs
from training.option_files import parse_plain
from training.reports import metrics
from training.run import CHECKPOINTS, read_run
from training.run_options import SCRATCH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Counts the tokens per round of a run's drafts as a function of the learned tokens, by exit.

    Attributes:
      run: the run directory of `soft`, `sft` or `layerskip`, finished or in progress. Train with a larger --keep, since
        a run keeps only its latest checkpoints.
      output: a file of JSON lines, one for each checkpoint: `step`, `tokens` (learned so far), and by exit for each
        text whether the draft proposes each of its tokens after the first, "1" or "0". The same command resumes it.
      target: the model that writes the texts and verifies the drafts. Default: the model of each checkpoint itself,
        whose early exits draft.
      exits: numbers of layers that draft. Default: those of the run, or its whole depth.
      num_draft_tokens: the draft length of the printed table.
      max_new_tokens: the number of tokens to generate after each prompt.
      prompt_file: prompts, in a form of `jaxspec bench`. Default: two of each kind of work, for tuning.
      limit: the maximum number of prompts.
      chat: use of the model's chat template: on, off, or auto, which uses it for messages.
    """

    run: Path
    output: Path
    target: str | None = None
    exits: tuple[int, ...] = ()
    num_draft_tokens: int = 5
    max_new_tokens: int = 64
    prompt_file: tuple[str, ...] = ()
    limit: int | None = None
    chat: Chat = "auto"


@functools.partial(jax.jit, static_argnames=("config", "exits"))
def _proposed(
    config: LlamaConfig, params: Params, tokens: jax.Array, exits: tuple[int, ...], part: Any
) -> jax.Array:
    """Returns the most likely token after each of tokens int32[1, T] by exit, int32[E, T]."""
    one = jnp.ones_like(tokens)
    outputs = layer_outputs(
        config, params, {"tokens": tokens, "segments": one, "positions": jnp.cumsum(one, 1) - 1}
    )
    head = head_of(params, part)
    best = [jnp.argmax(llama.logits(config, head, outputs[layers - 1][0]), -1) for layers in exits]
    chosen = jnp.stack(best)
    return chosen if part is None else jnp.asarray(part)[chosen]


def rounds(right: str, num_draft_tokens: int) -> int:
    """Returns the number of rounds in which a text is written after its first token.

    Args:
      right: for each of these tokens "1" if the draft proposes it after the true ones before it, else "0".
      num_draft_tokens: the draft length. A draft of greedy tokens depends on true tokens only, up to its first error.

    Examples:
      >>> rounds("1101", 2), rounds("1101", 1), rounds("000", 5)
      (2, 3, 3)
    """
    place = count = 0
    while place < len(right):
        draft = right[place : place + num_draft_tokens]
        place += len(draft) - len(draft.lstrip("1")) + 1
        count += 1
    return count


def count(options: Options, console: Console) -> list[dict[str, Any]]:
    """Counts the given model and every checkpoint that the output does not have; returns all entries, by step.

    Raises:
      ValueError: the run started from scratch or trains a head, or nothing says which exits draft.
    """
    given = read_run(options.run, ("options",))["options"]
    if given.get("start", SCRATCH) == SCRATCH:
        raise ValueError(
            f"the run in {options.run} has no given model; give a run of soft, sft or layerskip with --start"
        )
    config = huggingface.read_config(options.run)
    exits = options.exits or tuple(given.get("exits") or ())
    if not exits and options.target is None:
        raise ValueError(
            "the run names no exits; give those that draft, such as --exits 6 10, or the target of the draft"
        )
    exits, start = exits or (config.num_layers,), given["start"]
    lm = load(options.target or start, dtype="float32")
    started = lm if options.target in (None, start) else load(start, dtype="float32")
    part = None
    if given.get("draft_vocab") is not None:
        ranking = vocabulary_file.read_vocabulary(given["draft_vocab"], None, config.vocab_size)
        part = ranking.first()
    asked = PromptOptions(options.prompt_file, options.limit, options.chat)
    prompts = read_prompts(lm, options.max_new_tokens, asked)
    header = {
        "format": "jaxspec.acceptance/1",
        "target": None if options.target is None else lm.fingerprint,
        "exits": list(exits),
        "prompts": [len(prompt) for prompt in prompts],
        "max_new_tokens": options.max_new_tokens,
    }
    log = LineLog(options.output, header, of="acceptance of a run", resume=True)
    done = {entry["step"] for entry in log.entries}
    written = texts(lm, prompts, options.max_new_tokens) if options.target is not None else None
    learned = {record["step"]: record["tokens"] for record in metrics.read(options.run)}
    with Checkpoints(options.run / CHECKPOINTS, read_only=True) as checkpoints:
        for step in (0, *checkpoints.steps()):
            if step in done:
                continue
            console.print(f"step {step}")
            params = checkpoints.params(step) if step else llama.truncate(started.params, config.num_layers)
            own = written or texts(
                LanguageModel(config, params, lm.tokenizer, device=lm.device), prompts, options.max_new_tokens
            )
            right = [_right(config, params, *pair, exits, part) for pair in zip(prompts, own, strict=True)]
            tokens = sum(number for when, number in learned.items() if when <= step)
            by_exit = {str(layers): [one[place] for one in right] for place, layers in enumerate(exits)}
            log.add({"step": step, "tokens": int(tokens), "exits": by_exit})
    return sorted(log.entries, key=lambda entry: entry["step"])


def texts(lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns the model's greedy text after each prompt."""
    written = lm.generate(prompts, method="autoregressive", max_new_tokens=max_new_tokens, temperature=0.0)
    return [[int(token) for token in one.tokens] for one in written]


def _right(
    config: LlamaConfig,
    params: Params,
    prompt: Sequence[int],
    text: Sequence[int],
    exits: tuple[int, ...],
    part: np.ndarray | None,
) -> list[str]:
    """Returns by exit whether it proposes each token of a text but the first, see `rounds`."""
    tokens = np.zeros((1, bucket(len(prompt) + len(text))), np.int32)
    tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
    found = np.asarray(_proposed(config, params, tokens, exits, part))
    own = found[:, len(prompt) : len(prompt) + len(text) - 1] == np.asarray(text[1:])
    return ["".join("01"[int(one)] for one in row) for row in own]


def table(entries: Sequence[dict[str, Any]], num_draft_tokens: int) -> str:
    """Returns tokens per round by learned tokens and exit as a Markdown table, with 95 % intervals over the texts.

    Examples:
      >>> print(table([{"tokens": 96, "exits": {"2": ["11", "00"]}}], 5))
      | learned tokens | exit 2 |
      |---|---|
      | 96 | 1.33 (1.00–2.00) |
    """
    exits = list(entries[0]["exits"])
    lines = [
        "| " + " | ".join(["learned tokens", *(f"exit {layers}" for layers in exits)]) + " |",
        "|---" * (1 + len(exits)) + "|",
    ]
    for entry in entries:
        cells = [f"{entry['tokens']:,}"]
        for layers in exits:
            pairs = [(len(right), rounds(right, num_draft_tokens)) for right in entry["exits"][layers]]
            mine = np.array(pairs, float)[:, None]
            ratio, interval = speed.ratio_of_counts(mine, np.ones_like(mine))
            cells.append(f"{ratio:.2f}" + ("" if interval is None else " ({:.2f}–{:.2f})".format(*interval)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        print(table(count(options, console), options.num_draft_tokens))

    return command.run("training.acceptance", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
