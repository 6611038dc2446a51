"""`jaxspec search`: which sublayers a draft of the model itself may skip."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.bar import Bar
from jaxspec.console.output import output_file
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import tell
from jaxspec.io.extras import require
from jaxspec.tuning.options import PromptOptions, SearchOptions


@dataclasses.dataclass(frozen=True)
class Search:
    """Search which sublayers to skip when the model drafts for itself, for --method draft-verify.

    By Bayesian optimisation; no mask is tried twice.

    Trials are written down as they come: a search that was interrupted goes on with the same command.

    The time is mostly that of compiling and of measuring what the parts of a round cost: about a minute on a CPU.

    Attributes:
      output: the plan file to write. Default: jaxspec.plan.json beside the model or, where that cannot be
        written or comes with jaxspec, in the user's data directory; the method finds it in both.
      resume: go on with a search that was interrupted; --no-resume begins again. Default: yes.
      json: print one JSON object and nothing else.
    """

    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    resume: bool = True
    json: bool = False
    search: SearchOptions = SearchOptions()  # noqa: RUF009
    prompts: PromptOptions = PromptOptions()  # noqa: RUF009
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Searches; returns the exit status."""
        if not self.search.random:
            require("search", "bayes_opt")
        with Bar() as bar:
            bar("loading the model")
            from jaxspec.io import lock
            from jaxspec.io.method_files import PLAN_NAME, write_plan
            from jaxspec.tuning.search import found_by, report, search
            from jaxspec.tuning.texts import read_prompts

            options = self.search
            lm = self.model.load()
            output = output_file(self.output, lm, PLAN_NAME)
            with lock.exclusive(output.parent, tell, "output", f"{output.name}.lock"):
                found = search(
                    lm,
                    read_prompts(lm, options.tokens, self.prompts),
                    options,
                    output.with_suffix(".trials.jsonl"),
                    resume=self.resume,
                    on_progress=bar,
                    on_trial=lambda kind, done, budget, best: bar.count(
                        f"{kind} search", done, budget, f"{best.score:.3f}"
                    ),
                )
                write_plan(output, lm.fingerprint, found.best.plan, found_by(found, options))
        result = report(lm, found, options) | {"output": str(output)}
        if self.json:
            print(json.dumps(result))
        else:
            _print(result)
        best = result["best"]
        speedup = best["score"] if options.objective == "speed" else best["predicted_speedup"]
        if speedup < 1:
            print(
                f"jaxspec: warning: no mask was found that makes drafts pay here ({speedup:.2f}× plain decoding)",
                file=sys.stderr,
            )
        if found.interrupted:
            print(
                f"jaxspec: interrupted; the best so far is in {output}, and the same command goes on from here",
                file=sys.stderr,
            )
            return INTERRUPTED
        return 0


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    table = Table(
        title=f"{report['model']}, {report['dtype']}, {report['device']}; {report['num_masks']:,.4g} masks",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    by_speed = report["objective"] == "speed"
    table.add_column("search", no_wrap=True)
    for heading in (
        *("masks tried", "seconds", "skips attention + MLP"),
        *(("tokens/s", "speed-up") if by_speed else ("agreement", "draft tokens", "predicted speed-up")),
    ):
        table.add_column(heading, justify="right")
    for entry in report["searches"]:
        if by_speed:
            worth = [f"{entry['tokens_per_second']:.1f}", f"{entry['score']:.2f}"]
        else:
            worth = [f"{entry['agreement']:.3f}", str(entry["num_draft_tokens"])]
            worth += [f"{entry['predicted_speedup']:.2f}"]
        table.add_row(
            entry["search"],
            str(entry["trials"]),
            f"{entry['seconds']:.0f}",
            f"{len(entry['skip_attention'])} + {len(entry['skip_mlp'])}",
            *worth,
        )
    console.print(table)
    best = report["best"]
    for name, key in (("attention", "skip_attention"), ("MLP", "skip_mlp")):
        layers = ", ".join(map(str, best[key])) or "none"
        console.print(f"best of all skips {name} of layers: {layers}", highlight=False, soft_wrap=True)
    console.print(
        f"written to {report['output']}, for --method draft-verify", highlight=False, soft_wrap=True
    )
