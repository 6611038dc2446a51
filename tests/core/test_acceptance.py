"""The acceptors on tables: the distribution of the text, by exact enumeration and by random draws."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import acceptance
from jaxspec.acceptance import BlockAcceptor, CoupledAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.drafting.chain_drafter import draft_chain
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.protocol import Acceptance, Proposal
from jaxspec.sampling import Greedy, Sampling, drawn_by
from jaxspec.stopping import Constant
from tests import tiny

V, K, TEXT = 3, 2, 3
GRID = 64
# A threshold within a cell of the grid causes an error of at most half a cell per draft token.
TOLERANCE = K / 2 / GRID
DRAFTS = list(itertools.product(range(V), repeat=K))


def table(
    seed: int, depth: int, zeros: bool = False, spread: float = 1.5
) -> dict[tuple[int, ...], np.ndarray]:
    """Returns a random distribution of the next token after every prefix of up to `depth` tokens."""
    rng = np.random.default_rng(seed)
    distribution = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(V), repeat=length):
            weights = np.exp(spread * rng.standard_normal(V))
            if zeros and sum(prefix) % 2 == 0:
                weights[rng.integers(V)] = 0
            distribution[prefix] = weights / weights.sum()
    return distribution


def certain(seed: int) -> dict[tuple[int, ...], np.ndarray]:
    """Returns a drafter whose tokens are certain."""
    rng = np.random.default_rng(seed)
    return {prefix: np.eye(V)[rng.integers(V)] for prefix in table(0, K - 1)}


# The seeds of the first two pairs were searched: (soft, full) reveals a wrong weight of the residual, (other, second) a
# wrong sum over the vocabulary. Most tables hide these errors.
TARGETS = {"full": table(11, TEXT), "second": table(12, TEXT), "zeros": table(2, TEXT, zeros=True)}
DRAFTERS = {
    "soft": table(1011, K - 1),
    "other": table(1012, K - 1),
    "zeros": table(4, K - 1, zeros=True),
    "close": {prefix: 0.9 * TARGETS["full"][prefix] + 0.1 / V for prefix in table(0, K - 1)},
    "certain": certain(5),
}
PAIRS = [
    ("soft", "full"),
    ("other", "second"),
    ("soft", "zeros"),
    ("zeros", "zeros"),
    ("close", "full"),
    ("certain", "full"),
    ("certain", "zeros"),
]
LIKELY = int(np.argmax(DRAFTERS["soft"][()]))
# The number of drafted tokens; a stop rule may use the tokens drafted so far.
ENDINGS = {
    "all": lambda draft: K,
    "one": lambda draft: 1,
    "none": lambda draft: 0,
    "stopped": lambda draft: 1 if draft[0] == LIKELY else K,
}


def proposal_of(draft_distribution, drafts, counts, point_mass: bool) -> Proposal:
    """Returns rows of drafts; the tokens after a row's count are arbitrary valid tokens."""
    beyond = np.arange(K)[None] >= np.asarray(counts)[:, None]
    if point_mass:
        return Proposal(jnp.asarray(np.where(beyond, 2, drafts)), jnp.asarray(counts), None)
    with np.errstate(divide="ignore"):
        distributions = np.log([[draft_distribution[tuple(draft[:i])] for i in range(K)] for draft in drafts])
    distributions = np.where(beyond[..., None], np.roll(distributions, 1, axis=-1), distributions).astype(
        np.float32
    )
    return Proposal(jnp.asarray(np.where(beyond, 2, drafts)), jnp.asarray(counts), jnp.asarray(distributions))


def logits_of(target, drafts) -> jnp.ndarray:
    with np.errstate(divide="ignore"):
        return jnp.log(
            jnp.array([[target[tuple(draft[:i])] for i in range(K + 1)] for draft in drafts], jnp.float32)
        )


