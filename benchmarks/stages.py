"""Measurements of one model on one device: floor, prefill, rows, masks, methods and trees."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import START, Case, dial_cases, only_layers, rounds_of
from benchmarks.dialed import Dial
from benchmarks.parts import Record
from jaxspec.drafting.ngram_drafter import NGram
from jaxspec.drafting.tree_drafter import Dynamic
from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads.eagle.drafter import Eagle
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.aot import cycles, hlo
from jaxspec.measuring.aot.accelerators import published
from jaxspec.measuring.aot.compiled_rounds import main_loop
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.device_profile import stream
from jaxspec.measuring.bench.speed import acceptance, speed_ratio
from jaxspec.measuring.bench.steps import PREFILL, DraftSteps, Loop, Steps, SubmodelSteps
from jaxspec.measuring.bench.timing import interleaved, measure_runs, median_ratio
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.texts.results import Result

# K of drafts of constant length, and of drafts with a stop rule: their verifications have 4 and 8 rows.
CONSTANT, LONGEST = 3, 7
# Drafts of an EAGLE head, (depth, tree tokens): a chain of K tokens, or a tree of N tokens.
FORMS: dict[str, tuple[int, int | None]] = {
    "eagle chain 3": (3, None),
    "eagle chain 7": (7, None),
    "eagle tree 15x4": (4, 15),
    "eagle tree 63x6": (6, 63),
}
# As in EAGLE-2: number of nodes per level that the head runs, and of tokens that it tries after each.
WIDTH = 10
# Bytes of the array for the bandwidth measurement: larger than any cache.
STREAMED = {"cpu": 2**27, "gpu": 2**31, "tpu": 2**30}


def published_figures(device: jax.Device) -> Any:
    """The published figures of a device, or None; see `aot.accelerators.published`."""
    return published(device.device_kind)


def estimated_ms(device: jax.Device, one: Loop) -> float | None:
    """Returns a round's milliseconds by the TPU compiler's cycles, see `aot.cycles`; None on other devices."""
    figures = published(device.device_kind)
    if figures is None or figures.is_gpu:
        return None
    module = hlo.parse(one.program())
    found = cycles.estimate(module, main_loop(module), figures)
    return None if found is None else 1e3 * found["round"]["cycles"] / figures.clock


def bandwidth(device: jax.Device, repeats: int = 10) -> float:
    """Returns the bandwidth of reading one large array, bytes per second, the fastest of several repetitions."""
    size = STREAMED.get(device.platform, 2**27) // 2
    with jax.default_device(device):
        array = jnp.ones((size // 4096, 4096), jnp.bfloat16)
        read = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
        read(array).block_until_ready()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            read(array).block_until_ready()
            times.append(time.perf_counter() - began)
    return float(array.nbytes / min(times))


class Stages:
    """The measurements of one model; times in milliseconds.

    Args:
      dial: the model.
      costs: costs of the parts of rounds, by name, in milliseconds; filled by the measurements.
      repeats: interleaved repetitions.
      max_new_tokens: new tokens per generation.
    """

    def __init__(self, dial: Dial, costs: dict[str, float], repeats: int, max_new_tokens: int) -> None:
        self._dial, self._lm, self._costs = dial, dial.lm, costs
        self._repeats, self._budget = repeats, max_new_tokens
        self._one: tuple[Any, Steps] | None = None

    def floor(self, on_progress: OnProgress) -> Record:
        """Compares a step of plain decoding with the time to read its weights.

        Returns:
          `floor_bytes`, `floor_measured_ms` (every weight read once, the fastest turn), `floor_published_ms` (at the
          published bandwidth; None where it is unknown), `step_ms`, `floor_from` (published or measured) and by it
          `floor_fraction`, floor ÷ the fastest step; `estimated_ms`, the step by the TPU compiler's
          cycles, and `over_estimated`, measured ÷ estimated (both None on other devices); `compile_seconds` of the
          plain loop and its prefill.
        """
        lm = self._lm
        on_progress("compiling the plain loop")
        began = time.perf_counter()
        one = self._plain()
        compile_seconds = time.perf_counter() - began
        read = stream(lm)
        read()
        taken = interleaved({"step": one, "floor": read}, 3 * self._repeats, on_progress)
        size, figures = floor_bytes(lm.config, lm.params), published_figures(lm.device)
        measured = min(taken["floor"])
        known = None if figures is None else 1e3 * size / figures.bandwidth
        step, estimated = min(taken["step"]) / one.rounds, estimated_ms(lm.device, one)
        self._costs["all over 1"] = self._costs["plain step"] = statistics.median(taken["step"]) / one.rounds
        return {
            "floor_bytes": size,
            "floor_measured_ms": measured,
            "floor_published_ms": known,
            "step_ms": self._costs["plain step"],
            "floor_from": "measured" if known is None else "published",
            "floor_fraction": (measured if known is None else known) / step,
            "estimated_ms": estimated,
            "over_estimated": None if estimated is None else step / estimated,
            "compile_seconds": compile_seconds,
        }

    def prefill(self, on_progress: OnProgress) -> Record:
        """Measures a prompt of `PREFILL` tokens; `flops_fraction` of the published peak, None if that is unknown."""
        one = self._plain()
        began = time.perf_counter()
        jax.block_until_ready(one.prefill())
        compile_seconds = time.perf_counter() - began
        run = {"prefill": lambda: jax.block_until_ready(one.prefill())}
        ms = statistics.median(interleaved(run, 3 * self._repeats, on_progress)["prefill"])
        lm, figures = self._lm, published_figures(self._lm.device)
        matrices = floor_bytes(lm.config, lm.params) / lm.params["embed"].dtype.itemsize
        flops = 2e3 * matrices * PREFILL / ms
        return {
            "prompt_tokens": PREFILL,
            "prefill_ms": ms,
            "prefill_tokens_per_second": 1e3 * PREFILL / ms,
            "flops_fraction": None if figures is None else flops / figures.flops,
            "compile_seconds": compile_seconds,
        }

    def rows(self, count: int, on_progress: OnProgress) -> Record:
        """Measures a step of several rows, in turns with one of one row; `over_one_row` is the median ratio."""
        on_progress("compiling")
        one = self._plain()
        began = time.perf_counter()
        several = rounds_of(self._lm, count)
        several()
        compile_seconds = time.perf_counter() - began
        taken = interleaved({"one": one, "several": several}, 3 * self._repeats, on_progress)
        step = statistics.median(taken["several"]) / several.rounds
        self._costs[f"all over {count}"] = step
        ratio = median_ratio(taken["several"], taken["one"])
        return {"rows": count, "step_ms": step, "over_one_row": ratio, "compile_seconds": compile_seconds}

    def masks(self, on_progress: OnProgress) -> Record:
        """Measures a draft token with a traced and with a static mask that skips every other later layer."""
        num_layers = self._lm.config.num_layers
        skipped = range(self._depth, num_layers - 1, 2)
        mask = LayerPlan.skipping(num_layers, skipped, skipped)
        given = {"traced": mask.traced(), "static": mask}
        loops, compile_seconds = {}, {}
        for name, plan in given.items():
            on_progress(f"compiling, {name}")
            began = time.perf_counter()
            loops[name] = DraftSteps(self._lm)
            loops[name](plan)
            compile_seconds[name] = time.perf_counter() - began
        runs = {name: (lambda name=name: loops[name](given[name])) for name in given}
        taken = interleaved(runs, 3 * self._repeats, on_progress)
        ratio = median_ratio(taken["traced"], taken["static"])
        steps = {f"{name}_ms": statistics.median(taken[name]) / Loop.rounds for name in given}
        return {**steps, "traced_over_static": ratio, "compile_seconds": compile_seconds}

    def method(self, name: str, rates: Sequence[float], on_progress: OnProgress) -> Record:
        """Compares a method with plain decoding at several rates of agreement; `ngram` on a repetitive text.

        Returns:
          `compile_seconds` of its programs (and, if it comes first, of plain decoding's), and `results`: `agreement` of
          the first layers with all, and the figures of `cases.Case.report`.
        """
        if name == "ngram":
            return self._measured([self._copying(on_progress)], name, on_progress)
        depth, cases = self._depth, []
        for rate in rates:
            on_progress(f"setting the agreement to {rate}")
            agreement = self._dial.turn_to(depth, rate)
            case = dial_cases(self._lm, depth, CONSTANT, self._budget, LONGEST)[name]
            cases.append(self._measured([({"rate": rate, "agreement": agreement}, case)], name, on_progress))
        seconds = sum(one["compile_seconds"] for one in cases)
        return {"compile_seconds": seconds, "results": [row for one in cases for row in one["results"]]}

    def _copying(self, on_progress: OnProgress) -> tuple[Record, Case]:
        """Makes a prompt that contains its continuation."""
        on_progress("writing a text that repeats")
        self._dial.turn(0, 1e-3)
        walked = self._lm.generate([3], method="autoregressive", max_new_tokens=self._budget, ignore_eos=True)
        again = [3, *walked.tokens, 3]
        return {}, Case(self._lm, again, NGram(num_draft_tokens=LONGEST), None, self._budget)

    def _measured(self, cases: list[tuple[Record, Case]], name: str, on_progress: OnProgress) -> Record:
        results, before = [], self._lm.executables.compile_ms
        for words, case in cases:
            case.take(*self._taken(case, name, on_progress))
            for what, make in case.parts().items():
                if what not in self._costs:
                    on_progress(f"measuring {what}")
                    self._costs[what] = self._timed(make())
            if "plain step" not in self._costs:
                self._costs["plain step"] = self._timed(self._plain())
            results.append({**words, **case.report(self._costs)})
        seconds = 1e-3 * (self._lm.executables.compile_ms - before)
        return {"compile_seconds": seconds, "results": results}

    def _taken(self, case: Case, name: str, on_progress: OnProgress) -> tuple[list[Result], list[Result]]:
        runs = {BASELINE: case.plain_run, name: case.run}
        (taken,) = measure_runs([self._lm], runs, [case.prompt], self._repeats, on_progress=on_progress)
        return taken[name], taken[BASELINE]

    def form(self, name: str, rates: Sequence[float], on_progress: OnProgress) -> Record:
        """Compares an EAGLE head's chain or tree with plain decoding at several rates of agreement of its top token.

        The predicted time of a round is the verification of its rows, plus K steps of the head for a chain. For a tree
        it
        is one step plus one step of `WIDTH` rows for each level after the first.

        Returns:
          see `method`.
        """
        depth, nodes = FORMS[name]
        head, params = self._dial.eagle
        drafter = Eagle(self._lm.config, head, num_draft_tokens=depth)
        if nodes is not None:
            drafter = dataclasses.replace(drafter, tree=Dynamic(nodes, depth, min(nodes, WIDTH)))
        before, results = self._lm.executables.compile_ms, []
        for rate in rates:
            on_progress(f"setting the agreement to {rate}")
            agreement = self._dial.turn_to(0, rate)
            case = Case(self._lm, START, drafter, params, self._budget)
            mine, plain = self._taken(case, name, on_progress)
            results.append({"rate": rate, "agreement": agreement, **self._of_form(name, mine, plain)})
        seconds = 1e-3 * (self._lm.executables.compile_ms - before)
        return {"compile_seconds": seconds, "results": results}

    def _of_form(self, name: str, mine: list[Result], plain: list[Result]) -> Record:
        depth, nodes = FORMS[name]
        draft = depth * self._head_step(1)
        if nodes is not None:
            draft = self._head_step(1) + (depth - 1) * self._head_step(min(nodes, WIDTH))
        verify = self._over((nodes or depth) + 1)
        counts = mine[0].statistics
        tokens, rounds = counts.num_tokens - 1, counts.num_rounds
        predicted = tokens * self._over(1) / (rounds * (verify + draft)) if rounds else None
        speedup, _ = speed_ratio([mine], [plain])
        both = speedup is not None and predicted is not None
        return {
            "speedup": speedup,
            "predicted": predicted,
            "obtained_over_predicted": speedup / predicted if both else None,  # type: ignore[operator]
            **acceptance([mine]),
            "draft_ms": draft,
            "identical_to_autoregressive": mine[0].tokens == plain[0].tokens,
        }

    def _head_step(self, rows: int) -> float:
        """Times a step of the head's layer over some rows, with the model's head."""
        name = f"head over {rows}"
        if name not in self._costs:
            _, params = self._dial.eagle
            (layer,) = params["layers"]
            attention = {"norm": self._lm.params["norm"], **layer["attention"]}
            whole = {**self._lm.params, "layers": [{**layer, "attention": attention}]}
            one = LanguageModel(self._lm.config.truncated(1), whole, device=self._lm.device)
            self._costs[name] = self._timed(SubmodelSteps(one, only_layers(1, [0]), rows))
        return self._costs[name]

    def _over(self, rows: int) -> float:
        """Returns the cost of a step of some rows, interpolated linearly between the measured ones."""
        known = {
            int(name.split()[-1]): ms for name, ms in self._costs.items() if name.startswith("all over ")
        }
        if rows not in known and (not known or max(known) < rows):
            self._costs[f"all over {rows}"] = known[rows] = self._timed(rounds_of(self._lm, rows))
        counts = sorted(known)
        return float(np.interp(rows, counts, [known[count] for count in counts]))

    def _timed(self, loop: Loop) -> float:
        loop()
        return statistics.median(interleaved({"it": loop}, 3 * self._repeats)["it"]) / loop.rounds

    @property
    def _depth(self) -> int:
        return max(1, self._lm.config.num_layers // 4)

    def _plain(self) -> Steps:
        """Compiles steps of plain decoding; again after the acceptance was changed, which donates the weights."""
        if self._one is None or self._one[0] is not self._lm.params:
            self._one = self._lm.params, rounds_of(self._lm, 1)
            self._one[1]()
        return self._one[1]
