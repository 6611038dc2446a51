"""A draft model of another vocabulary against transformers' token-level intersection, round for round.

The draft is llama2xs with its tokens in another order, without some of them, and with likely tokens of its own. Texts
are greedy: under sampling, transformers verifies drafts by another distribution than that which they follow.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from transformers.generation import candidate_generator  # noqa: E402

import jaxspec  # noqa: E402
from jaxspec.io.tokenizers.intersection import intersection  # noqa: E402
from jaxspec.io.tokenizers.tokenizer import load_tokenizer  # noqa: E402
from jaxspec.requests.results import played_rounds  # noqa: E402
from tests.data import MODELS  # noqa: E402

TARGET, SAME = MODELS / "stories260K", MODELS / "llama2xs"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not SAME.is_dir(), reason="the shared data is not here"),
]
OPENINGS = ["Once upon a time, there was a little girl named Lily.", "One day, a dog found a big red ball"]
BUDGET, LENGTH = 80, 4
NEW = {"qx": "▁the", "qy": "▁a", "qz": ".", "qw": "▁and", "qv": ",", "qu": "▁to"}
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def target() -> jaxspec.LanguageModel:
    return jaxspec.load(TARGET, dtype="float32", device="cpu")


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Without BOS, which transformers leaves out when it encodes a prompt for the draft."""
    return tuple(tuple(target().encode(opening)[1:]) for opening in OPENINGS)


@functools.cache
def plain() -> list[list[int]]:
    rows = target().generate(
        [*map(list, prompts())], max_new_tokens=BUDGET, ignore_eos=True, method="autoregressive"
    )
    return [row.tokens for row in rows]


@functools.cache
def draft() -> Path:
    """Every second piece that no merge and no text needs is missing."""
    made = tempfile.TemporaryDirectory()
    _KEPT.append(made)
    path = Path(made.name)
    content = json.loads((SAME / "tokenizer.json").read_text())
    pieces, merges = content["model"]["vocab"], content["model"]["merges"]
    needed = {piece for pair in merges for piece in pair}
    used = {index for row in (*prompts(), *plain()) for index in row}
    idle = [
        piece
        for piece, index in pieces.items()
        if len(piece) > 1 and index > 258 and index not in used and piece not in needed
    ]
    left = [piece for piece in pieces if piece not in idle[::2]]
    tokens = [*left, *NEW]
    order = np.random.default_rng(0).permutation(len(tokens) - 3)
    tokens = tokens[:3] + [
        tokens[3 + index] for index in order
    ]  # special tokens have their ids in several places
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    content["model"]["merges"] = [pair for pair in merges if "".join(pair) in left]
    (path / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    config = json.loads((SAME / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokens)}))
    tensors = load_file(SAME / "model.safetensors")
    factor = np.array([[1.2 if token in NEW else 1.0] for token in tokens], np.float32)
    embed = tensors["model.embed_tokens.weight"]
    rows = [pieces[NEW.get(token, token)] for token in tokens]
    save_file({**tensors, "model.embed_tokens.weight": factor * embed[rows]}, path / "model.safetensors")
    return path


@functools.cache
def translator() -> candidate_generator.AssistantToTargetTranslator:
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (TARGET, draft()))
    return candidate_generator.AssistantToTargetTranslator(ours, theirs, target().config.vocab_size)


def theirs(prompt: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """The text, and for each round the number of draft tokens and of accepted ones."""
    model, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (TARGET, draft())
    )
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule = LENGTH, "constant"
    own.assistant_confidence_threshold = 0.0
    # An end's id would be the target's, which is another token of the draft.
    config = transformers.GenerationConfig(
        min_length=0, max_length=len(prompt) + BUDGET, do_sample=False, eos_token_id=None
    )
    tokens = torch.tensor([prompt])
    made = candidate_generator.UniversalSpeculativeDecodingGenerator(
        tokens,
        assistant,
        translator()._target_tokenizer,
        translator()._assistant_tokenizer,
        config,
        {},
        translator(),
    )
    rounds = []
    with torch.no_grad():
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(dim=-1)], dim=1)
        while (length := tokens.shape[1]) < len(prompt) + BUDGET:
            candidates, _ = made.get_candidates(tokens)
            drafted = candidates[0, length:].tolist()
            chosen = model(candidates).logits[0, length - 1 :].argmax(dim=-1).tolist()
            accepted = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
            rounds.append((len(drafted), accepted))
            tokens = torch.cat([tokens, torch.tensor([chosen[: accepted + 1]])], dim=1)
    return tokens[0, len(prompt) :].tolist(), rounds


def test_the_shared_tokens_are_theirs():
    """Theirs are compared by their signs, so the bytes that a text has as characters are shared too."""
    own = load_tokenizer(draft())
    found = intersection(target().tokenizer, own, target().config.vocab_size, own.vocab_size)
    ours, theirs = dict(found.shared.tolist()), dict(translator().target_to_assistant_input_ids)
    pieces = translator()._target_tokenizer.convert_ids_to_tokens([*theirs.keys() - ours.keys()])
    assert {index: theirs.get(index) for index in ours} == ours
    assert all(piece.startswith("<0x") for piece in pieces)
    assert len(ours) + len(pieces) < min(target().config.vocab_size, own.vocab_size)


@pytest.mark.parametrize("row", range(len(OPENINGS)))
def test_every_round_accepts_what_theirs_does(row):
    found = target().generate(
        list(prompts()[row]),
        max_new_tokens=BUDGET,
        ignore_eos=True,
        method="draft-model",
        draft=draft(),
        num_draft_tokens=LENGTH,
    )
    text, rounds = theirs(prompts()[row])
    assert found.tokens == text == plain()[row]
    assert played_rounds(found.token_records) == rounds
    assert 0 < found.statistics.draft_acceptance_rate < 1
