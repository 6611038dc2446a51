"""Training of Medusa, Hydra, Kangaroo and DFlash heads: the predictions, the losses by hand, and the files."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec
from jaxspec.heads import files as heads
from jaxspec.heads.dflash import network as dflash
from jaxspec.heads.dflash.drafter import DFlashDrafter
from jaxspec.heads.dspark.drafter import DSparkDrafter
from jaxspec.heads.hydra import network as hydra
from jaxspec.heads.hydra.drafter import HydraDrafter
from jaxspec.heads.kangaroo import network as kangaroo
from jaxspec.heads.kangaroo.drafter import KangarooDrafter
from jaxspec.heads.medusa import network as medusa
from jaxspec.heads.medusa.drafter import MedusaDrafter
from jaxspec.heads.writer import write_head
from jaxspec.io.hf import huggingface
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.protocol import Weights
from tests import refused, tiny
from tests.heads.test_training_heads import (
    TARGET,
    arguments,
    distribution_of,
    documents_of,
    layer_names,
    run,
)
from training.heads import kinds
from training.heads import measure as drafts
from training.heads import train as command
from training.heads.head_type import HeadOptions
from training.losses import base
from training.losses.base import Given
from training.reports import metrics

SIZE = TARGET.vocab_size
OPTIONS = {
    "medusa": HeadOptions(num_heads=3),
    "medusa-shared": HeadOptions(num_heads=3, shared_head=True),
    "hydra": HeadOptions(num_heads=3),
    "kangaroo": HeadOptions(exit_layer=3),
    "dflash": HeadOptions(num_layers=2, block_size=4, num_anchors=16, aux_layers=(1, 3)),
    "dspark": HeadOptions(num_layers=2, block_size=3, num_anchors=16, aux_layers=(1, 3), markov_rank=4),
}
STEPS = 3
# These learn the target's distribution, not the text.
DISTILLED = ("kangaroo", "dflash", "dspark")


def begun(name: str, target: Any = TARGET) -> tuple[kinds.Kind, Any, Any]:
    """Returns a head type, its network and its initial parameters."""
    kind = kinds.KINDS[name.partition("-")[0]]
    network, params = kind.init(OPTIONS[name], target, tiny.params(target), None, 0)
    return kind, network, params


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("dflash", "dspark")])
def test_a_head_begins_with_what_the_target_says(name, batch):
    """Its blocks are the identity and its matrix is the target's; Kangaroo's attention writes nothing."""
    _, network, params = begun(name)
    (seen, _, _), logits = run(network, params, batch, STEPS)
    target = tiny.params(TARGET)
    whole = network.target
    for step in range(STEPS):
        if name == "kangaroo":
            there = np.roll(seen.aux_hidden_states, -1 - step, axis=1)
            expected = llama.logits(whole, target, there)
        else:
            expected = seen.aux_hidden_states @ target["head"].T
        np.testing.assert_allclose(logits[step], expected, atol=1e-5)


def test_an_adapter_needs_an_early_exit():
    with refused("the target has one layer; choose another kind"):
        begun("kangaroo", dataclasses.replace(TARGET, num_layers=1))


def drafter_of(name: str, network: Any) -> Any:
    if name == "kangaroo":
        return KangarooDrafter(TARGET, network.head, 3, num_draft_tokens=STEPS)
    made = {"hydra": HydraDrafter, "dflash": DFlashDrafter, "dspark": DSparkDrafter}.get(name, MedusaDrafter)
    return made(TARGET, network.head, num_draft_tokens=STEPS)


def said_by_the_decoder(name: str, network: Any, params: Any) -> Any:
    """Returns (tokens, t) → logits of the drafter's functions after t + 2 tokens, if the drafts are the text."""
    target, drafter = tiny.params(TARGET), drafter_of(name, network)
    weights, zero = Weights(target, params), jnp.zeros(1, jnp.int32)

    @jax.jit
    def said(tokens: jax.Array, t: jax.Array) -> jax.Array:
        cache = kv.create(TARGET, 1, 16, jnp.float32, merged=True)
        embedded = llama.embed(TARGET, target, tokens[None])
        aux_hidden_states = llama.run_with_aux(TARGET, target, embedded, zero, cache, network.aux_layers)[1]
        own = drafter.begin(weights, t[None] + 2, 16, merged=True)
        own = drafter.absorb(
            weights, own, aux_hidden_states, jnp.roll(tokens[None], -1, axis=1), zero, t[None] + 1
        )

        def fed(values: jax.Array) -> jax.Array:
            """Returns the tokens that are fed: the pending one and the drafts after it."""
            return jax.lax.dynamic_slice_in_dim(values, t + 1, STEPS, axis=1)

        if name == "kangaroo":
            hidden, _ = kangaroo.run_head(network.head, params, fed(aux_hidden_states), t[None] + 1, own)
            return kangaroo.logits(network.head, params, TARGET, target, hidden)[0]
        if name in ("dflash", "dspark"):
            head, before = network.head, fed(tokens[None])
            block = jnp.where(jnp.arange(head.block_size) > 0, head.mask_id, before[:, :1])
            rows = llama.embedding_rows(target, block)
            hidden = dflash.run_head(head, params, rows, t[None] + 1, own)[0][0, head.first :]
            logits = dflash.logits(head, params, TARGET, target, hidden)
            return drafter.given(params, logits, hidden, before[0])[0]
        if name == "hydra":
            read = jnp.concatenate([own.hidden[:, None], fed(embedded)], axis=1)
            rows = [hydra.logits(network.head, params, step, read[:, : step + 2])[0] for step in range(STEPS)]
            return jnp.stack(rows)
        return medusa.logits(network.head, params, TARGET, target, own)[0]

    return said


