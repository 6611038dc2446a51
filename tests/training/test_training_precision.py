"""Precision and memory of a training step, and the recipes of the papers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.io.hf import huggingface
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.quantisation import is_quantised
from training import soft
from training.data import bpe_tokenizer, reading
from training.loop import optimizer, state_sharding, step
from training.losses import base
from training.option_files import parse
from training.reports import metrics

RECIPES = Path(soft.__file__).with_name("recipes") / "papers"
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))
NAMED = ("Tim", "Sam", "Ann", "Ben", "Lily", "Max")
WIDE = LlamaConfig(64, 128, 256, 2, 2, 1, 64)
BATCH = {
    "tokens": np.arange(32, dtype=np.int32).reshape(1, 1, 32) * 7 % 64,
    "segments": np.ones((1, 1, 32), np.int32),
    "positions": np.arange(32, dtype=np.int32).reshape(1, 1, 32),
    "learn": np.ones((1, 1, 32), bool),
}


def trained(steps: int = 8, weights: str = "float32", **options):
    """The state after a few steps on one batch, and the losses."""
    given = optimizer.OptimizerOptions(**{"learning_rate": 1e-3, "warmup": 1, **options})
    transform = optimizer.make_optimizer(given, 100)
    state = step.init_state(llama.init_params(WIDE, jax.random.key(0), dtype=weights), transform)
    advance, losses = step.make_step(base.next_token(WIDE), transform, 0), []
    for _ in range(steps):
        state, measured = advance(state, BATCH)
        losses.append(float(measured["loss"]))
    return state, losses


def dtypes(tree) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if leaf.ndim}


def size(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_weights_in_bfloat16_follow_those_in_float32():
    """Updates are far smaller than the distance between two bfloat16 numbers, and are kept in the mean."""
    exact, losses = trained(learning_rate=2e-5)
    kept, others = trained(learning_rate=2e-5, weights="bfloat16")
    assert dtypes(kept.params) == {"bfloat16"}
    assert dtypes(kept.opt_state) == {"float32"}
    assert others[-1] - others[0] == pytest.approx(losses[-1] - losses[0], rel=0.2)

    def change(params, dtype):
        before = llama.init_params(WIDE, jax.random.key(0), dtype=dtype)
        now, began = (np.float32(one["layers"][0]["mlp"]["down"]) for one in (params, before))
        return now - began

    # Rounding to the nearest would change nearly nothing.
    wanted, found = change(exact.params, "float32"), change(kept.params, "bfloat16")
    assert np.mean(found * np.sign(wanted)) == pytest.approx(np.mean(np.abs(wanted)), rel=0.2)


def test_moments_in_bfloat16_and_adafactor_take_less_memory_and_learn():
    plain, losses = trained()
    parameters = size(plain.params)
    assert size(plain.opt_state) == pytest.approx(2 * parameters, rel=0.01)
    half, halved = trained(moments="bfloat16")
    assert dtypes(half.opt_state) == {"float32", "bfloat16"}
    assert size(half.opt_state) == pytest.approx(1.5 * parameters, rel=0.01)
    few, factored = trained(algorithm="adafactor", weight_decay=0.1)
    assert (
        size(few.opt_state) < 0.2 * parameters
    )  # nearly all of it is the embedding, which is too small to factor
    fall = losses[0] - losses[-1]
    assert fall > 0.2
    assert halved[0] - halved[-1] == pytest.approx(fall, rel=0.05)
    assert 0.5 * fall < factored[0] - factored[-1] < 2 * fall


def test_a_policy_recomputes_less_and_changes_no_gradient():
    params = llama.init_params(WIDE, jax.random.key(0))
    batch = jax.tree.map(lambda leaf: leaf[0], BATCH)
    given = base.Given(jnp.int32(0), jax.random.key(0))

    def gradient(remat):
        return jax.grad(lambda p: base.next_token(WIDE, remat)(p, batch, given)[0])

    counts, gradients = [], []
    for remat in (False, "dots_saveable", "dots_with_no_batch_dims_saveable", True):
        counts.append(str(jax.make_jaxpr(gradient(remat))(params)).count("dot_general"))
        gradients.append(jax.jit(gradient(remat))(params))
    assert counts[0] == counts[1] < counts[2] < counts[3]
    for other in gradients[1:]:
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
        jax.tree.map(compare, gradients[0], other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text and a model of its vocabulary."""
    folder = tmp_path_factory.mktemp("precision")
    stories = [f"{name} saw a {thing}." for name in NAMED for thing in ("ball", "tree", "dog", "car", "hat")]
    (folder / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(stories * 6))
    words = bpe_tokenizer.train(stories, 300)
    config = dataclasses.replace(
        WIDE, vocab_size=words.get_vocab_size(), eos_token_ids=(bpe_tokenizer.EOS_ID,)
    )
    config = dataclasses.replace(config, bos_token_id=bpe_tokenizer.BOS_ID)
    huggingface.save(folder, config, llama.init_params(config, jax.random.key(1)))
    bpe_tokenizer.save(words, folder, config.context_length)
    return folder


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    size = "--window 16 --batch 2 --accumulate 2 --held-out 4 --steps 4 --every 2 --samples 0 --exits 2"
    small = "--weights bfloat16 --moments bfloat16 --remat-policy dots_saveable --target-weights int8 --distil-weight 1"
    paths = {"--data": "text.txt", "--start": ".", "--target": ".", "--run": name}
    named = [word for option, place in paths.items() for word in (option, str(folder / place))]
    return [*named, *size.split(), *small.split(), *more]


@pytest.mark.full
def test_a_run_with_all_of_it_resumes_exactly(folder):
    assert soft.main(arguments(folder, "whole")) == 0
    assert soft.main(arguments(folder, "halves", "--minutes", "1e-9")) == 0
    assert len(metrics.read_metrics(folder / "halves")) == 1
    assert soft.main(arguments(folder, "halves")) == 0
    whole, halves = (
        [one["loss"] for one in metrics.read_metrics(folder / name)] for name in ("whole", "halves")
    )
    assert whole == halves
    # The target begins as the draft, so the divergence is that of its rounding.
    assert 1e-6 < whole[0] < 0.01


def test_a_target_in_int8_has_the_fingerprint_of_its_model(folder):
    mesh, config = state_sharding.make_mesh(), huggingface.read_config(folder)
    load = functools.partial(state_sharding.load_target, mesh, folder, config)
    (plain, fingerprint), (small, same) = load("auto", "float32"), load("int8", "float32")
    assert fingerprint == same
    assert is_quantised(small["layers"][0]["mlp"]["down"])
    assert size(small["layers"]) < 0.3 * size(plain["layers"])


def test_each_recipe_of_a_paper_names_data_licence_hours_and_command():
    assert len(NAMES) == 9
    for name in NAMES:
        text = (RECIPES / f"{name}.yaml").read_text()
        for line in ("model    ", "data     ", "hours    ", "command  python -m training."):
            assert text.count(f"#   {line}") == 1, (name, line)
        assert f"training/recipes/papers/{name}.yaml" in text
        assert "(" in text.split("#   data     ")[1].splitlines()[0], "a licence"
        (module,) = re.findall(r"^#   command  python -m (training\.\w+) --config", text, re.MULTILINE)
        job = importlib.import_module({"training.heads": "training.heads.train"}.get(module, module))
        parse(job.Options, ["--config", str(RECIPES / f"{name}.yaml")], module)
