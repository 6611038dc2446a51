"""Predicts speed-ups on any chips from bytes and exchanges alone: `python -m benchmarks.scaling`.

This is a prediction, not a measurement. A pass of some layers over R rows takes

    max(bytes ÷ bandwidth, R × FLOPs ÷ peak) + exchanges × their latency

on each chip. The bytes are the weights that the pass reads; caches and all other costs are ignored. A draft of K
tokens, each accepted with probability a, gives (1 − a^(K+1)) ÷ (1 − a) tokens (Leviathan et al. 2023). The best K is
chosen.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from jaxspec.costs.rounds import predicted_speedup, tokens_per_round
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.aot import roofline
from jaxspec.measuring.aot.accelerators import Topology, parse_topology
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.model.config import LlamaConfig

# Exchanges of a pass: two per layer, and four for embedding and head; see `jaxspec compile`.
A_LAYER, BESIDE = 2, 4


@dataclasses.dataclass(frozen=True)
class Options:
    """Predicts speed-ups over plain decoding from bytes and exchanges.

    Attributes:
      topology: as in `jaxspec compile`; the model is divided over all chips.
      shape: one of profile's shapes.
      draft: the draft model's shape; "" for none.
      agreement: probability that a draft token is accepted.
      num_draft_tokens: largest K.
      exchange_us: assumed microseconds of an exchange between the chips; measure yours.
    """

    topology: str = "v5e:2x2"
    shape: str = "8b"
    draft: str = ""
    agreement: float = 0.8
    num_draft_tokens: int = 10
    exchange_us: float = 5.0


@dataclasses.dataclass(frozen=True)
class Pass:
    """A part of a model that runs in one pass.

    `StepCosts` has one device, where a layer's share of a step is constant; exchanges do not grow with the rows.

    Attributes:
      weights: number of weights that it reads, two bytes each.
      layers: number of its layers, with exchanges in each.
      beside: its other exchanges.
    """

    weights: float
    layers: float
    beside: int = BESIDE

    def seconds(self, topology: Topology, rows: int, exchange_s: float) -> float:
        """Returns the seconds for `rows` rows on all chips."""
        chips, kind = topology.num_devices, topology.accelerator
        reading, working = 2 / kind.bandwidth, 2 * rows / kind.flops
        exchanged = (A_LAYER * self.layers + self.beside) * exchange_s if chips > 1 else 0.0
        return self.weights / chips * max(reading, working) + exchanged


def of_model(config: LlamaConfig, share: float = 1.0, head: bool = True) -> Pass:
    """Returns the pass of a share of a model's layers, with or without its head."""
    of_layer, of_head = roofline.weights(config)
    layers = share * config.num_layers
    return Pass(layers * of_layer + (of_head if head else 0), layers, BESIDE if head else 0)


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Predicts the figures of the methods; measures nothing.

    Returns:
      `plain_ms`, the step of plain decoding; `exchange_share` of it; `free_rows`, the rows up to which the bytes
      determine the time of a pass; and by method `speedup`, its best `num_draft_tokens`, `tokens_per_round`, and
      `draft_share`, the draft's share of a round.

    Raises:
      ValueError: an unknown shape or topology, or an agreement outside 0 to 1.
    """
    for name in filter(None, (options.shape, options.draft)):
        if name not in SHAPES:
            raise ValueError(f"unknown shape {name!r}; give one of {', '.join(SHAPES)}")
    if not 0 <= options.agreement <= 1:
        raise ValueError(f"agreement is {options.agreement}; give 0 to 1")
    if options.num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {options.num_draft_tokens}; give at least 1")
    topology, exchange_s = parse_topology(options.topology), 1e-6 * options.exchange_us
    config = SHAPES[options.shape]

    def seconds(part: Pass, rows: int = 1) -> float:
        return part.seconds(topology, rows, exchange_s)

    whole, quarter = of_model(config), of_model(config, 0.25)
    plain = seconds(whole)
    # An EAGLE-3 head: a layer that reads twice its width, the projection of three streams, 32,000 tokens.
    layer = of_model(config, 1 / config.num_layers, head=False)
    width, rows = config.hidden_size, 2 * config.num_kv_heads + config.num_heads
    eagle3 = Pass(layer.weights + width * (rows * config.head_dim + 3 * width + 32_000), 1)
    # The passes of draft step and verification. An early exit has run its layers for all tokens but the last.
    last, rest = of_model(config, 0.25, head=False), of_model(config, 0.75)
    drafts: dict[str, tuple[Pass | None, list[Pass]]] = {
        "ngram": (None, [whole]),
        "layerskip": (quarter, [last, rest]),
        "draft-verify": (of_model(config, 0.625), [whole]),
        "eagle3": (eagle3, [whole]),
    }
    if options.draft:
        drafts["draft-model"] = (of_model(SHAPES[options.draft]), [whole])

    def best(step: Pass | None, verified: list[Pass]) -> dict[str, float]:
        def drafting(count: int) -> float:
            return 0.0 if step is None else count * seconds(step)

        def took(count: int) -> float:
            return drafting(count) + sum(seconds(part, count + 1) for part in verified)

        found = predicted_speedup(options.agreement, plain, took, options.num_draft_tokens)
        count = found.num_draft_tokens
        tokens = tokens_per_round(options.agreement, count)
        shares = {"tokens_per_round": tokens, "draft_share": drafting(count) / took(count)}
        return {"speedup": found.speedup, "num_draft_tokens": count, **shares}

    kind = topology.accelerator
    return {
        "prediction": True,
        "shape": options.shape,
        "topology": options.topology,
        "plain_ms": 1e3 * plain,
        "exchange_share": 1
        - dataclasses.replace(whole, layers=0, beside=0).seconds(topology, 1, 0.0) / plain,
        "free_rows": int(kind.flops / kind.bandwidth),
        "methods": {name: best(step, verified) for name, (step, verified) in drafts.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report as JSON; returns the exit status."""
    return command.run("benchmarks.scaling", Options, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