@pytest.mark.representatives("medusa", "dspark")
@pytest.mark.parametrize("name", OPTIONS)
def test_each_step_is_what_the_drafter_says_after_the_texts_own_tokens(name, batch):
    _, network, _ = begun(name)
    params = tiny.head_params(network.head)
    _, found = run(network, params, batch, STEPS)
    said, compared = said_by_the_decoder(name, network, params), 0
    for row, first, tokens in documents_of(batch):
        padded = jnp.pad(tokens, (0, 12 - len(tokens)))
        for t in range(len(tokens) - 1 - STEPS):
            expected = said(padded, jnp.int32(t))
            np.testing.assert_allclose(found[:, row, first + t], expected, atol=2e-5)
            compared += 1
    assert compared > 8


@pytest.mark.representatives("medusa", "dspark")
@pytest.mark.parametrize("name", ["medusa", "hydra", "kangaroo", "dflash", "dspark"])
def test_the_loss_is_the_papers(name, batch):
    """Medusa and Hydra learn the text's tokens, token k with weight 0.8^k; the others the target's distribution.

    DSpark learns its acceptance too.
    """
    kind, network, _ = begun(name)
    params = tiny.head_params(network.head)
    loss = kind.loss(network, OPTIONS[name], None)
    given = Given(jnp.int32(0), jax.random.key(0), tiny.params(TARGET))
    (total, count), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, given)
    steps = 1 if name == "kangaroo" else STEPS
    (_, wanted_logits, outputs), logits = run(network, params, batch, steps)
    shares = np.array([0.8**step for step in range(steps)])
    wanted, rows = 0.0, 0
    for row, first, tokens in documents_of(batch):
        for t in range(len(tokens)):
            for step in range(steps):
                told = t + 2 + step
                if told < len(tokens) and batch["learn"][row, first + told]:
                    distribution = np.log(distribution_of(logits[step, row, first + t]))
                    said = np.eye(SIZE)[tokens[told]]
                    if name in DISTILLED:
                        said = distribution_of(wanted_logits[row, first + told - 1])
                    wanted -= shares[step] / shares.sum() * (said @ distribution)
                    rows += step == 0
                    if name == "dspark":
                        hidden, before = np.split(outputs[step][row, first + t], [TARGET.hidden_size])
                        scale = np.sqrt(np.mean(hidden**2) + TARGET.rms_norm_eps)
                        read = np.concatenate([hidden / scale * params["norm"], before])
                        predicted = 1 / (
                            1 + np.exp(-(params["confidence"][0] @ read + params["confidence_bias"][0]))
                        )
                        accepted = np.minimum(said, np.exp(distribution)).sum()
                        crossed = accepted * np.log(predicted) + (1 - accepted) * np.log(1 - predicted)
                        wanted -= shares[step] / shares.sum() * crossed
    assert (float(total), int(count)) == (pytest.approx(wanted, rel=1e-4), rows)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 0, path


