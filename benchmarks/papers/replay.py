"""Counts the drafts of a stop rule without running the model again.

A greedy text does not depend on the drafts. So the draft's behaviour at each position can be recorded once: whether it
is right, its estimates, and its estimates after a wrong token. Any stop rule is then replayed on the record, with the
real `draft_chain` and the rule itself, and its rounds are counted exactly, as in the engine.

The caller supplies the cost of the rounds. Prices must be those of whole rounds: when parts are timed separately, a
small model stays in a processor's cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafting.chain_drafter import draft_chain, model_step
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.programs.buckets import bucket
from jaxspec.protocol import Outcome, Signal, StopRule, kinds_of
from jaxspec.sampling import Greedy, seed_key
from jaxspec.stopping import Estimate, GammaState

# Number of wrong tokens that are continued in one batch.
BRANCHES = 8
_RIGHT = 1


@struct.dataclass
class Record:
    """The drafts along one greedy text of N tokens, N the budget: the text continues after its end-of-text token.

    Attributes:
      right: bool[N], whether the draft proposes token n after the right ones before it.
      sure: float32[M, N], the logarithm of each of M estimates for that proposal.
      after: float32[M, N, K], for wrong proposals, the same for the tokens that the draft adds after them.
      end: int32, number of tokens of the text: up to the end-of-text token, at most N.
    """

    right: jax.Array
    sure: jax.Array
    after: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Counts:
    """The rounds of B replays on one text.

    Attributes:
      tokens: number of tokens after the first.
      rounds: int[B, K + 1], rounds by the number of drafted and verified tokens.
      drafted, accepted: int[B], as in a result's statistics.
      gamma: float[B], γ at the end; None for rules without γ.
    """

    tokens: int
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    gamma: np.ndarray | None


@struct.dataclass
class Recorded:
    """The estimate of replayed stop rules, which reads the record.

    Attributes:
      which: index of the estimate in the record, static.

    Examples:
      >>> signal = Signal(jnp.int32(0), jnp.array([1]), jnp.zeros((1, 2)), jnp.array([[-0.5, -2.0]]))
      >>> Recorded(1).log_probability(signal).tolist()
      [-2.0]
    """

    which: int = struct.field(pytree_node=False, default=0)

    def log_probability(self, signal: Signal) -> jax.Array:
        """Returns the recorded logarithm, float32[B]."""
        return signal.hidden[:, self.which]


def record(
    lm: LanguageModel,
    prompt: Sequence[int],
    text: Sequence[int],
    draft: tuple[LlamaConfig, Params],
    estimates: Sequence[Estimate],
    num_draft_tokens: int,
) -> Record:
    """Records the drafts along the target's greedy text.

    Args:
      lm: the target.
      prompt: token ids.
      text: N tokens of the target's greedy text after the prompt, from `generate(ignore_eos=True)`.
      draft: config and parameters of a model with the target's vocabulary. For an early exit after E layers, the
        target truncated to them: on a true text it computes the same as the exit in the target's cache.
      estimates: M estimates of a draft token's acceptance.
      num_draft_tokens: largest K to replay.
    """
    config, params = draft
    true = np.asarray(text)
    eos = np.flatnonzero(np.isin(true, list(lm.config.eos_token_ids)))
    with jax.default_device(lm.device):
        drafted, sure, cache = along(prompt, text, draft, estimates, num_draft_tokens)
        after = np.zeros((len(estimates), len(text), num_draft_tokens), np.float32)
        wrong = np.flatnonzero(drafted != true)
        for begin in range(0, len(wrong), BRANCHES):
            some = wrong[begin : begin + BRANCHES]
            where = np.resize(some, BRANCHES)
            found = _behind(
                config, params, cache, jnp.asarray(drafted[where]), jnp.asarray(len(prompt) + where),
                tuple(estimates), num_draft_tokens,
            )  # fmt: skip
            after[:, some] = np.asarray(found)[:, : len(some)]
    end = int(eos[0]) + 1 if len(eos) else len(text)
    return Record(jnp.asarray(drafted == true), sure, jnp.asarray(after), jnp.int32(end))


def along(
    prompt: Sequence[int],
    text: Sequence[int],
    draft: tuple[LlamaConfig, Params],
    estimates: Sequence[Estimate] = (),
    room: int = 0,
) -> tuple[np.ndarray, jax.Array, KVCache]:
    """Returns the draft's proposal at each position of a text, after the true tokens before it.

    Args:
      prompt, text, draft, estimates: see `record`.
      room: least number of free slots in the cache after the text.

    Returns:
      the draft's tokens int32[N]; its estimates for them, float32[M, N]; and its cache of prompt and text.
    """
    tokens = np.zeros((1, bucket(len(prompt) + len(text) + room)), np.int32)
    tokens[0, : len(prompt) + len(text)] = [*prompt, *text]
    drafted, sure, cache = _along(*draft, jnp.asarray(tokens), len(prompt) - 1, tuple(estimates), len(text))
    return np.asarray(drafted), sure, cache


@functools.partial(jax.jit, static_argnames=("config", "count"))
def _along(
    config: LlamaConfig, params: Params, tokens: jax.Array, first: Any, estimates: Any, count: int
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Reads the tokens int32[1, S]; returns the proposals at `count` positions from `first` on, see `along`."""
    cache = kv.create(config, 1, tokens.shape[1], params["embed"].dtype)
    hidden, cache = llama.run_layers(
        config, params, llama.embed(config, params, tokens), jnp.zeros(1, jnp.int32), cache
    )
    hidden = jax.lax.dynamic_slice_in_dim(hidden[0], first, count)
    logits = llama.logits(config, params, hidden)
    drafted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    signal = Signal(jnp.int32(0), drafted, logits, hidden)
    sure = [one.log_probability(signal) for one in estimates]
    return drafted, jnp.stack(sure) if sure else jnp.zeros((0, count)), cache


