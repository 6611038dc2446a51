"""The options of the training commands: frozen dataclasses, from the command line, a YAML file, or both."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import jax
import tyro
import yaml

from jaxspec.console.parsing import one_line_errors
from training.data import formats, sizing, tasks
from training.data.sizing import AUTO, Auto, Sized
from training.loop.growth import Stages
from training.loop.loop import LoopOptions
from training.loop.step import OptimizerOptions

SCRATCH = "scratch"
# One document in so many is held out: the same in all commands, so that a probe is judged on what its model
# has not seen.
HELD_OUT = 20


@dataclasses.dataclass(frozen=True)
class Source:
    """One part of the data, written PATH[,kind=K][,format=F][,weight=W].

    Attributes:
      path: a file, hf:NAME[:SPLIT] or tasks:FAMILY[:COUNT]; see `training.data.formats.read`.
      kind: the kind of work; held-out loss is told by kind. The file's or family's name if not
        given.
      format: one of `training.data.formats.FORMATS`, or auto.
      weight: how often it is drawn, relative to the other sources.
    """

    path: str
    kind: str = ""
    format: str = formats.AUTO
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """Reads the written form.

        Raises:
          ValueError: it is not of that form.
        """
        path, *settings = text.split(",")
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals or name not in ("kind", "format", "weight"):
                raise ValueError(f"{setting!r} in {text!r}; expected PATH[,kind=K][,format=F][,weight=W]")
            values[name] = value
        if "weight" in values:
            values["weight"] = float(values["weight"])
            if not values["weight"] > 0:
                raise ValueError(f"weight is {values['weight']} in {text!r}; give a number above 0")
        name = path.partition(":")[2] if path.startswith(("hf:", tasks.PREFIX)) else path
        usual = name.partition(":")[0] if path.startswith(tasks.PREFIX) else Path(name).stem
        kind = values.pop("kind", "") or usual
        return cls(path, kind, **values)

    def __str__(self) -> str:
        return f"{self.path},kind={self.kind},format={self.format},weight={self.weight!r}"


SourceArgument = Annotated[
    Source,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH[,kind=K][,format=F][,weight=W]",
        instance_from_str=lambda words: Source.parse(words[0]),
        is_instance=lambda value: isinstance(value, Source),
        str_from_instance=lambda source: [str(source)],
    ),
]


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
      growth: pairs LAYERS STEP: so many layers until that step; after the last pair, `layers`. New layers are
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
        """How deep the model is at each step."""
        return Stages(self.growth, self.layers)


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which text, and how it is laid into batches.

    Attributes:
      data: the sources; those of the same kind are put together, and have the same weight.
      window: tokens per packed row; longer documents are cut. `auto` follows the size of the data.
      batch: rows per micro-batch. `auto` follows the size of the data.
      held_out: one document in so many is held out, chosen by its hash.
      held_out_rows: how many packed held-out rows of each kind are measured at each checkpoint.
      skip_malformed: report and leave out records that do not fit their format, instead of ending.
    """

    data: tuple[SourceArgument, ...]
    window: Sized = AUTO
    batch: Sized = AUTO
    held_out: int = HELD_OUT
    held_out_rows: int = 64
    skip_malformed: bool = False

    def __post_init__(self):
        sizing.check(self, window=2, batch=1, held_out=2, held_out_rows=1)
        if not self.data:
            raise ValueError("no data is given; name at least one source with --data")
        for source in self.data:
            if source.weight != self.weights[source.kind]:
                raise ValueError(
                    f"sources of kind {source.kind} weigh {source.weight} and {self.weights[source.kind]}; give "
                    "them one weight, or kinds of their own with kind=NAME"
                )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each kind."""
        return {source.kind: source.weight for source in self.data}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What all training commands share.

    The same command goes on where it was stopped; Ctrl-C stops it with a checkpoint and an export.

    Attributes:
      output: the Hugging Face directory to write; None to keep checkpoints in the run directory only.
      start: a Hugging Face directory to start from, or `scratch`.
      start_layers: keep only so many first layers of the given model; all if not given.
      run: where checkpoints, metrics and the tokenised data are kept; if not given, a directory in
        runs/ that is named after the whole path of the output: runs/a-b for a/b.
      seed: of initial weights, of the order of the data and of all that is drawn.
      remat: compute layers again in the backward pass: less memory, about a third more time.
      compute: of the products; parameters and optimiser state are float32 always. `auto` is bfloat16 on
        accelerators and float32 on CPU.
      samples: texts to write into the card after each prompt.
      plot: draw curves of loss and acceptance into the run directory at the end.
    """

    data: DataOptions
    output: Path | None = None
    start: str = SCRATCH
    start_layers: int | None = None
    run: Path | None = None
    seed: int = 0
    remat: bool = False
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    samples: int = 2
    plot: bool = False
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)

    def __post_init__(self):
        if self.output is None and self.run is None:
            raise ValueError(
                "neither output nor run is given; name the directory of the model with --output DIR"
            )
        if self.start == SCRATCH and self.start_layers is not None:
            raise ValueError("start_layers is for a given model; name one with --start DIR, or give --layers")
        shape = [name for name, value in vars(self.model).items() if value != getattr(ModelOptions, name)]
        if self.start != SCRATCH and shape:
            raise ValueError(
                f"{', '.join(shape)}: the shape is chosen for a model from scratch, start is {self.start}; leave "
                "one of them out"
            )

    def settled(self, characters: int, earlier: Mapping[str, int]) -> tuple[Self, dict[str, int]]:
        """Replaces each `auto` by a number; returns the options and the numbers that were chosen now.

        Args:
          characters: of the training text.
          earlier: what was chosen when the run began, by name of option; none for a new run.
        """
        sections = ("model", "data", "loop") if self.start == SCRATCH else ("data", "loop")
        found = {
            name: value
            for section in sections
            for name, value in vars(getattr(self, section)).items()
            if name in sizing.NAMES and (name != "vocab_size" or self.model.tokenizer is None)
        }
        given = {name: value for name, value in found.items() if not isinstance(value, Auto)}
        open_ones = found.keys() - given.keys()
        given |= {name: value for name, value in earlier.items() if name in open_ones}
        sizes = sizing.choose(characters, self.start == SCRATCH, self.optimizer.accumulate, given)
        changed = {
            section: dataclasses.replace(
                getattr(self, section),
                **{name: sizes[name] for name in open_ones if name in vars(getattr(self, section))},
            )
            for section in sections
        }
        return dataclasses.replace(self, **changed), {n: sizes[n] for n in found if n not in given}

    @property
    def compute_dtype(self) -> str:
        """The dtype of the products."""
        if self.compute != "auto":
            return self.compute
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def run_directory(self) -> Path:
        """Where the run's own files are kept."""
        if self.run is not None:
            return self.run
        assert self.output is not None
        output, here = self.output.resolve(), Path.cwd().resolve()
        inside = output.relative_to(here if output.is_relative_to(here) else output.anchor)
        return Path("runs") / "-".join(inside.parts)


