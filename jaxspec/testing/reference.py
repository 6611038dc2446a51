"""A slow, simple Llama in float64 NumPy: no cache, no batch, one head at a time.

It shares only the configuration and the layout of the parameters with `jaxspec.model`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.model.config import LayerType, LlamaConfig, RopeScaling
from jaxspec.model.llama import is_shape, param_shapes
from jaxspec.model.quantisation import is_quantised


def random_params(config: LlamaConfig, seed: int) -> dict[str, Any]:
    """Returns parameters without zeros and ones, so that tests detect a missing bias or norm."""
    return random_tree(param_shapes(config), seed)


def random_tree(shapes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns parameters as `random_params` does for a tree of shapes, with norms and biases recognised by name."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if path[-1].key.endswith("norm"):
            return (1 + 0.2 * noise).astype(np.float32)
        if path[-1].key.endswith("bias"):
            return (0.3 * noise).astype(np.float32)
        return (noise / math.sqrt(shape[-1])).astype(np.float32)

    drawn: dict[str, Any] = jax.tree.map_with_path(draw, shapes, is_leaf=is_shape)
    return drawn


def as_float64(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters as float64 NumPy arrays."""

    def widened(leaf: Any) -> Any:
        if is_quantised(leaf):
            return widened(leaf.values()) * widened(leaf.scale)[..., None]
        return np.asarray(leaf).astype(np.float64)

    wide: dict[str, Any] = jax.tree.map(widened, params, is_leaf=is_quantised)
    return wide


def frequencies(config: LlamaConfig, of: LayerType, length: int) -> list[float]:
    """Returns the radians per position of each coordinate pair, in layers of a type, for a text of `length` tokens."""
    dim, base, scaling = config.rotary_dim or config.head_dim, of.rope_theta, of.rope_scaling
    assert base is not None
    if scaling is not None and scaling.kind == "dynamic":
        trained = config.max_position_embeddings
        if length > trained:
            base *= (scaling.factor * length / trained - (scaling.factor - 1)) ** (dim / (dim - 2))
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    original = scaling.original_max_position_embeddings
    if scaling.kind == "longrope":
        divisors = scaling.long_factors if length > original else scaling.short_factors
        return [f / divisor for f, divisor in zip(plain, divisors, strict=True)]
    if scaling.kind == "yarn":
        return [_yarn(i, f, base, dim, scaling) for i, f in enumerate(plain)]
    turned = []
    for f in plain:
        wavelength = 2 * math.pi / f
        if wavelength < original / scaling.high_freq_factor:
            turned.append(f)
        elif wavelength > original / scaling.low_freq_factor:
            turned.append(f / scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (original / wavelength - scaling.low_freq_factor) / span
            turned.append((1 - smooth) * f / scaling.factor + smooth * f)
    return turned


def _yarn(index: int, plain: float, base: float, dim: int, scaling: RopeScaling) -> float:
    """Returns a frequency of YaRN, equations 17 to 19 of the paper, with bounds as indices of frequencies."""
    low, high = (
        dim
        * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns))
        / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = min(max((index - low) / (high - low if low != high else 0.001), 0.0), 1.0)
    return (1 - ramp) * plain + ramp * plain / scaling.factor


def _rotate(config: LlamaConfig, of: LayerType, x: np.ndarray, rope_length: int) -> np.ndarray:
    """Returns x [N, hd] with coordinates i and i + r/2 of the first r rotated as a pair."""
    turned, scaling = x.copy(), of.rope_scaling
    if of.rope_theta is None:
        return turned
    width = config.rotary_dim or config.head_dim
    half, factor = width // 2, 1.0 if scaling is None else scaling.attention_factor
    for position in range(len(x)):
        angle = position * np.asarray(frequencies(config, of, max(rope_length, position + 1)))
        a, b = x[position, :half], x[position, half:width]
        turned[position, :half] = factor * (a * np.cos(angle) - b * np.sin(angle))
        turned[position, half:width] = factor * (b * np.cos(angle) + a * np.sin(angle))
    return turned


