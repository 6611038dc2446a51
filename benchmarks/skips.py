"""Counts drafts that skip sublayers: `python -m benchmarks.skips`.

It prints a row for each method. The counts are sums over prompts, or over passages of a text, each continued greedily:
tokens, rounds, draft tokens, choices of sublayers, and the layers that a draft token runs. A layer counts by the bytes
of its weights and of the cache that it reads. The speed relative to plain decoding is that of a device where reading
takes all time, with the interval of a bootstrap over the prompts. There a pass takes the time of a step, and one with
more than `--free-rows` tokens in proportion longer, which charges the choices.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import LanguageModel
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.cli.methods import parse_run
from jaxspec.decoding import Parts, Request
from jaxspec.measuring.bench.prompt_files import encoded, in_turn, own_tasks, read_tasks
from jaxspec.measuring.bench.speed import spread
from jaxspec.methods import KnapSpec
from jaxspec.programs.compiler_options import tracing
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy, seed_key
from jaxspec.testing.loop import prefill, run_rounds

MADE = "<!-- Made by `python -m benchmarks.results` from docs/results/skips.json; do not edit. -->"
HEADINGS = [
    "run",
    "tokens a round",
    "rounds",
    "draft tokens",
    "choices",
    "layers of a draft token",
    "× plain",
]


def read(
    lm: LanguageModel, text: Path | None, prompts: list[str], passages: int, context: int, follows: bool
) -> list[list[int]]:
    """Returns the prompts of sets, the model's own reporting prompts, or passages of a text, as tokens."""
    if text is not None:
        whole = text.read_text("utf-8", errors="replace")
        # Passages begin at the starts of equal parts.
        part = len(whole) // passages
        return [lm.encode(whole[at * part : at * part + 10 * context])[:context] for at in range(passages)]
    tasks = read_tasks(prompts) if prompts else own_tasks(directory=lm.directory)
    tokens = [encoded(lm, task) for task in in_turn(tasks, lambda task: task.category)]
    # In this order the prompt before is of another kind.
    return [tokens[at - 1] + one for at, one in enumerate(tokens)] if follows else tokens


def counts(lm: LanguageModel, run: str, prompts: list[list[int]], count: int, free_rows: int) -> np.ndarray:
    """Returns of each prompt its tokens, rounds, draft tokens, choices, layers of its draft tokens, and steps."""
    method = parse_run(run)
    drafter, own = lm.drafter(method)
    weights, parts = Weights(lm.params, own), Parts(drafter, GreedyAcceptor(), Greedy())
    by_bytes: Any = lm.drafter(KnapSpec())[0]
    size = 1 << (max(map(len, prompts)) + count + drafter.reach).bit_length()
    cost = method.cost(lm.loaded, drafter, own)
    rows, every = (0, 1) if cost is None else cost.choice
    found = []
    for prompt in prompts:
        length = jnp.array([len(prompt)])
        tokens = jnp.pad(jnp.array([prompt]), ((0, 0), (0, size - len(prompt))))
        request = Request(tokens, length, length + count, jnp.array([[-1, -1]]), seed_key(0)[None])
        with tracing(weights):
            state, _ = prefill(lm.config, weights, parts, request, chunk_size=256)
            drafts = np.zeros(3)  # tokens, layers, time
            while not state.done.all():
                before = int(state.stats.num_draft_tokens[0])
                args = lm.config, weights, parts, state, jnp.int32(1), jnp.zeros(1, bool)
                state, _ = run_rounds(*args, window=size)
                drafted = int(state.stats.num_draft_tokens[0]) - before
                own_state = state.drafter_state.own
                chosen = getattr(own_state, "plan", None)
                plan = drafter.plans(state.drafter_state, ~state.done) if chosen is None else chosen
                times = np.asarray(by_bytes.times.of(lm.config, state.length))[0]
                ran = float((np.asarray(plan)[0].reshape(-1) * times).sum())
                layers = lm.config.num_layers * ran / times.sum()
                step = float(by_bytes.times.rest) + times.sum()
                drafts += drafted * np.array([1, layers, (ran + float(by_bytes.times.rest)) / step])
        rounds = int(state.stats.num_rounds[0])
        choices = math.ceil(rounds / every) if rows else 0
        steps = rounds + drafts[2] + choices * max(1, rows / free_rows)
        found.append([int(state.length[0]) - len(prompt) - 1, rounds, drafts[0], choices, drafts[1], steps])
    return np.array(found)


def row(run: str, each: np.ndarray) -> list[str]:
    """Returns the cells of a run from the counts of its prompts."""
    tokens, rounds, drafted, choices, layers, steps = each.sum(axis=0)
    drawn = np.random.default_rng(0).integers(len(each), size=(2000, len(each)))
    sums = each[drawn].sum(axis=1)
    _, limits = spread(np.append(tokens / steps, sums[:, 0] / sums[:, 5]))
    low, high = limits or (math.nan, math.nan)
    cells = [run, f"{tokens / rounds:.2f}", f"{rounds:.0f}", f"{drafted:.0f}", f"{choices:.0f}"]
    return [*cells, f"{layers / max(drafted, 1):.1f}", f"{tokens / steps:.2f} ({low:.2f}–{high:.2f})"]


def table(stored: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table in Markdown of the counts of several commands by their headings."""
    lines = [HEADINGS, ["---", *["--:"] * (len(HEADINGS) - 1)]]
    for heading, runs in stored.items():
        lines.append([f"**{heading}**"])
        lines += [row(f"`{run}`", np.array(each)) for run, each in runs.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Reads the arguments, counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="a text; its passages in place of prompts")
    parser.add_argument("--prompts", action="append", default=[], help="a prompt set; several times")
    parser.add_argument("--follows", action="store_true", help="each prompt follows that of another kind")
    parser.add_argument(
        "--run", action="append", required=True, help="a method and its options; several times"
    )
    parser.add_argument("--context", type=int, default=256, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="tokens that are generated after each prompt")
    parser.add_argument("--free-rows", type=int, default=64)
    parser.add_argument("--output", type=Path, help="a JSON file of the counts of each prompt")
    given = parser.parse_args()
    lm = jaxspec.load(given.model, dtype="float32")
    if lm.step_costs is not None:
        parser.error("here are measured costs of steps of this model; set JAXSPEC_CACHE to a new folder")
    prompts = read(lm, given.text, given.prompts, given.passages, given.context, given.follows)
    lengths = sorted(map(len, prompts))
    print(
        f"{lm.name}, {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {given.tokens} tokens each"
    )
    print(*HEADINGS, sep=" | ")
    stored = {}
    for run in given.run:
        each = counts(lm, run, prompts, given.tokens, given.free_rows)
        print(*row(run, each), sep=" | ", flush=True)
        stored[run] = each.round(3).tolist()
        if given.output:
            given.output.write_text(json.dumps(stored) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
