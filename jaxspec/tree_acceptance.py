"""Acceptance of trees: a walk from the pending token along accepted nodes, then one more token. Both are lossless."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.model.tree import Shape, Tree, along
from jaxspec.protocol import Acceptance, Proposal
from jaxspec.sampling import Distribution, categorical

# number of the step, keys [B], logits float32[B, V] at the row of each walk, that row int32[B]
#   -> whether there is a node to go on to bool[B], its row int32[B], the token drawn int32[B]
Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def walk(
    keys: jax.Array, proposal: Proposal, branches: Tree, logits: jax.Array, distribution: Distribution
) -> Acceptance:
    """Draws from the target at each node, starting at the pending token, and follows the child with the drawn token.

    The text follows the target's distribution for any tree. If the draft tokens are deterministic given the text, no
    lossless rule accepts more. If the keys depend only on the position, as in `decoding.decode_round`, the text equals
    that of plain decoding token for token, if the logits are equal.

    Args:
      keys: [B, D + 1], one for each depth; D is the maximum number of accepted tokens.
      proposal: of R − 1 nodes.
      branches: the tree of R rows.
      logits: float32[B, R, V] at the pending token and at every node.
      distribution: the target's.

    Returns:
      What is accepted, with its path.
    """
    held, parent = _held(proposal), branches.parent
    if distribution.drawing is False:
        # The most likely tokens need no keys, so all rows are compared at once. A TPU adds a maximum to the head's
        # product, but not an argmax.
        every, best = jnp.arange(logits.shape[-1]), jnp.max(logits, axis=-1, keepdims=True)
        drawn = jnp.min(jnp.where(logits == best, every, every[-1]), axis=-1)
        before = along(drawn, jnp.broadcast_to(parent, drawn.shape))
        length = lengths(branches, (held == before) | (jnp.arange(held.shape[1]) == 0))
        last = jnp.argmax(length, axis=1)
        token = along(drawn, last[:, None])[:, 0]
        return Acceptance(jnp.max(length, axis=1), token, path_to(branches, last, keys.shape[1]))

    def step(
        number: jax.Array, key: jax.Array, here: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # The draw is final: it is an accepted node's token, or the token that ends the walk.
        drawn, _ = distribution.draw(_stream(key, 1), here)
        child = (parent == at[:, None]) & (held == drawn[:, None])
        return jnp.any(child, axis=1), jnp.argmax(child, axis=1).astype(jnp.int32), drawn

    return _walked(keys, logits, step)


def reject(
    keys: jax.Array, proposal: Proposal, branches: Tree, logits: jax.Array, distribution: Distribution
) -> Acceptance:
    """Tries the children of each node in order, starting at the pending token, and follows the first accepted one.

    Recursive rejection sampling (SpecInfer, Miao et al. 2024; Sequoia, Chen et al. 2024), see `chances`. The text
    follows the target's distribution for any draft distribution, provided that the number of a node's children does
    not depend on the children's tokens.

    Args:
      keys, branches, logits, distribution: as for `walk`.
      proposal: of R − 1 nodes, siblings in the order in which they were drawn; with `log_probs`.

    Returns:
      What is accepted, with its path.
    """
    assert proposal.log_probs is not None
    distributions, held, parent = proposal.log_probs, _held(proposal), branches.parent
    depth, nodes = keys.shape[1] - 1, distributions.shape[1]
    of = proposal.parents
    most = of.most_siblings if isinstance(of, Shape) else proposal.most_siblings or max(nodes, 1)
    if not nodes:  # the pending token alone is verified
        distributions = jnp.zeros_like(logits)

    def step(
        number: jax.Array, key: jax.Array, here: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        children = (parent == at[:, None]) & (held >= 0) & (number < depth)
        # Children in the order of drawing, padded to the largest number of siblings.
        order = jnp.where(children, jnp.cumsum(children, axis=1), 0)
        match = order[:, None] == jnp.arange(1, most + 1)[:, None]
        rows = jnp.argmax(match, axis=2).astype(jnp.int32)
        tokens = jnp.where(jnp.any(match, axis=2), along(held, rows), -1)
        # Each rejection changes the distribution for the next sibling, and at last for the final token.
        chance, rest = chances(
            jnp.exp(distribution.log_probs(here)), tokens, along(distributions, jnp.maximum(rows - 1, 0))
        )
        tries = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(_stream(key, 0))
        stands = tries < chance
        first = jnp.argmax(stands, axis=1)[:, None]
        drawn = categorical(_stream(key, 1), jnp.log(rest))
        return jnp.any(stands, axis=1), jnp.take_along_axis(rows, first, axis=1)[:, 0], drawn

    return _walked(keys, logits, step)


def chances(target: jax.Array, tokens: jax.Array, distributions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each sibling's acceptance probability after the earlier ones failed, and the distribution after all fail.

    Sibling x, drawn from q, is accepted with probability min(1, p(x) ÷ q(x)). After a rejection, p becomes
    norm(max(p − q, 0)) for the next sibling.

    Args:
      target: float32[B, V], p.
      tokens: int32[B, C], −1 for none.
      distributions: float32[B, C, V], log-probabilities of the distribution that each was drawn from, given those
        before it.

    Returns:
      float32[B, C] and float32[B, V].
    """

    def step(p: jax.Array, sibling: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, q = sibling[0], jnp.exp(sibling[1])
        here = jnp.maximum(token, 0)[:, None]
        p_of, q_of = (jnp.take_along_axis(probs, here, axis=1)[:, 0] for probs in (p, q))
        left = jnp.maximum(p - q, 0.0)
        total = jnp.sum(left, axis=1, keepdims=True)
        # The residual is zero only if p = q; then acceptance is certain, except for rounding.
        tried = (token >= 0)[:, None] & (total > 0)
        chance = jnp.where(token >= 0, jnp.minimum(p_of / jnp.maximum(q_of, 1e-38), 1.0), 0.0)
        return jnp.where(tried, left / jnp.where(total > 0, total, 1.0), p), chance

    siblings = jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(distributions, 1, 0)
    with jax.named_scope(f"trips_{tokens.shape[1]}"):  # for a reader of the compiled program
        rest, chance = jax.lax.scan(step, target, siblings)
    return jnp.moveaxis(chance, 0, 1), rest


def lengths(branches: Tree, accepted: jax.Array) -> jax.Array:
    """Returns the depth of each row, int32[B, R]; −1 unless all rows of the path to it are `accepted`, bool[B, R]."""
    whole = ~jnp.any(branches.behind & ~accepted[:, None], axis=2)
    return jnp.where(whole, branches.depth, -1)


def path_to(branches: Tree, last: jax.Array, length: int) -> jax.Array:
    """Returns the rows from the pending token to row `last`, int32[B], then 0, as int32[B, length]."""
    rows = jnp.arange(branches.behind.shape[1])
    is_last = rows == last[:, None]
    on_path = jnp.any(branches.behind & is_last[:, :, None], axis=1)[:, None]
    at_depth = branches.depth[:, None] == jnp.arange(length)[:, None]
    # A path has at most one row at each depth. jax 0.12 cannot compile the argmax of two dimensions in a branch of
    # `cond` for a CPU, if the other branch returns the transposed result of a loop, as `_walked` does.
    return jnp.max(jnp.where(on_path & at_depth, rows, 0), axis=2)


def _walked(keys: jax.Array, logits: jax.Array, step: Step) -> Acceptance:
    """Walks at most D nodes from the pending token; keys [B, D + 1]."""
    batch, depth = logits.shape[0], keys.shape[1] - 1

    def go_on(
        carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array], column: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
        walking, count, token, at = carry
        number, key = column
        here = jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0]
        found, row, drawn = step(number, key, here, at)
        goes_on = walking & found & (number < depth)
        token = jnp.where(walking, drawn, token)
        return (goes_on, count + goes_on, token, jnp.where(goes_on, row, at)), at

    nothing = jnp.zeros(batch, jnp.int32)
    first = (jnp.ones(batch, bool), nothing, nothing, nothing)
    with jax.named_scope(f"trips_{depth + 1}"):  # for a reader of the compiled program
        columns = (jnp.arange(depth + 1), jnp.moveaxis(keys, 1, 0))
        (_, count, token, _), path = jax.lax.scan(go_on, first, columns)
    return Acceptance(count, token, jnp.moveaxis(path, 0, 1))


def _stream(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _held(proposal: Proposal) -> jax.Array:
    """Returns the token of each row, int32[B, R]; −1 in the pending token's row, which is the root."""
    return jnp.pad(proposal.tokens, ((0, 0), (1, 0)), constant_values=-1)
