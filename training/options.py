"""The options that all training commands share, but for those of the data, the optimiser and the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from jaxspec.console.distributed import ProcessOptions
from jaxspec.engine.loading import devices_of
from training.data import sizing
from training.data.sizing import AUTO, Auto, Sized
from training.data.sources import DataOptions
from training.loop.growth import Stages
from training.loop.loop import LoopOptions
from training.loop.optimizer import OptimizerOptions

SCRATCH = "scratch"
# The parameters that belong to words: what `freeze_embeddings` holds.
_OF_WORDS = ("embed", "head")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The shape of a model trained from scratch; `--start` from a directory takes that model's.

    What is `auto` follows the size of the data; see `training.data.sizing`.

    Attributes:
      vocab_size: tokens, learned from the training part of the data.
      tokenizer: a directory whose tokenizer.json is taken instead.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      layers: number of layers.
      growth: pairs LAYERS STEP: the number of layers until that step; after the last pair, `layers`. New layers are
        copies of the lower ones.
      heads: query heads.
      kv_heads: key/value heads; `heads` is a multiple of it.
      head_dim: width of a head, even.
      context: longest text in tokens, written into the config.
      tied: whether the embedding serves as head too.
      induction: start from weights that copy already; see `training.induction`. Not with tied embeddings.
    """

    vocab_size: Sized = AUTO
    tokenizer: Path | None = None
    hidden_size: Sized = AUTO
    intermediate_size: Sized = AUTO
    layers: Sized = AUTO
    growth: tuple[tuple[int, int], ...] = ()
    heads: Sized = AUTO
    kv_heads: Sized = AUTO
    head_dim: Sized = AUTO
    context: Sized = AUTO
    tied: bool = True
    induction: bool = False

    def __post_init__(self):
        sizing.check(self, vocab_size=1, hidden_size=1, intermediate_size=1, layers=1, heads=1, kv_heads=1)
        sizing.check(self, head_dim=2, context=2)
        if not isinstance(self.layers, Auto):
            self.stages  # noqa: B018  refuses an impossible one
        elif self.growth:
            raise ValueError(f"growth is {self.growth} up to an unknown depth; give it with --layers")

    @property
    def stages(self) -> Stages:
        """The depth of the model at each step."""
        return Stages(self.growth, self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of everything that is trained by the loop.

    The same command goes on where it was stopped; Ctrl-C stops it with a checkpoint and an export.

    Attributes:
      output: the directory to write.
      run: where checkpoints, metrics and the tokenised data are kept; if not given, a directory in
        runs/ that is named after the whole path of the output: runs/a-b for a/b.
      seed: of initial weights, of the order of the data and of all that is drawn.
      mesh: how devices are arranged, such as data=2,model=4: rows of a batch are divided over data, and with them
        parameters and optimiser state; over model these are cut by heads, MLP width and vocabulary. Default: all
        devices along data.
      compute: of the products; parameters and optimiser state are float32 always. `auto` is bfloat16 on
        accelerators and float32 on CPU.
    """

    data: DataOptions
    output: Path | None = None
    run: Path | None = None
    seed: int = 0
    mesh: str | None = None
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)
    processes: ProcessOptions = dataclasses.field(default_factory=ProcessOptions)

    def settled(self, characters: int, earlier: Mapping[str, int]) -> tuple[Self, dict[str, int]]:
        """Replaces each `auto` by a number; returns the options and the numbers that were chosen now.

        Args:
          characters: of the training text.
          earlier: what was chosen when the run began, by name of option; none for a new run.
        """
        found = {
            name: value
            for section in self.sized
            for name, value in vars(getattr(self, section)).items()
            if name in sizing.NAMES and name not in self.unsized
        }
        given = {name: value for name, value in found.items() if not isinstance(value, Auto)}
        open_ones = found.keys() - given.keys()
        given |= {name: value for name, value in earlier.items() if name in open_ones}
        sizes = sizing.choose(characters, "model" in self.sized, self.optimizer.accumulate, given)
        changed = {
            section: dataclasses.replace(
                getattr(self, section),
                **{name: sizes[name] for name in open_ones if name in vars(getattr(self, section))},
            )
            for section in self.sized
        }
        return dataclasses.replace(self, **changed), {n: sizes[n] for n in found if n not in given}

    @property
    def sized(self) -> tuple[str, ...]:
        """The sections whose numbers may be `auto`."""
        return "data", "loop"

    @property
    def unsized(self) -> tuple[str, ...]:
        """The names of numbers in them that nobody needs to choose."""
        return ()

    @property
    def compute_dtype(self) -> str:
        """The dtype in which products are computed."""
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
    """The options that all commands share which train a model.

    Attributes:
      output: the Hugging Face directory to write; None to keep checkpoints in the run directory only.
      start: a Hugging Face directory, a GGUF file, a hub id or the name of an embedded model, or `scratch`.
      start_layers: keep only this many first layers of the given model; all if not given.
      widen: make the given model this many times as wide, without changing what it computes; see
        `training.loop.widening`.
      freeze_embeddings: leave embedding and head of the given model as they are: of a model with a large vocabulary
        they are most of what would have to be kept and moved.
      remat: compute layers again in the backward pass: less memory, about a third more time.
      samples: texts to write into the card after each prompt.
      plot: draw curves of loss and acceptance into the run directory at the end.
    """

    start: str = SCRATCH
    start_layers: int | None = None
    widen: int | None = None
    freeze_embeddings: bool = False
    remat: bool = False
    samples: int = 2
    plot: bool = False
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)

    def __post_init__(self):
        if self.output is None and self.run is None:
            raise ValueError(
                "neither output nor run is given; name the directory of the model with --output DIR"
            )
        if self.start == SCRATCH and self.start_layers is not None:
            raise ValueError("start_layers is for a given model; name one with --start DIR, or give --layers")
        if self.start == SCRATCH and self.freeze_embeddings:
            raise ValueError("freeze_embeddings is for a given model; name one with --start DIR")
        if self.start == SCRATCH and self.widen is not None:
            raise ValueError("widen is for a given model; name one with --start DIR, or give --hidden-size")
        if self.widen is not None and self.widen < 2:
            raise ValueError(f"widen is {self.widen}; give a whole number of at least 2, or leave it out")
        shape = [name for name, value in vars(self.model).items() if value != getattr(ModelOptions, name)]
        if self.start != SCRATCH and shape:
            raise ValueError(
                f"{', '.join(shape)}: the shape is chosen for a model from scratch, start is {self.start}; leave "
                "one of them out"
            )

    @property
    def sized(self) -> tuple[str, ...]:
        """The sections whose numbers may be `auto`."""
        return ("model", *super().sized) if self.start == SCRATCH else super().sized

    @property
    def unsized(self) -> tuple[str, ...]:
        """The vocabulary, where the tokenizer is given."""
        return () if self.model.tokenizer is None else ("vocab_size",)

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained."""
        return _OF_WORDS if self.freeze_embeddings else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions(JobOptions):
    """The options that the jobs share whose model may be a draft.

    Attributes:
      draft_vocab: a ranking of tokens, made by `jaxspec vocab` for the target: the draft learns to choose among these,
        as it is to do with the decoder's option of that name. Positions whose next token is another are left out.
    """

    draft_vocab: Path | None = None
