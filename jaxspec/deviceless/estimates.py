"""What steps of a model cost on a TPU by its compiler's cycles: a few programs of one and two layers, compiled once."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.choosing.costs import StepCosts
from jaxspec.console.environment import compile_only
from jaxspec.deviceless import hlo, programs
from jaxspec.deviceless.accelerators import Accelerator, Topology
from jaxspec.deviceless.report import build
from jaxspec.deviceless.roofline import LIVE, roofline
from jaxspec.deviceless.rounds import counted
from jaxspec.io import cost_files
from jaxspec.io.extras import MissingExtra, require
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig

# Rows of a step that are compiled; between them costs lie on straight lines.
ROWS = (1, 9, 65, 1024)
# Fewer layers than a model has: what two add is twice what each of a model's layers takes.
_FEW, _MORE = 1, 3


def estimated(
    accelerator: Accelerator,
    config: LlamaConfig,
    name: str,
    on_progress: Callable[[str], None] = lambda what: None,
) -> StepCosts | None:
    """The steps of a model in bfloat16 on one TPU chip, as `roofline` gives them, by its compiler's estimates.

    Compiling takes a minute; the costs are kept in the user's cache for this compiler and this version of the code.

    Args:
      accelerator: the chip.
      config: the model's shape.
      name: of the shape.
      on_progress: called with what is being done.

    Returns:
      the costs; None for a GPU, where the compiler is not installed, and where three layers do not fit.
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
            pass  # damaged: estimated again
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
    """The compiler's estimate of a step of one text through some layers and the head; None where it does not fit."""
    text = build(functools.partial(lowered_step, place, config.truncated(layers), rows)).text
    if not text:
        return None
    module = hlo.parse(text)
    return counted(
        module, module.entry, lambda one: None if one.cycles is None else ("all", one.cycles)
    ).total()


def lowered_step(place: programs.Place, config: LlamaConfig, rows: int) -> Any:
    """A greedy step of one text in bfloat16, lowered: rows of tokens, all layers, the head."""

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
