"""Draft models with another tokenizer than the target's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LanguageModel
from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import Parts
from jaxspec.io.methods.vocabulary_file import Ranking
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights
from jaxspec.sampling import Sampling
from jaxspec.testing.contracts import propose
from tests import tiny

PROMPT, BUDGET = "ab cd", 24
# The draft's tokens in their order: two of the target's are missing, "cd" and "ab ", and three are new.
TOKENS = ["ca", "ba", "<begin>", "c", "e ", "a", "d", "bb", "<end>", "b", "ab", " ", "e", "d "]
NAMES = {"<begin>": "<s>", "<end>": "</s>"}
NAMED = {text: name for name, text in NAMES.items()}


def of_target(token: str) -> int | None:
    """Returns the target's id of one of the draft's tokens."""
    text = NAMES.get(token, token)
    return tiny.TOKENS.index(text) if text in tiny.TOKENS else None


SHARED = sorted(index for token in TOKENS if (index := of_target(token)) is not None)


def tokenizer(tokens: list[str], begin: str = "<begin>", end: str = "<end>") -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([begin, end])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end))


def draft_of(
    tokens: list[str], config: LlamaConfig = tiny.TARGET, changed: float = 0.0, **options: Any
) -> LanguageModel:
    """The target's weights for the draft's tokens; new ones are twice as likely as the others."""
    params = dict(tiny.params(config))
    rows = np.array([index if (index := of_target(token)) is not None else 3 for token in tokens])
    new = np.array([[2.0 if of_target(token) is None else 1.0] for token in tokens], np.float32)
    noise = np.random.default_rng(2).standard_normal((len(tokens), config.hidden_size)).astype(np.float32)
    params |= {"embed": params["embed"][rows], "head": new * params["head"][rows] + changed * noise}
    config = dataclasses.replace(tiny.engine_config(config), vocab_size=len(tokens))
    return LanguageModel(config, params, tokenizer(tokens), name="other", **options)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny.language_model()


METHODS: dict[str, dict[str, Any]] = {
    "draft-model": {"method": "draft-model", "num_draft_tokens": 4},
    "draft-exit": {"method": "draft-model", "draft_exit": 1, "stop_rule": "confidence", "gamma": 0.1},
    "s2d": {"method": "s2d"},
}


@pytest.mark.representatives("draft-model")
@pytest.mark.parametrize("name", METHODS)
def test_the_text_is_plain_decodings(lm, name):
    """Greedy, and with seeds of their own under the coupled acceptor."""
    draft = draft_of(TOKENS, changed=0.1, trained_for=TrainedFor((1, 2)))
    options = {"max_new_tokens": BUDGET, "ignore_eos": True}
    for sampled in ({}, {"temperature": 0.9, "seed": 3, "acceptor": "coupled"}):
        plain = lm.generate(PROMPT, **options, **sampled, method="autoregressive")
        found = lm.generate(PROMPT, **options, **sampled, **METHODS[name], draft=draft)
        assert found.tokens == plain.tokens
        assert found.text == plain.text
        assert found.statistics.num_accepted_tokens > 0


def test_a_draft_proposes_what_both_have_by_a_distribution_over_the_targets_tokens(lm):
    """Although tokens that only the draft has are likelier."""
    drafter, own = lm.drafter("draft-model", draft=draft_of(TOKENS), num_draft_tokens=tiny.K)
    distribution = Sampling(jnp.array([1.5]))
    loop = tiny.Loop(Parts(drafter, BlockAcceptor(), distribution), Weights(lm.params, own), lm.config)
    state, _ = loop.begin([lm.encode(PROMPT)], 8)
    proposal, _ = propose(loop.parts, loop.weights, state, 50)
    assert {*np.unique(proposal.tokens).tolist()} <= {*SHARED}
    assert proposal.log_probs.shape[-1] == lm.config.vocab_size
    drawn_from = np.exp(np.asarray(proposal.log_probs))
    np.testing.assert_allclose(drawn_from.sum(axis=-1), 1, rtol=1e-5)
    outside = np.setdiff1d(np.arange(lm.config.vocab_size), SHARED)
    assert outside.tolist() == [tiny.TOKENS.index("cd"), tiny.TOKENS.index("ab ")]
    assert (drawn_from[..., outside] == 0).all()


@pytest.mark.parametrize(
    "sampled", [{}, {"temperature": 1.0, "seed": 5, "acceptor": "block"}], ids=["greedy", "block"]
)
def test_a_draft_that_is_the_target_in_another_order_is_accepted_whole(lm, sampled):
    """So each token is fed as what it is, and proposed as what it is, also the first and the last of a text."""
    order = np.random.default_rng(1).permutation(len(tiny.TOKENS))
    tokens = [NAMED.get(tiny.TOKENS[index], tiny.TOKENS[index]) for index in order]
    options = {"max_new_tokens": BUDGET, "method": "draft-model", "draft": draft_of(tokens), **sampled}
    for ignore_eos in (True, False):
        found = lm.generate(["ab", "e cd ba", "c"], ignore_eos=ignore_eos, **options)
        assert [row.statistics.draft_acceptance_rate for row in found] == [1, 1, 1]


def test_a_part_of_what_both_have(lm, tmp_path):
    """By `draft_vocab`, whose tokens are the target's, or by the draft's record, whose tokens are the draft's."""
    path = tmp_path / "ranking.json"
    ranked = [tiny.TOKENS.index(text) for text in ("ab ", "a", "e ", "cd", "c")]
    Ranking((0, 10), tuple(ranked), 50, len(tiny.TOKENS)).write(path, lm.fingerprint, {})
    few = lm.drafter("draft-model", draft=draft_of(TOKENS), draft_vocab=path)[1]["vocabulary"]
    assert [tiny.TOKENS[index] for index in few.ids.tolist()] == ["<s>", "a", "c", "e ", "</s>"]
    recorded = tuple(sorted(TOKENS.index(token) for token in ("a", "bb", "e ", "<end>")))
    draft = draft_of(TOKENS, trained_for=TrainedFor(draft_vocab=recorded))
    of_record = lm.drafter("draft-model", draft=draft)[1]["vocabulary"]
    assert [tiny.TOKENS[index] for index in of_record.ids.tolist()] == ["a", "e ", "</s>"]
    rows = np.asarray(draft.params["head"])[[TOKENS.index(token) for token in ("a", "e ", "<end>")]]
    np.testing.assert_array_equal(of_record.head, rows)


