"""Adapters of Uno: drafts against a slow reference, files, method and training."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxspec import methods
from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import Parts
from jaxspec.decoding.rounds import run_rounds
from jaxspec.heads import files as heads
from jaxspec.heads.uno import network
from jaxspec.heads.uno.drafter import UnoDrafter, UnoSinglePassDrafter
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.heads.writer import write_head
from jaxspec.measuring.bench.free_rows import free_rows
from jaxspec.methods.base import share_of_step
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.quantisation import quantise
from jaxspec.protocol import Weights
from jaxspec.sampling import Sampling
from jaxspec.testing import reference as slow
from jaxspec.testing.contracts import PROMPTS, propose
from tests import refused, tiny
from tests.heads import reference
from tests.heads.files import (
    TARGET,
    WIDTH,
    Files,
    Round,
    furthest,
    matrix,
    rounds_of,
    with_config,
    with_tensors,
)
from tests.heads.test_training_heads import distribution_of, documents_of, run
from training.heads import kinds, measure
from training.heads.head_type import HeadOptions
from training.losses.base import Given

QWEN3 = dataclasses.replace(TARGET, qk_norm=True, model_type="qwen3")
TARGETS = {"llama": TARGET, "qwen3": QWEN3}
RANK, MASK = 3, 11
PREFIX = "base_model.model.model.layers"
# By projection: inputs and outputs.
SHAPES = {
    **{f"self_attn.{name}_proj": (WIDTH, out) for name, out in (("q", 16), ("k", 8), ("v", 8))},
    "self_attn.o_proj": (16, WIDTH),
    "mlp.gate_proj": (WIDTH, TARGET.intermediate_size),
    "mlp.up_proj": (WIDTH, TARGET.intermediate_size),
    "mlp.down_proj": (TARGET.intermediate_size, WIDTH),
}


def uno(**own: Any) -> Files:
    """Returns an adapter as PEFT writes it."""
    rng, tensors = np.random.default_rng(1), {}
    for number in range(TARGET.num_layers):
        for name, (inputs, outputs) in SHAPES.items():
            tensors[f"{PREFIX}.{number}.{name}.lora_A.weight"] = matrix(rng, (RANK, inputs))
            tensors[f"{PREFIX}.{number}.{name}.lora_B.weight"] = matrix(rng, (outputs, RANK))
    modules = [name.partition(".")[2] for name in SHAPES]
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "target_modules": modules, "bias": "none"}
    return {**content, "use_dora": False, "rank_pattern": {}, "modules_to_save": None, **own}, tensors


def write(directory: Any, files: Files, mask: int | None = MASK) -> Any:
    """Writes a model's directory as it is published, with the adapter in `adapter`."""
    content, tensors = files
    inner = directory / "adapter"
    inner.mkdir(parents=True)
    (inner / "adapter_config.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, inner / "adapter_model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "mask_token_id": mask}))
    return directory


# Drafts


@pytest.mark.representatives("qwen3")
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_are_those_of_the_slow_reference(target, tmp_path):
    model = TARGETS[target], tiny.params(TARGETS[target])
    head = UnoConfig(TARGET, RANK, 2.0, (1, MASK))

    def logits_of(one: Round) -> np.ndarray:
        start = jnp.array([len(one.tokens) - 1])
        block = network.block(head, jnp.array([one.tokens[-1]]), start, tiny.K)
        return reference.uno_logits(*uno(), *model, one.tokens, np.asarray(block)[0, 1:].tolist())

    make = functools.partial(UnoDrafter, TARGETS[target], num_draft_tokens=tiny.K)
    assert furthest(rounds_of(write(tmp_path, uno()), make, target=TARGETS[target]), logits_of) < 2e-5


