"""ASD: the choice of skipped sublayers, and the masks of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.drafting.asd_drafter import ASDDrafter, admg
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.sampling import Greedy
from jaxspec.stopping import Constant
from tests import tiny

generate_draft = jax.jit(admg)


def removed(similarity, alpha: float, every: int, keep_last: int) -> tuple[list[int], list[int]]:
    """Algorithm 1, with layers counted from 1: returns the skipped attention and MLP sublayers."""
    num_layers = len(similarity)
    last = num_layers - keep_last
    mlps = [j * every for j in range(1, num_layers + 1) if every > 0 and j * every <= last]
    attention = []
    for number, cosine in enumerate(similarity, start=1):
        alike = alpha < 1 and cosine >= alpha
        if (alike and number <= last) or number in mlps:
            attention.append(number)
    return attention, mlps


def gone(similarity, *numbers) -> tuple[list[int], list[int]]:
    run = np.asarray(generate_draft(jnp.asarray(similarity, jnp.float32), *numbers))
    return tuple((np.flatnonzero(~run[:, column]) + 1).tolist() for column in (0, 1))


def test_the_numbers_of_the_paper():
    """Llama-2-13B: 40 layers, m = 3, n = 2."""
    similarity = np.full(40, 0.9)
    similarity[[0, 4, 36, 37, 38, 39]] = [0.985, 0.9849, 0.99, 0.99, 0.99, 1.0]
    thirds = list(range(3, 37, 3))
    attention, mlp = gone(similarity, 0.985, 3, 2)
    assert mlp == thirds
    assert attention == sorted([1, *thirds, 37, 38])


@settings(max_examples=150)
@given(
    similarity=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.984, 0.985, 0.99, 1.0]), min_size=7, max_size=7),
    alpha=st.sampled_from([0.5, 0.985, 0.99, 1.0]),
    every=st.integers(0, 8),
    keep_last=st.integers(0, 8),
)
@example([1.0] * 7, 1.0, 3, 2)
def test_masks_are_those_of_the_algorithm(similarity, alpha, every, keep_last):
    assert gone(similarity, alpha, every, keep_last) == removed(similarity, alpha, every, keep_last)


def test_rows_have_masks_of_their_own_or_the_mean_of_the_live_ones():
    asd = ASDDrafter(tiny.DEEP, jnp.float32(0.8), jnp.int32(0), jnp.int32(0))
    state = ChainState((), jnp.array([[0.9, 0.1, 0.9], [0.9, 0.9, 0.5], [0.0, 0.0, 0.0]]))
    live = jnp.array([True, True, False])
    attention = np.asarray(jax.jit(ASDDrafter.plans)(asd, state, live))[:, :, 0]
    assert attention.tolist() == [[False, True, False], [False, False, True], [True, True, True]]
    shared = jax.jit(ASDDrafter.plans)(asd.replace(shared_mask=True), state, live)
    assert (shared == shared[0]).all()
    assert shared[0, :, 0].tolist() == [False, True, True]


@pytest.mark.full
def test_groups_draft_what_each_row_drafts_alone():
    """Rows of two masks, one row finished: each proposal and mask equals that of the row alone."""
    prompts = ((1, 2, 3), (5,), (4, 4), (7, 1, 7, 1, 7, 1, 7, 2))
    drafter, _ = tiny.drafter_of("asd", "constant", tiny.DEEP)
    batch = tiny.loop(tiny.Combination("asd", "constant", "greedy"))
    state, _ = batch.begin(prompts, (9, 9, 1, 9))
    assert state.done.tolist() == [False, False, True, False]
    proposal = proposed(batch, drafter, state)
    plans = drafter.plans(state.drafter_state, ~state.done)
    assert proposal.count.tolist() == [tiny.K, tiny.K, 0, tiny.K]
    for row, prompt in enumerate(prompts):
        single, _ = batch.begin([prompt], 9)
        special = DraftVerifyDrafter(tiny.DEEP, plans[row], Constant(), tiny.K)
        if not state.done[row]:
            alone = proposed(batch, special, single)
            assert alone.tokens[0].tolist() == proposal.tokens[row].tolist()


def proposed(loop, drafter, state):
    view = tiny.view(state)
    keys = jax.random.split(jax.random.key(0), len(state.length))
    propose = jax.jit(lambda d, w, s, v: d.propose(keys, w, s, v, Greedy())[0])
    return propose(drafter, loop.weights, state.drafter_state, view)
