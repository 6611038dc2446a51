"""The layers that CLaSp and KnapSpec leave out: against a slow loop over depth, and as a text goes on."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.costs.rounds import StepCosts, guessed
from jaxspec.decoding import Parts
from jaxspec.drafting.clasp_drafter import CLaSpDrafter
from jaxspec.drafting.knapspec_drafter import KnapSpecDrafter, SublayerTimes, weights_of
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods.resources import Resources
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import View, Weights
from jaxspec.sampling import Greedy
from jaxspec.stopping import ConfidenceBelow, Constant, FixedGamma
from jaxspec.testing import reference
from tests import refused, tiny

DEPTH = 6
CONFIG = dataclasses.replace(tiny.TARGET, num_layers=DEPTH, sliding_windows=(None, 4, None, None, 4, None))
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [5, 1, 12], [9]]
# The last tokens of a text see their window in rings of so many places more.
SPARE = 5


def params(config: LlamaConfig) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), reference.random_params(config, 3))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def slow_paths(
    config: LlamaConfig,
    weights: Any,
    text: list[int],
    num_tokens: int,
    items: list[list[int]],
    saves: list[int],
    budget: int,
    least_cosine: float = -np.inf,
) -> dict[int, tuple[list[np.ndarray], list[bool]]]:
    """By saved weight the streams of the last tokens and which sublayers run, from a pass per item and state.

    `items` are groups of sublayers in their order, and `saves` their weights, 0 for those that always run.
    """
    after_sublayers: list[np.ndarray] = []
    reference.forward(config, weights, text, stream=after_sublayers)
    layers = reference.as_float64(weights)["layers"]
    true = np.stack(after_sublayers, axis=1)
    places = range(max(len(text) - num_tokens, 0), len(text))
    best: dict[int, Any] = {0: ([true[place, 0] for place in places], [])}
    for item, save in zip(items, saves, strict=True):
        found = collections.defaultdict(list)
        for saved, (streams, runs) in best.items():
            ran = streams
            for number in item:
                ran = [
                    sublayer_by_hand(config, layers, number, true[: place + 1, number], stream)
                    for place, stream in zip(places, ran, strict=True)
                ]
            found[saved].append((ran, [*runs, *[True] * len(item)]))
            if save and saved + save <= budget:
                found[saved + save].append((streams, [*runs, *[False] * len(item)]))
        end = true[places.start :, item[-1] + 1]
        near = functools.partial(nearness, end)
        best = {saved: max(options, key=near) for saved, options in found.items()}
        best = {saved: path for saved, path in best.items() if saved == 0 or near(path) >= least_cosine}
    return best


def nearness(true: np.ndarray, path: tuple[list[np.ndarray], list[bool]]) -> float:
    return float(np.mean([cosine(stream, one) for stream, one in zip(path[0], true, strict=True)]))


def slow(config: LlamaConfig, weights: Any, text: list[int], num_skipped: int) -> list[list[bool]]:
    """CLaSp's sublayers, [L, 2]."""
    layers = [[2 * layer, 2 * layer + 1] for layer in range(config.num_layers)]
    paths = slow_paths(config, weights, text, 1, layers, [1] * len(layers), num_skipped)
    return np.reshape(paths[num_skipped][1], (-1, 2)).tolist()


def slow_times(config: LlamaConfig, times: SublayerTimes, length: int) -> list[float]:
    windows = [config.window(layer) or length for layer in range(config.num_layers)]
    attention = [float(times.attention) + float(times.cached) * min(length, window) for window in windows]
    return [time for one in attention for time in (one, float(times.mlp))]


def slow_knapspec(
    drafter: KnapSpecDrafter, weights: Any, text: list[int], least_cosine: float = 0.5
) -> tuple[list[list[bool]], int, int]:
    """KnapSpec's sublayers, the length of drafts, and the number of paths among which it chose."""
    config, count = drafter.config, 2 * drafter.config.num_layers
    times = slow_times(config, drafter.times, len(text))
    saves = [min(round(time / min(times)), 5) for time in times]
    budget = sum(saves) // 2
    inner = [save if 2 <= number < count - 2 else 0 for number, save in enumerate(saves)]
    sublayers = [[number] for number in range(count)]
    paths = slow_paths(config, weights, text, drafter.num_fitted, sublayers, inner, budget, least_cosine)
    said = {
        saved: [int(np.argmax(head_by_hand(config, weights, stream))) for stream in streams]
        for saved, (streams, _) in paths.items()
    }
    speeds = {}
    for saved, (_, runs) in paths.items():
        alpha = float(np.mean(np.array(said[saved]) == said[0]))
        path = sum(time for time, one in zip(times, runs, strict=True) if one) + float(drafter.times.rest)
        step = sum(times) + float(drafter.times.rest)
        for length in range(1, drafter.num_draft_tokens + 1):
            speeds[saved, length] = sum(alpha**i for i in range(length + 1)) / (path * length + step)
    saved, length = max(speeds, key=speeds.__getitem__)
    return np.reshape(paths[saved][1], (-1, 2)).tolist(), length, len(paths)