def test_the_first_draft_token_is_always_accepted():
    """Its distribution is the target's, and a whole draft without adapters and noise of its own still has it."""
    loop = tiny.loop(tiny.Combination("uno", "constant", "rejection"))
    state, _ = loop.begin(((1, 2, 3), (5,), (7, 1, 7)), 12)
    state, _ = loop.go_on(state)
    histogram = np.asarray(state.stats.acceptance_histogram)
    assert histogram.sum() > 6
    assert not histogram[:, 0].any()
    assert histogram[:, 1].any()


@pytest.mark.parametrize("name", ["uno", "uno-tree"])
def test_verification_runs_the_draft_tokens_only(name, monkeypatch):
    """The pending token has been run by the draft."""
    fed, real = [], llama.run_with_aux

    def spy(config, params, hidden, *given, **more):
        fed.append(hidden.shape[1])
        return real(config, params, hidden, *given, **more)

    def of_draft(config, params, hidden, start, cache, **more):
        ran = real(config, params, hidden, start, cache, (), **more)
        return ran.hidden, ran.cache

    monkeypatch.setattr(llama, "run_with_aux", spy)
    monkeypatch.setattr(llama, "run_layers", of_draft)
    loop = tiny.loop(tiny.Combination(name, "constant" if name == "uno" else "-", "block"))
    state, _ = jax.eval_shape(lambda: loop.begin(PROMPTS))
    fed.clear()
    arguments = (loop.weights, loop.parts, state, jnp.int32(1), jnp.zeros(len(PROMPTS), bool))
    jax.eval_shape(functools.partial(run_rounds, loop.config, window=tiny.CAPACITY), *arguments)
    assert fed == [loop.parts.drafter.num_nodes]


def test_a_single_pass_drafts_what_the_next_block_would(tmp_path):
    """Its rows are those of a block in which the pending token is noise."""
    head = heads.read_head(write(tmp_path, uno()), TARGET)
    weights = Weights(tiny.params(TARGET), head.load(np.float32))
    drafter, distribution = (
        UnoSinglePassDrafter(TARGET, head.config, num_draft_tokens=2),
        Sampling(jnp.full(len(PROMPTS), 2.0)),
    )
    parts = Parts(drafter, BlockAcceptor(), distribution)
    loop = tiny.Loop(parts, weights, TARGET)
    state, _ = loop.begin(PROMPTS, 12, capacity=64)
    accepted = 0
    for _ in range(5):
        before = state
        state, _ = loop.go_on(state, 1)
        logits = network.logits(weights.drafter, TARGET, weights.target, state.drafter_state.own)
        for row, length in enumerate(state.length.tolist()):
            if bool(state.done[row]):
                continue
            accepted += length - int(before.length[row]) - 1
            text = state.tokens[row, : length - 1].tolist()
            places = jnp.arange(length - 1, length + 1)
            noise = network.noise(head.config, jnp.full(2, text[-1]), places).tolist()
            expected = reference.uno_logits(*uno(), TARGET, tiny.params(TARGET), text, noise)[1:]
            np.testing.assert_allclose(logits[row], expected, atol=2e-4)
    assert accepted > 0


def test_a_round_reads_the_adapter_once():
    """In two passes with the model and its head; in a single pass with the head, which also runs in verification."""
    lm = tiny.language_model()
    drafter, params = tiny.drafter_of("uno")
    two = free_rows(lm, methods.Uno(), drafter, params)
    single = free_rows(lm, methods.Uno(single_pass=True), *tiny.drafter_of("uno-single-pass"))
    assert two.draft.once
    assert single.draft.once
    assert share_of_step(two.draft, lm.loaded) == pytest.approx(1 + tiny.share_of_step(lm, params["layers"]))
    assert share_of_step(single.draft, lm.loaded) == pytest.approx(
        tiny.share_of_step(lm, params["layers"], head=True)
    )
    drafter, params = tiny.drafter_of("uno-vocab")
    few = methods.Uno().cost(lm.loaded, drafter, params)
    assert share_of_step(few, lm.loaded) == pytest.approx(
        tiny.share_of_step(lm, (lm.params["layers"], params))
    )


