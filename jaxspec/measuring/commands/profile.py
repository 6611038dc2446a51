"""`jaxspec profile`: measures decoding steps on this device, or predicts them from an accelerator's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.tables import Table
from jaxspec.host.progress import Progress
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.measuring.output import show


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measure the costs of a model's steps on this device, and predict the speed-ups of drafts.

    The costs by rows, layers, texts and live tokens are measured once per device, shape and dtype, and kept in the
    user's cache. A step of several rows verifies several tokens; it should cost little more than a step of one row.

    The floor is the time to read every weight once, the fastest of several measurements. A step may be faster than
    the floor through noise, or if the weights stay in the processor's cache.

    Attributes:
      shape: use random weights of a common shape: 31m, 134m, 1b, 1.2b, 7b, 8b, 13b, 70b or 405b.
      fresh: measure again.
      device_model: predict speed-ups for --shape, in 16 bits or with --weights int8, from the published figures of a
        device instead: h100, h200, a100, l4, v100, t4, v5e, v5p or v6e, or several, such as v5e:2x4 or l4:4. Nothing
        is measured.
      batch: the number of texts for which speed-ups are predicted.
      launch_us: with --device-model, microseconds to start one operation. Default: the device's.
      json: print one JSON object and nothing else.
    """

    shape: str | None = None
    fresh: bool = False
    device_model: str | None = None
    batch: int = 1
    launch_us: float | None = None
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures or predicts; returns the exit status."""
        self._check()
        if self.device_model is not None:
            show(self._predict(), self.json, _prediction)
        else:
            show(self._costs(), self.json, _costs)
        return 0

    def _check(self) -> None:
        """Checks that the given options fit together."""
        paper = self.device_model is not None
        known = ModelOptions(weights=self.model.weights, kv_cache_dtype=self.model.kv_cache_dtype)
        if paper and (self.fresh or self.model != known):
            raise ValueError(
                "`device_model` predicts for a named shape on a device that is not attached; give it with `shape`, "
                "without `fresh`, `model`, `dtype`, `device` or `mesh`"
            )
        # Each process would create the random weights on devices that may belong to another process.
        if self.shape is not None and self.model.processes.asked:
            raise ValueError(
                "`shape` is measured by one process; give `model`, or leave out `distributed` and `coordinator_address`"
            )
        if paper and self.shape is None:
            raise ValueError("`device_model` needs a shape; give `shape`, such as 8b")
        if self.launch_us is not None and not paper:
            raise ValueError("`launch_us` is given without `device_model`; give both, or neither")
        check_count("batch", self.batch)

    def _costs(self) -> dict[str, Any]:
        from jaxspec.costs.rounds import kinds, speedup_table
        from jaxspec.measuring.bench.device_profile import floor_ms, language_model
        from jaxspec.measuring.bench.step_costs import remembered_step_costs

        given = self.model
        with Progress() as progress:
            progress("loading the model")
            where = (given.dtype, given.device, given.mesh, given.weights, given.kv_cache_dtype)
            lm = language_model(given.model, self.shape, *where)
            costs, measured = remembered_step_costs(lm, fresh=self.fresh, on_progress=progress)
            progress("reading the weights")
            floor = floor_ms(lm)
        table = speedup_table(costs, kinds(costs.num_layers), batch=self.batch)
        return {
            "measured_now": measured,
            "batch": self.batch,
            "floor_ms": floor,
            "costs": dataclasses.asdict(costs),
            "speedups": {
                name: {rate: dataclasses.asdict(one) for rate, one in by_rate.items()}
                for name, by_rate in table.items()
            },
        }

    def _predict(self) -> dict[str, Any]:
        from jaxspec.loading.loading import resolve_weights
        from jaxspec.measuring.roofline import report

        assert self.device_model is not None
        assert self.shape is not None
        given = (self.device_model, self.shape, self.batch, self.launch_us)
        return report(*given, resolve_weights(self.model.weights), self.model.kv_cache_dtype)


def _costs(report: dict[str, Any]) -> Iterator[str | Table]:
    from jaxspec.costs.rounds import StepCosts

    costs = StepCosts(**report["costs"])
    yield f"{costs.model}, {costs.dtype}, {costs.device}, after {costs.live} tokens"
    rows = [("floor: read all weights once", f"{report['floor_ms']:.3f} ms")]
    for number, batch, step_ms in costs.full_ms:
        texts = "" if batch == 1 else f" of each of {batch} texts"
        rows.append((f"{_step(number)}{texts}", f"{step_ms:.3f} ms"))
    cut, layers = costs.cut_layers, costs.num_layers
    rows += [
        ("floor ÷ step of 1 row", f"{report['floor_ms'] / costs.step_ms():.2f}"),
        (f"step of 1 row through {cut} of {layers} layers and the head", f"{costs.cut_ms:.3f} ms"),
        ("  one layer", f"{costs.step_ms(layers=1) - costs.step_ms(layers=0):.3f} ms"),
        ("each live token", f"{1e3 * costs.live_token_ms:.2f} µs"),
        ("overhead of a round", f"{costs.loop_ms:.3f} ms"),
        ("n-gram lookup of a draft", f"{costs.lookup_ms:.3f} ms"),
        ("prefill of a token", f"{costs.absorb_ms:.3f} ms"),
    ]
    yield Table((), rows, name=60)
    yield from _speedups(report["speedups"], f"predicted from these costs, {_texts(report['batch'])}")


def _prediction(report: dict[str, Any]) -> Iterator[str | Table]:
    from jaxspec.measuring.roofline import CAPACITY

    yield f"prediction, not a measurement: {report['shape']} on {report['device']}, {report['dtype']}"
    rows = [
        ("bandwidth", f"{1e-9 * report['bandwidth']:,.0f} GB/s"),
        ("peak operations per second", f"{1e-12 * report['flops']:,.0f} · 10¹²"),
        ("start of an operation (assumed)", f"{report['launch_us']:g} µs"),
        (f"step of plain decoding, {_texts(report['batch'])}", f"{report['plain_ms']:.3f} ms"),
        (f"weights and a cache of {CAPACITY:,} tokens", f"{report['needed_gb']:.1f} GB"),
    ]
    if needs := " or ".join(filter(None, report["remedies"])):
        rows.append(("they do not fit its memory", f"give {needs}"))
    yield Table((), rows, name=60)
    about = f"prediction, {_texts(report['batch'])}, {report['live']} live tokens"
    yield from _speedups(report["speedups"], about)


def _speedups(speedups: dict[str, Any], about: str) -> Iterator[str | Table]:
    yield f"\nspeed-up over plain decoding (draft tokens): {about}"
    rows = []
    for rate in next(iter(speedups.values())):
        cells = (by_rate[rate] for by_rate in speedups.values())
        rows.append([rate, *(f"{one['speedup']:.2f} ({one['num_draft_tokens']})" for one in cells)])
    yield Table(("acceptance", *speedups), rows)


def _step(rows: int) -> str:
    return f"step of {rows} row{'s' if rows > 1 else ''}"


def _texts(batch: int) -> str:
    return "one text" if batch == 1 else f"{batch} texts"
