"""Estimates the costs of a model's steps on a TPU from its compiler's cycles for a few programs of 1 and 3 layers."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.console.environment import compile_only
from jaxspec.costs.rounds import StepCosts
from jaxspec.host.extras import MissingExtra, require
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.io.methods import cost_files
from jaxspec.measuring.aot import hlo, programs
from jaxspec.measuring.aot.accelerators import Accelerator, Topology
from jaxspec.measuring.aot.compiled_rounds import counted
from jaxspec.measuring.aot.report import build
from jaxspec.measuring.aot.roofline import LIVE, roofline
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig

# Numbers of rows for which a step is compiled; costs between them are interpolated linearly.
ROWS = (1, 9, 65, 1024)
# Numbers of layers that are compiled. Half of the difference of the two costs is the cost of one layer.
_FEW, _MORE = 1, 3


@shows_progress
def estimated(
    accelerator: Accelerator,
    config: LlamaConfig,
    name: str,
    on_progress: OnProgress = lambda what: None,
) -> StepCosts | None:
    """Returns the costs of a model's steps in bfloat16 on one TPU chip, from its compiler's estimates.

    Compiling takes a minute. The user's cache keeps the costs for this compiler and this version of the code.

    Args:
      accelerator: the chip.
      config: the model's shape.
      name: the shape's name.
      on_progress: receives a line about each program that is compiled.

    Returns:
      The costs, in the form that `roofline` returns; None for a GPU, if the compiler is not installed, or if three
      layers do not fit the chip's memory.
    """
    try:
        require("aot", "libtpu")
    except MissingExtra:
        return None
    if accelerator.is_gpu:
        return None
    files = [Path(__file__), *sorted(Path(llama.__file__).parent.glob("*.py"))]
    code = b"".join(path.read_bytes() for path in files)
    compiler = f"libtpu {importlib.metadata.version('libtpu')}, model {hashlib.sha256(code).hexdigest()[:16]}"
    key = cost_files.key(f"{accelerator.name} by {compiler}", "tpu", config, "bfloat16")
    path = cost_files.path_of(key)
    if path is not None and path.is_file():
        try:
            return cost_files.read(path, key)
        except (OSError, ValueError):
            pass  # The file is damaged: estimate again.
    compile_only()
    chip = programs.devices(Topology(accelerator, (1,) * accelerator.axes))
    ms: dict[int, tuple[float, float]] = {}
    for rows in ROWS:
        on_progress(f"compiling a step of {rows} rows of {name} for {accelerator.name}")
        few, more = (
            step_cycles(programs.Place(chip, None), config, rows, layers) for layers in (_FEW, _MORE)
        )
        if few is None or more is None:
            return None
        layer = (more - few) / (_MORE - _FEW)
        ms[rows] = (1e3 * layer / accelerator.clock, 1e3 * (few - _FEW * layer) / accelerator.clock)
    costs = roofline(accelerator, config, name, steps_ms=ms)
    if path is not None:
        cost_files.write(path, key, costs)
    return costs


def step_cycles(place: programs.Place, config: LlamaConfig, rows: int, layers: int) -> int | None:
    """Returns the estimated cycles of one text's step through these layers and the head; None if it does not fit."""
    text = build(functools.partial(lowered_step, place, config.truncated(layers), rows)).text
    if not text:
        return None
    module = hlo.parse(text)
    return counted(
        module, module.entry, lambda one: None if one.cycles is None else ("all", one.cycles)
    ).total()


def lowered_step(place: programs.Place, config: LlamaConfig, rows: int) -> Any:
    """Returns the lowered greedy step of one text in bfloat16, with this number of tokens."""

    def step(
        params: llama.Params, tokens: jax.Array, start: jax.Array, cache: kv.KVCache
    ) -> tuple[jax.Array, kv.KVCache]:
        logits, _, cache = llama.forward(config, params, tokens, start, cache)
        return jnp.argmax(logits, axis=-1), cache

    shapes = jax.eval_shape(
        lambda: (
            llama.init_params(config, jax.random.key(0), jnp.bfloat16),
            jnp.zeros((1, rows), jnp.int32),
            jnp.zeros(1, jnp.int32),
            kv.create(config, 1, max(LIVE, rows), jnp.bfloat16),
        )
    )
    return jax.jit(step, donate_argnums=3).lower(*place.put(shapes))