def _norm(config: LlamaConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    normed: np.ndarray = x / size * (weight + config.norm_offset)
    return normed


def _attention(
    config: LlamaConfig, of: LayerType, p: dict[str, Any], x: np.ndarray, rope_length: int
) -> np.ndarray:
    length, hd, group = len(x), config.head_dim, config.num_heads // config.num_kv_heads
    fused = p["qkv"].reshape(config.num_kv_heads, group + 2, hd, config.hidden_size)
    bias = np.zeros((config.num_kv_heads, group + 2, hd))
    if config.qkv_bias:
        bias = p["qkv_bias"].reshape(bias.shape)
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = (behind >= 0) if of.window is None else (behind >= 0) & (behind < of.window)
    if of.window is None and config.draft_window is not None:
        sinks, last = config.draft_window
        seen &= (behind < last) | (np.arange(length) < sinks)
    every = x @ fused.swapaxes(-1, -2) + bias[:, :, None]  # [KV, G + 2, N, hd]
    queries, keys, values = every[:, :group].reshape(-1, length, hd), every[:, group], every[:, group + 1]
    if config.qk_norm and config.qk_norm_over_heads:
        queries, keys = (
            _norm(config, np.concatenate(list(heads), axis=-1), weight.reshape(-1))
            .reshape(length, len(heads), hd)
            .swapaxes(0, 1)
            for heads, weight in ((queries, p["wide_q_norm"]), (keys, p["wide_k_norm"]))
        )
    elif config.qk_norm:
        queries, keys = _norm(config, queries, p["q_norm"]), _norm(config, keys, p["k_norm"])
    beta, original = 0.0, 1
    if of.rope_scaling is not None:
        beta, original = of.rope_scaling.query_beta, of.rope_scaling.original_max_position_embeddings
    larger = 1 + beta * np.log(1 + np.arange(length) // original)[:, None]
    scale = 1 / math.sqrt(hd) if config.scores.scale is None else config.scores.scale
    heads = []
    for head in range(config.num_heads):
        query = _rotate(config, of, queries[head], rope_length) * larger
        key, value = _rotate(config, of, keys[head // group], rope_length), values[head // group]
        if config.kv_cache_dtype == "int8":
            key, value = map(_in_int8, (key, value))
        scores = _capped(query @ key.T * scale, config.scores.cap)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads.append(weights / weights.sum(axis=-1, keepdims=True) @ value)
    out = np.concatenate(heads, axis=-1) @ p["out"].T
    biased: np.ndarray = out + p["out_bias"] if config.output_bias else out
    return biased


def _in_int8(x: np.ndarray) -> np.ndarray:
    """Returns x [N, hd] as an int8 cache keeps it: 127 levels up to the largest magnitude of each row, and below."""
    top = np.abs(x).max(axis=-1, keepdims=True)
    rounded: np.ndarray = np.round(x / top * 127) / 127 * top
    return rounded


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _mlp(config: LlamaConfig, p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    gate, up = x @ p["gate_up"][0].T, x @ p["gate_up"][1].T
    if config.mlp_bias:
        gate, up = gate + p["gate_up_bias"][0], up + p["gate_up_bias"][1]
    if config.activation == "silu":
        inner = gate / (1 + np.exp(-gate))
    else:
        inner = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    out = (inner * up) @ p["down"].T
    biased: np.ndarray = out + p["down_bias"] if config.mlp_bias else out
    return biased


def forward(
    config: LlamaConfig,
    params: dict[str, Any],
    tokens: Sequence[int],
    *,
    rope_length: int | None = None,
    run: Sequence[tuple[bool, bool]] | None = None,
    num_layers: int | None = None,
    stream: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Returns the logits float64[N, V] of every position of one text.

    Args:
      config: the model.
      params: parameters in the layout of `jaxspec.model.llama`, in any dtype.
      tokens: N ids.
      rope_length: for dynamic RoPE, the length for which the first tokens are rotated: the prompt's length for a
        decoder with a cache; N if None, as in a pass over the whole text.
      run: for each layer, whether attention and MLP run; None for all.
      num_layers: the number of layers before the final norm and head; None for all.
      stream: a list to which the residual stream [N, D] is appended at the start and after each sublayer.
    """
    params = as_float64(params)
    rope_length = len(tokens) if rope_length is None else rope_length
    x = params["embed"][np.asarray(tokens)] * config.embedding_multiplier
    stream = [] if stream is None else stream
    stream.append(x)
    for index in range(config.num_layers if num_layers is None else num_layers):
        p = params["layers"][index]
        run_attention, run_mlp = (True, True) if run is None else run[index]
        for name, runs in (("attention", run_attention), ("mlp", run_mlp)):
            if runs:
                part = p[name]
                seen = _norm(config, x, part["norm"]) if "norm" in part else x
                if name == "mlp":
                    write = _mlp(config, part, seen)
                else:
                    write = _attention(config, config.layer_type(index), part, seen, rope_length)
                write = _norm(config, write, part["post_norm"]) if "post_norm" in part else write
                x = x + write * config.residual_multiplier
            stream.append(x)
    head = params["embed"] if config.tie_embeddings else params["head"]
    products = _norm(config, x, params["norm"]) @ head.T
    return _capped(products * config.logit_multiplier, config.logit_cap)


def greedy(
    config: LlamaConfig,
    params: dict[str, Any],
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int] = (),
) -> list[int]:
    """Returns the tokens of plain greedy decoding, up to and including the first of `eos`, by one full pass each."""
    params = as_float64(params)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        logits = forward(config, params, tokens, rope_length=len(prompt))
        tokens.append(int(np.argmax(logits[-1])))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