def head_by_hand(config: LlamaConfig, weights: Any, stream: np.ndarray) -> np.ndarray:
    p = {name: np.asarray(weights[name], np.float64) for name in ("norm", "head")}
    normed = stream / np.sqrt(np.mean(stream**2) + config.rms_norm_eps) * p["norm"]
    return p["head"] @ normed


def sublayer_by_hand(
    config: LlamaConfig, layers: Any, number: int, before: np.ndarray, stream: np.ndarray
) -> np.ndarray:
    """A sublayer on `stream`, in place of the last of `before`, whose keys and values are those of `before`."""
    layer, is_mlp = divmod(number, 2)
    p = layers[layer]
    eps, hd, group = config.rms_norm_eps, config.head_dim, config.group_size

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight

    if is_mlp:
        normed = norm(stream, p["mlp"]["norm"])
        gate, up = p["mlp"]["gate_up"][0] @ normed, p["mlp"]["gate_up"][1] @ normed
        return stream + p["mlp"]["down"] @ (gate / (1 + np.exp(-gate)) * up)

    def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angle = positions[:, None] * np.asarray(reference.frequencies(config, config.layer_type(layer), 1))
        a, b = x[:, : hd // 2], x[:, hd // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    places = np.arange(len(before))
    window = config.window(layer)
    seen = places >= (0 if window is None else len(before) - window)
    read, asked = norm(before, p["attention"]["norm"]), norm(stream, p["attention"]["norm"])
    fused = p["attention"]["qkv"].reshape(config.num_kv_heads, group + 2, hd, config.hidden_size)
    heads = []
    for one in fused:
        keys, values = rotated(read @ one[group].T, places), read @ one[group + 1].T
        for member in range(group):
            query = rotated((asked @ one[member].T)[None], places[-1:])[0]
            scores = np.where(seen, keys @ query / np.sqrt(hd), -np.inf)
            shares = np.exp(scores - scores.max())
            heads.append(shares @ values / shares.sum())
    return stream + p["attention"]["out"] @ np.concatenate(heads)


def cached(config: LlamaConfig, weights: Any) -> View:
    """Returns the texts with a token more, which is pending, and the full model's cache of those before."""
    length = np.array([len(text) for text in TEXTS])
    tokens = np.zeros((len(TEXTS), 8), np.int32)
    for row, text in enumerate(TEXTS):
        tokens[row, : len(text)] = text
    step = jax.jit(functools.partial(llama.run_layers, config))
    with pytest.MonkeyPatch.context() as patch:  # layers with a window keep their window and few slots more
        sizes = tuple(window and window + SPARE for window in config.sliding_windows)
        patch.setattr(kv, "most_places", lambda config: sizes)
        cache = kv.create(config, len(TEXTS), 16, jnp.float32)
    for place in range(tokens.shape[1]):
        hidden = llama.embed(config, weights, jnp.asarray(tokens[:, place : place + 1]))
        _, cache = step(weights, hidden, jnp.minimum(place, length), cache)
    return View(jnp.asarray(tokens), jnp.asarray(length + 1), cache, jnp.ones(len(TEXTS), jnp.int32))


@jax.jit
def choose(drafter: Any, weights: Any, view: View) -> tuple[jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array] = drafter.choose(Weights(weights), view)
    return found


def clasp(num_skipped: int = 2, refresh: int = 16) -> CLaSpDrafter:
    return CLaSpDrafter(CONFIG, num_skipped, jnp.int32(refresh), Constant(), tiny.K)


def knapspec(refresh: int = 64, times: tuple[float, ...] = (4, 1, 0.9, 2), **changes: Any) -> KnapSpecDrafter:
    """By default attention is the dearer sublayer of the longest text only."""
    made = SublayerTimes(*map(jnp.float32, times))
    given = {"num_fitted": 4, "rule": Constant(), "num_draft_tokens": tiny.K, **changes}
    return KnapSpecDrafter(CONFIG, made, 1 + 3 * DEPTH, refresh=jnp.int32(refresh), **given)


@pytest.mark.full
@pytest.mark.representatives("2")
@pytest.mark.parametrize("num_skipped", [1, 2, 3, DEPTH - 1])
def test_layers_are_those_of_the_slow_loop(num_skipped):
    weights = params(CONFIG)
    plans, lengths = choose(clasp(num_skipped), weights, cached(CONFIG, weights))
    assert plans.tolist() == [slow(CONFIG, weights, text, num_skipped) for text in TEXTS]
    assert (~plans).sum(axis=(1, 2)).tolist() == [2 * num_skipped] * len(TEXTS)
    assert lengths.tolist() == [tiny.K] * len(TEXTS)


# Times of an MLP, an attention, a cached token and the rest; fitted tokens; the least cosine.
CHOICES = {
    "attention-grows": ((4, 1, 0.9, 2), 4, 0.5),
    "dear-mlps": ((9, 1, 0.0, 2), 4, 0.8),
    "dear-attentions": ((1, 3, 1.0, 0.1), 3, 0.5),
    "one-token": ((2, 2, 0.0, 20), 1, 0.9),
}


@pytest.mark.full
@pytest.mark.representatives("attention-grows")
@pytest.mark.parametrize("choice", CHOICES)
def test_sublayers_and_lengths_are_those_of_the_slow_loop(choice):
    """Rows differ in their weights, because their lengths do. With dear MLPs some paths are dropped on their way."""
    weights, (times, num_fitted, least) = params(CONFIG), CHOICES[choice]
    drafter = knapspec(times=times, num_fitted=num_fitted, least_cosine=least, num_draft_tokens=9)
    plans, lengths = choose(drafter, weights, cached(CONFIG, weights))
    expected = [slow_knapspec(drafter, weights, text, least) for text in TEXTS]
    assert plans.tolist() == [plan for plan, _, _ in expected]
    assert lengths.tolist() == [length for _, length, _ in expected]
    every = [slow_knapspec(drafter, weights, text, -np.inf)[2] for text in TEXTS]
    if choice == "dear-mlps":
        assert [number for _, _, number in expected] < every


def test_without_a_near_path_nothing_is_skipped():
    weights = params(CONFIG)
    plans, _ = choose(knapspec(least_cosine=1.1, num_draft_tokens=9), weights, cached(CONFIG, weights))
    assert plans.all()


@pytest.mark.parametrize(
    ("times", "length", "weights"),
    [
        ((10.0, 4.0, 0.1), 0, (2, 1)),  # 2.5, to the even number
        ((10.0, 4.0, 0.1), 60, (1, 1)),
        ((10.0, 4.0, 0.1), 400, (1, 4)),
        ((10.0, 4.0, 0.1), 10_000, (1, 5)),
        ((100.0, 1.0, 0.0), 10_000, (5, 1)),
    ],
)
def test_weights_are_ratios_of_times_at_this_length(times, length, weights):
    of = SublayerTimes(*map(jnp.float32, (*times, 1.0))).of(tiny.TARGET, jnp.array([length]))
    attention, mlp = weights_of(of).reshape(-1, 2)[0].tolist()
    assert (mlp, attention) == weights


def test_a_window_limits_what_an_attention_costs():
    """Layers have a window, or the draft has; a step reads all that its layers see."""
    times = SublayerTimes(*map(jnp.float32, (1, 1, 1, 1)))
    config = dataclasses.replace(CONFIG, draft_window=(1, 2))
    draft, step = (times.of(config, jnp.array([2, 9]), draft)[:, ::2].tolist() for draft in (True, False))
    assert draft == [[3.0] * DEPTH, [4.0, 5.0, 4.0, 4.0, 5.0, 4.0]]
    assert step == [[3.0] * DEPTH, [10.0, 5.0, 10.0, 10.0, 5.0, 10.0]]


@pytest.mark.full
@pytest.mark.parametrize("method", ["clasp", "knapspec"])
def test_the_layers_follow_the_text(method):
    """Those of the last tokens that were verified, in the rounds in which it is time to choose."""
    weights, masks = params(CONFIG), []
    for refresh in (1, 3):
        drafter: Any = clasp(refresh=refresh) if method == "clasp" else knapspec(refresh)
        running = tiny.Loop(Parts(drafter, GreedyAcceptor(), Greedy()), Weights(weights), CONFIG)
        state, _ = running.begin(TEXTS, 20)
        for number in range(6):
            live = ~np.asarray(state.done)
            known = [state.tokens[row, : state.length[row] - 1].tolist() for row in range(len(TEXTS))]
            before, drafted = np.asarray(state.drafter_state.own.plan), state.stats.num_draft_tokens
            state, _ = running.go_on(state, 1)
            after = np.asarray(state.drafter_state.own.plan)
            for row in np.flatnonzero(live):
                length = tiny.K
                if number % refresh:
                    plan = before[row].tolist()
                elif method == "clasp":
                    plan = slow(CONFIG, weights, known[row], 2)
                else:
                    plan, length, _ = slow_knapspec(drafter, weights, known[row])
                assert after[row].tolist() == plan
                if number % refresh == 0 and not state.done[row]:
                    assert state.stats.num_draft_tokens[row] - drafted[row] == length
            masks.append(after)
    assert len({tuple(row) for mask in masks for row in mask.reshape(len(TEXTS), -1).tolist()}) > 2


DEEP = LanguageModel(tiny.engine_config(tiny.DEEP), tiny.params(tiny.DEEP), tiny.tokenizer())


def deep(**options: Any) -> Any:
    return DEEP.drafter("knapspec", **options)[0]


def test_a_draft_ends_by_the_authors_rule_or_at_the_chosen_length():
    usual, chosen = deep(), deep(stop_rule="constant")
    assert (usual.rule, usual.num_draft_tokens) == (ConfidenceBelow(FixedGamma(jnp.float32(0.7))), 4)
    assert (chosen.rule, chosen.num_draft_tokens, chosen.verify_widths) == (Constant(), 17, (1, 5, 18))
    assert deep(stop_rule="product").rule.gamma.gamma == jnp.float32(0.8)


def test_times_are_measured_or_bytes():
    """Attention and MLP share a layer's time by their sizes. With the cache of a long text, attention takes longer."""
    of_bytes = deep().times
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(DEEP.params["layers"][0][name]))
        for name in ("attention", "mlp")
    ]
    assert float(of_bytes.attention / of_bytes.mlp) == pytest.approx(sizes[0] / sizes[1])
    per_token = 2 * tiny.DEEP.num_kv_heads * tiny.DEEP.head_dim * 4
    assert float(of_bytes.cached / of_bytes.mlp) == pytest.approx(per_token / sizes[1])
    costs = StepCosts("cpu", "", "float32", 3, 100, ((1, 1, 10.0), (5, 1, 12.0)), 1, 4.0, 0.015)
    resources = Resources(lambda name: None, list, costs=costs)
    drafter, _ = methods.KnapSpec().build(DEEP.loaded, resources)
    times = drafter.times
    # A layer takes 3 ms after 100 tokens, of which .5 ms are reading the cache, and all else 1 ms.
    assert float(times.attention + times.mlp) == pytest.approx(2.5)
    assert (float(times.cached), float(times.rest)) == pytest.approx((0.005, 1.0))


