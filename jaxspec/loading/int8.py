"""Chooses the form of int8 products: on a CPU with a fast int8 kernel, activations are rounded to int8 too."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import warnings
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.host.user_cache import keep, kept
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.model.calibration import calibrated
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.numerics import linear
from jaxspec.model.quantisation import NUM_OUTLIERS, Quantised, quantised, with_outliers

# Prose, numbers, quotation and code. With 256 tokens of a book or of chats the loss is the same; with random tokens it
# is higher (docs/measurements/cpu.md).
CALIBRATION = (
    'The quick brown fox jumps over the lazy dog. In 1998, 12 people (3 of them women) went to Paris; they said: "How '
    'much is it?" def f(x): return x + 1\n'
)
CALIBRATION_TOKENS = 128
# The shape of the weight in the check, and its turns.
_SHAPE, _TURNS = (4096, 2048), 6


def for_device(
    config: LlamaConfig, params: Params, device: jax.Device, tokenizer: Tokenizer | None = None
) -> Params:
    """Returns int8 parameters in the form whose products are fastest on a device.

    On a CPU with a fast int8 kernel, products round activations to int8 too; elsewhere parameters are unchanged.

    Args:
      config: the model.
      params: its parameters, with matrices in int8.
      device: the device of the parameters.
      tokenizer: encodes a text for the calibration; without one, random tokens are used.
    """
    if device.platform != "cpu" or not is_faster():
        return params
    return with_activations(config, params, tokenizer)


def warn_if_slower(device: jax.Device) -> None:
    """Warns that int8 saves memory and no time, on a CPU without a fast int8 kernel."""
    if device.platform == "cpu" and not is_faster():
        warnings.warn(
            "int8 products are slower than float32 products on this CPU: int8 weights save memory, not time",
            RuntimeWarning,
            stacklevel=4,
        )


def with_activations(config: LlamaConfig, params: Params, tokenizer: Tokenizer | None = None) -> Params:
    """Returns int8 parameters whose products round activations to int8, except outliers; see `for_device`."""
    length = min(CALIBRATION_TOKENS, config.max_position_embeddings or CALIBRATION_TOKENS)
    if tokenizer is None:
        ids = np.random.default_rng(0).integers(0, config.vocab_size, length)
    else:
        ids = np.resize(tokenizer.encode(CALIBRATION), length)
    return calibrated(config, params, jnp.asarray(ids, jnp.int32), NUM_OUTLIERS)


@functools.cache
def is_faster() -> bool:
    """Returns whether a row's product with int8 weights is faster in int8 than in float32 on this CPU.

    It is measured once per machine and version of jaxlib, and kept in the user's cache directory.
    """
    version = importlib.metadata.version("jaxlib")
    machine = f"jaxlib {version}, {platform.machine()}, {platform.processor()}, {os.cpu_count()} CPUs"
    found = kept("int8", machine)
    if not isinstance(found, bool):
        found = _measure()
        keep("int8", machine, found)
    return found


def _measure() -> bool:
    weight, row = quantised(jnp.ones(_SHAPE)), jnp.ones((1, _SHAPE[1]))
    product = jax.jit(linear)

    def seconds(form: Quantised) -> float:
        began = perf_counter()
        product(row, form).block_until_ready()
        return perf_counter() - began

    forms = (weight, with_outliers(weight, row[0]))
    # In turns, the first of which compiles: other programs on the machine slow both.
    turns = [[seconds(form) for form in forms] for _ in range(1 + _TURNS)]
    in_float32, in_int8 = (min(turn[form] for turn in turns[1:]) for form in (0, 1))
    return in_int8 < in_float32