def enumerated(monkeypatch, acceptor, target, draft_distribution, ending, point_mass=False):
    """Returns the exact distribution of the first tokens of a text whose first round uses the acceptor.

    It enumerates every draft with its probability and every cell of a grid over the acceptor's uniform numbers, and
    uses the distribution of the replacement token instead of a draw.

    Returns:
      The distribution of the text, and the mean number of accepted tokens.
    """
    cells = (np.array(list(itertools.product(range(GRID), repeat=K))) + 0.5) / GRID
    drafts = np.repeat(np.array(DRAFTS, np.int32), len(cells), axis=0)
    counts = np.array([ending(tuple(draft)) for draft in DRAFTS], np.int32)
    uniforms = jnp.asarray(np.tile(cells, (len(DRAFTS), 1)), jnp.float32)
    monkeypatch.setattr(acceptance, "_uniforms", lambda keys, width: uniforms[:, :width])
    monkeypatch.setattr(acceptance, "categorical", lambda keys, logits: jax.nn.softmax(logits, axis=-1))
    one_each = proposal_of(draft_distribution, np.array(DRAFTS, np.int32), counts, point_mass)
    proposal = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(cells), axis=0), one_each)
    logits = jnp.repeat(logits_of(target, DRAFTS), len(cells), axis=0)
    keys = jax.random.split(jax.random.key(0), len(drafts))
    decided = acceptor.accept(keys, proposal, logits, Sampling(jnp.ones(len(drafts))))
    accepted = np.asarray(decided.count).reshape(len(DRAFTS), -1)
    redrawn = np.asarray(decided.token, np.float64).reshape(len(DRAFTS), -1, V)

    distribution: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for row, draft in enumerate(DRAFTS):
        kept = draft[: counts[row]]
        if any(draft[len(kept) :]):
            continue  # the same draft as the one with zeros there
        chance = np.prod([draft_distribution[kept[:i]][kept[i]] for i in range(len(kept))])
        for count in range(len(kept) + 1):
            here = accepted[row] == count
            mass = chance * here.mean()
            if mass == 0:
                continue
            mean += mass * count
            for token, prob in enumerate(redrawn[row][here].mean(axis=0)):
                start = (*kept[:count], token)
                rest = tiny.text_distribution(
                    lambda prefix, start=start: target[start + prefix], TEXT - len(start)
                )
                for ending_text, tail in rest.items():
                    distribution[start + ending_text] = (
                        distribution.get(start + ending_text, 0.0) + mass * prob * tail
                    )
    return distribution, mean


@pytest.mark.parametrize("acceptor", [GreedyAcceptor(), RejectionAcceptor(), BlockAcceptor()])
@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("point_mass", [True, False])
def test_each_row_gets_a_count_and_a_token(acceptor, width, point_mass):
    """For any number of rows and of drafts, including none."""
    rows, vocab = 7, 5

    def accept(keys, logits, drafts, counts, distributions):
        return acceptor.accept(
            keys, Proposal(drafts, counts, distributions), logits, Sampling(jnp.ones(rows))
        )

    drafts = jnp.zeros((rows, width), jnp.int32)
    distributions = None if point_mass else jnp.zeros((rows, width, vocab))
    keys, logits = jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, width + 1, vocab))
    decided = jax.eval_shape(accept, keys, logits, drafts, jnp.full(rows, width), distributions)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(decided)] == 2 * [((rows,), jnp.int32)]


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_what_the_target_cannot_say_is_never_accepted(monkeypatch, acceptor):
    """Not even with the smallest random number."""
    monkeypatch.setattr(acceptance, "_uniforms", lambda keys, width: jnp.zeros((len(keys), width)))
    logits = jnp.log(jnp.array([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]]))
    proposal = Proposal(jnp.array([[0, 1]]), jnp.array([2]), jnp.log(jnp.full((1, 2, V), 1 / V)))
    keys = jax.random.split(jax.random.key(0), 1)
    assert acceptor.accept(keys, proposal, logits, Sampling(jnp.ones(1))).count[0] == 0


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("drafter", "target"), PAIRS)
@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_the_text_follows_the_target_exactly(monkeypatch, acceptor, drafter, target, ending):
    expected = tiny.text_distribution(TARGETS[target].__getitem__, TEXT)
    distribution, _ = enumerated(monkeypatch, acceptor, TARGETS[target], DRAFTERS[drafter], ENDINGS[ending])
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-5)
    assert tiny.distance(distribution, expected) < TOLERANCE


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_a_point_mass_needs_no_log_probs(monkeypatch, acceptor):
    arguments = (acceptor, TARGETS["full"], DRAFTERS["certain"], ENDINGS["stopped"])
    without, mean = enumerated(monkeypatch, *arguments, point_mass=True)
    with_distributions, same_mean = enumerated(monkeypatch, *arguments)
    assert without == pytest.approx(with_distributions, abs=1e-6)
    assert mean == pytest.approx(same_mean, abs=1e-6)