def test_a_single_pass_takes_all_rounds():
    drafter, _ = tiny.drafter_of("uno-single-pass")
    with refused("give it all rounds, or two passes"):
        drafter.taking_turns()
    with refused("single_pass drafts a chain"):
        methods.Uno(single_pass=True, tree="8x4")


def test_noise_is_of_the_range_and_a_function_of_the_text():
    head = UnoConfig(TARGET, RANK, 2.0, (2, 5))
    place = jnp.arange(300)
    noise = np.asarray(network.noise(head, 0 * place + 7, place))
    assert sorted(set(noise.tolist())) == [2, 3, 4]
    assert np.bincount(noise).max() < 150
    assert (noise != np.asarray(network.noise(head, 0 * place + 8, place))).any()


def test_int8_weights_draft_with_the_same_adapters():
    """The adapters are added to the products of quantised weights."""
    target, head = tiny.params(TARGET), UnoConfig(TARGET, RANK, 2.0, (1, MASK))
    own, tokens = tiny.head_params(head), jnp.array([[5, 3, 4]])
    rows = []
    for params in (target, quantise(TARGET, target, 8)):
        cache = kv.create(TARGET, 1, 8, jnp.float32)
        hidden, _ = network.run_head(TARGET, params, head, own, tokens, jnp.array([0]), cache)
        rows.append(np.asarray(network.logits(own, TARGET, params, hidden))[0])
    embedded, cache = llama.embed(TARGET, target, tokens), kv.create(TARGET, 1, 8, jnp.float32)
    hidden, _ = llama.run_layers(TARGET, target, embedded, jnp.array([0]), cache)
    plain = np.asarray(network.logits(own, TARGET, target, hidden))[0]
    assert np.abs(rows[0] - rows[1]).max() < 0.25 < np.abs(rows[0] - plain)[1:].max()
    np.testing.assert_allclose(rows[0][0], plain[0], atol=1e-5)


# Trees