def test_the_choices_are_charged():
    """A pass of all tokens of a choice, divided by the rounds between two choices."""
    costs = guessed(3, row=0.5)
    for method, tokens in ((methods.CLaSp(skip_layers=2, refresh=8), 3), (methods.KnapSpec(refresh=8), None)):
        drafter, own = DEEP.drafter(method)
        cost = method.cost(DEEP.loaded, drafter, own)
        tokens = tokens or drafter.num_rows * drafter.num_fitted
        free = dataclasses.replace(cost, choice=(0, 1))
        charge = cost.round_ms(costs, 4) - free.round_ms(costs, 4)
        assert charge == pytest.approx((1 + 0.5 * (tokens - 1)) / 8)


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        ("clasp", {"skip_layers": 2}, "skip_layers is 2, but the model has 2 layers; give 1 to 1"),
        ("clasp", {"skip_layers": 0}, "skip_layers is 0, but the model has 2 layers"),
        ("clasp", {"refresh": 0}, "refresh is 0; give 1 to 2147483647"),
        ("knapspec", {"refresh": 2**40}, "refresh is 1099511627776; give 1 to 2147483647"),
        ("knapspec", {"gamma": 2.0}, "gamma is 2.0; give a number from 0 to 1"),
        ("knapspec", {"gamma": 0.5, "stop_rule": "constant"}, "has no option `gamma`"),
        (
            "knapspec",
            {},
            "knapspec runs the first and the last two sublayers, and the model has 4; choose another",
        ),
    ],
)
def test_options_that_do_not_fit(method, options, line):
    with refused(line):
        tiny.language_model().drafter(method, **options)
