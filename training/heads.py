"""Trains a head that drafts for a model: `python -m training.heads --kind eagle3 --target DIR --data FILE`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

import jaxspec
from jaxspec.bench.speed import acceptance, rows
from jaxspec.bench.timing import measure_runs
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.loading import find_model
from jaxspec.engine.results import played_rounds
from jaxspec.io import acceptance_file, checkpoint, files, lock, processes, vocabulary_file
from jaxspec.io.head_writer import write_head
from jaxspec.io.heads import head_name
from jaxspec.io.user_data import home
from jaxspec.tuning.acceptance import fitted
from training import command, head_kinds, job, outputs, prompts, run
from training.data import conversations, sources, tokenizer
from training.data.packing import Windows
from training.data.sources import Kinds
from training.head_kinds import HeadOptions, Kind
from training.loop import checkpoints, sharding
from training.loop.loop import Result
from training.loop.progress import Progress
from training.losses.heads import Network
from training.options import RunOptions
from training.parsing import parse
from training.prompts import PromptOptions
from training.reports import drafts, head_card, metrics
from training.start import document_marks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Trains a head on what a frozen model computes, and writes it where the model's methods find it.

    The best text to learn from is the model's own: `python -m training.own_text`.

    Attributes:
      kind: of the head, which is the method that drafts with it.
      target: the model it drafts for: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded one.
      output: the directory to write; if not given `heads/KIND` beside the target, or in the user's data directory
        where that is not the user's.
      head: the shape of the head, and how far it looks ahead.
      dtype: of the file.
      card_prompts: held-out prompts of each kind of work that are decoded for the card; 0 for none.
      card_tokens: generated after each of them.
    """

    kind: Literal["eagle", "eagle3", "medusa", "hydra", "kangaroo"]
    target: str
    head: HeadOptions = dataclasses.field(default_factory=HeadOptions)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    card_prompts: int = 4
    card_tokens: int = 64

    def __post_init__(self):
        for name, least in (("card_prompts", 0), ("card_tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least {least}")
        usual = HeadOptions()
        foreign = [
            f"`{field.name}`"
            for field in dataclasses.fields(usual)
            if field.name not in self.made.options
            and getattr(self.head, field.name) != getattr(usual, field.name)
        ]
        if foreign:
            raise ValueError(f"a head of {self.kind} has no option {', '.join(foreign)}; leave it out")

    @property
    def made(self) -> Kind:
        """How a head of this kind is made."""
        return head_kinds.KINDS[self.kind]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A head in training, and what it needs.

    Attributes:
      network: what it computes.
      part: int32[N], the tokens that it may choose, rising; None for all.
      record: what the run directory says of the run.
    """

    network: Network
    part: np.ndarray | None
    record: dict[str, Any]


def draft_tokens(options: HeadOptions, lm: LanguageModel, counts: np.ndarray) -> np.ndarray | None:
    """Chooses the tokens of a head's vocabulary, int32[N], rising; None for all.

    Args:
      options: a ranking, a number of tokens, both or none.
      lm: the target.
      counts: float64[V], how often each token is to be predicted.

    Raises:
      FileNotFoundError, ValueError: the ranking cannot be read, or has fewer tokens.
    """
    size, vocab_size = options.draft_vocab_size, lm.config.vocab_size
    if options.draft_vocab is not None:
        ranking = vocabulary_file.read_vocabulary(options.draft_vocab, lm.fingerprint, vocab_size)
        return ranking.first(size, "draft_vocab_size")
    if size is None or size == vocab_size:
        return None
    if size > vocab_size:
        raise ValueError(f"draft_vocab_size is {size}; the target has {vocab_size} tokens: give fewer")
    order = np.argsort(-counts, kind="stable").tolist()
    ranked = list(dict.fromkeys([*lm.config.eos_token_ids, *order]))
    return np.sort(np.array(ranked[:size], np.int32))


def learned_counts(windows: dict[str, Windows], weights: dict[str, float], vocab_size: int) -> np.ndarray:
    """Counts how often each token is to be predicted where kinds are drawn by their weights, float64[V]."""
    counts = np.zeros(vocab_size)
    for kind, part in windows.items():
        tokens = part["tokens"][part["learn"] & (part["segments"] > 0)]
        counts += weights[kind] * np.bincount(tokens, minlength=vocab_size) / len(part["tokens"])
    return counts


def train(options: Options, typed: str, console: Console) -> int:
    """Trains a head, then writes the best checkpoint with its card.

    Args:
      options: what and how.
      typed: the whole command line, for the record.
      console: where progress is shown.

    Returns:
      the exit status, as of `training.job.train`.

    Raises:
      FileNotFoundError, ValueError: something given does not fit; the message says what to do.
    """
    source = find_model(options.target)
    lm = jaxspec.load(options.target, dtype=options.compute_dtype)
    if options.output is None:
        place = home(checkpoint.directory_of(source), options.target, lm.fingerprint)
        output = (place / head_name(options.kind)).parent
        options = dataclasses.replace(options, output=output)
    assert options.output is not None
    outputs.check(options)
    words = tokenizer.load(source)
    with tokenizer.files_of(source) as directory:
        chat = conversations.chat_of(directory)
    documents = sources.read_kinds(options.data, chat, console.print)
    with lock.exclusive(options.run_directory, console.print):
        options, result, trained = _run_loop(options, lm, source, words, documents, typed, console)
        _export(options, lm, trained, documents[1], console)
    return 0 if result.signal is None else 128 + result.signal


def _run_loop(
    options: Options,
    lm: LanguageModel,
    source: Path,
    words: Tokenizer,
    documents: tuple[Kinds, Kinds],
    typed: str,
    console: Console,
) -> tuple[Options, Result, Trained]:
    """Prepares the run directory and trains in it, from its newest checkpoint if there is one."""
    options, resumed = job.settle(options, documents[0], console)
    directory, kind = options.run_directory, options.made
    marks = document_marks(lm.config, source)
    key = sources.data_key(options.data, documents, words, marks)
    windows, held_out = sources.packed(options.data, directory, documents, words, marks, key)
    counts = learned_counts(windows, options.data.weights, lm.config.vocab_size)
    part = draft_tokens(options.head, lm, counts)
    if part is not None:
        share = counts[part].sum() / counts.sum()
        console.print(f"the head chooses among {len(part):,} tokens, {share:.1%} of those to be predicted")
    network, params = kind.init(options.head, lm.config, lm.params, part, options.seed)
    same = {
        "job": "training.heads",
        "kind": options.kind,
        "target": lm.fingerprint,
        "taps": [str(tap) for tap in network.taps],
        "intermediate_size": options.head.intermediate_size,
        "test_steps": options.head.test_steps,
        "step_decay": options.head.step_decay,
        "num_heads": options.head.num_heads,
        "shared_head": options.head.shared_head,
        "draft_vocab": None if part is None else hashlib.sha256(part.tobytes()).hexdigest()[:16],
        "seed": options.seed,
        "held_out": options.data.held_out,
        "data": key[:16],
    }
    if resumed:
        run.refuse_another(directory, None, same)
    assert options.output is not None
    outputs.refuse_another(options.output, directory, same)
    if not resumed:
        run.forget(directory)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = None if part is None else len(part)
    console.print(run.record(options, same, size, windows, held_out, documents[0], typed, draft_vocab=tokens))
    loss = kind.loss(network, options.head, part)
    target = sharding.place_state(sharding.make_mesh(options.mesh), lm.params)
    measure = drafts.make_measure(network, loss, target, part)
    result = job.take_steps(
        options, loss, params, lm.config.vocab_size, target, measure, (windows, held_out), console
    )
    return options, result, Trained(network, part, run.read_run(directory))


def _export(options: Options, lm: LanguageModel, trained: Trained, held_out: Kinds, console: Console) -> None:
    """Writes the best checkpoint's head, decodes held-out prompts with it, and writes its card."""
    assert options.output is not None
    with checkpoints.Checkpoints(options.run_directory / run.CHECKPOINTS, read_only=True) as kept:
        state, step, measured = kept.best(console.print)
    if not processes.is_first():
        return
    outputs.claim(options.output, options.run_directory, trained.record["identity"])
    size = write_head(
        options.output,
        trained.network.head,
        state["params"],
        lm.fingerprint,
        trained.part,
        jnp.dtype(options.dtype),
    )
    loss = measured["held_out_loss"]
    console.print(f"wrote step {step}, held-out loss {loss:.4f}, to {options.output} ({size / 1e6:.2f} MB)")
    decoded = _decoded(options, lm, held_out, console)
    text = head_card.write(
        options.output.name,
        options.kind,
        options.target,
        lm.fingerprint,
        size,
        trained.record,
        metrics.read(options.run_directory),
        step,
        measured,
        decoded,
    )
    files.write_atomic(options.output / "README.md", text)
    if decoded:
        written = [text for one in decoded.values() for turns in one.drafted for text in rows(turns[0])]
        found = [played_rounds(text.token_records) for text in written]
        about = {"command": "python -m training.heads", "texts": len(found)}
        expected = fitted({options.kind: found})
        acceptance_file.write_acceptance(
            options.output / acceptance_file.NAME, lm.fingerprint, expected, about
        )
        taken = [texts for one in decoded.values() for texts in one.drafted]
        console.print(
            f"held-out prompts, greedy: {acceptance(taken)['mean_acceptance_length']:.2f} tokens per round"
        )


def _decoded(
    options: Options, lm: LanguageModel, held_out: Kinds, console: Console
) -> dict[str, head_card.Decoded]:
    """Decodes held-out prompts of each kind with the head that was written and without one, in turns."""
    if not options.card_prompts:
        return {}
    how = PromptOptions(model=Path(options.target), data=options.data.data, new_tokens=options.card_tokens)
    generate = functools.partial(lm.generate, max_new_tokens=options.card_tokens, temperature=0.0)
    settings = {"method": options.kind, "draft": str(options.output), "stop_rule": "constant"}
    runs = {
        "drafted": lambda prompt, turn: generate(prompt, **settings),
        "plain": lambda prompt, turn: generate(prompt, method="autoregressive"),
    }
    begun = {
        kind: [prompts.beginning(document, how, lm) for document in part[: options.card_prompts]]
        for kind, part in held_out.items()
    }
    found = {}
    with Progress(console, "card: kind", len(begun)) as progress:
        progress.doing("compiling")
        for done, (kind, ids) in enumerate(begun.items(), 1):
            taken = list(measure_runs([lm], runs, ids, 1, warm=done > 1))
            found[kind] = head_card.Decoded(*([one[name] for one in taken] for name in runs))
            progress.update(done, kind)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(given: list[str], prog: str, console: Console) -> int:
        options = command.joined(parse(Options, given, prog), "training.heads")
        return train(options, shlex.join([*prog.split(), *given]), console)

    return command.run("training.heads", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
