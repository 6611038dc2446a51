"""Training goes on from models whose block differs from Llama's: sorted drafts, heads and width."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.io.hf import huggingface
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests.families import family
from tests.training.test_training_run import STORIES, arguments, metrics
from training import soft
from training.data import bpe_tokenizer, reading
from training.heads import train as heads

# Sandwiched norms with an offset, two bases of RoPE and windows; norms of outputs and over all heads; multipliers;
# interleaved pairs and joined matrices.
FAMILIES = ("gemma3_text", "olmo3", "granite", "glm4")


@pytest.fixture
def folder(tmp_path, words, request):
    """A text, and an untrained model of a family."""
    (tmp_path / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    sizes = LlamaConfig(words.get_vocab_size(), 16, 24, 4, 2, 1, 8, 64, bos_token_id=0, eos_token_ids=(1,))
    config = family(request.param, sizes)
    start = tmp_path / "start"
    huggingface.save(start, config, llama.init_params(config, jax.random.key(0), scale=2.0), np.float32)
    bpe_tokenizer.save(words, start, 64)
    return tmp_path


def check_drafts(folder, method: str) -> None:
    """Checks that the trained draft drafts for the model from which it was trained, and changes no text."""
    lm = jaxspec.load(folder / "start", dtype="float32")
    plain = lm.generate("Once upon a", max_new_tokens=12, temperature=0.0)
    drafted = lm.generate(
        "Once upon a", max_new_tokens=12, temperature=0.0, method=method, draft=folder / "out"
    )
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.num_draft_tokens


@pytest.mark.full
@pytest.mark.representatives("olmo3")
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_sorted_draft_is_trained(folder):
    start = ["--start", str(folder / "start"), "--exits", "1", "2", "--warmup", "1"]
    assert soft.main([*arguments(folder, "out", *start), "--steps", "2", "--every", "1"]) == 0
    first, second = (one["held_out_loss"] for one in metrics(folder, "out"))
    assert second < first
    trained, config = (huggingface.read_config(folder / name) for name in ("out", "start"))
    assert trained == config.truncated(2)
    check_drafts(folder, "s2d")


@pytest.mark.full
@pytest.mark.representatives("gemma3_text-eagle3")
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "kangaroo", "uno"])
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_head_is_trained(folder, kind):
    sizes = "--window 48 --batch 2 --held-out 6 --held-out-rows 4 --every 2 --card-prompts 0 --test-steps 2"
    places = {"--target": "start", "--data": "text.txt", "--run": "run-out", "--output": "out"}
    named = [word for option, place in places.items() for word in (option, str(folder / place))]
    assert heads.main(["--kind", kind, *named, *sizes.split(), "--steps", "2", "--warmup", "1"]) == 0
    check_drafts(folder, kind)