class WrongDraftDistribution(RejectionAcceptor):
    """Assumes that the draft is uniform."""

    def accept(self, keys, proposal, logits, distribution):
        flat = jnp.full_like(proposal.log_probs, -np.log(V))
        return super().accept(keys, dataclasses.replace(proposal, log_probs=flat), logits, distribution)


class NoResidual(RejectionAcceptor):
    """Draws the replacement from p."""

    def accept(self, keys, proposal, logits, distribution):
        decided = super().accept(keys, proposal, logits, distribution)
        here = jnp.take_along_axis(jax.nn.softmax(logits), decided.count[:, None, None], axis=1)
        return Acceptance(decided.count, here[:, 0])


class AllOfIndices(RejectionAcceptor):
    """Accepts a whole block unless its first token is rejected, the effect of all() on index values."""

    def accept(self, keys, proposal, logits, distribution):
        decided = super().accept(keys, proposal, logits, distribution)
        return Acceptance(jnp.where(decided.count > 0, proposal.count, 0), decided.token)


class Withdrawing(RejectionAcceptor):
    """Drops the token after which the draft stopped."""

    def accept(self, keys, proposal, logits, distribution):
        kept = jnp.where(proposal.count == 1, 0, proposal.count)
        return super().accept(keys, dataclasses.replace(proposal, count=kept), logits, distribution)


@pytest.mark.parametrize("wrong", [WrongDraftDistribution, NoResidual, AllOfIndices, Withdrawing])
def test_a_wrong_acceptor_is_noticed(monkeypatch, wrong):
    expected = tiny.text_distribution(TARGETS["full"].__getitem__, TEXT)
    distribution, _ = enumerated(monkeypatch, wrong(), TARGETS["full"], DRAFTERS["soft"], ENDINGS["stopped"])
    assert tiny.distance(distribution, expected) > 2 * TOLERANCE


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_how_many_are_accepted(monkeypatch, drafter, ending):
    """Rejection accepts Σ min(p, q) per token, one after the other; block accepts Σ E w, which is at least as much."""
    target, draft_distribution = TARGETS["full"], DRAFTERS[drafter]
    one_by_one = block = 0.0
    for draft in DRAFTS:
        kept = draft[: ENDINGS[ending](draft)]
        if any(draft[len(kept) :]):
            continue
        chance = stands = weight = 1.0
        for i, token in enumerate(kept):
            chance *= draft_distribution[kept[:i]][token]
        for i, token in enumerate(kept):
            if chance == 0:
                break
            ratio = target[kept[:i]][token] / draft_distribution[kept[:i]][token]
            stands, weight = stands * min(1, ratio), min(1, weight * ratio)
            one_by_one += chance * stands
            block += chance * weight
    means = [
        enumerated(monkeypatch, acceptor, target, draft_distribution, ENDINGS[ending])[1]
        for acceptor in (RejectionAcceptor(), BlockAcceptor())
    ]
    assert means == pytest.approx([one_by_one, block], abs=2 * TOLERANCE)
    assert block >= one_by_one - 1e-12