def test_tied_quantised_embeddings(lm):
    """They are also the head, of which the draft keeps the shared rows."""
    plain = draft_of(TOKENS)
    params = {name: leaf for name, leaf in plain.params.items() if name != "head"}
    config = dataclasses.replace(plain.config, tie_embeddings=True)
    draft = LanguageModel(config, params, plain.tokenizer)
    small = LanguageModel(config, draft.loaded.quantised(8).params, plain.tokenizer)
    options = {"method": "draft-model", "max_new_tokens": 12, "ignore_eos": True}
    for one in (draft, small):
        assert lm.generate(PROMPT, draft=one, **options).tokens == tiny.greedy(lm.encode(PROMPT), 12)
    head = lm.drafter("draft-model", draft=small)[1]["vocabulary"].head
    rows = np.array([TOKENS.index(NAMED.get(tiny.TOKENS[index], tiny.TOKENS[index])) for index in SHARED])
    np.testing.assert_allclose(head.whole(), small.params["embed"].whole()[rows])


def test_tables_are_made_once(lm, monkeypatch):
    draft = draft_of(TOKENS)
    first = lm.drafts.load(draft)
    monkeypatch.setattr(Tokenizer, "meanings", None)
    assert lm.drafts.load(draft) is first
    assert first.fingerprint == draft.fingerprint
    assert jax.tree.structure(first.params) == jax.tree.structure(lm.drafts.load(draft).params)


def test_a_draft_with_too_few_of_the_targets_tokens_is_refused():
    """The line has the figure, what was expected, and what to do."""
    many = [f"a{number}" for number in range(87)]
    target = draft_of(["<begin>", "<end>", *many, *TOKENS[:2], "c", *"defghijk"])
    draft = draft_of(["<begin>", "<end>", "c", "zz"])
    line = (
        "draft other has another tokenizer, with 3 of the target's 100 tokens; give a draft that has at least 5 of "
        r"them \(5%\)"
    )
    with pytest.raises(ValueError, match=line) as caught:
        target.generate([2, 3], method="draft-model", draft=draft)
    assert "\n" not in str(caught.value)
    enough = draft_of(["<begin>", "<end>", "c", "d", "e", "zz"])
    assert len(target.drafter("draft-model", draft=enough)[1]["vocabulary"].ids) == 5