def test_the_loss_in_pieces_of_positions_is_the_same(monkeypatch, batch):
    """A head that reads the target's output matrix: no array has the logits of all positions."""
    kind, network, _ = begun("kangaroo")
    params, shape = tiny.head_params(network.head), batch["tokens"].shape
    given = Given(jnp.int32(0), jax.random.key(0), tiny.params(TARGET))

    def graded(params):
        loss = kind.loss(network, OPTIONS["kangaroo"], None)
        return jax.value_and_grad(loss, has_aux=True)(params, batch, given)

    whole = jax.jit(graded)(params)
    monkeypatch.setattr(base, "_MAX_LOGITS", shape[1] * SIZE // 2)
    # JAX keeps what it traced of a function.
    again = str(jax.make_jaxpr(lambda params: graded(params))(params))
    assert f"[{shape[0]},{shape[1]},{SIZE}]" not in again
    divided = jax.jit(lambda params: graded(params))(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), divided, whole)


@pytest.mark.representatives("kangaroo")
@pytest.mark.parametrize("name", OPTIONS)
def test_acceptance_rises(name, own_text):
    kind, network, params = begun(name)
    target, loss = tiny.params(TARGET), kind.loss(network, OPTIONS[name], None)
    measure = drafts.make_measure(network, loss, target, "float32")
    given, optimizer = Given(jnp.int32(0), jax.random.key(0), target), optax.adam(1e-2)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            gradient = jax.grad(lambda params: loss(params, own_text, given)[0] / own_text["learn"].sum())(
                params
            )
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=60)[0][0]

    before, after = (measure(one, {"x": [own_text]}, {"x": 1.0}) for one in (params, train(params)))
    assert after["held_out_loss"] < before["held_out_loss"]
    assert after["mean_acceptance_length"] > before["mean_acceptance_length"] + 0.5
    for position in range(1, STEPS + 1):
        assert after[f"acceptance/{position}"] > before[f"acceptance/{position}"]
    # As many as draft.
    assert ("acceptance/4" in after) == (name == "kangaroo")


# Files