def test_a_redraw_without_residual_is_from_the_target(monkeypatch):
    """If p = q, a rejection can only be a rounding error."""
    monkeypatch.setattr(acceptance, "_uniforms", lambda keys, width: jnp.full((1, width), 2.0))
    monkeypatch.setattr(acceptance, "categorical", lambda keys, logits: jax.nn.softmax(logits, axis=-1))
    logits, distribution = logits_of(TARGETS["full"], [(0, 1)]), Sampling(jnp.ones(1))
    proposal = Proposal(jnp.array([[0, 1]]), jnp.array([K]), distribution.log_probs(logits)[:, :K])
    decided = RejectionAcceptor().accept(
        jax.random.split(jax.random.key(0), 1), proposal, logits, distribution
    )
    assert decided.count[0] == 0
    np.testing.assert_allclose(decided.token[0], TARGETS["full"][()], atol=1e-5)


@pytest.mark.parametrize("ending", ["all", "stopped"])
@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_drawn_texts_follow_the_target(acceptor, ending):
    """The acceptors with real keys: χ² over many rows."""
    rows, rng = 60_000, np.random.default_rng(7)
    target, draft_distribution = TARGETS["zeros"], DRAFTERS["soft"]
    whole = tiny.text_distribution(draft_distribution.__getitem__, K)
    drafts = rng.choice(len(DRAFTS), rows, p=[whole[draft] for draft in DRAFTS])
    counts = np.array([ENDINGS[ending](draft) for draft in DRAFTS], np.int32)
    each = proposal_of(draft_distribution, np.array(DRAFTS, np.int32), counts, False)
    proposal = jax.tree.map(lambda leaf: leaf[drafts], each)
    keys = jax.random.split(jax.random.key(1), rows)
    distribution = Sampling(jnp.ones(rows))
    decided = jax.jit(acceptor.accept)(keys, proposal, logits_of(target, DRAFTS)[drafts], distribution)
    texts = []
    columns = drafts, np.asarray(decided.count), np.asarray(decided.token), rng.random((rows, TEXT))
    for draft, count, token, u in zip(*columns, strict=True):
        text = (*DRAFTS[draft][:count], int(token))
        while len(text) < TEXT:
            text += (int(np.searchsorted(np.cumsum(target[text]), u[len(text)])),)
        texts.append(text)
    assert tiny.chi_square(texts, tiny.text_distribution(target.__getitem__, TEXT)) > 1e-3


