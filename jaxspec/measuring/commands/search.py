"""`jaxspec search`: searches the sublayers to skip in self-speculative drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.output import output_file
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.tables import Table
from jaxspec.console.terminal import tell
from jaxspec.host.extras import require
from jaxspec.host.progress import Progress
from jaxspec.measuring.output import show
from jaxspec.measuring.tuning.tuning_options import PromptOptions, SearchOptions


@dataclasses.dataclass(frozen=True)
class Search:
    """Search the sublayers to skip when the model drafts for itself, for --method draft-verify.

    The search uses Bayesian optimisation; no mask is tried twice. Every trial is logged, so the same command resumes
    an interrupted search.

    Most of the time, about a minute on a CPU, is spent on compilation and on measuring the costs of a round's parts.

    Attributes:
      output: the plan file to write. Default: jaxspec.plan.json in the model's directory or, if that is not writable
        or belongs to jaxspec, in the user's data directory; the method finds it in both.
      resume: continue an interrupted search; --no-resume begins again. Default: yes.
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
        with Progress() as progress:
            progress("loading the model")
            from jaxspec.host import lock
            from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
            from jaxspec.measuring.tuning.mask_search import found_by, report, search, search_kinds
            from jaxspec.measuring.tuning.texts import read_kinds

            options = self.search
            lm = self.model.load()
            prompts = read_kinds(lm, options.tokens, self.prompts)
            output = output_file(self.output, lm, PLAN_NAME)
            with lock.exclusive(output.parent, tell, "output", f"{output.name}.lock"):
                log = output.with_suffix(".trials.jsonl")
                run = functools.partial(
                    search,
                    lm,
                    options=options,
                    resume=self.resume,
                    on_progress=progress,
                    on_trial=lambda kind, done, budget, best: progress.count(
                        f"{kind} search", done, budget, f"best {best.score:.3f}"
                    ),
                )
                found, kinds = run([ids for _, ids in prompts], log=log), []
                if options.by_kind and not found.interrupted:
                    progress("reading the prompts")
                    kinds = search_kinds(lm, prompts, log, functools.partial(run, costs=found.costs))
                    found = dataclasses.replace(found, interrupted=not kinds)
                origin, names = found_by(found, options), tuple(kind for kind, _ in kinds)
                write_plan(output, lm.fingerprint, found.best.plan, origin, names)
        result = report(lm, found, options, kinds) | {"output": str(output)}
        show(result, self.json, _parts)
        speedup = max(one["predicted_speedup"] for one in [result["best"], *result["kinds"]])
        if speedup < 1:
            tell(f"warning: with every mask tried, drafts are slower than plain decoding ({speedup:.2f}×)")
        if found.interrupted:
            tell(f"interrupted; the best so far is in {output}; the same command continues")
            return INTERRUPTED
        return 0


def _parts(report: dict[str, Any]) -> Iterator[str | Table]:
    yield f"{report['model']}, {report['dtype']}, {report['device']}; {report['num_masks']:,.4g} masks"
    headings = ["search", "masks tried", "seconds", "skips attention + MLP"]
    headings += ["agreement", "draft tokens", "predicted speed-up"]
    rows = []
    for entry in report["searches"] + report["kinds"]:
        skipped = f"{len(entry['skip_attention'])} + {len(entry['skip_mlp'])}"
        row = [entry.get("kind", entry["search"]), str(entry["trials"]), f"{entry['seconds']:.0f}", skipped]
        row += [f"{entry['agreement']:.3f}", str(entry["num_draft_tokens"])]
        rows.append([*row, f"{entry['predicted_speedup']:.2f}"])
    yield Table(headings, rows)
    for name, key in (("attention", "skip_attention"), ("MLP", "skip_mlp")):
        layers = ", ".join(map(str, report["best"][key])) or "none"
        yield f"best of all skips {name} of layers: {layers}"
    yield f"written to {report['output']}, for --method draft-verify"
