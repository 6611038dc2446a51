"""ASD's Table 1 without its times: cosine similarities of the sublayers, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.papers.tables import Cell, Claim, Row, Table, more_than
from jaxspec.measuring.bench.speed import spread, weights
from jaxspec.measuring.tuning.inspection import SUBLAYERS

# Llama-2-13B on CNN/DM: attention, MLP.
PAPER = {"min": (0.581, 0.854), "max": (0.998, 0.991), "mean": (0.953, 0.942), "median": (0.977, 0.960)}
_STATISTICS: dict[str, Callable[..., np.ndarray]] = {
    "min": np.min,
    "max": np.max,
    "mean": np.mean,
    "median": np.median,
}


def tables(similarities: np.ndarray, kinds: Sequence[str]) -> tuple[Table, list[Claim]]:
    """Returns the table, and the paper's observations about attention.

    Args:
      similarities: float[P, L, 2], of each prompt and attention and MLP sublayer.
      kinds: task type of each prompt.
    """
    by_layer = np.tensordot(weights(kinds), similarities, 1) / len(kinds)
    drawn = {name: compute(by_layer, axis=1) for name, compute in _STATISTICS.items()}

    def cell(values: np.ndarray, paper: float) -> Cell:
        ours, interval = spread(values)
        return Cell(paper, ours, interval if len(kinds) > 1 else None)

    rows = [
        Row(
            name,
            {part: cell(values[:, column], PAPER[name][column]) for column, part in enumerate(SUBLAYERS)},
        )
        for name, values in drawn.items()
    ]
    table = Table(
        "Table 1: cosine similarity of attention and MLP sublayers",
        SUBLAYERS,
        tuple(rows),
        ("Means over tuning prompts, then over the layers. The paper: Llama-2-13B on CNN/DM.",),
        digits=3,
    )
    apart = {name: values[:, 0] - values[:, 1] for name, values in drawn.items()}
    printed = {name: attention - mlp for name, (attention, mlp) in PAPER.items()}
    observed = {
        "higher mean": (apart["mean"], printed["mean"]),
        "higher median": (apart["median"], printed["median"]),
        "wider range": (apart["max"] - apart["min"], printed["max"] - printed["min"]),
    }
    claims = [
        more_than(
            f"Attention has the {what} of cosine similarity, compared with the MLP.",
            "attention − MLP",
            cell(values, paper),
            0.0,
        )
        for what, (values, paper) in observed.items()
    ]
    return table, claims
