"""What of a tree of drafts stands, by a walk from the pending token on, and the token after it. Both are lossless."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.model.tree import Shape, Tree, along
from jaxspec.protocol import Acceptance, Proposal
from jaxspec.sampling import Law, categorical

# number of the step, keys [B], logits float32[B, V] at the row of each walk, that row int32[B]
#   -> whether there is a node to go on to bool[B], its row int32[B], the token drawn int32[B]
Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def walk(keys: jax.Array, proposal: Proposal, branches: Tree, logits: jax.Array, law: Law) -> Acceptance:
    """Draws from the target's law at the pending token, goes on to the node that holds what was drawn, draws there, …

    The text is that of plain decoding, whatever the tree: of tokens that are certain given the text before them, no
    lossless rule accepts more. Where the keys follow from the position alone, as in `decoding.decode_round`, the text
    is plain decoding's token for token, as far as the logits are.

    Args:
      keys: [B, D + 1], for the token at each depth; D the most tokens accepted.
      proposal: of R − 1 nodes.
      branches: the tree of R rows.
      logits: float32[B, R, V] at the pending token and at every node.
      law: the target's.

    Returns:
      What is accepted, with its path.
    """
    held, parent = _held(proposal), branches.parent

    def step(
        number: jax.Array, key: jax.Array, here: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        drawn, _ = law.draw(_stream(key, 1), here)
        child = (parent == at[:, None]) & (held == drawn[:, None])
        return jnp.any(child, axis=1), jnp.argmax(child, axis=1).astype(jnp.int32), drawn

    return _walked(keys, logits, step)


def reject(keys: jax.Array, proposal: Proposal, branches: Tree, logits: jax.Array, law: Law) -> Acceptance:
    """Tries the nodes after the pending token one after the other, goes on to the first that stands, tries those, …

    Recursive rejection sampling (SpecInfer, Miao et al. 2024; Sequoia, Chen et al. 2024), see `chances`. The text
    follows the target's law, whatever the draft's, as long as how many nodes follow another is not decided by what
    these hold.

    Args:
      keys, branches, logits, law: as of `walk`.
      proposal: of R − 1 nodes, siblings in the order in which they were drawn; with `log_probs`.

    Returns:
      What is accepted, with its path.
    """
    assert proposal.log_probs is not None
    laws, held, parent = proposal.log_probs, _held(proposal), branches.parent
    depth, nodes = keys.shape[1] - 1, laws.shape[1]
    most = proposal.parents.most_siblings if isinstance(proposal.parents, Shape) else nodes

    def step(
        number: jax.Array, key: jax.Array, here: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        children = (parent == at[:, None]) & (held >= 0) & (number < depth)
        order = jnp.where(children, jnp.cumsum(children, axis=1), 0)
        match = order[:, None] == jnp.arange(1, most + 1)[:, None]
        rows = jnp.argmax(match, axis=2).astype(jnp.int32)
        tokens = jnp.where(jnp.any(match, axis=2), along(held, rows), -1)
        chance, rest = chances(jnp.exp(law.log_probs(here)), tokens, along(laws, jnp.maximum(rows - 1, 0)))
        tries = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(_stream(key, 0))
        stands = tries < chance
        first = jnp.argmax(stands, axis=1)[:, None]
        drawn = categorical(_stream(key, 1), jnp.log(rest))
        return jnp.any(stands, axis=1), jnp.take_along_axis(rows, first, axis=1)[:, 0], drawn

    return _walked(keys, logits, step)


def chances(target: jax.Array, tokens: jax.Array, laws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how probable each of some siblings stands if those before it do not, and the law where none does.

    Sibling x that was drawn from q stands with probability min(1, p(x) ÷ q(x)), and where it does not, p becomes
    norm(max(p − q, 0)) for the next one.

    Args:
      target: float32[B, V], p.
      tokens: int32[B, C], −1 for none.
      laws: float32[B, C, V], log-probabilities of the law that each was drawn from, given those before it.

    Returns:
      float32[B, C] and float32[B, V].

    Examples:
      >>> law = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]]))
      >>> chance, rest = chances(jnp.array([[0.25, 0.75, 0.0]]), jnp.array([[0, 2]]), law)
      >>> chance.tolist(), rest.tolist()
      ([[0.5, 0.0]], [[0.0, 1.0, 0.0]])
    """

    def step(p: jax.Array, sibling: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, q = sibling[0], jnp.exp(sibling[1])
        here = jnp.maximum(token, 0)[:, None]
        p_of, q_of = (jnp.take_along_axis(probs, here, axis=1)[:, 0] for probs in (p, q))
        left = jnp.maximum(p - q, 0.0)
        total = jnp.sum(left, axis=1, keepdims=True)
        # Where nothing is left, the token stands for sure, but for rounding.
        tried = (token >= 0)[:, None] & (total > 0)
        chance = jnp.where(token >= 0, jnp.minimum(p_of / jnp.maximum(q_of, 1e-38), 1.0), 0.0)
        return jnp.where(tried, left / jnp.where(total > 0, total, 1.0), p), chance

    siblings = jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(laws, 1, 0)
    with jax.named_scope(f"trips_{tokens.shape[1]}"):  # for a reader of the compiled program
        rest, chance = jax.lax.scan(step, target, siblings)
    return jnp.moveaxis(chance, 0, 1), rest


def _walked(keys: jax.Array, logits: jax.Array, step: Step) -> Acceptance:
    """Walks from the pending token on, at most D nodes far; keys [B, D + 1]."""
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
    """The token of each row, int32[B, R]; no token is the pending one's, which follows none."""
    return jnp.pad(proposal.tokens, ((0, 0), (1, 0)), constant_values=-1)
