"""The prices of rounds from which the compiled loop chooses, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.costs.rounds import DraftCost, StepCosts

# The numbers of rows for which prices are given.
ROWS = (1, 2, 4, 8, 16, 32)


@struct.dataclass
class Prices:
    """The data of a choice among C candidates: the times of rounds, in any unit, and the expected acceptance.

    The time of a round with R rows that still generate, of t tokens each on average, is a time at t = 0 and a time per
    token. It is the sum of verification, by its width, and of drafting, by the length of the draft or, for a tree, by
    the depth. Where `model.control.narrowest` runs only the largest width, all widths take its time.

    Attributes:
      rows: int32[N], rising numbers of rows for which times are given. A batch takes the next larger one.
      verify: float32[N, W, 2], the time of a verification of each of the drafter's `verify_widths`, and per token.
      draft: float32[N, C, K + 1, 2], the time of a draft of each length, and per token. It is negative where
        verification saves more layers than the draft runs. 0 for lookups, which run in every round.
      accept: float32[C, K], the acceptance of a draft token whose predecessors are accepted, by position, before the
        first round of a text. Of a lookup only the first two positions are used: the second holds for all further ones.
    """

    rows: jax.Array
    verify: jax.Array
    draft: jax.Array
    accept: jax.Array

    def for_rows(self, rows: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `verify` float32[W] and `draft` float32[C, K + 1] for a number of rows and tokens, in plain steps."""
        at = jnp.minimum(jnp.searchsorted(self.rows, rows), len(self.rows) - 1)
        verify, draft = (of[at, ..., 0] + of[at, ..., 1] * tokens for of in (self.verify, self.draft))
        return verify / verify[0], draft / verify[0]


def measured_prices(
    costs: StepCosts,
    drafts: Sequence[DraftCost],
    trees: Sequence[int],
    widths: Sequence[int],
    longest: int,
    accept: Sequence[Sequence[float]],
    one_width: bool = False,
) -> Prices:
    """Returns prices from the costs of steps, for batches of up to `ROWS[-1]` rows.

    Args:
      costs: of the device.
      drafts: the work of each candidate's drafts.
      trees: the number of nodes of each candidate's trees; 0 for chains.
      widths: the drafter's `verify_widths`.
      longest: K.
      accept: of each candidate, the acceptance of the first positions; the last one holds for later ones.
      one_width: whether every verification has the largest width.
    """

    def verify_ms(width: int, live: int, batch: int) -> float:
        return costs.step_ms(widths[-1] if one_width else width, live=live, batch=batch) + costs.loop_ms

    def draft_ms(draft: DraftCost, nodes: int, length: int, live: int, batch: int) -> float:
        if draft.lookup or not length:
            return 0.0
        width = next(width for width in widths if width > (nodes or length))
        its = dataclasses.replace(draft, widths=(widths[-1] if one_width else width,))
        return its.round_ms(costs, length, live, batch) - verify_ms(width, live, batch)

    def table(live: int) -> tuple[np.ndarray, np.ndarray]:
        verify = [[verify_ms(width, live, batch) for width in widths] for batch in ROWS]
        draft = [
            [
                [draft_ms(one, nodes, length, live, batch) for length in range(longest + 1)]
                for one, nodes in zip(drafts, trees, strict=True)
            ]
            for batch in ROWS
        ]
        return np.array(verify), np.array(draft)

    (verify, draft), later = table(0), table(1)
    known = [np.asarray(one, np.float32)[:longest] for one in accept]
    return Prices(
        jnp.array(ROWS, jnp.int32),
        jnp.asarray(np.stack([verify, later[0] - verify], axis=-1), jnp.float32),
        jnp.asarray(np.stack([draft, later[1] - draft], axis=-1), jnp.float32),
        jnp.asarray(np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in known])),
    )
