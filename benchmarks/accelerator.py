"""Measures an accelerator in an hour, or in pieces of minutes: `python -m benchmarks.accelerator` runs a plan.

The parts come in the order of their worth. Each prints a line of JSON and writes it to the directory of --output, from
which the same command continues after the last finished part. The last line lists the parts that were left out, and
why.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import stages
from benchmarks.auto_guarantee import KINDS
from benchmarks.cases import CASES
from benchmarks.dialed import Dial
from benchmarks.parts import LeftOutError, Part, Parts, Record
from benchmarks.real_texts import RealTexts
from benchmarks.stages import FORMS, Stages
from jaxspec.cli.methods import usual_methods
from jaxspec.cli.options import ModelOptions
from jaxspec.console import frame
from jaxspec.console.output import check_directory
from jaxspec.console.parsing import parse_as
from jaxspec.console.terminal import tell
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host import lock
from jaxspec.host.progress import OnProgress, Progress
from jaxspec.io import checkpoint
from jaxspec.loading.loading import dtype_named, find_model
from jaxspec.measuring.aot.accelerators import published
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.device_profile import SHAPES, language_model
from jaxspec.measuring.bench.suite_options import Amount, check_count
from jaxspec.measuring.line_log import LineLog
from jaxspec.programs.memory import Texts, check_fits

RECORDS, FORMAT = "records.jsonl", "jaxspec.accelerator/1"
# Options of the command line for the ways to hold and run a model; a new way is an entry here, and a place in `plan`.
SETTINGS: dict[str, tuple[str, ...]] = {
    "bfloat16": ("--dtype", "bfloat16"),
    "float16": ("--dtype", "float16"),
    "float32": ("--dtype", "float32"),
    "int8": ("--weights", "int8"),
    "int8 cache": ("--kv-cache-dtype", "int8"),
}
# Methods of the first texts, beside those that need nothing but the model.
BESIDE = ("auto",)
# Methods for the settings that are not the device's own: copying, early exits, and a tree.
FEW = ("ngram", "layerskip", "token-recycling")
# Drafts of a trained head.
HEADS = (
    "eagle3 --num-draft-tokens 3",
    "eagle3 --num-draft-tokens 7",
    "eagle3 --tree 15x4",
    "eagle3 --tree 63x6",
)
# Tokens of the prompts.
LENGTHS = (1024, 4096, 8192, 16384, 32768)
# The rate at which the draft of a random model agrees with it.
RATE = 0.8
# Options of the guarantee of `auto`, and of the training beside its recipe.
AUTO = ("--temperatures", "0,0.7", "--batches", "1")
TRAINING = ("--batch", "16")
# Slots of the largest cache of a measurement with synthetic acceptance.
CAPACITY = 512
# The model and the directories of the shared files, if they are beside the working directory or in it.
SMOLLM2 = "models/smollm2-135m-instruct"
SHARED = (Path("shared/data"), Path("../shared/data"))


@dataclasses.dataclass(frozen=True)
class Options(Amount):
    """Measures an accelerator part by part, and trains a draft. The same command continues after the last part.

    Speeds are of random weights of named shapes, texts of a trained model. A part is not started if it would not end
    in time, and is stopped at the end.

    Attributes:
      output: a directory for the records, the texts and the trained weights.
      resume: continue with the records in the directory of --output.
      budget: seconds for this run.
      shapes: shapes of `profile`, separated by commas, the most important first.
      model: the model of the texts: a directory, a GGUF file or the name of an embedded model. Default: SmolLM2 in the
        directory of --data, else large.
      data: the directory of the shared files that the draft learns from: prompts and text. Default: shared/data or
        ../shared/data if there, else generated tasks.
      longest_prompt: tokens of the longest prompt.
      own_texts: texts of the model that the draft learns from.
      train_steps: steps of the training, of 16 windows of 384 tokens each.
    """

    output: Path = Path("runs/accelerator")
    resume: bool = True
    budget: float = 525.0
    shapes: str = "8b,1.2b"
    model: str | None = None
    data: Path | None = None
    longest_prompt: int = LENGTHS[-1]
    own_texts: int = 8000
    train_steps: int = 1500
    limit: int | None = 8
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("longest_prompt", "own_texts", "train_steps"):
            check_count(name, getattr(self, name))
        if not self.budget > 0:
            raise ValueError(f"budget is {self.budget}; give seconds above 0")

    @property
    def named_shapes(self) -> list[str]:
        """The names of the shapes.

        Raises:
          ValueError: a name is unknown.
        """
        names = [name.strip() for name in self.shapes.split(",")]
        if unknown := [name for name in names if name not in SHAPES]:
            raise ValueError(f"unknown shape {unknown[0]!r}; give some of {', '.join(SHAPES)}")
        return names

    @property
    def shared(self) -> Path | None:
        """The directory of the shared files; None without one."""
        return self.data or next((path for path in SHARED if path.is_dir()), None)

    @property
    def text_model(self) -> str:
        """The model of the texts."""
        if self.model is not None:
            return self.model
        found = None if self.shared is None else self.shared / SMOLLM2
        return str(found) if found is not None and found.is_dir() else "large"


def plan(options: Options, ends: float) -> list[Part]:
    """Returns the parts in order.

    Only one model is on the device at a time.

    Args:
      options: the options.
      ends: the time at which the budget is spent, by `time.monotonic`.

    Raises:
      ValueError, FileNotFoundError: an unknown shape or model.
    """
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"data is {options.data}, which is no directory; give that of the shared files")
    device, model, shapes = jax.devices()[0], options.text_model, options.named_shapes
    own = dtype_named(None, device).name
    dtypes = [name for name, words in SETTINGS.items() if "--dtype" in words]
    dtypes.sort(key=lambda name: name != own)
    held, real = _Held(options, device), RealTexts(model, options.shared, options.output, ends)
    num_layers = checkpoint.read_config(find_model(model)).num_layers
    usual = [name for name in usual_methods(num_layers) if name != BASELINE]
    repeats = f"--repeats={options.repeats}"
    amount = [f"--max-new-tokens={options.max_new_tokens}", repeats]
    kinds = []
    if options.limit is not None:
        amount.append(f"--limit={options.limit}")
        kinds = [f"--kinds={','.join([*KINDS][: options.limit])}"]

    def on_shapes(name: str, measure: Callable[..., Record], *given: Any, kind: str = "") -> list[Part]:
        return [
            Part(name, shape, functools.partial(measure, shape, *given), kind and f"{shape} {kind}")
            for shape in shapes
        ]

    def on_texts(name: str, measure: Callable[..., Record], *given: Any, **more: Any) -> Part:
        def run(on_progress: OnProgress) -> Record:
            held.drop()
            return measure(*given, on_progress)

        return Part(name, Path(model).name, run, **more)

    def texts(setting: str, methods: Sequence[str]) -> Part:
        words = [*SETTINGS[setting], *amount, "--methods", ",".join(methods)]
        place = f"texts-{setting.replace(' ', '-')}"
        return on_texts(f"texts {setting}", real.bench, place, words, resumable=True)

    def steps(setting: str) -> list[Part]:
        return on_shapes(f"steps {setting}", held.steps, setting, kind="steps")

    heads = [*SETTINGS[own], *amount, *(word for run in HEADS for word in ("--run", run))]
    sizes = (options.own_texts, 2 * options.max_new_tokens)
    every = max(1, options.train_steps // 10)
    training = (options.train_steps, [*TRAINING, "--every", str(every)])
    return [
        Part("device", "", functools.partial(device_record, device)),
        texts(own, [*usual, *BESIDE]),
        *(texts(name, FEW) for name in dtypes[1:]),
        *(part for name in dtypes[:2] for part in steps(name)),
        *on_shapes("prompts", held.prompts, own),
        *(part for name in FORMS for part in on_shapes(name, held.draft, Stages.form, name, kind="tree")),
        on_texts("auto", real.auto, [*kinds, *AUTO, repeats]),
        on_texts("heads", real.bench, "heads", heads, resumable=True),
        *steps("int8"),
        texts("int8", FEW),
        *steps("int8 cache"),
        texts("int8 cache", FEW),
        on_texts("own texts", real.own_texts, *sizes, resumable=True),
        on_texts("training", real.train, *training, resumable=True, needs="own texts"),
        on_texts("s2d", real.s2d, amount, resumable=True, needs="training"),
        *(part for name in CASES for part in on_shapes(name, held.draft, Stages.method, name, kind="method")),
    ]


class _Held:
    """Measures shapes; holds the one model that is on the device."""

    def __init__(self, options: Options, device: jax.Device) -> None:
        self._options, self._device = options, device
        self._dtype = dtype_named(None, device)
        self._name: tuple[str, str] | None = None
        self._model: Any = None
        # The measured costs of the parts of rounds are kept when the model is replaced.
        self._costs: dict[str, dict[str, float]] = {}

    def drop(self) -> None:
        """Frees the memory of the model."""
        self._name = self._model = None
        gc.collect()

    def steps(self, shape: str, setting: str, on_progress: OnProgress) -> Record:
        """Measures steps of a shape; see `stages.steps`."""
        lm = self._random(shape, setting, on_progress)
        return {"dtype": lm.precision, **stages.steps(lm, self._options.repeats, on_progress)}

    def prompts(self, shape: str, setting: str, on_progress: OnProgress) -> Record:
        """Measures the first token after long prompts; see `stages.prompts`."""
        lm = self._random(shape, setting, on_progress)
        lengths = [length for length in LENGTHS if length <= self._options.longest_prompt]
        lengths = lengths or [self._options.longest_prompt]
        return {"dtype": lm.precision, **stages.prompts(lm, lengths, self._options.repeats, on_progress)}

    def draft(self, shape: str, measure: Callable[..., Record], name: str, on_progress: OnProgress) -> Record:
        """Measures a method by `Stages.method` or `Stages.form`, on a model with synthetic acceptance."""
        dtype = self._dtype.name
        return {"dtype": dtype, **measure(self._dialed(shape, on_progress), name, (RATE,), on_progress)}

    def _random(self, shape: str, setting: str, on_progress: OnProgress) -> LanguageModel:
        def make() -> LanguageModel:
            given: ModelOptions = parse_as(ModelOptions, SETTINGS[setting], "setting")
            how = given.mesh, given.weights, given.kv_cache_dtype
            return language_model(None, shape, given.dtype, given.device, *how)

        return self._made((shape, setting), make, on_progress)

    def _dialed(self, shape: str, on_progress: OnProgress) -> Stages:
        def make() -> Stages:
            config = SHAPES[shape]
            untied = dataclasses.replace(config, tie_embeddings=False)
            check_fits(Texts(untied, self._dtype, 1, self._device), CAPACITY)
            dial = Dial(shape, config, self._dtype, self._device, self._options.max_new_tokens)
            costs = self._costs.setdefault(shape, {})
            return Stages(dial, costs, self._options.repeats, self._options.max_new_tokens)

        return self._made((shape, "synthetic acceptance"), make, on_progress)

    def _made(self, name: tuple[str, str], make: Callable[[], Any], on_progress: OnProgress) -> Any:
        """Returns a model; makes it in place of another.

        Raises:
          LeftOutError: its weights do not fit the device.
        """
        if self._name != name:
            self.drop()
            on_progress("making the weights")
            try:
                self._name, self._model = name, make()
            except ValueError as error:
                self._name = None
                raise LeftOutError(str(error)) from None
        return self._model


def device_record(device: jax.Device, on_progress: OnProgress) -> Record:
    """Describes the device and measures its memory bandwidth."""
    stats, figures = device.memory_stats() or {}, published(device.device_kind)
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "memory_bytes": stats.get("bytes_limit"),
        "published_bandwidth": figures and figures.bandwidth,
        "published_flops": figures and figures.flops,
        "published_at": figures and figures.source,
        "measured_bandwidth": stages.bandwidth(device),
    }


def measure(options: Options, emit: Callable[[Record], None], on_progress: OnProgress, began: float) -> None:
    """Measures as many parts as there is time for; `emit` receives each new record.

    Raises:
      ValueError: the directory of the records has those of other options.
    """
    parts = plan(options, began + options.budget)
    check_directory(options.output)
    with lock.exclusive(options.output, tell, "output"):
        header = {"format": FORMAT, "device": jax.devices()[0].device_kind} | {
            name: value if isinstance(value, int | None) else str(value)
            for name, value in dataclasses.asdict(options).items()
            if name not in ("output", "resume", "budget", "data", "model")
        }
        header |= {"model": options.text_model, "jax": jax.__version__}
        header["xla_flags"] = os.environ.get("XLA_FLAGS", "")
        log = LineLog(options.output / RECORDS, header, of="measurement", resume=options.resume)

        def taken(record: Record) -> None:
            if "part" in record:
                log.add(record)
            emit(record)

        Parts(options.budget, taken, began=began, earlier=list(log.entries)).run(parts, on_progress)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the records as lines of JSON; returns the exit status."""
    began, output = time.monotonic(), sys.stdout

    def work(given: Options) -> None:
        with Progress() as progress:
            # Commands of parts print elsewhere, also while the last record is printed.
            measure(given, lambda record: print(json.dumps(record), flush=True, file=output), progress, began)

    return frame.run("benchmarks.accelerator", Options, work, argv)


if __name__ == "__main__":
    sys.exit(main())
