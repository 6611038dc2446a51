"""Measurements of random weights of a shape on one device: steps, prompts, methods and trees."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks.cases import START, Case, WrongDrafts, dial_cases, only_layers, rounds_of
from benchmarks.dialed import Dial
from benchmarks.parts import Record
from jaxspec.drafting.autoregressive_drafter import Autoregressive
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
from jaxspec.measuring.bench.steps import Loop, SubmodelSteps
from jaxspec.measuring.bench.timing import interleaved, measure_runs, median_ratio
from jaxspec.model import llama
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.texts.results import Result

# K of drafts of constant length, and of drafts with a stop rule: their verifications have 4 and 8 rows.
CONSTANT, LONGEST = 3, 7
# Rows of the measured steps beside one: the most that a kernel for few rows takes, and a large tree.
ROWS = (16, 65)
# New tokens of the texts whose rounds are measured.
TOKENS = 64
# Live tokens of a step in a large cache.
LIVE = 1024
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


def estimated_ms(device: jax.Device, one: Loop) -> float | None:
    """Returns a round's milliseconds by the TPU compiler's cycles, see `aot.cycles`; None on other devices."""
    figures = published(device.device_kind)
    if figures is None or figures.is_gpu:
        return None
    module = hlo.parse(one.program().as_text())
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


def steps(lm: LanguageModel, repeats: int, on_progress: OnProgress) -> Record:
    """Compares a step of plain decoding with the time to read its weights, and rounds of `ROWS` rows with it.

    They are rounds of `generate`, with its compiler options and kernels. Their drafts are wrong.

    Args:
      lm: the model.
      repeats: a third of the turns.
      on_progress: called with the current activity.

    Returns:
      times in milliseconds: `floor_bytes`, `floor_measured_ms` (every weight read once, the fastest turn),
      `floor_published_ms` (at the published bandwidth; None where it is unknown), `step_ms`, `floor_from` (published or
      measured) and by it `floor_fraction`, floor ÷ the fastest step; `over_one_row`, a round of several rows ÷ one of
      one row, the median over the turns, by number of rows; `estimated_ms`, the step by the TPU compiler's cycles, and
      `over_estimated`, measured ÷ estimated (both None on other devices); `compile_seconds` of all programs.
    """
    rounds: dict[int, list[float]] = {rows: [] for rows in (1, *ROWS)}

    def decode(rows: int) -> None:
        method = WrongDrafts(rows - 1) if rows > 1 else Autoregressive()
        result = lm.generate(START, method=method, max_new_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        rounds[rows].append(result.statistics.decode_ms / max(1, result.statistics.num_rounds))

    read = stream(lm)
    runs: dict[str, Callable[[], object]] = {"floor": read}
    runs |= {str(rows): functools.partial(decode, rows) for rows in rounds}
    # The first run of a program takes longer.
    interleaved(runs, 2, lambda turn: on_progress("compiling"))
    for taken in rounds.values():
        taken.clear()
    measured = min(interleaved(runs, 3 * repeats, on_progress)["floor"])
    size, figures = floor_bytes(lm.config, lm.params), published(lm.device_kind)
    known = None if figures is None else 1e3 * size / figures.bandwidth
    step = min(rounds[1])
    estimated = estimated_ms(lm.device, rounds_of(lm, 1)) if lm.platform == "tpu" else None
    return {
        "floor_bytes": size,
        "floor_measured_ms": measured,
        "floor_published_ms": known,
        "step_ms": statistics.median(rounds[1]),
        "floor_from": "measured" if known is None else "published",
        "floor_fraction": (measured if known is None else known) / step,
        "over_one_row": {rows: median_ratio(rounds[rows], rounds[1]) for rows in ROWS},
        "estimated_ms": estimated,
        "over_estimated": None if estimated is None else step / estimated,
        "compile_seconds": 1e-3 * lm.executables.compile_ms,
    }


def prompts(lm: LanguageModel, lengths: Sequence[int], repeats: int, on_progress: OnProgress) -> Record:
    """Measures the first token after prompts of several lengths, and steps in the cache of the longest one.

    Args:
      lm: the model; its context may be shorter, because its weights are random.
      lengths: tokens of the prompts, ascending.
      repeats: measurements of each length, and a third of the turns of the steps.
      on_progress: called with the current activity.

    Returns:
      `prompts`: by number of tokens `first_token_ms`, `tokens_per_second`, `flops_fraction` of the published peak for
      the products with weights (None where it is unknown), and `compile_seconds`; `live_in_longest`: a step with
      `LIVE` live tokens in a cache for the longest prompt ÷ one in a cache of twice as many slots.
    """
    config = dataclasses.replace(lm.config, max_position_embeddings=2 * lengths[-1])
    lm = LanguageModel(config, lm.params, name=lm.name, device=lm.device)
    figures, found = published(lm.device_kind), {}
    numbers = llama.num_params(dataclasses.replace(config, vocab_size=0))
    for length in lengths:
        prompt = [3 + at % (config.vocab_size - 3) for at in range(length)]
        first = functools.partial(
            lm.generate, prompt, method=BASELINE, max_new_tokens=1, ignore_eos=True, temperature=0.0
        )
        on_progress(f"compiling the prefill of {length} tokens")
        began = time.perf_counter()
        first()
        compile_seconds = time.perf_counter() - began
        ms = statistics.median(interleaved({"first": first}, repeats, on_progress)["first"])
        found[length] = {
            "first_token_ms": ms,
            "tokens_per_second": 1e3 * length / ms,
            "flops_fraction": None if figures is None else 2e3 * numbers * length / ms / figures.flops,
            "compile_seconds": compile_seconds,
        }
    every = LayerPlan.skipping(config.num_layers)
    sizes = {"longest": max(lengths[-1], 2 * LIVE), "twice": 2 * LIVE}
    loops = {name: SubmodelSteps(lm, every, live=LIVE, capacity=size) for name, size in sizes.items()}
    for name, loop in loops.items():
        on_progress(f"compiling a step in {sizes[name]} slots")
        loop()
    taken = interleaved(loops, 3 * repeats, on_progress)
    return {"prompts": found, "live_in_longest": median_ratio(taken["longest"], taken["twice"])}


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
            self._costs["plain step"] = self._over(1)
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
        it is one step plus one step of `WIDTH` rows for each level after the first.

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
        """Times a step of some rows."""
        name = f"all over {rows}"
        if name not in self._costs:
            self._costs[name] = self._timed(rounds_of(self._lm, rows))
        return self._costs[name]

    def _timed(self, loop: Loop) -> float:
        loop()
        return statistics.median(interleaved({"it": loop}, 3 * self._repeats)["it"]) / loop.rounds

    @property
    def _depth(self) -> int:
        return max(1, self._lm.config.num_layers // 4)
