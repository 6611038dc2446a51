"""A drafter that breaks a contract is noticed by the check of that contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.model.cache import KVCache
from jaxspec.protocol import Drafter
from jaxspec.stopping import Constant
from jaxspec.testing import contracts
from tests import tiny


@struct.dataclass
class Wrapped(Drafter):
    """A draft model that keeps the contracts; its state is that and a number per row, of the rounds drafted."""

    inner: DraftModelDrafter

    @property
    def num_draft_tokens(self):
        return self.inner.num_draft_tokens

    @property
    def verify_widths(self):
        return self.inner.verify_widths

    @property
    def reach(self):
        return self.inner.reach

    def init(self, params, view, prefill):
        return self.inner.init(params, view, prefill), self.first(view)

    def first(self, view):
        return jnp.zeros_like(view.length)

    def propose(self, keys, params, state, view, distribution):
        proposal, own, cache = self.inner.propose(self.keys(keys), params, state[0], view, distribution)
        return self.changed(keys, proposal), (own, state[1] + 1), self.written(state[1], view, cache)

    def keys(self, keys):
        return keys

    def changed(self, keys, proposal):
        return proposal

    def written(self, rounds, view, cache):
        return cache

    def observe(self, params, state, outcome):
        return self.inner.observe(params, state[0], outcome), state[1]


def added(cache: KVCache, slot: jax.Array, number: jax.Array) -> KVCache:
    """A cache with a number added to one slot of each row, [B] both."""
    rows = jnp.arange(len(slot))

    def put(array):
        rowwise = array.reshape(len(slot), -1, *array.shape[-2:])
        return rowwise.at[rows, :, slot].add(number[:, None, None]).reshape(array.shape)

    return dataclasses.replace(cache, layers=jax.tree.map(put, cache.layers))


@struct.dataclass
class Biased(Wrapped):
    def changed(self, keys, proposal):
        other = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 77), 0.15))(keys)
        return proposal.replace(tokens=jnp.where(other[:, None], (proposal.tokens + 1) % 13, proposal.tokens))


@struct.dataclass
class WrongLogProbs(Wrapped):
    def changed(self, keys, proposal):
        return proposal.replace(log_probs=jax.nn.log_softmax(0.7 * proposal.log_probs))


@struct.dataclass
class Writes(Wrapped):
    def written(self, rounds, view, cache):
        return added(cache, jnp.maximum(view.length - 2, 0), jnp.where(view.length > 1, 1e-6, 0.0))


@struct.dataclass
class WritesLater(Wrapped):
    def written(self, rounds, view, cache):
        return added(cache, jnp.maximum(view.length - 2, 0), jnp.where(rounds > 0, 1e-6, 0.0))


@struct.dataclass
class KeepsParams(Wrapped):
    def changed(self, keys, proposal):
        return proposal.replace(tokens=table()[proposal.tokens].argmax(axis=-1) % 13)


@struct.dataclass
class BeginsWithParams(Wrapped):
    def first(self, view):
        return table()[view.pending].argmax(axis=-1)


@struct.dataclass
class OneNumber(Wrapped):
    def first(self, view):
        return jnp.int32(0)


@struct.dataclass
class BeginsWithNothing(Wrapped):
    def absorbed(self, state):
        return self.inner.absorbed(state[0])


@struct.dataclass
class SharedKeys(Wrapped):
    def keys(self, keys):
        return jnp.broadcast_to(keys[0], keys.shape)


def table() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((13, 64)), jnp.float32)


def loop_of(drafter: Any) -> tiny.Loop:
    small = dataclasses.replace(tiny.TARGET, num_layers=1, intermediate_size=20)
    made = drafter(DraftModelDrafter(small, Constant(), tiny.K))
    return contracts.drafter_loop(lambda config: (made, tiny.params(small)), "rejection")


@pytest.mark.representatives(
    "Biased-check_log_probs-",
    "Writes-check_loan-",
    "KeepsParams-check_params_are_arguments-",
    "BeginsWithParams-check_params_are_arguments-",
    "SharedKeys-check_rows_are_independent-",
)
@pytest.mark.parametrize(
    ("drafter", "check", "message"),
    [
        (Biased, contracts.check_log_probs, "was drawn|do not follow log_probs"),
        (WrongLogProbs, contracts.check_log_probs, "do not follow log_probs"),
        (Writes, contracts.check_loan, "changed committed slots"),
        (WritesLater, contracts.check_loan, "changed committed slots"),
        (KeepsParams, contracts.check_params_are_arguments, "a constant of 832"),
        (BeginsWithParams, contracts.check_params_are_arguments, "a constant of 832"),
        (BeginsWithNothing, contracts.check_begin, "begin returns None"),
        (OneNumber, contracts.check_refill, r"an array of shape \(\)"),
        (SharedKeys, contracts.check_rows_are_independent, "beside other rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_drafter_is_noticed(drafter, check, message):
    with pytest.raises(AssertionError, match=message):
        check(loop_of(drafter))


@pytest.mark.full
def test_the_drafter_that_is_broken_here_keeps_the_contracts():
    loop = loop_of(Wrapped)
    for check in (contracts.check_loan, contracts.check_params_are_arguments, contracts.check_refill):
        check(loop)