Options = TypeVar("Options")


class WrongOptions(ValueError):
    """The options of a command cannot be understood, or do not fit each other."""


_CONFIG = "--config"
_CONFIG_HELP = (
    "Options may stand in YAML files too, one name and value each: --config FILE.yaml, any number of times; the "
    "command line wins."
)


def parse(kind: type[Options], arguments: Sequence[str] | None, prog: str) -> Options:
    """Options from `--config FILE.yaml`, given any number of times, and the command line, which wins.

    A YAML file holds what the command line does: option names (with _ or -) and values; sections are free. Of
    several files the later ones win.

    Raises:
      WrongOptions: a file cannot be read, or an option is unknown or impossible; one line.
      SystemExit: help was asked for, and is printed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    words: list[str] = []
    rest: list[str] = []
    while given:
        word = given.pop(0)
        if word == _CONFIG or word.startswith(_CONFIG + "="):
            file = word[len(_CONFIG) + 1 :] or (given.pop(0) if given else "")
            words += yaml_words(Path(file))
        else:
            rest.append(word)
    rest = _collected(rest, "--data")
    # tyro takes the attributes' part itself, for each option, unless a description is given.
    about = (inspect.getdoc(kind) or "").partition("\nAttributes:")[0].strip()
    return parse_plain(kind, [*words, *rest], prog, f"{about}\n\n{_CONFIG_HELP}")


def parse_plain(
    kind: type[Options], arguments: Sequence[str] | None, prog: str, description: str | None = None
) -> Options:
    """Options from the command line alone.

    Raises:
      WrongOptions, SystemExit: as `parse`.
    """
    try:
        with one_line_errors(prog):
            return tyro.cli(
                kind,
                args=arguments,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except ValueError as error:
        # What the dataclasses themselves refuse comes with their names, which a user does not know.
        raise WrongOptions(re.sub(r"^error parsing (?!-)\S+: ", "", str(error))) from None


def _collected(words: list[str], option: str) -> list[str]:
    """All values of an option that is given several times behind one; tyro would take the last ones alone."""
    others: list[str] = []
    values: list[str] = []
    ours = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            ours = name == option
        if not ours:
            others.append(word)
        elif not word.startswith("--"):
            values.append(word)
        elif equals:
            values.append(value)
    return [*others, option, *values] if values else words


def yaml_words(file: Path) -> list[str]:
    """A YAML file as words of the command line.

    Raises:
      WrongOptions: it cannot be read, or is no mapping of options.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongOptions(f"cannot read {file} ({error.strerror}); --config wants a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WrongOptions(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise WrongOptions(f"{file} holds a {type(content).__name__}, expected options by name")
    return _words(content)


def _words(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = "--" + str(name).replace("_", "-")
        if isinstance(value, dict):
            words += _words(value)
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list):
            words += [option, *map(_word, _flat(value))]
        else:
            words += [option, _word(value)]
    return words


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list) else [value]


def _word(value: Any) -> str:
    if isinstance(value, dict):
        path, settings = value.get("path"), [f"{k}={v}" for k, v in value.items() if k != "path"]
        return ",".join([str(path), *settings])
    return str(value)


def plain(options: Any) -> Any:
    """Options as dictionaries, lists, texts and numbers, as they are written into YAML and JSON."""
    if isinstance(options, (Source, Auto, Path)):
        return str(options)
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        return {field.name: plain(getattr(options, field.name)) for field in dataclasses.fields(options)}
    return [plain(item) for item in options] if isinstance(options, tuple) else options


def to_yaml(options: JobOptions) -> str:
    """The resolved options as a file that `--config` reads."""
    return yaml.safe_dump(plain(options), sort_keys=False)


def chosen_earlier(file: Path) -> dict[str, int]:
    """The numbers in the file that `to_yaml` made for a run, by name of option; none if it cannot be read."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        sections = [part for part in content.values() if isinstance(part, dict)]
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}
    return {
        name: value
        for section in sections
        for name, value in section.items()
        if name in sizing.NAMES and isinstance(value, int)
    }