@functools.partial(jax.jit, static_argnames=("config", "num_draft_tokens"))
def _behind(
    config: LlamaConfig,
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    start: jax.Array,
    estimates: Any,
    num_draft_tokens: int,
) -> jax.Array:
    """Returns the estimates float32[M, R, K] for K draft tokens after each of R wrong tokens int32[R] at `start`."""
    rows = kv.create(config, len(tokens), cache.capacity, params["embed"].dtype)
    for row in range(len(tokens)):
        rows = kv.insert(rows, jnp.int32(row), cache)
    step = model_step(config, params, start)

    def add(carry: tuple[jax.Array, KVCache], i: jax.Array) -> tuple[tuple[jax.Array, KVCache], jax.Array]:
        token, rows = carry
        logits, hidden, rows = step(rows, token, i, jnp.ones(len(token), bool))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        signal = Signal(i, token, logits, hidden)
        return (token, rows), jnp.stack([one.log_probability(signal) for one in estimates])

    _, found = jax.lax.scan(add, (tokens, rows), jnp.arange(num_draft_tokens))
    return jnp.moveaxis(found, 0, -1)


def replay(record: Record, rule: StopRule, num_draft_tokens: int, batch_size: int = 1) -> Counts:
    """Counts the rounds of a text under a stop rule.

    Args:
      record: record of the text.
      rule: a rule with `Recorded` as its estimate, or `oracle.Oracle(record.right)`. With numbers [B] it gives B
        replays at once, such as one for each γ0.
      num_draft_tokens: K, at most that of the record.
      batch_size: B.
    """
    rounds, drafted, accepted, state = _replay(record, rule, kinds_of(rule), num_draft_tokens, batch_size)
    gammas = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_gamma) if _is_gamma(leaf)]
    gamma = np.asarray(gammas[0].gamma) if gammas else None
    return Counts(int(record.end) - 1, np.asarray(rounds), np.asarray(drafted), np.asarray(accepted), gamma)


def _is_gamma(node: Any) -> bool:
    return isinstance(node, GammaState)


@functools.partial(jax.jit, static_argnames=("kinds", "num_draft_tokens", "batch_size"))
def _replay(
    record: Record, rule: StopRule, kinds: tuple[type, ...], num_draft_tokens: int, batch_size: int
) -> Any:
    """Returns rounds by draft tokens [B, K + 1], drafted [B], accepted [B], and the rule's state.

    `kinds` are the rule's types; they keep the programs of two rules apart, see `kinds_of`.
    """
    limit, rows = len(record.right), jnp.arange(batch_size)
    keys = jax.random.split(seed_key(0), batch_size)  # any keys, because nothing is sampled

    def at(values: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take(values, index, axis=-1, mode="clip")

    def one_round(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        length, rounds, drafted, accepted, state = carry
        live = length < record.end

        def step(wrong: jax.Array, token: jax.Array, i: jax.Array, active: jax.Array) -> Any:
            # `wrong` is the position of the draft's first wrong token, if there is one.
            here = length + i
            clean = token == _RIGHT
            right = clean & at(record.right, here)
            behind = record.after[:, wrong, jnp.clip(here - wrong - 1, 0, record.after.shape[-1] - 1)]
            sure = jnp.where(clean, at(record.sure, here), behind)
            return jax.nn.one_hot(right.astype(jnp.int32), 2), sure.T, jnp.where(clean, here, wrong)

        room = jnp.where(live, limit - length - 1, 0)
        begin = (jnp.zeros_like(length), jnp.full_like(length, _RIGHT), room)
        proposal, _, state = draft_chain(step, *begin, num_draft_tokens, keys, Greedy(), rule, state)
        standing = (proposal.tokens == _RIGHT) & (jnp.arange(num_draft_tokens) < proposal.count[:, None])
        good = jnp.sum(jnp.cumprod(standing, axis=1), axis=1)
        count = jnp.where(live, jnp.minimum(good + 1, record.end - length), 0)
        outcome = Outcome(
            tokens=jnp.zeros((batch_size, num_draft_tokens + 1), jnp.int32),
            count=count,
            drafted=jnp.where(count <= good, count, proposal.count),
            accepted=jnp.minimum(good, count),
        )
        rounds = rounds.at[rows, proposal.count].add(live.astype(jnp.int32))
        state = rule.observe(state, outcome)
        return length + count, rounds, drafted + outcome.drafted, accepted + outcome.accepted, state

    zero = jnp.zeros(batch_size, jnp.int32)
    first = (zero + 1, jnp.zeros((batch_size, num_draft_tokens + 1), jnp.int32), zero, zero)
    carry = (*first, rule.init(batch_size))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < record.end), one_round, carry)[1:]