def test_greedy_keeps_what_the_target_would_say():
    target = TARGETS["full"]
    logits = logits_of(target, DRAFTS)
    keys = jax.random.split(jax.random.key(0), len(DRAFTS))
    for drafted in range(K + 1):
        proposal = Proposal(jnp.array(DRAFTS), jnp.full(len(DRAFTS), drafted))
        decided = GreedyAcceptor().accept(keys, proposal, logits, Greedy())
        for row, draft in enumerate(DRAFTS):
            count = 0
            while count < drafted and draft[count] == np.argmax(target[draft[:count]]):
                count += 1
            assert (decided.count[row], decided.token[row]) == (count, np.argmax(target[draft[:count]]))


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
@pytest.mark.parametrize("point_mass", [True, False])
def test_a_row_of_temperature_zero_is_greedy(acceptor, point_mass):
    """Beside sampled rows, for any key."""
    rows = len(DRAFTS)
    counts = np.arange(rows, dtype=np.int32) % (K + 1)
    proposal = Proposal(jnp.array(DRAFTS), jnp.asarray(counts))
    if not point_mass:
        proposal = dataclasses.replace(proposal, log_probs=jnp.log(jax.nn.one_hot(jnp.array(DRAFTS), V)))
    logits = logits_of(TARGETS["full"], DRAFTS)
    distribution = Sampling(jnp.zeros(rows).at[0].set(1.0))
    keys = jax.random.split(jax.random.key(0), rows)
    expected = GreedyAcceptor().accept(keys, proposal, logits, Greedy())
    for seed in range(5):
        decided = acceptor.accept(
            jax.random.split(jax.random.key(seed), rows), proposal, logits, distribution
        )
        assert (decided.count[1:] == expected.count[1:]).all()
        assert (decided.token[1:] == expected.token[1:]).all()


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_rows_do_not_depend_on_their_neighbours(acceptor):
    target, draft_distribution = TARGETS["full"], DRAFTERS["soft"]
    rows = len(DRAFTS)
    counts = np.arange(rows, dtype=np.int32) % (K + 1)
    proposal = proposal_of(draft_distribution, np.array(DRAFTS, np.int32), counts, False)
    arguments = (jax.random.split(jax.random.key(3), rows), proposal, logits_of(target, DRAFTS))
    temperature = jnp.linspace(0.0, 2.0, rows)
    whole = acceptor.accept(*arguments, Sampling(temperature))
    order = np.random.default_rng(0).permutation(rows)
    turned = acceptor.accept(*jax.tree.map(lambda leaf: leaf[order], arguments), Sampling(temperature[order]))
    assert (turned.count == whole.count[order]).all()
    assert (turned.token == whole.token[order]).all()


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_a_row_alone_has_the_distribution_that_it_has_in_a_batch(monkeypatch, acceptor):
    """Also for the replacement: tokens with probability 0 in a row may have a positive one in its neighbours."""
    monkeypatch.setattr(acceptance, "categorical", lambda keys, logits: jax.nn.softmax(logits, axis=-1))
    rows = len(DRAFTS)
    proposal = proposal_of(DRAFTERS["soft"], np.array(DRAFTS, np.int32), np.full(rows, K, np.int32), False)
    arguments = (jax.random.split(jax.random.key(5), rows), proposal, logits_of(TARGETS["full"], DRAFTS))
    whole = acceptor.accept(*arguments, Sampling(jnp.ones(rows)))
    assert (whole.count < K).sum() > 2
    for row in range(rows):
        alone = acceptor.accept(
            *jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], arguments), Sampling(jnp.ones(1))
        )
        assert alone.count[0] == whole.count[row]
        np.testing.assert_allclose(alone.token[0], whole.token[row], atol=1e-6)


@pytest.mark.representatives("rejection-True", "block-False")
@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
def test_a_row_does_not_depend_on_how_much_its_neighbours_draft(acceptor, partitionable):
    """The longest draft of a batch determines the width of a verification."""
    rows, wide = 200, K + 3
    rng = np.random.default_rng(4)
    before = jax.config.jax_threefry_partitionable
    jax.config.update("jax_threefry_partitionable", partitionable)
    try:
        logits = jnp.asarray(rng.standard_normal((rows, wide + 1, V)), jnp.float32)
        distributions = jax.nn.log_softmax(jnp.asarray(rng.standard_normal((rows, wide, V)), jnp.float32))
        drafts, counts = jnp.asarray(rng.integers(V, size=(rows, wide))), jnp.full(rows, K)
        keys, distribution = jax.random.split(jax.random.key(0), rows), Sampling(jnp.ones(rows))
        whole = acceptor.accept(keys, Proposal(drafts, counts, distributions), logits, distribution)
        narrow = Proposal(drafts[:, :K], counts, distributions[:, :K])
        same = acceptor.accept(keys, narrow, logits[:, : K + 1], distribution)
    finally:
        jax.config.update("jax_threefry_partitionable", before)
    assert (whole.count == same.count).all()
    assert (whole.token == same.token).all()
    assert 0 < whole.count.mean() < K


def test_the_numbers_of_a_row_have_nothing_to_do_with_each_other():
    """They are independent of those of other rows and of the replacement's."""
    keys = jax.random.split(jax.random.key(0), 2_000)
    drawn = np.asarray(acceptance._uniforms(keys, 3))
    redraw = [jax.random.uniform(jax.random.fold_in(key, 1)) for key in keys[:50]]
    columns = np.concatenate([drawn.T, drawn.T[:1, ::-1]])
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < 0.1
    assert np.histogram(drawn, bins=10, range=(0, 1))[0].min() > 500
    assert not np.isin(np.asarray(redraw), drawn[:50]).any()


