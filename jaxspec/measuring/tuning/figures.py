"""Figures of an `inspect_model` report, as SVG files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from jaxspec.host.files import make_directory, write_atomic
from jaxspec.measuring import charts

SIMILARITY, EXITS = "inspect-similarity.svg", "inspect-exits.svg"


def save_figures(report: dict[str, Any], directory: str | os.PathLike[str]) -> dict[str, str]:
    """Draws both figures, then writes each file atomically.

    Args:
      report: a report of `inspect_model`.
      directory: the output directory, created if missing. Existing files of the same names are replaced.

    Returns:
      Paths by name: `similarity`, the heat map of the mean over prompts, and `exit_agreement`.

    Raises:
      OSError: the directory cannot be written.
    """
    drawn = {SIMILARITY: str(similarity_figure(report)), EXITS: str(exits_figure(report))}
    directory = Path(directory)
    make_directory(directory)
    for name, content in drawn.items():
        write_atomic(directory / name, content)
    return {"similarity": str(directory / SIMILARITY), "exit_agreement": str(directory / EXITS)}


def similarity_figure(report: dict[str, Any]) -> charts.Chart:
    """The heat map of layers × {attention, MLP}; frames mark the sublayers that ADMG skips for the mean."""
    rows = {
        name: report["similarity"][key]["by_layer"]
        for name, key in (("attention", "attention"), ("MLP", "mlp"))
    }
    # Colours are linear in the angle, because most cosines are near 1.
    lowest = math.acos(max(-1.0, min(math.floor(10 * min(map(min, rows.values()))) / 10, 0.9)))
    shares = {
        name: [1 - math.acos(max(-1.0, min(value, 1.0))) / lowest for value in row]
        for name, row in rows.items()
    }
    prompts = len(report["prompts"])
    return charts.heat_map(
        rows,
        shares,
        {name: [_short(value) for value in row] for name, row in rows.items()},
        {"attention": report["mask"]["skip_attention"], "MLP": report["mask"]["skip_mlp"]},
        title="Cosine similarity before and after each sublayer",
        below=f"{_name(report)}: {f'mean over {prompts} prompts' if prompts > 1 else '1 prompt'}; framed: skipped by "
        f"ADMG (α {report['alpha']:g}, m {report['every']}, n {report['keep_last']})",
        columns="layer",
    )


def exits_figure(report: dict[str, Any]) -> charts.Chart:
    """The agreement of every exit with the whole model, for each prompt and for all prompts."""
    single = [prompt["exit_agreement"] for prompt in report["prompts"]]
    new = sum(prompt["new_tokens"] for prompt in report["prompts"])
    # One series for all prompts, with a gap after each.
    each = [point for agreement in single for point in [*enumerate(agreement, 1), (1, math.nan)]]
    series = {"each prompt": charts.Curve(each, faint=True)} if len(single) > 1 else {}
    return charts.curves(
        series | {"all prompts": charts.Curve(list(enumerate(report["exit_agreement"], 1)))},
        x="exit after this many layers",
        y="share with the same next token as all layers",
        title="Agreement of early exits with the whole model",
        below=f"{_name(report)}: greedy, {new} new token{'s' if new > 1 else ''} of {len(single)} "
        f"prompt{'s' if len(single) > 1 else ''}",
        colours={"each prompt": charts.COLOURS[0], "all prompts": charts.COLOURS[1]},
        most=1.0,
    )


def _name(report: dict[str, Any]) -> str:
    name: str = report["model"]
    return name if len(name) <= 64 else "…" + name[-63:]


def _short(value: float) -> str:
    """Three digits without the leading zero, as in .953, −.021 and 1.00."""
    text = f"{value:.3f}"
    return "1.00" if text.startswith("1.") else text.replace("0.", ".", 1).replace("-", "−")
