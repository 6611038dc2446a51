"""Random automata over the tokens of small models, and the tokens that they allow, computed one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxspec.grammar.table import TokenTable
from jaxspec.testing import reference
from jaxspec.testing.models import params

EOS = (10, 4)


def table(
    seed: int, vocab_size: int = 13, num_states: int = 6, num_classes: int = 6, density: float = 0.3
) -> TokenTable:
    """Returns a random automaton from whose states the last one can be reached, where the text often ends."""
    rng = np.random.default_rng(seed)
    shape = num_states, num_classes
    following = np.where(rng.random(shape) < density, rng.integers(0, num_states, shape), -1)
    following[-1] = np.where(rng.random(num_classes) < 0.3, following[-1], -1)
    before = np.arange(num_states - 1)
    following[before, rng.integers(0, num_classes, num_states - 1)] = before + 1
    final = rng.random(num_states) < 0.2
    final[-1] = True
    # Each class has a token that does not end a text.
    members = np.setdiff1d(np.arange(vocab_size), EOS if vocab_size > 4 else (2,))
    class_of = rng.integers(0, num_classes, vocab_size)
    class_of[members[:num_classes]] = np.arange(num_classes)
    return TokenTable(class_of.astype(np.uint16), following.astype(np.int32), final, str(seed))


def state_after(one: TokenTable, text: Sequence[int]) -> int:
    state = 0
    for token in text:
        state = int(one.next[state, one.class_of[token]])
        assert state >= 0, f"{text} leaves the grammar"
    return state


def allowed(one: TokenTable, text: Sequence[int], eos: Collection[int], size: int) -> np.ndarray | None:
    """Returns the tokens that may follow, bool[V]; None where nothing but the end can."""
    state = state_after(one, text)
    found = np.array([one.next[state, one.class_of[token]] >= 0 for token in range(size)])
    found[list(eos)] = False
    if text and not found.any():
        return None
    found[list(eos)] = one.final[state]
    return found


def masked(one: TokenTable | None, logits: np.ndarray, text: Sequence[int], eos: Collection[int]):
    if one is None:
        return logits
    found = allowed(one, text, eos, len(logits))
    return None if found is None else np.where(found, logits, -np.inf)


def greedy_text(
    one: TokenTable | None,
    prompt: Sequence[int],
    config,
    budget: int,
    eos: Collection[int] = EOS,
    weights=None,
) -> list[int]:
    """Returns the text of plain greedy decoding under a grammar, from the slow decoder."""
    weights = params(config) if weights is None else weights
    text: list[int] = []
    while len(text) < budget and not (text and text[-1] in eos):
        logits = reference.forward(config, weights, [*prompt, *text], rope_length=len(prompt))[-1]
        logits = masked(one, logits, text, eos)
        if logits is None:
            break
        text.append(int(np.argmax(logits)))
    return text
