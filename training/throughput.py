"""Measures the speed of a training step and of its parts: `python -m training.throughput --layers 12 …`.

Speeds are compared with the rate of a large matrix product on the same device, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.loading.loading import devices_of
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.sampling import seed_key
from training import command
from training.loop import optimizer
from training.losses import base
from training.losses.exits import LayerSkipOptions, layerskip_loss, most_exits
from training.option_files import parse_plain
from training.run_options import ModelOptions
from training.start import init_params

# Side of the square matrices for the measurement of the device's rate.
SIDE = {"cpu": 2048, "gpu": 8192, "tpu": 8192}


def _usual_shape() -> ModelOptions:
    """The default shape; `auto` needs data, and there is none here."""
    return ModelOptions(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        layers=6,
        heads=6,
        kv_heads=6,
        head_dim=32,
        context=512,
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """Times a training step and its parts.

    Attributes:
      model: the shape; `growth` is ignored.
      window: tokens per row.
      batch: number of rows of a micro-batch.
      accumulate: number of micro-batches whose gradients are added before the optimiser's update.
      objective: the loss.
      compute: dtype of the matrix products.
      repeats: number of timings; the median is reported.
      json: print JSON instead of a table.
    """

    model: ModelOptions = dataclasses.field(default_factory=_usual_shape)
    window: int = 256
    batch: int = 8
    accumulate: int = 8
    objective: Literal["sft", "layerskip"] = "sft"
    compute: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 7
    json: bool = False


def step_flops(config: LlamaConfig, rows: int, window: int, exits: int) -> dict[str, float]:
    """Counts the floating-point operations of the products of one step, forward and backward.

    A weight takes part in 2 operations per token in the forward pass and 4 in the backward pass. Attention is counted
    over the whole square, because masked scores are computed too.

    Args:
      config: the model.
      rows: rows of the batch.
      window: tokens per row.
      exits: number of applications of the head.
    """
    tokens = rows * window
    layer = sum(
        np.prod(shape)
        for part in llama.param_shapes(config)["layers"][0].values()
        for shape in part.values()
        if len(shape) > 1
    )
    scores = 2 * 2 * window * config.num_heads * config.head_dim
    return {
        "layers": 6.0 * tokens * config.num_layers * layer,
        "attention": 3.0 * tokens * config.num_layers * scores,
        "heads": 6.0 * tokens * exits * config.vocab_size * config.hidden_size,
    }


def _ready(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Compiles a function for these arguments and calls it once; returns a function that calls it again."""
    compiled = jax.jit(function)

    def call() -> Any:
        return jax.block_until_ready(compiled(*arguments))

    call()
    return call


def measure(options: Options) -> dict[str, Any]:
    """Times the step, its parts and a large matrix product; times in ms, rates in operations per second."""
    shape, dtype = options.model, jnp.dtype(options.compute)
    config = LlamaConfig(
        shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.layers, shape.heads, shape.kv_heads,
        shape.head_dim, max(shape.context, options.window), tie_embeddings=True,
    )  # fmt: skip
    side = SIDE.get(devices_of(None)[0].platform, 2048)
    square = jnp.ones((side, side), dtype)
    params = init_params(config, 0)
    batch = _random_batch(config, options)
    exits = 1
    loss = base.next_token(config)
    if options.objective == "layerskip":
        recipe = LayerSkipOptions()
        exits += most_exits(recipe, config.num_layers)
        loss = layerskip_loss(config, recipe, 1000)
    loss = base.in_dtype(loss, dtype)
    transform = optimizer.make_optimizer(optimizer.OptimizerOptions(), 1000)
    given = base.Given(jnp.int32(0), seed_key(0))

    def blocks(params, batch):
        rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return jnp.sum(base.layer_outputs(config, rounded, batch)[-1].astype(jnp.float32) ** 2)

    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    taken = interleaved(
        {
            "product": _ready(product, square, square),
            "gradients": _ready(jax.grad(lambda p, b: loss(p, b, given)[0]), params, batch),
            "layers": _ready(jax.grad(blocks), params, batch),
            "optimiser": _ready(transform.update, params, transform.init(params), params),
        },
        options.repeats,
    )
    times = {name: statistics.median(values) for name, values in taken.items()}
    peak = 2 * side**3 / (1e-3 * times["product"])
    times = {
        name: ms * (options.accumulate if name in ("gradients", "layers") else 1)
        for name, ms in times.items()
    }
    flops = step_flops(config, options.batch * options.accumulate, options.window, exits)
    total_ms = times["gradients"] + times["optimiser"]
    tokens = options.batch * options.accumulate * options.window
    return {
        "parameters": llama.num_params(config),
        "tokens_per_second": 1e3 * tokens / total_ms,
        "matrix_product_flops": peak,
        "step_flops": sum(flops.values()),
        "fraction_of_matrix_product_rate": sum(flops.values()) / (1e-3 * total_ms) / peak,
        "step_ms": total_ms,
        "at_full_rate_ms": {name: 1e3 * count / peak for name, count in flops.items()},
        "measured_ms": {
            "layers and attention": times["layers"],
            "heads and losses": times["gradients"] - times["layers"],
            "optimiser": times["optimiser"],
        },
    }


def _random_batch(config: LlamaConfig, options: Options) -> base.Batch:
    shape = (options.batch, options.window)
    return {
        "tokens": jax.random.randint(seed_key(1), shape, 0, config.vocab_size),
        "segments": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(options.window), shape),
        "learn": jnp.ones(shape, bool),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report as a table."""
    console.print(
        f"{report['parameters']:,} parameters, {report['tokens_per_second']:,.0f} tokens/s: "
        f"{report['fraction_of_matrix_product_rate']:.0%} of the "
        f"{report['matrix_product_flops'] / 1e9:,.0f} GFLOP/s of a large matrix product"
    )
    table = Table("part of a step", "measured, ms", "at the full rate, ms")
    ideal = report["at_full_rate_ms"]
    ideals = {
        "layers and attention": ideal["layers"] + ideal["attention"],
        "heads and losses": ideal["heads"],
        "optimiser": 0.0,
    }
    for name, measured in report["measured_ms"].items():
        table.add_row(name, f"{measured:,.1f}", f"{ideals[name]:,.1f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        report = measure(options)
        if options.json:
            print(json.dumps(report, indent=2))
        else:
            show(report, Console())

    return command.run("training.throughput", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
