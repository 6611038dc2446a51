"""Trains AdaSPEED's probes: `python -m training.probe --model DIR --exit-layers 3 6 --data FILE`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from jaxspec.engine.keywords import MethodName
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.files import write_json
from jaxspec.host.progress import duration
from jaxspec.io import checkpoint
from jaxspec.io.methods import method_files
from jaxspec.loading.loading import find_model
from training import command, outputs, prompt_options
from training.loop.progress import Pace, Progress
from training.option_files import plain
from training.probes import fit, gather
from training.prompt_options import PromptOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(PromptOptions):
    """Trains a linear probe for each exit layer, for one sampling distribution, and reports its quality.

    The report compares the probe, on the same held-out tokens, with the base rate (the share accepted in training, for
    every token), the draft's own probability, and that probability with Platt scaling (two parameters).

    Attributes:
      exit_layers: layers after which the draft exits; one probe each.
      held_out_prompts: number of texts, of held-out documents, for the report.
      num_draft_tokens: K in training and in the report.
      output: a directory for the probes. Default: beside the model.
    """

    exit_layers: tuple[int, ...]
    held_out_prompts: int = 60
    num_draft_tokens: int = 8
    output: Path | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("held_out_prompts", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if not self.exit_layers:
            raise ValueError("exit_layers is empty; give at least one layer, such as --exit-layers 3 6")


def decoded(
    lm: LanguageModel,
    prompts: list[list[int]],
    options: Options,
    method: MethodName,
    report: Callable[[int], None],
    **more: Any,
) -> dict[str, Any]:
    """Decodes the prompts with a method: mean acceptance length, and tokens drafted and accepted per round."""
    settings: dict[str, Any] = options.distribution | more
    pieces = lm.stream(
        prompts,
        method=method,
        max_new_tokens=options.new_tokens,
        num_draft_tokens=options.num_draft_tokens,
        max_batch=options.batch,
        **settings,
    )
    statistics = []
    for piece in pieces:
        if piece.result is not None:
            statistics.append(piece.result.statistics)
            report(len(statistics))
    rounds = max(1, sum(one.num_rounds for one in statistics))
    drafted = sum(one.num_draft_tokens for one in statistics)
    accepted = sum(one.num_accepted_tokens for one in statistics)
    return {
        "mean_acceptance_length": sum(one.num_tokens - 1 for one in statistics) / rounds,
        "drafted_a_round": drafted / rounds,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
    }


def train_probe(
    lm: LanguageModel,
    exit_layer: int,
    parts: tuple[list[list[int]], list[list[int]]],
    options: Options,
    console: Console,
) -> tuple[Path, dict[str, Any]]:
    """Trains one probe, writes it, and reports on held-out prompts.

    Raises:
      ValueError: the exit layer is not below the last, or the examples cannot be learned.
    """
    depth = lm.config.num_layers
    if not 1 <= exit_layer < depth:
        raise ValueError(
            f"exit layer {exit_layer} of a model with {depth} layers; give layers from 1 to {depth - 1}"
        )

    def prompts_done(what: str, prompts: list[list[int]]) -> _Prompts:
        return _Prompts(console, f"exit {exit_layer}, {what}: prompt", len(prompts))

    def gathered(number: int, what: str) -> gather.Examples:
        with prompts_done(f"gathering {what} tokens", parts[number]) as done:
            return gather.gather(
                lm.config,
                lm.params,
                parts[number],
                exit_layer,
                options.distribution,
                num_draft_tokens=options.num_draft_tokens,
                new_tokens=options.new_tokens,
                batch=options.batch,
                seed=options.sampling.seed + number,
                report=done,
            )

    training, held_out = gathered(0, "training"), gathered(1, "held-out")
    v, b = fit.fit(training)
    path = _path(options, exit_layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    method_files.write_probe(
        path, lm.fingerprint, method_files.ProbeFile(v, b, exit_layer, options.distribution_name)
    )

    decoding = {}
    runs: dict[MethodName, dict[str, str]]
    runs = {"layerskip": {}, "adaspeed": {}, "adaspeed-probe": {"probe": str(path)}}
    for method, more in runs.items():
        with prompts_done(f"decoding by {method}", parts[1]) as done:
            decoding[method] = decoded(lm, parts[1], options, method, done, exit_layer=exit_layer, **more)
    report = {
        "exit_layer": exit_layer,
        "law": options.distribution_name,
        "options": plain(options),
        "draft_tokens": {"training": len(training.label), "held_out": len(held_out.label)},
        "accepted_share": float(held_out.label.mean()),
        **fit.compared(training, held_out, fit.predict(v, b, held_out.hidden)),
        "decoding": decoding,
    }
    write_json(path.with_suffix(".json"), report)
    return path, report


def _path(options: Options, exit_layer: int) -> Path:
    directory = options.output or checkpoint.directory_of(find_model(options.model))
    return method_files.probe_path(directory, exit_layer, options.distribution_name)


class _Prompts(Progress):
    """Progress through prompts; called with the number of finished ones. The first ones include compilation."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        super().__init__(console, what, total)
        self._pace = Pace(latest=total)
        self._before: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self.doing("compiling, then the first prompts")
        return self

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self._before is not None:
            self._pace.add(done - self._before[0], now - self._before[1])
        self._before = done, now
        rate = self._pace.tokens_per_second
        self.update(
            done, f"about {duration((self.total - done) / rate)} left" if rate and done < self.total else ""
        )


def show(report: dict[str, Any], console: Console) -> None:
    """Prints two small tables: the estimates, and the decoding methods that use them."""

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    title = f"exit layer {report['exit_layer']}, {report['law']}: {report['accepted_share']:.1%} accepted"
    figures = ("accuracy", "cross_entropy", "information", "auroc", "calibration_error")
    # Headings of several words can wrap: a pipe has 80 columns.
    headings = ("estimate", "accuracy", "cross entropy", "information", "AUROC", "calibration error")
    table = Table(*headings, title=title)
    for name in fit.ESTIMATES:
        table.add_row(name.replace("_", " "), *(figure(report[name][key]) for key in figures))
    console.print(table)
    table = Table("method", "tokens per round", "drafted per round", "acceptance rate")
    for name, values in report["decoding"].items():
        table.add_row(name, *map(figure, values.values()))
    console.print(table)


def train(options: Options, console: Console) -> None:
    """Trains a probe for each exit layer of the options.

    Raises:
      ValueError: an argument does not fit.
    """
    if options.output is not None:
        outputs.check_beside(options.output, find_model(options.model))
    lm = prompt_options.load_model(options.model, options.mesh)
    documents = prompt_options.read_documents(options, console.print)
    counts = (options.prompts, options.held_out_prompts)
    training, held_out = (
        [prompt_options.beginning(one, options, lm) for one in prompt_options.choose(part, options, count)]
        for part, count in zip(documents, counts, strict=True)
    )
    for exit_layer in options.exit_layers:
        path, report = train_probe(lm, exit_layer, (training, held_out), options, console)
        show(report, console)
        console.print(f"wrote {path} and {path.with_suffix('.json').name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return command.run_command("training.probe", Options, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
