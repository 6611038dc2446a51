"""Heads as their authors publish them, of a tiny target, and what such a head says in the loop."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.tree import Dynamic
from jaxspec.io import heads
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights
from jaxspec.sampling import Sampling
from jaxspec.testing.contracts import propose
from tests import tiny

# So few layers as have EAGLE-3's usual taps; a RoPE that no head shares.
TARGET = dataclasses.replace(tiny.TARGET, num_layers=4, rope_theta=50.0)
WIDTH = TARGET.hidden_size
# One prompt is fed in two pieces, so that a feature at the border meets a token of the next one.
PROMPTS = ((1, 2, 3, 5, 7, 11, 4, 6, 8, 9, 10), (5, 1, 2))
# So high that a random head has drafts accepted.
TEMPERATURE = 2.0
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": TARGET.vocab_size,
    "rms_norm_eps": 1e-5,
}
# The tokens of a head over a part of the vocabulary, not in their order.
SOME = np.array([1, 4, 2, 7, 8, 10, 11, 5])
# The config and the tensors of a head.
Files = tuple[dict[str, Any], dict[str, np.ndarray]]


def layer(rng: Any, prefix: str, read: int, width: int = WIDTH) -> dict[str, np.ndarray]:
    """The tensors of one Llama layer but its norms before the attention; its attention reads vectors this wide."""
    shapes = {"self_attn.q_proj": (16, read), "self_attn.k_proj": (8, read), "self_attn.v_proj": (8, read)}
    shapes |= {"self_attn.o_proj": (width, 16), "mlp.down_proj": (width, 20)}
    shapes |= {"mlp.gate_proj": (20, width), "mlp.up_proj": (20, width)}
    drawn = {f"{prefix}.{name}.weight": matrix(rng, shape) for name, shape in shapes.items()}
    return drawn | {f"{prefix}.post_attention_layernorm.weight": norm(rng, width)}


def matrix(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def norm(rng: Any, width: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)


def write(directory: Path, files: Files) -> Path:
    content, tensors = files
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


@dataclasses.dataclass
class Round:
    """What a head said in one row of one round: the law of each draft token, given those before it."""

    tokens: list[int]
    drafts: list[int]
    laws: np.ndarray


def rounds_of(
    directory: Path,
    make: Callable[[Any], Any],
    temperature: float = TEMPERATURE,
    target: LlamaConfig = TARGET,
) -> list[Round]:
    """Of a head on a target, whose drafter `make` makes of its config: after the prompts, and after some rounds."""
    head = heads.read_head(directory, target)
    drafter = make(head.config)
    weights = Weights(tiny.params(target), head.load(np.float32))
    law = Sampling(jnp.full(len(PROMPTS), temperature))
    parts = Parts(drafter, BlockAcceptor(), law)
    loop = tiny.Loop(parts, weights, target)
    state, _ = loop.begin(PROMPTS, 20)
    found, accepted = [], 0
    for _ in range(4):
        proposal, _ = propose(parts, weights, state, 1)
        for row, length in enumerate(state.length.tolist()):
            tokens, drafts = state.tokens[row, :length].tolist(), proposal.tokens[0, row].tolist()
            found.append(Round(tokens, drafts, np.exp(np.asarray(proposal.log_probs[0, row]))))
        state, _ = loop.go_on(state, 1)
        accepted = int(state.stats.num_accepted_tokens.sum())
    assert accepted, "no draft was accepted, so nothing shows where its feature comes from"
    return found


def furthest(
    found: list[Round], logits_of: Callable[[Round], np.ndarray], temperature: float = TEMPERATURE
) -> float:
    """The largest difference between what a head said and what a reference says of the same rounds."""
    worst = 0.0
    for one in found:
        logits = logits_of(one)
        law = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
        worst = max(worst, np.abs(law / law.sum(axis=-1, keepdims=True) - one.laws).max())
    return worst


def with_tensors(files: Files, **changes: Any) -> Files:
    return files[0], {name: one for name, one in {**files[1], **changes}.items() if one is not None}


def with_config(files: Files, **changes: Any) -> Files:
    return {**files[0], **changes}, files[1]


def check_trees(
    directory: Path, make: Callable[[Any], Any], logits_after: Callable[[list[int], list[int]], np.ndarray]
) -> None:
    """The trees of a head are those of the most probable paths, in the first rounds after two prompts.

    Where tokens are drawn, the first after each token comes from the head's law there.
    `make` makes the drafter of the head's config; a reference says the logits after tokens and a path behind them.
    """
    head = heads.read_head(directory, TARGET)
    drafter = make(head.config)
    weights = Weights(tiny.params(TARGET), head.load(np.float32))
    parts = Parts(drafter, BlockAcceptor(), Sampling(jnp.full(len(PROMPTS), TEMPERATURE)))
    loop = tiny.Loop(parts, weights, TARGET)
    state, _ = loop.begin(PROMPTS, 12, capacity=64)
    for _ in range(4):
        proposal, _ = propose(parts, weights, state, 1)
        for row, length in enumerate(state.length.tolist()):
            tokens = state.tokens[row, :length].tolist()
            drawn = proposal.log_probs is not None
            parents = proposal.parents.parents if drawn else proposal.parents[0, row].tolist()
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(proposal.tokens[0, row].tolist(), parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if not drawn:
                expected = slow_tree(functools.partial(logits_after, tokens), drafter.tree)
                assert sorted(paths) == sorted(expected)
                continue
            for node in [parents.index(parent) for parent in sorted(set(parents))]:
                law = np.exp(logits_after(tokens, list(paths[node][:-1])) / TEMPERATURE)
                found = np.exp(proposal.log_probs[0, row, node])
                np.testing.assert_allclose(found, law / law.sum(), atol=2e-5)
        state, _ = loop.go_on(state, 1)
    assert state.stats.num_accepted_tokens.sum() > 0


def slow_tree(logits_after: Callable[[list[int]], np.ndarray], size: Dynamic) -> list[tuple[int, ...]]:
    """The paths of EAGLE-2's tree, one node at a time."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(size.depth):
        level = {}
        for path in frontier:
            logits = logits_after(list(path))
            law = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token in np.argsort(-law)[: size.width]:
                level[(*path, int(token))] = scores[path] + law[token]
        scores |= level
        frontier = sorted(level, key=level.__getitem__, reverse=True)[: size.width]
    del scores[()]
    return sorted(scores, key=scores.__getitem__, reverse=True)[: size.num_nodes]
