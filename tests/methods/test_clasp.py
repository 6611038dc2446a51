"""The layers that CLaSp leaves out: against a slow loop over depth, and as a text goes on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.clasp_drafter import CLaSpDrafter, choose_layers
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.stopping import Constant
from jaxspec.testing import reference
from tests import refused, tiny

DEPTH = 6
CONFIG = dataclasses.replace(tiny.TARGET, num_layers=DEPTH, sliding_windows=(None, 4, None, None, 4, None))
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [5, 1, 12], [9]]


def params(config: LlamaConfig) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), reference.random_params(config, 3))


def streams_of(config: LlamaConfig, weights: Any, text: list[int]) -> np.ndarray:
    """What entered each layer and what left the last one, [N, L + 1, D]."""
    after_sublayers: list[np.ndarray] = []
    reference.forward(config, weights, text, stream=after_sublayers)
    return np.stack(after_sublayers[::2], axis=1)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def slow(config: LlamaConfig, weights: Any, text: list[int], num_skipped: int) -> list[bool]:
    """Which layers run, from one forward pass per layer and number of layers left out."""
    true = streams_of(config, weights, text)

    def after(layer: int, stream: np.ndarray) -> np.ndarray:
        """The layer on this stream of the last token; all tokens before it, and its key and value, are true."""
        one = dataclasses.replace(config, num_layers=1, sliding_windows=(config.window(layer),))
        return layer_by_hand(one, weights["layers"][layer], true[:, layer], stream)

    best = {0: (true[-1, 0], [])}
    for layer in range(config.num_layers):
        found = {}
        for skipped in range(num_skipped + 1):
            options = []
            if skipped in best:
                stream, runs = best[skipped]
                options.append((after(layer, stream), [*runs, True]))
            if skipped - 1 in best:
                stream, runs = best[skipped - 1]
                options.append((stream, [*runs, False]))
            if options:
                found[skipped] = max(options, key=lambda option: cosine(option[0], true[-1, layer + 1]))
        best = found
    return best[num_skipped][1]


def layer_by_hand(config: LlamaConfig, p: Any, before: np.ndarray, stream: np.ndarray) -> np.ndarray:
    """A layer on `stream`, in place of the last of `before`, whose keys and values are those of `before`."""
    p = reference.as_float64(p)
    eps, hd, group = config.rms_norm_eps, config.head_dim, config.group_size

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight

    def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angle = positions[:, None] * np.asarray(reference.frequencies(config, config.layer_type(0), 1))
        a, b = x[:, : hd // 2], x[:, hd // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    places = np.arange(len(before))
    window = config.window(0)
    seen = places >= (0 if window is None else len(before) - window)
    read, asked = norm(before, p["attention"]["norm"]), norm(stream, p["attention"]["norm"])
    fused = p["attention"]["qkv"].reshape(config.num_kv_heads, group + 2, hd, config.hidden_size)
    heads = []
    for one in fused:
        keys, values = rotated(read @ one[group].T, places), read @ one[group + 1].T
        for member in range(group):
            query = rotated((asked @ one[member].T)[None], places[-1:])[0]
            scores = np.where(seen, keys @ query / np.sqrt(hd), -np.inf)
            weights = np.exp(scores - scores.max())
            heads.append(weights @ values / weights.sum())
    x = stream + p["attention"]["out"] @ np.concatenate(heads)
    normed = norm(x, p["mlp"]["norm"])
    gate, up = p["mlp"]["gate_up"][0] @ normed, p["mlp"]["gate_up"][1] @ normed
    return x + p["mlp"]["down"] @ (gate / (1 + np.exp(-gate)) * up)


def chosen(config: LlamaConfig, weights: Any, num_skipped: int) -> list[list[bool]]:
    """By row what `choose_layers` says of the last token of each text, all in one batch."""
    length = np.array([len(text) for text in TEXTS])
    tokens = np.zeros((len(TEXTS), 8), np.int32)
    for row, text in enumerate(TEXTS):
        tokens[row, : len(text)] = text
    aux_layers = tuple(range(config.num_layers + 1))
    step = jax.jit(functools.partial(llama.run_with_aux, config, aux_layers=aux_layers))
    with pytest.MonkeyPatch.context() as patch:  # layers with a window keep their window and one slot more
        sizes = tuple(window and window + 1 for window in config.sliding_windows)
        patch.setattr(kv, "most_places", lambda config: sizes)
        cache = kv.create(config, len(TEXTS), 16, jnp.float32)
    found = []
    for place in range(tokens.shape[1]):
        hidden = llama.embed(config, weights, jnp.asarray(tokens[:, place : place + 1]))
        _, aux_hidden_states, cache, _ = step(weights, hidden, jnp.minimum(place, length), cache)
        found.append(np.asarray(aux_hidden_states).reshape(len(TEXTS), len(aux_layers), -1))
    last = np.stack(found, axis=1)[np.arange(len(TEXTS)), length - 1]
    plans = choose_layers(config, weights, last, jnp.asarray(length - 1, jnp.int32), cache, num_skipped)
    assert (plans[..., 0] == plans[..., 1]).all()
    return plans[..., 0].tolist()


@pytest.mark.full
@pytest.mark.representatives("2")
@pytest.mark.parametrize("num_skipped", [1, 2, 3, DEPTH - 1])
def test_layers_are_those_of_the_slow_loop(num_skipped):
    weights = params(CONFIG)
    found = chosen(CONFIG, weights, num_skipped)
    assert found == [slow(CONFIG, weights, text, num_skipped) for text in TEXTS]
    assert all(row.count(False) == num_skipped for row in found)


def loop(refresh: int) -> tiny.Loop:
    drafter = CLaSpDrafter(CONFIG, 2, jnp.int32(refresh), Constant(), tiny.K)
    return tiny.Loop(Parts(drafter, GreedyAcceptor(), Greedy()), Weights(params(CONFIG)), CONFIG)


@pytest.mark.full
def test_the_layers_follow_the_text():
    """Those of the last token that was verified, in the rounds in which it is time to choose."""
    weights, masks = params(CONFIG), []
    for refresh in (1, 3):
        running = loop(refresh)
        state, _ = running.begin(TEXTS, 20)
        for number in range(6):
            live = ~np.asarray(state.done)
            known = [state.tokens[row, : state.length[row] - 1].tolist() for row in range(len(TEXTS))]
            before = np.asarray(state.drafter_state.own.plan)
            state, _ = running.go_on(state, 1)
            after = np.asarray(state.drafter_state.own.plan)[..., 0]
            for row in np.flatnonzero(live):
                if number % refresh == 0:
                    assert after[row].tolist() == slow(CONFIG, weights, known[row], 2)
                else:
                    assert after[row].tolist() == before[row, :, 0].tolist()
            masks.append(after)
    assert len({tuple(row) for mask in masks for row in mask.tolist()}) > 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"skip_layers": 2}, "skip_layers is 2, but the model has 2 layers; give 1 to 1"),
        ({"skip_layers": 0}, "skip_layers is 0, but the model has 2 layers"),
        ({"refresh": 0}, "refresh is 0; give 1 to 2147483647"),
        ({"refresh": 2**40}, "refresh is 1099511627776; give 1 to 2147483647"),
    ],
)
def test_numbers_that_do_not_fit(options, line):
    with refused(line):
        tiny.language_model().drafter("clasp", **options)