def test_a_tree_has_the_most_probable_paths_of_the_marginals(tmp_path):
    head = heads.read_head(write(tmp_path, uno()), TARGET)
    weights = Weights(tiny.params(TARGET), head.load(np.float32))
    tree = tiny.Dynamic(5, depth=3, width=5)
    drafter = UnoDrafter(TARGET, head.config, num_draft_tokens=3, tree=tree)
    acceptor = tiny.ACCEPTORS["greedy"]()
    loop = tiny.Loop(Parts(drafter, acceptor, tiny.Greedy()), weights, TARGET)
    prompt = (1, 2, 3, 5, 7)
    state, _ = loop.begin((prompt,), 12)
    proposal, _ = propose(loop.parts, weights, state, 1)
    text = state.tokens[0, : int(state.length[0])].tolist()
    block = network.block(head.config, jnp.array(text[-1:]), jnp.array([len(text) - 1]), 3)
    logits = reference.uno_logits(
        *uno(), TARGET, tiny.params(TARGET), text, np.asarray(block)[0, 1:].tolist()
    )
    shares = np.log(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    # The first token is certain in a greedy text.
    first = int(shares[0].argmax())
    scores = {(first,): 0.0}
    for second in range(TARGET.vocab_size):
        scores[first, second] = shares[1, second]
        for third in range(TARGET.vocab_size):
            scores[first, second, third] = shares[1, second] + shares[2, third]
    expected = sorted(scores, key=scores.__getitem__, reverse=True)[:5]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens[0, 0].tolist(), proposal.parents[0, 0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert sorted(paths) == sorted(expected)


# Files


def test_an_adapter_is_found_in_a_models_directory_and_by_itself(tmp_path):
    whole = heads.read_head(write(tmp_path, uno()), TARGET)
    inner = heads.read_head(tmp_path / "adapter", TARGET)
    assert whole.config == inner.config == UnoConfig(TARGET, RANK, 2.0, (1, MASK))
    assert heads.read_head(write(tmp_path / "x", uno(use_rslora=True), None), TARGET).config == UnoConfig(
        TARGET, RANK, 2 * math.sqrt(RANK), (1, TARGET.vocab_size)
    )


def test_the_published_adapter_has_the_shapes_of_qwen3_8b():
    config = dataclasses.replace(
        QWEN3, vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    found = {
        source.name: source.shape
        for _, _, sources in heads.head_leaves(network.usual(config))
        for source in sources
    }
    assert len(found) == 36 * 7 * 2
    assert found[f"{PREFIX}.35.self_attn.k_proj.lora_B.weight"] == (1024, 128)
    assert found[f"{PREFIX}.0.self_attn.o_proj.lora_A.weight"] == (128, 4096)
    assert found[f"{PREFIX}.7.mlp.down_proj.lora_A.weight"] == (128, 12288)
    assert round(sum(map(math.prod, found.values())) / 1e9, 2) == 0.35


def test_an_adapter_is_written_as_it_is_read(tmp_path):
    head = UnoConfig(TARGET, RANK, 1.5, (12, 13))
    params = tiny.head_params(head)
    write_head(tmp_path, head, params, "abc")
    found = heads.read_head(tmp_path, TARGET)
    assert (found.config, found.target) == (head, "abc")
    jax.tree.map(np.testing.assert_array_equal, found.load(np.float32), params)


NAME = f"{PREFIX}.1.self_attn.k_proj.lora_B.weight"
BAD = {
    "is for a model of 4 layers and width 16, the target has 2 and 16": (uno(), tiny.TARGET),
    "is for a model of 4 layers and width 16, the target has 4 and 24": (
        uno(),
        dataclasses.replace(TARGET, hidden_size=24),
    ),
    "layers.0.self_attn.k_proj.lora_B.weight has shape \\(8, 3\\), expected \\(16, 3\\)": (
        uno(),
        dataclasses.replace(TARGET, num_kv_heads=4),
    ),
    f"tensor {NAME} is missing": (with_tensors(uno(), **{NAME: None}), TARGET),
    "embed_tokens.lora_A.weight has no place in an uno head": (
        with_tensors(uno(), **{"base_model.model.model.embed_tokens.lora_A.weight": np.ones((3, 16))}),
        TARGET,
    ),
    "use_dora is True; adapters with it are not supported": (with_config(uno(), use_dora=True), TARGET),
    "rank_pattern is {'q_proj': 8}; adapters": (with_config(uno(), rank_pattern={"q_proj": 8}), TARGET),
    "lora_alpha is None; expected a number": (with_config(uno(), lora_alpha=None), TARGET),
    "the noise tokens are 5 to 12; expected tokens of the target, 0 to 8": (
        with_config(uno(), jaxspec={"noise": [5, 13]}),
        dataclasses.replace(TARGET, vocab_size=9),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, message):
    files, target = BAD[message]
    with refused(message):
        heads.read_head(write(tmp_path, files), target)


def test_an_adapter_drafts_by_the_name_of_its_method(model, tmp_path):
    path = write(tmp_path / "published", uno())
    made, _ = model.drafter("uno", draft=str(path), num_draft_tokens=3)
    assert (made.num_draft_tokens, made.verify_widths, made.head.noise) == (3, (4,), (1, MASK))
    with refused("holds a head of uno; choose method='uno'"):
        model.drafter("eagle3", draft=str(path))


# Training

STEPS = 4
OPTIONS = HeadOptions(lora_rank=RANK, block_sizes=(2, 4), block_steps=10)


def begun() -> tuple[kinds.Kind, Any, Any]:
    kind = kinds.KINDS["uno"]
    net, params = kind.init(OPTIONS, TARGET, tiny.params(TARGET), None, 0)
    return kind, net, params


def test_each_step_is_what_the_drafter_says_after_the_texts_own_tokens(batch):
    _, net, _ = begun()
    net = dataclasses.replace(net, head=dataclasses.replace(net.head, noise=(1, 12)))
    params, target = tiny.head_params(net.head), tiny.params(TARGET)
    _, found = run(net, params, batch, STEPS)

    @jax.jit
    def expected(tokens: jax.Array, t: jax.Array) -> jax.Array:
        """Returns the logits of a block whose pending token is t + 1."""
        cache, zero = kv.create(TARGET, 1, 24, jnp.float32), jnp.zeros(1, jnp.int32)
        _, cache = llama.run_layers(TARGET, target, llama.embed(TARGET, target, tokens[None]), zero, cache)
        start = t[None] + 1
        block = network.block(net.head, tokens[start], start, STEPS)
        hidden, _ = network.run_head(TARGET, target, net.head, params, block, start, cache)
        return network.logits(params, TARGET, target, hidden)[0]

    compared = 0
    for row, first, tokens in documents_of(batch):
        padded = jnp.pad(tokens, (0, 12 - len(tokens)))
        for t in range(len(tokens) - 1 - STEPS):
            np.testing.assert_allclose(found[:, row, first + t], expected(padded, jnp.int32(t)), atol=2e-5)
            compared += 1
    assert compared > 8


def test_the_loss_is_the_l1_distance_at_the_same_position(batch):
    """By the slow reference, with one noise token, for blocks of the second size."""
    kind, net, _ = begun()
    params, target = tiny.head_params(net.head), tiny.params(TARGET)
    files = _files(net.head, params)
    loss = kind.loss(net, OPTIONS, None)
    given = Given(jnp.int32(10), jax.random.key(4), target)
    (total, count), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, given)
    shifts = jax.random.randint(jax.random.split(given.key)[0], (len(batch["tokens"]), 1), 0, 3)
    wanted, rows = 0.0, 0
    for row, first, tokens in documents_of(batch):
        text, shift = tokens.tolist(), int(shifts[row, 0])
        clean = distribution_of(slow.forward(TARGET, target, text))
        for at in range(len(text) - 1):
            last = (at + shift) // 3 * 3 - shift - 1
            if last < 0 or not batch["learn"][row, first + at + 1]:
                continue
            noise = [TARGET.vocab_size - 1] * (at - last)
            found = distribution_of(reference.uno_logits(*files, TARGET, target, text[: last + 1], noise))[-1]
            wanted += np.abs(clean[at] - found).sum()
            rows += 1
    assert rows > 8
    assert (float(total), int(count)) == (pytest.approx(wanted, rel=1e-4), rows)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 0, path


def _files(head: UnoConfig, params: Any) -> Files:
    """Returns an adapter in its published form."""
    tensors = {}
    for leaf, (_, _, sources) in zip(jax.tree.leaves(params), heads.head_leaves(head), strict=True):
        for one in sources:
            tensors[one.name] = np.asarray(leaf).reshape(one.split)[one.index].reshape(one.shape)
    return {"r": head.rank, "lora_alpha": head.alpha}, tensors


@pytest.mark.full
def test_the_loss_falls_and_only_the_adapters_are_trained(own_text):
    kind, net, params = begun()
    target, loss = tiny.params(TARGET), kind.loss(net, OPTIONS, None)
    measured = measure.make_measure(net, loss, target, "float32")
    optimizer = optax.adam(2e-2)

    @jax.jit
    def train(params):
        def step(carry, number):
            params, state = carry
            given = Given(number, jax.random.fold_in(jax.random.key(1), number), target)
            gradient = jax.grad(lambda params: loss(params, own_text, given)[0] / own_text["learn"].sum())(
                params
            )
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(60))[0][0]

    before, after = (measured(one, {"x": [own_text]}, {"x": 1.0}) for one in (params, train(params)))
    assert after["held_out_loss"] < 0.8 * before["held_out_loss"]
    assert before["acceptance/1"] == after["acceptance/1"] == 1
    assert after["acceptance/2"] > before["acceptance/2"]
    assert after["mean_acceptance_length"] > before["mean_acceptance_length"]
