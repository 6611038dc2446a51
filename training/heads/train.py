"""Trains a head that drafts for a model: `python -m training.heads --kind eagle3 --target DIR --data FILE`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads import kinds as head_kinds
from jaxspec.heads.files import head_name
from jaxspec.heads.writer import write_head
from jaxspec.host import files, processes
from jaxspec.io import checkpoint
from jaxspec.io.methods import acceptance_file, vocabulary_file
from jaxspec.io.user_data import home
from jaxspec.loading.loading import find_model
from jaxspec.measuring.bench.speed import acceptance, rows
from jaxspec.measuring.bench.timing import measure_runs
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.requests.results import played_rounds
from training import outputs, prompt_options, run
from training.data import bpe_tokenizer
from training.data.packing import Windows
from training.data.sources import Kinds
from training.heads import card
from training.heads.accepted import accepted_shares
from training.heads.head_type import HeadOptions, Kind, begin
from training.heads.kinds import KINDS, KindName
from training.heads.losses import Network
from training.heads.measure import make_measure
from training.loop import checkpoints, state_sharding
from training.loop.progress import Progress
from training.loop.training_loop import Result
from training.prompt_options import PromptOptions
from training.reports import metrics
from training.run_options import RunOptions, TargetWeights

# Options of heads in the identity of every run, whatever its kind: as recorded by earlier versions.
IN_EVERY_IDENTITY = (
    *("intermediate_size", "test_steps", "step_decay", "feature_weight", "token_weight"),
    *("num_heads", "shared_head"),
)
# Options that are not recorded by name a second time: `kind`, `taps` and `draft_vocab` tell them.
IN_NO_IDENTITY = (
    *(*IN_EVERY_IDENTITY, "loss", "fc_norm", "norm_output"),
    *("aux_layers", "exit_layer", "draft_vocab", "draft_vocab_size"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Trains a head on what a frozen model computes, and writes it where the model's methods find it.

    The best text to learn from is the model's own: `jaxspec train own-text`.

    Attributes:
      kind: of the head, which is the method that drafts with it.
      target: the model it drafts for: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded one.
      output: the directory to write; if not given `heads/KIND` beside the target, or in the user's data directory
        where that is not the user's.
      head: the shape of the head, and how far it looks ahead.
      dtype: of the file.
      target_weights: weights of the target: a dtype, or int8 with a scale per output channel. `auto`: as `compute`.
      layout: of the files: that of the head's authors, which vLLM and SGLang read too, or that of another trainer,
        `speculators` or `specforge` (EAGLE-3 only). A finished run is written again in another layout.
      card_prompts: held-out prompts of each kind of work that are decoded for the card; 0 for none.
      card_tokens: generated after each of them.
    """

    kind: KindName
    target: str
    head: HeadOptions = dataclasses.field(default_factory=HeadOptions)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    target_weights: TargetWeights = "auto"
    layout: Literal["authors", "speculators", "specforge"] = "authors"
    card_prompts: int = 4
    card_tokens: int = 64

    def __post_init__(self):
        for name, least in (("card_prompts", 0), ("card_tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least {least}")
        if self.layout != "authors" and self.layout not in head_kinds.known()[self.kind].layouts:
            raise ValueError(f"a head of {self.kind} has no layout {self.layout}; leave layout out")
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
        return KINDS[self.kind]

    @functools.cached_property
    def tokenizer_source(self) -> Path:
        """The directory or GGUF file of the target."""
        return find_model(self.target)


class Target(NamedTuple):
    """The frozen model that a head drafts for: its config, fingerprint and parameters in shards."""

    config: LlamaConfig
    fingerprint: str
    params: Params


def draft_tokens(
    options: HeadOptions, target: Target | LanguageModel, counts: np.ndarray
) -> np.ndarray | None:
    """Chooses the tokens of a head's vocabulary, int32[N], rising; None for all.

    Args:
      options: a ranking, a number of tokens, both or none.
      target: its config and fingerprint.
      counts: float64[V], how often each token is to be predicted.

    Raises:
      FileNotFoundError, ValueError: the ranking cannot be read, or has fewer tokens.
    """
    size, vocab_size = options.draft_vocab_size, target.config.vocab_size
    if options.draft_vocab is not None:
        ranking = vocabulary_file.read_vocabulary(options.draft_vocab, target.fingerprint, vocab_size)
        return ranking.first(size, "draft_vocab_size", options.draft_vocab)
    if size is None or size == vocab_size:
        return None
    if size > vocab_size:
        raise ValueError(f"draft_vocab_size is {size}; the target has {vocab_size} tokens: give fewer")
    order = np.argsort(-counts, kind="stable").tolist()
    ranked = list(dict.fromkeys([*target.config.eos_token_ids, *order]))
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
      0, also when --minutes are over; 128 plus the signal's number if a signal ended training.

    Raises:
      FileNotFoundError, ValueError: something given does not fit; the message says what to do.
    """
    target = _load_target(options)
    fingerprint = target.fingerprint
    if options.output is None:
        place = home(checkpoint.directory_of(options.tokenizer_source), options.target, fingerprint)
        options = dataclasses.replace(options, output=(place / head_name(options.kind)).parent)
    with run.opened(options, "training.heads", typed, console) as opened:
        result, network, part = _trained(opened, target)
        del target  # its devices are needed for the model that decodes
        if result.exports:
            _export(opened, network, fingerprint, part)
        opened.draw(result)
    return result.status


def _load_target(options: Options) -> Target:
    source, mesh = options.tokenizer_source, state_sharding.make_mesh(options.mesh)
    config, kind = checkpoint.read_config(source), options.target_weights
    params, fingerprint = state_sharding.load_target(mesh, source, config, kind, options.compute_dtype)
    return Target(config, fingerprint, params)


def _trained(opened: run.Run[Options], target: Target) -> tuple[Result, Network, np.ndarray | None]:
    """Trains from the newest checkpoint of the run if there is one; returns also the head and its tokens."""
    options, console = opened.options, opened.console
    opened.tokenise(bpe_tokenizer.load(options.tokenizer_source), target.config)
    vocab_size = target.config.vocab_size
    counts = learned_counts(opened.windows[0], options.data.weights, vocab_size)
    part = draft_tokens(options.head, target, counts)
    if part is not None:
        share = counts[part].sum() / counts.sum()
        console.print(f"the head chooses among {len(part):,} tokens, {share:.1%} of those to be predicted")
    mesh, model = state_sharding.make_mesh(options.mesh), (target.config, target.params)
    network, params = begin(options.made, options.head, model, part, options.seed, mesh)
    if options.layout != "authors":  # refuses a head that it cannot express
        head_kinds.known()[options.kind].layouts[options.layout].content(network.head, options.dtype)
    opened.admit(identity(options, network, target.fingerprint, part))
    loss = options.made.loss(network, options.head, part)
    measure = make_measure(network, loss, target.params, options.dtype, part)
    tokens = None if part is None else len(part)
    result = opened.take_steps(loss, params, vocab_size, target.params, measure, draft_vocab=tokens)
    return result, network, part


def identity(options: Options, network: Network, target: str, part: np.ndarray | None) -> dict[str, Any]:
    """Returns the properties of a head that a resumed run must keep, beside those of every run.

    Args:
      options: its options.
      network: its network.
      target: fingerprint of its target.
      part: int32[N], the tokens among which it chooses; None for all.
    """
    head = options.head
    # The flags are part of the kind, so that the identity of a run without them stays as it was.
    flags = [name for name in ("fc_norm", "norm_output") if getattr(head, name)]
    loss = [head.loss] if head.loss != HeadOptions().loss else []
    return {
        "kind": " ".join([options.kind, *flags, *loss]),
        "target": target,
        "taps": [str(layer) for layer in network.aux_layers],
        "draft_vocab": None if part is None else hashlib.sha256(part.tobytes()).hexdigest()[:16],
        **{name: getattr(head, name) for name in IN_EVERY_IDENTITY},
        # Options of one kind only.
        **{name: str(getattr(head, name)) for name in options.made.options if name not in IN_NO_IDENTITY},
    }


def _export(opened: run.Run[Options], network: Network, target: str, part: np.ndarray | None) -> None:
    """Writes the best checkpoint's head, decodes held-out prompts with it, and writes its card."""
    options, console, record = opened.options, opened.console, run.read_run(opened.directory)
    assert options.output is not None
    with checkpoints.Checkpoints(opened.directory / run.CHECKPOINTS, read_only=True) as kept:
        params, step, measured = kept.best(console.print)
    if not processes.is_first():
        return
    outputs.claim(options.output, opened.directory, opened.identity)
    size = write_head(
        options.output,
        network.head,
        params,
        target,
        part,
        jnp.dtype(options.dtype),
        None if options.layout == "authors" else options.layout,
        options.target,
    )
    loss = measured["held_out_loss"]
    console.print(f"wrote step {step}, held-out loss {loss:.4f}, to {options.output} ({size / 1e6:.2f} MB)")
    decoded = _decoded(options, opened.documents[1], console)
    text = card.write(
        options.output,
        options.kind,
        options.target,
        target,
        size,
        record,
        metrics.read_metrics(opened.directory),
        step,
        measured,
        decoded,
        options.made.unit if options.head.loss == HeadOptions().loss else f"per token ({options.head.loss})",
    )
    files.write_atomic(options.output / "README.md", text)
    if decoded:
        written = [text for one in decoded.values() for turns in one.drafted for text in rows(turns[0])]
        found = [played_rounds(text.token_records) for text in written]
        about = {"command": "python -m training.heads", "texts": len(found)}
        path, shares = options.output / acceptance_file.NAME, accepted_shares(found)
        accepted = {options.kind: acceptance_file.Accepted(shares)} if shares else {}
        acceptance_file.Acceptances(accepted).write(path, target, about)
        taken = [texts for one in decoded.values() for texts in one.drafted]
        console.print(
            f"held-out prompts, greedy: {acceptance(taken)['mean_acceptance_length']:.2f} tokens per round"
        )


def _decoded(options: Options, held_out: Kinds, console: Console) -> dict[str, card.Decoded]:
    """Decodes held-out prompts of each kind with the head that was written and without one, in turns."""
    if not options.card_prompts:
        return {}
    how = PromptOptions(model=Path(options.target), data=options.data.data, new_tokens=options.card_tokens)
    lm = prompt_options.load_model(options.target, dtype=options.compute_dtype)
    generate = functools.partial(lm.generate, max_new_tokens=options.card_tokens, temperature=0.0)
    settings = {"method": options.kind, "draft": str(options.output), "stop_rule": "constant"}
    runs = {
        "drafted": lambda prompt, turn: generate(prompt, **settings),
        "plain": lambda prompt, turn: generate(prompt, method="autoregressive"),
    }
    begun = {
        kind: [prompt_options.beginning(document, how, lm) for document in part[: options.card_prompts]]
        for kind, part in held_out.items()
    }
    for length in options.made.lengths:
        runs[str(length)] = functools.partial(_of_length, generate, settings | {"num_draft_tokens": length})
    found = {}
    with Progress(console, "card: kind", len(begun)) as progress:
        progress.doing("compiling, then the first texts")
        for done, (kind, ids) in enumerate(begun.items(), 1):
            taken = list(measure_runs([lm], runs, ids, 1, warm=done > 1))
            drafted, plain, *others = ([one[name] for one in taken] for name in runs)
            found[kind] = card.Decoded(drafted, plain, dict(zip(options.made.lengths, others, strict=True)))
            progress.update(done, kind)
    return found


def _of_length(generate: Any, settings: dict[str, Any], prompt: Any, turn: int) -> Any:
    del turn
    return generate(prompt, **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run.main(Options, train, "training.heads", arguments)
