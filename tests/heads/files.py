"""Heads of a tiny target in their published form, and the distributions that such a head predicts in the loop."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.tree_drafter import Dynamic
from jaxspec.heads import files as heads
from jaxspec.heads.writer import write_head
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights
from jaxspec.sampling import Sampling
from jaxspec.testing.contracts import propose
from tests import refused, tiny

# The fewest layers with EAGLE-3's default auxiliary layers; a RoPE that differs from every head's.
TARGET = dataclasses.replace(tiny.TARGET, num_layers=4, rope_theta=50.0)
WIDTH = TARGET.hidden_size
# One prompt has two chunks, so that a hidden state at the border pairs with a token of the next chunk.
PROMPTS = ((1, 2, 3, 5, 7, 11, 4, 6, 8, 9, 10), (5, 1, 2))
# High enough that some drafts of a random head are accepted.
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
# The tokens of a head over a part of the vocabulary, not sorted.
SOME = np.array([1, 4, 2, 7, 8, 10, 11, 5])
# The config and the tensors of a head.
Files = tuple[dict[str, Any], dict[str, np.ndarray]]


def layer(rng: Any, prefix: str, read: int, width: int = WIDTH) -> dict[str, np.ndarray]:
    """Returns the tensors of one Llama layer without the norms before attention, which reads vectors of this width."""
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


def check_rewritten(directory: Path, files: Files) -> None:
    """Checks that a head that is read and written by jaxspec is the same head when it is read again."""
    once = heads.read_head(write(directory / "read", files), TARGET)
    given = once.load(np.float32)
    few = given.get("vocabulary")
    params = {name: one for name, one in given.items() if name != "vocabulary"}
    if few is not None:
        params["head"] = few.head
    write_head(
        directory / "written", once.config, params, "abc", None if few is None else np.asarray(few.ids)
    )
    again = heads.read_head(directory / "written", TARGET)
    assert again.config == once.config
    jax.tree.map(np.testing.assert_array_equal, again.load(np.float32), given)


@dataclasses.dataclass
class Round:
    """A head's predictions in one row of one round: the distribution of each draft token given the earlier ones.

    The first `count` of `drafts` are proposed.
    """

    tokens: list[int]
    drafts: list[int]
    distributions: np.ndarray
    count: int


def rounds_of(
    directory: Path,
    make: Callable[[Any], Any],
    temperature: float = TEMPERATURE,
    target: LlamaConfig = TARGET,
) -> list[Round]:
    """Returns a head's predictions after the prompts and after some rounds; `make` maps its config to a drafter."""
    head = heads.read_head(directory, target)
    drafter = make(head.config)
    weights = Weights(tiny.params(target), head.load(np.float32))
    distribution = Sampling(jnp.full(len(PROMPTS), temperature))
    parts = Parts(drafter, BlockAcceptor(), distribution)
    loop = tiny.Loop(parts, weights, target)
    state, _ = loop.begin(PROMPTS, 20)
    found, accepted = [], 0
    for _ in range(4):
        proposal, _ = propose(parts, weights, state, 1)
        for row, length in enumerate(state.length.tolist()):
            tokens, drafts = state.tokens[row, :length].tolist(), proposal.tokens[0, row].tolist()
            count = int(proposal.count[0, row])
            found.append(Round(tokens, drafts, np.exp(np.asarray(proposal.log_probs[0, row])), count))
        state, _ = loop.go_on(state, 1)
        accepted = int(state.stats.num_accepted_tokens.sum())
    assert accepted, "no draft was accepted, so nothing shows where its auxiliary hidden state comes from"
    return found


def furthest(
    found: list[Round], logits_of: Callable[[Round], np.ndarray], temperature: float = TEMPERATURE
) -> float:
    """Returns the largest difference between a head's predictions and a reference's for the same rounds."""
    worst = 0.0
    for one in found:
        logits = logits_of(one)
        distribution = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
        worst = max(
            worst, np.abs(distribution / distribution.sum(axis=-1, keepdims=True) - one.distributions).max()
        )
    return worst


def with_tensors(files: Files, **changes: Any) -> Files:
    return files[0], {name: one for name, one in {**files[1], **changes}.items() if one is not None}


def with_config(files: Files, **changes: Any) -> Files:
    return {**files[0], **changes}, files[1]


def check_refused(directory: Path, files: Files, message: str) -> None:
    """Checks that a head of these files is refused in one line that matches `message`."""
    with refused(message):
        heads.read_head(write(directory, files), TARGET)


def check_trees(
    directory: Path, make: Callable[[Any], Any], logits_after: Callable[[list[int], list[int]], np.ndarray]
) -> None:
    """Checks that a head's trees consist of the most probable paths, in the first rounds after two prompts.

    In drawn trees, the first child of each token is drawn from the head's distribution. `make` maps the head's config
    to a drafter; the reference returns the logits after the tokens and a path.
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
                distribution = np.exp(logits_after(tokens, list(paths[node][:-1])) / TEMPERATURE)
                found = np.exp(proposal.log_probs[0, row, node])
                np.testing.assert_allclose(found, distribution / distribution.sum(), atol=2e-5)
        state, _ = loop.go_on(state, 1)
    assert state.stats.num_accepted_tokens.sum() > 0


def slow_tree(logits_after: Callable[[list[int]], np.ndarray], size: Dynamic) -> list[tuple[int, ...]]:
    """Returns the paths of EAGLE-2's tree, grown one node at a time."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(size.depth):
        level = {}
        for path in frontier:
            logits = logits_after(list(path))
            distribution = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token in np.argsort(-distribution)[: size.width]:
                level[(*path, int(token))] = scores[path] + distribution[token]
        scores |= level
        frontier = sorted(level, key=level.__getitem__, reverse=True)[: size.width]
    del scores[()]
    return sorted(scores, key=scores.__getitem__, reverse=True)[: size.num_nodes]
