"""Counts of the server under vLLM's names: for Prometheus, and for each response."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxspec.requests.results import Statistics
from jaxspec.serving.openai import FINISH_REASONS
from jaxspec.serving.server.engine_thread import EngineThread, Job, Pieces, Timing

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(2.0**power for power in range(18))


class Metrics:
    """Counts for Prometheus. Counts of speculation are those of texts that have ended, complete or not.

    Args:
      model: the name of the model, a label of each metric.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._running, self._waiting = (
            self._made(Gauge, f"num_requests_{what}", f"Texts that are {what}.")
            for what in ("running", "waiting")
        )
        counters = {
            "prompt_tokens": "Prompt tokens.",
            "generation_tokens": "Generated tokens.",
            "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
            "prefix_cache_hits": "Prompt tokens that were not fed again.",
            "spec_decode_num_drafts": "Rounds with draft tokens.",
            "spec_decode_num_draft_tokens": "Draft tokens.",
            "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
        }
        self._counters = {name: self._made(Counter, name, text) for name, text in counters.items()}
        self._positions = self._labelled(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position.", "position"
        )
        self._successes = self._labelled(
            Counter, "request_success", "Texts that have ended.", "finished_reason"
        )
        histograms = {
            "time_to_first_token_seconds": ("Time to the first token of a text.", _SECONDS),
            "inter_token_latency_seconds": ("Mean time between the tokens of a text.", _SECONDS),
            "e2e_request_latency_seconds": ("Time to the end of a text.", _SECONDS),
            "request_prompt_tokens": ("Prompt tokens of a text.", _TOKENS),
            "request_generation_tokens": ("Generated tokens of a text.", _TOKENS),
        }
        self._histograms = {
            name: self._made(Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in histograms.items()
        }

    def _made(self, kind: Any, name: str, text: str, **more: Any) -> Any:
        return self._labelled(kind, name, text, **more).labels(**self._labels)

    def _labelled(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        return kind(f"vllm:{name}", text, [*self._labels, *labels], registry=self._registry, **more)

    def read(self, engine: EngineThread) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        self._running.set(engine.num_running)
        self._waiting.set(max(engine.num_open - engine.num_running, 0))
        return generate_latest(self._registry)

    def took(self, job: Job, pieces: Pieces) -> None:
        """Counts new pieces."""
        for row, piece in pieces:
            self._counters["generation_tokens"].inc(len(piece.token_records))
            timing = job.timings[row]
            if timing.first == timing.last and piece.token_records:
                self._histograms["time_to_first_token_seconds"].observe(timing.last - job.arrived)

    def left(self, job: Job) -> None:
        """Counts a job that has ended, or whose client has gone."""
        for timing in job.timings:
            if timing.piece is None:
                self._ended("abort")
                continue
            result, counts = timing.result, timing.piece.statistics
            self._ended("abort" if result is None else FINISH_REASONS[result.finish_reason])
            self._count(counts)
            self._histograms["e2e_request_latency_seconds"].observe(time.perf_counter() - job.arrived)
            if timing.first is not None and counts.num_tokens > 1:
                mean = (timing.last - timing.first) / (counts.num_tokens - 1)
                self._histograms["inter_token_latency_seconds"].observe(mean)

    def _ended(self, reason: str) -> None:
        self._successes.labels(**self._labels, finished_reason=reason).inc()

    def _count(self, counts: Statistics) -> None:
        for name, number in {
            "prompt_tokens": counts.num_prompt_tokens,
            "prefix_cache_queries": counts.num_prompt_tokens,
            "prefix_cache_hits": counts.num_reused_tokens,
            "spec_decode_num_drafts": counts.num_drafts,
            "spec_decode_num_draft_tokens": counts.num_draft_tokens,
            "spec_decode_num_accepted_tokens": counts.num_accepted_tokens,
        }.items():
            self._counters[name].inc(number)
        self._histograms["request_prompt_tokens"].observe(counts.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(counts.num_tokens)
        for position in range(len(counts.acceptance_histogram) - 1):
            accepted = sum(counts.acceptance_histogram[position + 1 :])
            self._positions.labels(**self._labels, position=str(position)).inc(accepted)


def metrics_of(job: Job) -> dict[str, Any] | None:
    """Returns the `metrics` of the response to a job that has ended, as vLLM; None for more than one text.

    `speculative_decoding` is None for a text without draft tokens. Its `mean_acceptance_length` is vLLM's: 1 + accepted
    tokens ÷ rounds with draft tokens. `tokens_per_round` beside it counts all rounds. `compile_time_ms` is the time
    for which the text waited for programs.
    """
    if len(job.timings) != 1:
        return None
    (timing,) = job.timings
    result = timing.result
    assert result is not None
    return _times(job, timing, result.statistics) | {
        "compile_time_ms": result.statistics.compile_ms,
        "tokens_per_round": result.statistics.mean_acceptance_length,
        "method": result.drafted_by,
        "lossy": result.lossy,
        "speculative_decoding": _speculative_decoding(result.statistics),
    }


def summary(job: Job) -> str:
    """Returns the tokens, the speed and the accepted drafts of a job that has ended, complete or not, in one line."""
    pieces = [timing.piece for timing in job.timings if timing.piece is not None]
    prompt, tokens, drafts, accepted = (
        sum(getattr(piece.statistics, f"num_{name}tokens") for piece in pieces)
        for name in ("prompt_", "", "draft_", "accepted_")
    )
    seconds = time.perf_counter() - job.arrived
    methods = ", ".join({one.result.drafted_by: 0 for one in pieces if one.result is not None})
    return (
        f"{prompt} prompt tokens, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), {accepted} of "
        f"{drafts} draft tokens accepted{methods and f'; {methods}'}{'' if job.ended else '; not complete'}"
    )


def _times(job: Job, timing: Timing, counts: Statistics) -> dict[str, Any]:
    first = timing.last if timing.first is None else timing.first
    generation_ms, count = 1e3 * (timing.last - first), counts.num_tokens - 1
    return {
        "time_to_first_token_ms": 1e3 * (first - job.arrived),
        "generation_time_ms": generation_ms,
        "mean_itl_ms": generation_ms / count if count > 0 else None,
        "tokens_per_second": 1e3 * count / generation_ms if count > 0 and generation_ms > 0 else None,
    }


def _speculative_decoding(counts: Statistics) -> dict[str, Any] | None:
    if not counts.num_drafts:
        return None
    return {
        "mean_acceptance_length": counts.mean_acceptance_length_drafting,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "acceptance_histogram": list(counts.acceptance_histogram),
        "num_spec_steps": counts.num_drafts,
        "num_accepted_draft_tokens": counts.num_accepted_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": len(counts.acceptance_histogram) - 1,
    }
