"""Runs the fitness test of a model: a forward pass over texts, greedy texts, and the checks of the gate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.method_files import FITNESS_FORMAT
from training.reports import fitness
from training.reports.fitness import Exits, Gate, Texts

# Rows per forward pass, and tokens per greedy text.
ROWS, NEW_TOKENS = 4, 128


def measure(
    lm: LanguageModel, kinds: Mapping[str, Texts], greedy_texts: int = 4, gate: Gate | None = None
) -> dict[str, Any]:
    """Runs the fitness test (see `training.reports.fitness`).

    Args:
      lm: the model, on one device.
      kinds: texts that the model was not trained on, by kind of work.
      greedy_texts: number of greedy texts per kind that are checked for repetition.
      gate: by default the project's own.

    Returns:
      JSON-ready: `format`, `model` (fingerprint), `num_layers`, `dtype`; `kinds`, see `summary`; `write_rms`;
      `repeated`, the share of repeated 8-grams in greedy texts of at most 128 tokens, None if no text is long
      enough to be continued or no greedy text has 8 tokens; `checks`, see `Check`; `passed`.

    Raises:
      ValueError: no text is given.
    """
    if not kinds:
        raise ValueError("no text is given; the fitness test needs some that the model was not trained on")
    report: dict[str, Any] = {
        "format": FITNESS_FORMAT,
        "model": lm.fingerprint,
        "num_layers": lm.config.num_layers,
        "dtype": lm.precision,
        "kinds": {kind: fitness.summary(texts, read_exits(lm, texts)) for kind, texts in kinds.items()},
        "write_rms": fitness.write_rms(lm.params),
    }
    starts = [
        start
        for texts in kinds.values()
        for start in texts.openings(greedy_texts)
        if len(start) < lm.config.context_length  # packed windows may be longer
    ]
    budgets = [min(NEW_TOKENS, lm.config.context_length - len(start)) for start in starts]
    written = (
        lm.generate(starts, method="autoregressive", max_new_tokens=budgets, temperature=0.0)
        if starts
        else []
    )
    shares = [(fitness.repeated(one.tokens), max(0, len(one.tokens) - fitness.GRAM + 1)) for one in written]
    grams = sum(count for _, count in shares)
    report["repeated"] = sum(share * count for share, count in shares) / grams if grams else None
    found = fitness.checks(report, gate)
    report["checks"] = [dataclasses.asdict(check) for check in found]
    report["passed"] = all(check.passed for check in found)
    return report


def read_exits(lm: LanguageModel, texts: Texts) -> Exits:
    """The predictions of each exit at each position of the texts, as NumPy arrays; runs `ROWS` rows at a time."""
    run = jax.jit(functools.partial(fitness.by_exit, lm.config))
    parts = []
    for begin in range(0, len(texts.tokens), ROWS):
        rows = slice(begin, begin + ROWS)
        arrays = [array[rows] for array in (texts.tokens, texts.segments, texts.positions)]
        missing = ROWS - len(arrays[0])
        got = run(lm.params, *(np.pad(array, ((0, missing), (0, 0))) for array in arrays))
        parts.append(Exits(*(np.asarray(one)[:, : ROWS - missing] for one in got)))
    return Exits(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))


def by_exit(report: Mapping[str, Any]) -> tuple[list[int], dict[str, dict[str, str]]]:
    """Formats the figures of a report for four exits: their layers, and the values by kind of work and figure."""
    depth = report["num_layers"]
    layers = sorted({max(1, round(depth * part / 4)) for part in (1, 2, 3, 4)})

    def cell(values: Sequence[float] | None, digits: int) -> str:
        return "-" if values is None else " / ".join(f"{values[layer - 1]:.{digits}f}" for layer in layers)

    columns = (("loss", 3), ("agreement", 2), ("confidence", 2), ("accuracy", 2))
    cells = {
        kind: {name: cell(figures[name], digits) for name, digits in columns}
        for kind, figures in report["kinds"].items()
    }
    return layers, cells
