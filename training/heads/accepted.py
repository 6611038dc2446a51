"""Measures how often a model accepts the drafts of a head, by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Decimals of a share; an estimate from a few texts is not more precise.
_DIGITS = 3
# Shares of positions that no draft reached are 1.
_EDGE = 1e-3


def accepted_shares(texts: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, ...]:
    """Returns the share of accepted draft tokens by position, given that those before were accepted.

    A draft that ends early counts as rejected at its end. A text's last round without a draft is left out, because the
    end of the text may have prevented the draft. Each share is moved by half an acceptance and half a rejection, so
    that nothing is certain.

    Args:
      texts: (draft tokens, accepted tokens) of each round, by text.

    Returns:
      One share for each position of the longest draft; () if there is no round.

    Examples:
      >>> accepted_shares([[(2, 1), (2, 2), (2, 0)]] * 9)
      (0.65, 0.5)
    """
    complete = [rounds if rounds and rounds[-1][0] else rounds[:-1] for rounds in texts]
    if not any(complete):
        return ()
    # A text without drafts counts as drafts of one token that were rejected.
    longest = max([1, *(drafted for rounds in texts for drafted, _ in rounds)])
    counts, at = np.zeros((len(texts), longest, 2)), np.arange(longest)  # accepted and rejected tokens
    for number, rounds in enumerate(complete):
        ends = len(rounds) == len(texts[number])
        for left, (drafted, accepted) in zip(range(len(rounds) - 1, -1, -1), rounds, strict=True):
            # The end of the text may cut the last draft short, which does not count against the head.
            most = drafted if ends and not left else longest
            counts[number] += np.stack([at < accepted, (at == accepted) & (accepted < most)], axis=-1)
    shares = (counts[..., 0].sum(axis=0) + _EDGE) / (counts.sum(axis=(0, -1)) + _EDGE)
    shown = (counts.sum(axis=-1) > 0).sum(axis=0)
    return tuple(((shares * shown + 0.5) / (shown + 1)).round(_DIGITS).tolist())
