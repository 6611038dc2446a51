"""Speculative decoding in 60 lines of plain JAX: draft, verify, accept (Leviathan et al. 2023, Chen et al. 2023).

A model is a function tokens int32[N] → logits float32[N, V] that attends to earlier positions only. There is no
key/value cache here, so the text is exact and slow. `jaxspec/decoding/` has the same round with caches and batches.
"""

import functools

import jax
import jax.numpy as jnp


def greedy(logits):
    """The sampling distribution of greedy decoding: all probability on the most likely token."""
    return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])


def decode_round(target, draft, probs, num_draft_tokens, key, tokens, length):
    """Adds 1 to K + 1 tokens to a text int32[N] of `length` tokens; returns it, its length and the accepted drafts."""
    draft_keys, accept_key, next_key = jax.random.split(key, 3)
    # Draft: K cheap steps, each after the token before. q[i] is the distribution from which draft token i is drawn.
    q = []
    for i, draft_key in enumerate(jax.random.split(draft_keys, num_draft_tokens)):
        q.append(probs(draft(tokens)[length - 1 + i]))
        tokens = tokens.at[length + i].set(jax.random.categorical(draft_key, jnp.log(q[-1])))
    drafts = tokens[length + jnp.arange(num_draft_tokens)]
    # Verify: one pass of the target gives the distribution at every draft token and at the token after all of them.
    p = probs(target(tokens)[length - 1 + jnp.arange(num_draft_tokens + 1)])
    # Accept: draft token x is accepted with probability min(1, p(x) ÷ q(x)), if all tokens before it were accepted.
    rows, q = jnp.arange(num_draft_tokens), jnp.stack(q)
    ratio = p[rows, drafts] / q[rows, drafts]
    accepted = jax.random.uniform(accept_key, rows.shape) < ratio
    count = jnp.sum(jnp.cumprod(accepted))
    # After a rejection the next token comes from the part of p that q did not cover, so that both cases together give
    # exactly p. If all draft tokens are accepted, it comes from p itself: the bonus token.
    covered = jnp.concatenate([q, jnp.zeros_like(q[:1])])[count]
    residual = jnp.maximum(p[count] - covered, 0.0)
    following = jax.random.categorical(next_key, jnp.log(residual))
    return tokens.at[length + count].set(following), length + count + 1, count


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def generate(target, draft, probs, num_draft_tokens, max_new_tokens, key, prompt):
    """Tokens int32[P] → the text int32[P + max_new_tokens] and the number of rounds, each one pass of the target."""
    limit = prompt.shape[0] + max_new_tokens
    # The last round may draft past the limit.
    tokens = jnp.pad(prompt, (0, max_new_tokens + num_draft_tokens))

    def more(state):
        return state[1] < limit

    def body(state):
        tokens, length, rounds = state
        round_key = jax.random.fold_in(key, length)
        tokens, length, _ = decode_round(target, draft, probs, num_draft_tokens, round_key, tokens, length)
        return tokens, length, rounds + 1

    tokens, _, rounds = jax.lax.while_loop(more, body, (tokens, jnp.int32(prompt.shape[0]), jnp.int32(0)))
    return tokens[:limit], rounds