NAMES = {
    "medusa": {"blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "lm_heads.0.weight"},
    "medusa-shared": {"0.0.linear.weight", "0.0.linear.bias"},
    "hydra": {
        "hydra_mlp.0.0.linear.weight",
        "hydra_mlp.0.0.linear.bias",
        "hydra_mlp.0.0.res_connection.weight",
        "hydra_mlp.0.0.res_connection.bias",
        "hydra_lm_head.0.weight",
        "hydra_lm_head.0.bias",
    },
    "kangaroo": {
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        "layers.0.input_layernorm.weight",
        "norm.weight",
    },
    "dflash": {"fc.weight", "hidden_norm.weight", "norm.weight"}.union(
        *(
            layer_names(f"layers.{at}", "self_attn.q_norm", "self_attn.k_norm", "input_layernorm")
            for at in range(2)
        )
    ),
}
NAMES["dspark"] = NAMES["dflash"] | {
    *(f"markov_head.markov_w{number}.weight" for number in (1, 2)),
    *(f"confidence_head.proj.{name}" for name in ("weight", "bias")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_head_is_written_as_it_is_published_and_read_back_as_it_was(name, tmp_path):
    _, network, _ = begun(name)
    params = tiny.head_params(network.head)
    write_head(tmp_path, network.head, params, "abc", None, jnp.dtype("bfloat16"))
    names = set(huggingface.open_tensors(tmp_path, integers=True))
    assert NAMES[name] <= names
    assert len(names) == len(NAMES[name]) * (1 if name in DISTILLED else 3)
    found = heads.read_head(tmp_path, TARGET)
    assert (found.config, found.target) == (network.head, "abc")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.load(np.float32), rounded))


def test_a_vocabulary_is_eagle3s_alone(tmp_path):
    _, network, params = begun("medusa")
    with refused("a head of medusa has the vocabulary of its target; leave ids out"):
        write_head(tmp_path / "x", network.head, params, "abc", np.arange(3))


# The command


OWN = {
    "kangaroo": "",
    "uno": "--lora-rank 4 --block-sizes 2 4 --block-steps 2",
    "dflash": "--num-layers 1 --block-size 3 --num-anchors 24",
    "dspark": "--num-layers 1 --block-size 2 --num-anchors 24 --markov-rank 8",
}


def typed(folder, name: str, *more: str, kind: str) -> list[str]:
    """Returns the words of a command; other kinds than EAGLE's have options of their own, and no `--test-steps`."""
    if kind.startswith("eagle"):
        return arguments(folder, name, *more, kind=kind)
    given = arguments(folder, name, *OWN.get(kind, "--num-heads 2").split(), *more, kind=kind)
    at = given.index("--test-steps")
    return [*given[:at], *given[at + 2 :]]


@pytest.mark.full
@pytest.mark.representatives("dspark")
@pytest.mark.parametrize("kind", ["medusa", "hydra", "kangaroo", "uno", "dflash", "dspark"])
def test_a_stopped_run_resumes_exactly_and_the_head_drafts(folder, kind):
    assert command.main(typed(folder, f"{kind}-whole", "--steps", "6", kind=kind)) == 0
    given = typed(folder, f"{kind}-stopped", "--steps", "6", "--card-prompts", "0", kind=kind)
    assert command.main([*given, "--minutes", "1e-9"]) == 0
    assert len(metrics.read_metrics(folder / f"run-{kind}-stopped")) == 1
    assert command.main(given) == 0
    whole, stopped = (metrics.read_metrics(folder / f"run-{kind}-{how}") for how in ("whole", "stopped"))
    assert [record["loss"] for record in whole] == [record["loss"] for record in stopped]
    assert stopped[-1]["held_out_loss"] < stopped[0]["held_out_loss"]
    files = [(folder / f"{kind}-{how}" / "model.safetensors").read_bytes() for how in ("whole", "stopped")]
    assert files[0] == files[1]
    # The decoder has drafted with the written head.
    card = (folder / f"{kind}-whole" / "README.md").read_text()
    assert f"--method {kind}" in card
    assert "| token 1 | token 2 |" in card
    assert ("Tokens per round by the length of the draft:" in card) == (kind == "uno")
    lm = jaxspec.load(folder)
    assert heads.read_head(folder / f"{kind}-whole", lm.config).target == lm.fingerprint


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("eagle", "--draft-vocab-size 9", "a head of eagle has no option --draft-vocab-size; leave it out"),
        ("eagle", "--aux-layers 1 --exit-layer 2", "eagle has no option --aux-layers, --exit-layer"),
        ("eagle", "--num-heads 0", "--num-heads is 0; give a whole number of at least 1"),
        ("eagle", "--test-steps 0", "--test-steps is 0; give a whole number of at least 1"),
        ("eagle", "--step-decay 0", "--step-decay is 0.0; give a number above 0, and at most 1"),
        ("eagle", "--card-tokens 1", "--card-tokens is 1; give a whole number of at least 2"),
        (
            "eagle3",
            "--aux-layers 9",
            "--aux-layers is (9,); the target has 4 layers: give numbers from 0 to 4",
        ),
        ("eagle3", "--draft-vocab-size 999", "--draft-vocab-size is 999; the target has 300"),
        ("medusa", "--aux-layers 1", "a head of medusa has no option --aux-layers; leave it out"),
        ("hydra", "--shared-head", "a head of hydra has no option --shared-head; leave it out"),
        ("kangaroo", "--exit-layer 4", "--exit-layer is 4; the target has 4 layers: give a number from 1"),
        ("dflash", "--aux-layers 4", "other than the last, and the target has 4 layers: give numbers from"),
        ("dflash", "--block-size 1", "--block-size is 1; give a whole number of at least 2"),
    ],
)
def test_wrong_options_are_one_line(folder, kind, more, said, capsys):
    assert command.main(typed(folder, "wrong", "--steps", "1", *more.split(), kind=kind)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("training.heads: error: ")
    assert said in error
    assert not (folder / "wrong").exists()