# The coupled acceptor


def coupled(p: np.ndarray, q: np.ndarray, keys: jax.Array, few: tuple[int, ...] | None = None) -> Acceptance:
    """Accepts one draft token per row, drawn from q [V] (over the tokens `few`) with the keys of the draws from p."""
    rows, vocabulary = len(keys), None
    if few is not None:
        vocabulary, q = Vocabulary(None, jnp.array(few), size=len(p)), q[list(few)]
    logits = jnp.broadcast_to(jnp.log(q), (rows, len(q)))
    proposal, _, _ = draft_chain(
        lambda carry, token, i, active: (logits, logits, carry),
        *((), jnp.zeros(rows, jnp.int32), jnp.full(rows, 9), 1, keys[:, 0]),
        *(Sampling(jnp.ones(rows)), Constant(), (), vocabulary, lambda i: drawn_by(keys[:, i])),
    )
    assert proposal.log_probs is None
    targets = jnp.broadcast_to(jnp.log(p), (rows, 2, len(p)))
    return CoupledAcceptor().accept(keys, proposal, targets, Sampling(jnp.ones(rows)))


@pytest.mark.full
def test_coupled_draws_agree_as_often_as_they_must():
    """They agree in at least (1 − d) ÷ (1 + d) of the rows at a distance d of p and q; the text is the target's."""
    rng, rows = np.random.default_rng(8), 20_000
    keys = jax.random.split(jax.random.key(3), (rows, 2))
    for sharpness in (0.5, 1.5, 4.0):
        p, other = (weights / weights.sum() for weights in np.exp(sharpness * rng.standard_normal((2, 8))))
        texts = []
        for q in (p, 0.7 * p + 0.3 * other, other):
            accepted = coupled(p, q, keys)
            distance = np.abs(p - q).sum() / 2
            least, most = (1 - distance) / (1 + distance), 1 - distance
            assert least - 0.01 < float(accepted.count.mean()) <= most + 0.01
            texts.append(np.where(accepted.count == 1, -1, accepted.token))
        assert (texts[0] == -1).all()
        # The same token replaces every rejected draft.
        fell = (texts[1] >= 0) & (texts[2] >= 0)
        assert (texts[1] == texts[2])[fell].all()
        assert fell.sum() > 100


@pytest.mark.full
def test_where_nothing_is_drafted_coupled_draws_are_those_of_the_others():
    keys = jax.random.split(jax.random.key(5), (500, 2))
    logits = jax.random.normal(jax.random.key(6), (500, 1, V))
    nothing = Proposal(jnp.zeros((500, 0), jnp.int32), jnp.zeros(500, jnp.int32))
    distribution = Sampling(jnp.full(500, 0.8))
    found = CoupledAcceptor().accept(keys, nothing, logits, distribution)
    for acceptor in (RejectionAcceptor(), BlockAcceptor()):
        assert (acceptor.accept(keys[:, 0], nothing, logits, distribution).token == found.token).all()


def test_a_coupled_draft_over_some_tokens_has_the_noise_of_these():
    p = np.exp(np.random.default_rng(1).standard_normal(8))
    p /= p.sum()
    keys, few = jax.random.split(jax.random.key(4), (5_000, 2)), (1, 2, 5, 6)
    accepted = coupled(p, p, keys, few)
    drawn = jax.vmap(jax.random.categorical, (0, None))(drawn_by(keys)[:, 0], jnp.log(p))
    assert (np.isin(drawn, few) == (accepted.count == 1)).all()
    after = jax.vmap(jax.random.categorical, (0, None))(drawn_by(keys)[:, 1], jnp.log(p))
    assert (accepted.token == np.where(accepted.count == 1, after, drawn)).all()
