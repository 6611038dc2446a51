"""The options that all training commands share, except those of the data, the optimiser and the loop."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from jaxspec.console.distributed import ProcessOptions
from jaxspec.loading.loading import devices_of, find_model
from training.data import sizing
from training.data.sizing import AUTO, Auto, Sized
from training.data.sources import DataOptions
from training.loop.optimizer import FROM_PRETRAINED, FROM_SCRATCH, OptimizerOptions
from training.loop.training_loop import LoopOptions

SCRATCH = "scratch"
RematPolicy = Literal["nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"]
TargetWeights = Literal["auto", "float32", "bfloat16", "int8"]
# The dtypes of written weights.
Written = Literal["float32", "bfloat16", "float16"]
# The parameters whose size depends on the vocabulary; `freeze_embeddings` freezes them.
_OF_WORDS = ("embed", "head")
# The usual range of settings for a pretrained model, from SoFT, LayerSkip and common fine-tuning.
_USUAL = {
    "learning_rate": (1e-5, 1e-4),
    "weight_decay": (0.0, 0.1),
    "epochs": (1, 4),
    "batch": (1, 512),
    "accumulate": (1, 128),
    "window": (256, 4096),
}


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The shape of a model trained from scratch; `--start` from a directory uses that model's shape.

    `auto` follows the size of the data; see `training.data.sizing`.

    Attributes:
      vocab_size: number of tokens, learned from the training part of the data.
      tokenizer: a directory with a tokenizer.json to use instead of learning one.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key/value heads; `heads` is a multiple of it.
      head_dim: width of a head, even.
      context: longest text in tokens, written into the config.
      tied: use the embedding as the head too.
    """

    vocab_size: Sized = AUTO
    tokenizer: Path | None = None
    hidden_size: Sized = AUTO
    intermediate_size: Sized = AUTO
    layers: Sized = AUTO
    heads: Sized = AUTO
    kv_heads: Sized = AUTO
    head_dim: Sized = AUTO
    context: Sized = AUTO
    tied: bool = True

    def __post_init__(self):
        sizing.check(self, vocab_size=1, hidden_size=1, intermediate_size=1, layers=1, heads=1, kv_heads=1)
        sizing.check(self, head_dim=2, context=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of everything that the training loop trains.

    The same command resumes a stopped run. Ctrl-C stops it with a checkpoint and an export.

    Attributes:
      output: the directory to write.
      run: directory for checkpoints, metrics and the tokenised data. Default: a directory in runs/, named after the
        path of the output: runs/a-b for a/b.
      seed: seed of the initial weights, of the order of the data and of all other random numbers.
      mesh: arrangement of the devices, such as data=2,model=4. `data` divides the rows of a batch, the parameters and
        the optimiser state; `model` divides parameters and optimiser state by heads, MLP width and vocabulary.
        Default: all devices along data.
      compute: dtype of the matrix products. `auto` is bfloat16 on accelerators and float32 on CPU.
      weights: dtype of the trained parameters. bfloat16 halves their memory and checkpoints; updates are then rounded
        stochastically.
      plot: draw curves of loss and acceptance into the run directory at the end.
    """

    data: DataOptions
    output: Path | None = None
    run: Path | None = None
    seed: int = 0
    mesh: str | None = None
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["float32", "bfloat16"] = "float32"
    plot: bool = False
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)
    processes: ProcessOptions = dataclasses.field(default_factory=ProcessOptions)

    def settled(
        self,
        characters: int,
        earlier: Mapping[str, Any],
        further: sizing.Further | None = None,
        tokens: int | None = None,
    ) -> tuple[Self, dict[str, int]]:
        """Replaces each `auto` and each default that depends on the start; returns also the newly chosen sizes.

        Args:
          characters: number of characters of the training text.
          earlier: the numbers chosen when the run began, by option name, and `places`, the number of devices that
            divided its rows (missing or None if it did not record it); empty for a new run.
          further: the given model that is trained; None for a model from scratch or a head.
          tokens: number of tokens of the training text, if its tokenizer is given.
        """
        epochs, usual = self.loop.epochs, FROM_SCRATCH
        if further is not None:
            usual = FROM_PRETRAINED | {name: earlier[name] for name in FROM_PRETRAINED if name in earlier}
        found = {
            name: value
            for section in self.sized
            for name, value in vars(getattr(self, section)).items()
            if name in sizing.NAMES and name not in self.unsized
        }
        given = {name: value for name, value in found.items() if not isinstance(value, Auto)}
        open_ones = found.keys() - given.keys()
        repeated = open_ones - ({"steps", "every"} if epochs is not None else set())
        given |= {name: value for name, value in earlier.items() if name in repeated}
        if further is not None and repeated & earlier.keys() >= {"batch", "accumulate"}:
            places, batch = earlier.get("places") or further.places, earlier["batch"]
            if places != further.places or batch % places:
                given |= sizing.divided(batch * earlier["accumulate"], given["window"], further.places)
        sizes = sizing.choose(characters, "model" in self.sized, given, epochs, further, tokens)
        # The chosen steps stand for the epochs from now on.
        numbers: dict[str, Any] = {name: sizes[name] for name in open_ones} | {"epochs": None}
        changed = {
            section: dataclasses.replace(
                getattr(self, section),
                **{name: value for name, value in numbers.items() if name in vars(getattr(self, section))},
            )
            for section in self.sized
        }
        changed["optimizer"] = changed["optimizer"].completed(usual)
        return dataclasses.replace(self, **changed), {n: sizes[n] for n in found if n not in given}

    def unusual(self, context: int) -> str | None:
        """Describes the given settings that are 10 times outside the usual range of a pretrained start, if any.

        Args:
          context: the model's longest text, in tokens. Every longer window is unusual.
        """
        far = [
            f"{name} is {value:g} (usual: {least:g} to {most:g})"
            for section in (self.optimizer, self.loop, self.data)
            for name, value in vars(section).items()
            for least, most in [_USUAL.get(name, (-math.inf, math.inf))]
            if isinstance(value, (int, float))
            and not isinstance(value, Auto)
            and not least / 10 <= value <= 10 * most
        ]
        if self.data.window > context:
            far.append(f"window is {self.data.window} (the model's context: {context})")
        return f"unusual for a pretrained model: {', '.join(far)}" if far else None

    @property
    def tokenizer_source(self) -> Path | None:
        """The directory or GGUF file of the tokenizer; None if one is learned."""
        return None

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained."""
        return ()

    @property
    def sized(self) -> tuple[str, ...]:
        """The sections that may contain `auto`."""
        return "data", "loop", "optimizer"

    @property
    def unsized(self) -> tuple[str, ...]:
        """The names of their numbers that need no value."""
        return ()

    @property
    def compute_dtype(self) -> str:
        """The dtype of the matrix products."""
        if self.compute != "auto":
            return self.compute
        return "float32" if devices_of(None)[0].platform == "cpu" else "bfloat16"

    @property
    def run_directory(self) -> Path:
        """The directory of the run's own files."""
        if self.run is not None:
            return self.run
        assert self.output is not None
        output, here = self.output.resolve(), Path.cwd().resolve()
        inside = output.relative_to(here if output.is_relative_to(here) else output.anchor)
        return Path("runs") / "-".join(inside.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(RunOptions):
    """The options that all commands share that train a model.

    Attributes:
      output: the Hugging Face directory to write. Default: with --run none, so that only checkpoints are kept; else the
        name of the start and of the job, such as smollm2-soft.
      start: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded model, or `scratch`.
      start_layers: keep only this many first layers of the given model. Default: all.
      freeze_embeddings: do not train the embedding and head of the given model. With a large vocabulary they are most
        of the optimiser state.
      remat: recompute layers in the backward pass: less memory, about a third more time.
      remat_policy: recompute, but store the results that this policy of `jax.checkpoint_policies` names: of no product,
        of every product, or of the products with weights only.
      dtype: dtype of the written weights, to which they are rounded in the measurements too. `auto`: that of the given
        model; from scratch bfloat16.
      samples: number of texts to write into the card after each prompt.
    """

    job: ClassVar[str]

    start: str = SCRATCH
    start_layers: int | None = None
    freeze_embeddings: bool = False
    remat: bool = False
    remat_policy: RematPolicy | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    samples: int = 2
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)

    def __post_init__(self):
        if self.output is None and self.run is None:
            name = "model" if self.start == SCRATCH else Path(self.start).resolve().name.removesuffix(".gguf")
            object.__setattr__(self, "output", Path(f"{name}-{self.job}"))
        if self.start == SCRATCH and self.start_layers is not None:
            raise ValueError("start_layers is for a given model; name one with --start DIR, or give --layers")
        if self.start == SCRATCH and self.freeze_embeddings:
            raise ValueError("freeze_embeddings is for a given model; name one with --start DIR")
        shape = [name for name, value in vars(self.model).items() if value != getattr(ModelOptions, name)]
        if self.start != SCRATCH and shape:
            raise ValueError(
                f"{', '.join(shape)}: the shape is chosen for a model from scratch, start is {self.start}; leave "
                "one of them out"
            )

    @property
    def sized(self) -> tuple[str, ...]:
        """The sections that may contain `auto`; the model's only from scratch."""
        return ("model", *super().sized) if self.start == SCRATCH else super().sized

    @property
    def unsized(self) -> tuple[str, ...]:
        """The vocabulary size, if a tokenizer is given."""
        return () if self.model.tokenizer is None else ("vocab_size",)

    @functools.cached_property
    def tokenizer_source(self) -> Path | None:
        """The tokenizer of the given model, or the given one."""
        return self.model.tokenizer if self.start == SCRATCH else find_model(self.start)

    @property
    def recompute(self) -> bool | str:
        """The argument `remat` of the losses."""
        return self.remat_policy or self.remat

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained."""
        return _OF_WORDS if self.freeze_embeddings else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions(JobOptions):
    """The options of jobs that can train a draft.

    Attributes:
      draft_vocab: a ranking of tokens, made by `jaxspec vocab` for the target. The draft learns to choose among these
        tokens, as with the decoder's option of that name. Positions with another next token are left out.
    """

    draft_vocab: Path | None = None
