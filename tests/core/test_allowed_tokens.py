"""Under a grammar, every drafter gives the text of plain decoding on the masked distribution."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.allowed_tokens import Grammars
from jaxspec.grammar.certain import certain_tokens
from jaxspec.grammar.table import TokenTable
from jaxspec.model.config import LlamaConfig
from jaxspec.model.tree import Shape
from jaxspec.penalties import Penalties
from jaxspec.protocol import Proposal
from jaxspec.requests.grammar_tables import Tables, packed
from jaxspec.requests.reading import RowRequest
from jaxspec.sampling import Sampling
from jaxspec.testing import distributions, reference
from jaxspec.testing.contracts import FOUR
from jaxspec.verification import trimmed
from tests import refused, tiny
from tests.random_grammars import EOS, allowed, greedy_text, masked, table

PROMPTS = ((1, 2, 3), (5,), (7, 7, 2, 7))


def request(one: TokenTable | None, eos: Sequence[int] = EOS) -> RowRequest:
    return RowRequest((0,), 1, tuple(eos), grammar=one)


def grammar(tables: Sequence[TokenTable | None], eos: Sequence[int] = EOS, vocab_size: int = 13) -> Grammars:
    found = Tables(None, vocab_size).pack([request(one, eos) for one in tables])
    assert found is not None
    return found


def constrained(
    loop: tiny.Loop,
    tables: Sequence[TokenTable | None],
    eos: Sequence[int] | None = None,
    begin: Sequence[int] | None = None,
    **rest,
) -> tiny.Loop:
    """Restricts rows; `begin` has the lengths of their prompts, which matter to penalties."""
    size = loop.config.vocab_size
    eos = (EOS if size > 4 else (2,)) if eos is None else eos
    begun = jnp.array([1] * len(tables) if begin is None else begin)
    settings = Penalties(begun, grammar=grammar(tables, eos, size), **rest)
    return dataclasses.replace(loop, parts=dataclasses.replace(loop.parts, penalties=settings))


TABLES = (table(7), None, table(3))
DRAFTERS = [
    tiny.Combination("draft-model-vocab", "confidence", "greedy"),
    tiny.Combination("token-recycling", "-", "greedy"),
    tiny.Combination("medusa-tree", "-", "greedy"),
]


# Plain decoding; drafts that are looked up, of a grammar, of a model, of sublayers, of exits, in a tree and in blocks;
# and choices among them.
MASKED = (
    *("autoregressive", "ngram", "grammar", "draft-model", "asd", "layerskip"),
    *("s2d", "eagle-tree", "dflash", "uno", "choosing"),
)


def parameters(representatives):
    """Rows of a test: the `representatives` are ordinary, one drafter of each way to mask full, and the rest slow."""
    every = [dataclasses.replace(one, acceptor="greedy") for one in tiny.ordinary()]
    usual = [one for one in every if one.drafter in MASKED]
    ordered = list(dict.fromkeys([*representatives, *usual, *every]))
    return [
        pytest.param(
            one,
            id=str(one),
            marks=[] if one in representatives else [pytest.mark.full if one in usual else pytest.mark.slow],
        )
        for one in ordered
    ]


@pytest.mark.parametrize("combination", parameters(DRAFTERS))
def test_greedy_text_is_the_slow_decoders(combination):
    loop = tiny.loop(combination)
    texts = constrained(loop, TABLES).texts(PROMPTS, 16, eos=EOS)
    assert texts == [greedy_text(*row, loop.config, 16) for row in zip(TABLES, PROMPTS, strict=True)]


def fuzzed(rng: np.random.Generator) -> LlamaConfig:
    """Returns a random small configuration, with a random block of `tiny.BLOCKS` or none."""
    heads = [(4, 2), (4, 4), (6, 2), (2, 1)][rng.integers(4)]
    shape = LlamaConfig(
        vocab_size=int(rng.integers(13, 90)),
        hidden_size=8 * int(rng.integers(1, 5)),
        intermediate_size=8 * int(rng.integers(1, 5)),
        num_layers=int(rng.integers(3, 5)),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=8,
        max_position_embeddings=512,
    )
    block = ["", *tiny.BLOCKS][rng.integers(1 + len(tiny.BLOCKS))]
    return tiny.with_block(block, shape) if block else shape


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(13))
def test_greedy_texts_of_fuzzed_models_are_the_slow_decoders(seed):
    """A hundred models: 13 shapes with eight sets of weights each, and each shape with two drafters."""
    rng = np.random.default_rng(seed)
    config = fuzzed(rng)
    tables = [
        None if at == 2 else table(int(rng.integers(2**31)), config.vocab_size, *rng.integers(4, 12, 2))
        for at in range(4)
    ]
    prompts = [rng.integers(0, 13, rng.integers(1, 8)).tolist() for _ in tables]
    drafters = [name for name in tiny.DRAFTERS if tiny.DRAFTERS[name].methods]
    for name in (drafters[2 * seed % len(drafters)], drafters[(2 * seed + 1) % len(drafters)]):
        loop = tiny.loop(tiny.Combination(name, "confidence", "greedy"), config=config)
        loop = constrained(loop, tables, EOS)
        for weights in (tiny.params(config, at) for at in range(8)):
            own = dataclasses.replace(loop, weights=loop.weights._replace(target=weights))
            texts = own.texts(prompts, 16, eos=EOS)
            assert texts == [
                greedy_text(*row, config, 16, weights=weights) for row in zip(tables, prompts, strict=True)
            ], (name, config)


def test_token_recycling_keeps_only_tokens_that_the_grammar_allows():
    one, prompt = table(7), PROMPTS[0]
    loop = constrained(tiny.loop(tiny.Combination("token-recycling", "-", "greedy")), (one,))
    state, _ = loop.begin([prompt], 8, eos=EOS)
    pending = int(state.tokens[0, len(prompt)])
    state, _ = loop.go_on(state, 1)
    free = np.array(reference.forward(loop.config, tiny.params(loop.config), [*prompt, pending])[-1])
    logits = masked(one, free, [pending], EOS)
    best = [int(token) for token in np.argsort(-logits, kind="stable") if logits[token] > -np.inf]
    kept = state.drafter_state[0, pending].tolist()
    assert kept == (best + [-1] * len(kept))[: len(kept)]
    assert kept != np.argsort(-free, kind="stable")[: len(kept)].tolist()


def next_probs(one: TokenTable, prompt, eos, presence, prefix, **warp) -> np.ndarray | None:
    logits = np.array(reference.forward(FOUR, tiny.params(FOUR), [*prompt, *prefix])[-1])
    logits[list(prefix)] -= presence
    logits = masked(one, logits, prefix, eos)
    return None if logits is None else distributions.warp(logits, **warp)


SAMPLED = [
    tiny.Combination("draft-model", "any_of", "block"),
    tiny.Combination("eagle-tree-drawn", "-", "rejection"),
    tiny.Combination("choosing-trees", "-", "rejection"),
    tiny.Combination("suffix", "-", "rejection"),
    tiny.Combination("medusa-tree", "-", "coupled"),
    tiny.Combination("layerskip", "constant", "coupled"),
    tiny.Combination("s2d-target", "confidence", "rejection"),
    tiny.Combination("uno", "constant", "block"),
    tiny.Combination("choosing", "-", "block"),
]


@pytest.mark.full
@pytest.mark.representatives("draft-model-any_of-block", "eagle-tree-drawn-rejection")
@pytest.mark.parametrize("combination", SAMPLED, ids=str)
def test_sampled_text_follows_the_enumerated_masked_distribution(combination):
    prompt, budget, eos, rows = (1, 3, 1), 4, (2,), 6000
    one = table(12, 4, 4, 3, 0.5)
    distribution = Sampling(jnp.full(rows, 1.5), top_p=jnp.full(rows, 0.95))
    loop = tiny.loop(combination, distribution, FOUR)
    expected = distributions.text_distribution(
        functools.partial(next_probs, one, prompt, eos, 0, temperature=1.5, top_p=0.95), budget, eos
    )
    assert len(expected) > 10, "too few texts are possible for a test"
    loop = constrained(loop, [one] * rows)
    found = [tuple(text) for text in loop.texts([prompt] * rows, budget, eos=eos, capacity=16)]
    assert distributions.chi_square(found, expected) > 1e-3


@pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalised"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "combination", [one for one in tiny.full_product() if one.acceptor != "greedy"], ids=str
)
def test_every_drafter_follows_the_enumerated_masked_distribution(combination, penalised):
    prompts, budget, eos, rows = ((1, 3, 1), (2,)), 4, (2,), 4000
    tables = table(12, 4, 4, 3, 0.5), table(8, 4, 4, 3, 0.5)
    batch = [row % 2 for row in range(rows)]
    distribution = Sampling(jnp.full(rows, 1.5), top_p=jnp.full(rows, 0.95))
    loop = tiny.loop(combination, distribution, FOUR)
    presence = {"presence": jnp.full(rows, 0.7 * penalised)}
    begin = [len(prompts[which]) for which in batch]
    loop = constrained(loop, [tables[which] for which in batch], begin=begin, **presence)
    texts = loop.texts([prompts[which] for which in batch], budget, eos=eos, capacity=16)
    for which, (one, prompt) in enumerate(zip(tables, prompts, strict=True)):
        own = functools.partial(next_probs, one, prompt, eos, 0.7 * penalised, temperature=1.5, top_p=0.95)
        expected = distributions.text_distribution(own, budget, eos)
        found = [tuple(text) for text, mine in zip(texts, batch, strict=True) if mine == which]
        assert distributions.chi_square(found, expected) > 1e-4


def test_bans_that_leave_no_token_have_no_effect():
    loop = tiny.loop(tiny.Combination("autoregressive", "-", "greedy"))
    one = table(7)
    first = np.flatnonzero(allowed(one, (), EOS, 13))
    banned = jnp.array([[*first, *[-1] * (13 - len(first))]] * 3)
    plain = constrained(loop, [one, one, None]).texts(PROMPTS, 8, eos=EOS)
    loop = constrained(
        loop,
        [one, one, None],
        biased=banned,
        bias=jnp.full(banned.shape, -jnp.inf),
        until=jnp.full(banned.shape, 99),
    )
    state, _ = loop.begin(PROMPTS, 8, eos=EOS)
    assert not state.broken.any()
    found = loop.texts(PROMPTS, 1, eos=EOS)
    assert [text[0] for text in found[:2]] == [text[0] for text in plain[:2]]
    assert found[2][0] not in first, "a row without a grammar keeps its bans"


def test_a_table_that_cannot_be_completed_is_refused():
    one = TokenTable(
        np.arange(13, dtype=np.uint16), np.full((2, 13), -1, np.int32), np.array([0, 1], bool), ""
    )
    one.next[0, 7] = 1
    assert packed(one, (10,), 13).states[0].tolist()[1:] == [7, 0]
    with refused("allows no text with these end tokens"):
        packed(one, (7,), 13)


def over_bytes(text: bytes, tokens: Sequence[bytes]) -> TokenTable:
    """Returns the automaton of a text in which `?` is any of a, b and c, over these tokens."""

    def after(place: int, token: bytes) -> int:
        fits = place + len(token) <= len(text) and all(
            byte == own or (own == ord("?") and byte in b"abc")
            for byte, own in zip(token, text[place:], strict=False)
        )
        return place + len(token) if fits and token else -1

    following = np.array(
        [[after(place, token) for token in tokens] for place in range(len(text) + 1)], np.int32
    )
    final = np.arange(len(text) + 1) == len(text)
    class_of = np.arange(len(tokens), dtype=np.uint16)
    certain = certain_tokens(class_of, following, final, tokens)
    return TokenTable(class_of, following, final, text.decode(), certain)


def test_certain_tokens_are_the_longest_of_the_certain_text():
    tokens = [b"", b"a", b"b", b"c", b"x", b"y", b"xy", b"xya", b"yx", b"ya", b"ab", b"xyxy"]
    one = over_bytes(b"xyxyx?xab", tokens)
    names = [tokens[index].decode() if index >= 0 else None for index in one.certain]
    # `x` before the free letter is certain although tokens go on into it; `ab` ends the text.
    assert names == ["xyxy", "yx", "xy", "yx", "x", None, "x", "ab", "b", None]


def test_certain_text_is_drafted_and_the_target_chooses_its_tokens():
    tokens = [b"", b"a", b"b", b"c", b"x", b"y", b"xy", b"xya", b"yx", b"ya", b"ab", b"xyxy", b"bc"]
    one = over_bytes(b"xyxyx?xabxy?yx", tokens)
    loops = [tiny.loop(tiny.Combination(name, "-", "greedy")) for name in ("grammar", "autoregressive")]
    rounds, texts = [], []
    for loop in loops:
        loop = constrained(loop, [one, None, one], ())
        state, _ = loop.go_on(loop.begin(PROMPTS, 16)[0])
        texts.append(tiny.generated(state, PROMPTS))
        rounds.append(np.asarray(state.stats.num_rounds).tolist())
    assert texts[0] == texts[1]
    for text in (texts[0][0], texts[0][2]):
        written = b"".join(tokens[index] for index in text)
        assert all(own in (byte, ord("?")) for byte, own in zip(written, b"xyxyx?xabxy?yx", strict=True))
    assert rounds[0][0] < rounds[1][0]
    assert rounds[0][2] < rounds[1][2]
    assert rounds[0][1] == rounds[1][1]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_draft_ends_at_the_first_forbidden_token(drawn):
    """A token that was drawn stays, because the target's rejection of it is a part of its distribution."""
    one = over_bytes(b"xyxy", [b"", b"a", b"x", b"y"])
    states = grammar([one], (), 4).walk(jnp.array([[2, 3, 1, 3]]))
    assert states.tolist() == [[0, 1, 2, -1, -1]]
    log_probs = jnp.zeros((1, 4, 4)) if drawn else None
    chain = Proposal(jnp.array([[2, 3, 1, 3]]), jnp.array([4]), log_probs)
    assert trimmed(chain, jnp.array([9]), 4, states).count.tolist() == [3 if drawn else 2]
    shape = Shape((-1, -1, 0, 1, 2, 2))  # below the pending token: x with y below it, and a with y below it
    nodes = jnp.array([[2, 1, 3, 3, 2, 1]])
    tree = Proposal(nodes, jnp.array([6]), jnp.zeros((1, 6, 4)) if drawn else None, parents=shape)
    states = grammar([one], (), 4).walk(nodes, shape, 3)
    assert states.tolist() == [[0, 1, -1, 2, -1, 3, -1]]
    kept = trimmed(tree, jnp.array([9]), 3, states).tokens.tolist()
    assert kept == ([[2, 1, 3, -1, 2, 1]] if drawn else [[2, -1, 3, -1, 2, -1]])
