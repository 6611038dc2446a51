"""Trains a Llama by next-token prediction: `python -m training.sft --data FILE --output DIR`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training import data, export, loop, losses, step, tokenizer
from training.loop import LoopOptions
from training.step import OptimizerOptions

SCRATCH = "scratch"


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The shape of a model trained from scratch; `--from` a directory takes that model's.

    Attributes:
      vocab_size: tokens, learned from the training part of the data.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      layers: how many.
      heads: query heads.
      kv_heads: key/value heads; `heads` is a multiple of it.
      head_dim: width of a head, even.
      context: longest text in tokens, written into the config.
    """

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 6
    heads: int = 6
    kv_heads: int = 6
    head_dim: int = 32
    context: int = 512


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which text, and how it is laid into batches.

    Attributes:
      data: text files, documents separated by <|endoftext|>.
      window: tokens a packed row; longer documents are cut.
      batch: rows a micro-batch.
      held_out: one document in so many is held out, chosen by its hash.
      held_out_rows: how many packed held-out rows are measured at each checkpoint.
    """

    data: tuple[Path, ...]
    window: int = 256
    batch: int = 8
    held_out: int = 50
    held_out_rows: int = 64

    def __post_init__(self):
        for name, least in (("window", 2), ("batch", 1), ("held_out", 2), ("held_out_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least {least}")


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains a Llama by next-token prediction and writes the best checkpoint as a Hugging Face directory.

    The same command goes on where it was stopped; Ctrl-C stops it with a checkpoint and an export.

    Attributes:
      output: the Hugging Face directory to write.
      source: a Hugging Face directory to start from, or `scratch`.
      run: where checkpoints, metrics and the tokenised data are kept; runs/NAME-OF-OUTPUT if not given.
      seed: of initial weights and of the order of the data.
      remat: compute layers anew in the backward pass: less memory, about a third more time.
      samples: stories to write into the card.
    """

    output: Path
    data: DataOptions
    source: Annotated[str, tyro.conf.arg(name="from")] = SCRATCH
    run: Path | None = None
    seed: int = 0
    remat: bool = False
    samples: int = 4
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)

    @property
    def run_directory(self) -> Path:
        """Where the run lives."""
        return self.run or Path("runs") / self.output.name


def start_model(options: Options, documents: list[str], run: Path) -> tuple[LlamaConfig, Params, Tokenizer]:
    """The config, initial float32 parameters and tokenizer; the tokenizer's files are put into `run`.

    Raises:
      ValueError: the shape is impossible, or the given model lacks what training needs.
    """
    if options.source != SCRATCH:
        return _given_model(Path(options.source), run)
    if not (run / "tokenizer.json").is_file():
        tokenizer.save(tokenizer.train(documents, options.model.vocab_size), run, options.model.context)
    words = tokenizer.load(run)
    shape = options.model
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_embeddings=True,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_ids=(tokenizer.EOS_ID,),
    )
    return config, init_params(config, options.seed), words


def _given_model(source: Path, run: Path) -> tuple[LlamaConfig, Params, Tokenizer]:
    from jaxspec.io import huggingface

    words = tokenizer.load(source)
    config = huggingface.read_config(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).write_bytes((source / name).read_bytes())
    return config, huggingface.load_params(source, config, jnp.float32), words


def init_params(config: LlamaConfig, seed: int) -> Params:
    """Random float32 parameters; the products that write into the residual stream shrink with its depth."""
    params = llama.init_params(config, jax.random.key(seed))
    shrink = (2 * config.num_layers) ** -0.5
    for layer in params["layers"]:
        layer["attention"]["out"] *= shrink
        layer["mlp"]["down"] *= shrink
    return params


def document_marks(config: LlamaConfig) -> tuple[int, int]:
    """The tokens that begin and end every document.

    Raises:
      ValueError: the config does not name both.
    """
    if config.bos_token_id is None or not config.eos_token_ids:
        raise ValueError("the model's config names no BOS or no EOS token; training marks documents by both")
    return config.bos_token_id, config.eos_token_ids[0]


def packed(
    options: DataOptions, words: Tokenizer, marks: tuple[int, int], run: Path
) -> dict[str, data.Windows]:
    """The packed `training` and `held_out` windows, tokenised once and kept in the run directory."""

    def make() -> dict[str, data.Windows]:
        parts = data.split(data.read_documents(options.data), options.held_out)
        packs = [data.pack(tokenizer.encode_documents(words, part, *marks), options.window) for part in parts]
        return dict(zip(("training", "held_out"), packs, strict=True))

    about = [
        words.to_str(),
        marks,
        options.window,
        options.held_out,
        [_fingerprint(file) for file in options.data],
    ]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    return data.cached(run / "tokens.npz", key, make)


def _fingerprint(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def train(options: Options, command: str, console: Console) -> None:
    """Trains, then exports the best checkpoint.

    Raises:
      ValueError: something given does not fit; the message says what to do.
    """
    from jaxspec.io import files, hf_config

    run = options.run_directory
    run.mkdir(parents=True, exist_ok=True)
    documents, _ = data.split(data.read_documents(options.data.data), options.data.held_out)
    config, params, words = start_model(options, documents, run)
    windows = packed(options.data, words, document_marks(config), run)
    tokens = {name: int((part["segments"] > 0).sum()) for name, part in windows.items()}
    earlier = export.read_run(run)["commands"] if (run / export.RUN_FILE).is_file() else []
    record = {
        "commands": [*(one for one in earlier if one != command), command],
        "options": dataclasses.asdict(options),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "documents": len(documents),
        "tokens": tokens,
    }
    if (run / "config.json").is_file() and hf_config.read_config(run) != config:
        raise ValueError(
            f"{run} holds a run of another model; give the options it was started with, or another --run"
        )
    files.write_json(run / "config.json", hf_config.config_json(config, "float32"))
    (run / export.RUN_FILE).write_text(json.dumps(record, indent=2, default=str) + "\n")
    console.print(
        f"{record['parameters']:,} parameters, {tokens['training']:,} training and "
        f"{tokens['held_out']:,} held-out tokens, run in {run}"
    )
    loss = losses.next_token(config, options.remat)
    transform = step.optimizer(options.optimizer, options.loop.steps)
    evaluate = step.make_evaluate(losses.next_token(config))
    parts = data.fixed_batches(windows["held_out"], options.data.batch, options.data.held_out_rows)
    with loop.checkpoint_manager(run / "checkpoints", options.loop.keep) as manager:
        result = loop.train(
            options.loop,
            run,
            manager,
            step.init_state(params, transform),
            step.make_step(loss, transform),
            data.batches(windows["training"], options.data.batch, options.optimizer.accumulate, options.seed),
            lambda state: loop.held_out_loss(evaluate, state.params, parts),
            console,
        )
    best, best_loss = export.export(run, options.output, options.samples)
    console.print(f"wrote step {best}, held-out loss {best_loss:.4f}, to {options.output}")
    if result.reason != "steps":
        console.print(f"stopped early ({result.reason}); the same command goes on from here")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = tyro.cli(
            Options, args=given, prog="python -m training.sft", config=(tyro.conf.OmitArgPrefixes,)
        )
        train(options, shlex.join(["python", "-m", "training.sft", *given]), console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
