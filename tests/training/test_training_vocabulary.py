"""Drafts over a part of the vocabulary and frozen embeddings: losses, figures, and the commands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.language_model import load
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import vocabulary_file
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests.training.test_training_run import arguments, best_of, losses_of, metrics, one_error
from training import sft, soft
from training.loop import optimizer, step
from training.losses import base
from training.losses import exits as exit_losses
from training.reports import evaluation

CONFIG = LlamaConfig(31, 8, 12, 2, num_heads=2, num_kv_heads=1, head_dim=4, tie_embeddings=True)
PART = np.array([1, 4, 5, 9, 12, 17, 18, 22, 30], np.int32)


@pytest.fixture(scope="module")
def params():
    return llama.init_params(CONFIG, jax.random.key(1), scale=2.0)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "tokens": jnp.asarray(rng.choice([*PART, 0, 2, 7, 29], (3, 14)), jnp.int32),
        "segments": jnp.ones((3, 14), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(14), (3, 14)),
        "learn": jnp.asarray(rng.random((3, 14)) > 0.2),
    }


def given(target=None) -> base.Given:
    return base.Given(jnp.int32(0), jax.random.key(0), target)


def distributions(config, params, batch, layers: int) -> np.ndarray:
    """The distribution after each position, float64[B, T, V]."""
    hidden = base.layer_outputs(config, params, batch)[layers - 1]
    return np.asarray(jax.nn.softmax(llama.logits(config, params, hidden), axis=-1), np.float64)


@pytest.mark.full
def test_the_text_loss_is_that_of_tokens_in_the_part(params, batch):
    total, weight = base.next_token(CONFIG, part=PART)(params, batch, given())
    targets, mask = map(np.asarray, base.next_token_targets(batch))
    restricted = distributions(CONFIG, params, batch, 2)[..., PART]
    restricted /= restricted.sum(axis=-1, keepdims=True)
    wanted, count = 0.0, 0
    for at in np.argwhere(mask):
        target = targets[tuple(at)]
        if target in PART:
            wanted -= np.log(restricted[tuple(at)][list(PART).index(target)])
            count += 1
    assert 0 < count < mask.sum()
    assert (float(total), float(weight)) == (pytest.approx(wanted, rel=1e-4), count)


@pytest.mark.full
def test_distillation_weighs_each_position_by_what_the_target_gives_the_part(params, batch):
    target = llama.init_params(CONFIG, jax.random.key(2), scale=2.0)
    loss = exit_losses.soft_loss(CONFIG, (1, 2), target=CONFIG, distil_weight=1.0, part=PART)
    p = distributions(CONFIG, target, batch, 2)[..., PART]
    mask = np.asarray(base.next_token_targets(batch)[1])
    wanted = 0.0
    for layers in (1, 2):
        q = distributions(CONFIG, params, batch, layers)[..., PART]
        q, inside = q / q.sum(axis=-1, keepdims=True), p.sum(axis=-1)
        divergence = np.sum(p / inside[..., None] * np.log(p / inside[..., None] / q), axis=-1)
        wanted += np.sum(mask * inside * divergence) / 2
    assert float(loss(params, batch, given(target))[0]) == pytest.approx(wanted, rel=1e-4)
    whole = exit_losses.soft_loss(CONFIG, (1, 2), target=CONFIG, distil_weight=1.0)
    all_tokens = exit_losses.soft_loss(CONFIG, (1, 2), target=CONFIG, distil_weight=1.0, part=np.arange(31))
    for one, other in zip(*(loss(params, batch, given(target)) for loss in (whole, all_tokens)), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-5)


def test_a_target_outside_the_part_is_a_miss(params, batch):
    measured = evaluation.make_measure(CONFIG, "float32", (1,), (1,), (CONFIG, params), PART)(
        params, {"a": [batch]}, {"a": 1.0}
    )
    mask = np.asarray(base.next_token_targets(batch)[1])
    chosen = distributions(CONFIG, params, batch, 2).argmax(axis=-1)
    drafted = PART[distributions(CONFIG, params, batch, 1)[..., PART].argmax(axis=-1)]
    assert measured["acceptance/1"] == pytest.approx((mask & (drafted == chosen)).sum() / mask.sum())
    assert not set(chosen[mask]) <= set(PART.tolist())
    total, weight = exit_losses.soft_loss(CONFIG, (1,), part=PART)(params, batch, given())
    assert measured["held_out_loss"] == pytest.approx(float(total / weight), rel=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_held_stays_and_has_no_moments(kind, tied, batch):
    config = LlamaConfig(31, 8, 12, 1, num_heads=2, num_kv_heads=1, head_dim=4, tie_embeddings=tied)
    start = llama.init_params(config, jax.random.key(0))
    before = jax.tree.map(np.array, start)
    transform = optimizer.make_optimizer(optimizer.OptimizerOptions(kind, warmup=1), 10, ("embed", "head"))
    state = step.init_state(start, transform)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.opt_state)}
    assert before["embed"].shape not in shapes
    step_fn = step.make_step(base.holding(base.next_token(config), ("embed", "head")), transform, 0)
    for _ in range(2):
        state, measured = step_fn(state, {name: array[None] for name, array in batch.items()})
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, state.params)
    assert not any(moved.pop(name) for name in ("embed", "head") if name in moved)
    assert all(jax.tree.leaves(moved))
    assert float(measured["gradient_norm"]) > 0


# The commands


@pytest.fixture(scope="module")
def folder(folder):
    """A target of two layers, its text, and rankings of its tokens."""
    shape = arguments(folder, "target", "--layers", "2", "--steps", "5")
    assert sft.main(shape) == 0
    size = huggingface.read_config(folder / "target").vocab_size
    for name, tokens in (("part", size - 40), ("other", size - 50)):
        ranking = vocabulary_file.Ranking((0, 1), tuple(range(tokens - 1, 1, -1)), 99, size)
        ranking.write(folder / f"{name}.json", "some target", {})
    return folder


@pytest.mark.full
@pytest.mark.representatives("sft")
@pytest.mark.parametrize("job", ["soft", "sft"])
def test_a_draft_over_a_part_of_the_vocabulary_is_trained_and_resumed(folder, job, capsys):
    """Cut from its target with the target's embedding; 10 steps at once are 1 and 9; another part is refused."""
    target, part = str(folder / "target"), str(folder / "part.json")
    more = ["--start", target, "--draft-vocab", part, "--freeze-embeddings", "--steps", "10"]
    if job == "soft":
        more += ["--exits", "1", "--target", target, "--distil-weight", "1"]
    else:
        more += ["--start-layers", "1"]
    main = {"soft": soft, "sft": sft}[job].main
    assert main(arguments(folder, f"{job}-whole", *more)) == 0
    killed = arguments(folder, f"{job}-parts", *more)
    assert main([*killed, "--minutes", "1e-9"]) == 0
    assert main(killed) == 0
    got, wanted = (losses_of(metrics(folder, f"{job}-{name}")) for name in ("parts", "whole"))
    assert got[1:9] == wanted[1:9]
    given = huggingface.load_params(
        folder / "target", huggingface.read_config(folder / "target"), jnp.float32
    )
    np.testing.assert_array_equal(best_of(folder, f"{job}-whole")[0]["embed"], given["embed"])
    # The draft carries its tokens, its exits and its target, which it needs for drafting without options.
    config = huggingface.read_config(folder / f"{job}-whole")
    carried = huggingface.read_trained_for(folder / f"{job}-whole", config)
    whole = load(target)
    tokens, fingerprint = tuple(range(config.vocab_size - 40)), whole.fingerprint
    wanted = TrainedFor((1,), tokens, target=fingerprint) if job == "soft" else TrainedFor((), tokens)
    assert carried == wanted
    _, params = whole.drafter("draft-model", draft=str(folder / f"{job}-whole"))
    assert len(params["vocabulary"].ids) == len(tokens)
    capsys.readouterr()
    assert main([*killed, "--draft-vocab", str(folder / "other.json")]) == 2
    assert "a run with --draft-vocab" in one_error(capsys, f"training.{job}")
    assert main([*killed, "--no-freeze-embeddings"]) == 2
    assert "a run with --freeze-embeddings True" in one_error(capsys, f"training.{job}")


@pytest.mark.full
def test_embeddings_of_a_model_from_scratch_are_not_held(capsys):
    assert sft.main(["--data", "a", "--run", "r", "--freeze-embeddings"]) == 2
    assert "--freeze-embeddings is for a given model" in one_error(capsys)
