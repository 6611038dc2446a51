"""Pictures of what `inspect_model` found, as PNG files."""

from __future__ import annotations

import io
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.io.files import make_directory, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMILARITY, EXITS = "inspect-similarity.png", "inspect-exits.png"
# Layers in one row of the heat map; more continue below.
_MAX_COLUMNS = 20
# Safe for the colour-blind, and lightness alone tells the order.
_COLOURS = "viridis"
_DPI = 150
_MEAN, _SINGLE = "#0072b2", "#9a9a9a"


def save_figures(report: dict[str, Any], directory: str | os.PathLike[str]) -> dict[str, str]:
    """Draws both figures; each file is written whole or not at all, and neither if one cannot be drawn.

    Args:
      report: of `inspect_model`.
      directory: where they go; made if missing. Files of the same names are replaced.

    Returns:
      Paths by name: `similarity`, the heat map of the mean over prompts, and `exit_agreement`.

    Raises:
      OSError: the directory cannot be written to.
    """
    drawn = {SIMILARITY: _png(similarity_figure(report)), EXITS: _png(exits_figure(report))}
    directory = Path(directory)
    make_directory(directory)
    for name, content in drawn.items():
        write_atomic(directory / name, content)
    return {"similarity": str(directory / SIMILARITY), "exit_agreement": str(directory / EXITS)}


def similarity_figure(report: dict[str, Any]) -> Figure:
    """The heat map: layers × {attention, MLP}, a frame around what ADMG would skip for the mean."""
    from matplotlib.ticker import NullLocator

    values = np.array([report["similarity"][name]["by_layer"] for name in ("attention", "mlp")])
    skipped = np.zeros(values.shape, bool)
    skipped[0, report["mask"]["skip_attention"]] = True
    skipped[1, report["mask"]["skip_mlp"]] = True
    depth = values.shape[1]
    panels = -(-depth // _MAX_COLUMNS)
    columns = -(-depth // panels)

    # In inches: a cell, what surrounds all panels, and the room for numbers of layers between them.
    cell, height, gap = 0.52, 0.42, 0.36
    left, right, top, bottom = 0.85, 1.0, 0.92, 0.15
    width = max(5.6, left + columns * cell + right)
    total = top + panels * (2 * height + gap) + bottom
    figure = _figure(width, total)
    scale = _scale(values)
    for panel in range(panels):
        first = panel * columns
        part = slice(first, min(first + columns, depth))
        count = part.stop - first
        lower = total - top - panel * (2 * height + gap) - 2 * height
        axes = figure.add_axes((left / width, lower / total, count * cell / width, 2 * height / total))
        _heat_map(axes, values[:, part], skipped[:, part], first, scale)
    reach = panels * (2 * height + gap) - gap
    bar = figure.add_axes(
        ((left + columns * cell + 0.25) / width, (total - top - reach) / total, 0.14 / width, reach / total)
    )
    figure.colorbar(scale, cax=bar).outline.set_visible(False)
    lowest = scale.norm.vmin
    ticks = [
        lowest,
        *(tick for tick in (-0.5, 0.0, 0.5, 0.8, 0.95, 1.0) if tick > lowest + 0.1 * (1 - lowest)),
    ]
    bar.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    bar.yaxis.set_minor_locator(NullLocator())
    bar.tick_params(labelsize=8, length=2)
    prompts = len(report["prompts"])
    _title(
        figure,
        report,
        "Cosine similarity before and after each sublayer",
        f"{f'mean over {prompts} prompts' if prompts > 1 else '1 prompt'} · framed: skipped by ADMG "
        f"(α {report['alpha']:g}, m {report['every']}, n {report['keep_last']})",
    )
    return figure


def exits_figure(report: dict[str, Any]) -> Figure:
    """Agreement of every exit with the whole model, for each prompt and for all."""
    depth = report["num_layers"]
    width, total = 6.4, 4.1
    figure = _figure(width, total)
    axes = figure.add_axes((0.85 / width, 0.55 / total, (width - 1.1) / width, (total - 1.5) / total))
    layers = np.arange(1, depth + 1)
    single = [prompt["exit_agreement"] for prompt in report["prompts"]]
    size = 5 if depth <= 40 else 3
    for number, agreement in enumerate(single if len(single) > 1 else ()):
        label = "each prompt" if number == 0 else None
        axes.plot(layers, agreement, color=_SINGLE, linewidth=0.8, alpha=0.6, label=label, zorder=1)
    new = sum(prompt["new_tokens"] for prompt in report["prompts"])
    axes.plot(
        layers,
        report["exit_agreement"],
        color=_MEAN,
        linewidth=2,
        marker="o",
        markersize=size,
        label="all prompts",
        zorder=2,
        clip_on=False,
    )
    axes.set_ylim(0, 1)
    axes.set_xlim((0.5, 1.5) if depth == 1 else (1 - 0.02 * depth, depth * 1.02))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, depth) if depth <= 12 * step)
    axes.set_xticks(range(step, depth + 1, step))
    axes.set_xlabel("exit after this many layers")
    axes.set_ylabel("same next token as all layers")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(single) > 1:
        axes.legend(frameon=False, loc="best", fontsize=9)
    tokens = f"{new} new token{'s' if new > 1 else ''}"
    _title(
        figure,
        report,
        "Agreement of early exits with the whole model",
        f"greedy, {tokens} of {len(single)} prompt{'s' if len(single) > 1 else ''}",
    )
    return figure


def _figure(width: float, height: float) -> Figure:
    # No pyplot: it would look for a screen, and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A model's name may have characters that the font has not; they become boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _scale(values: np.ndarray) -> Any:
    """The colours of cosines, in even steps of the angle: most are near 1, where the cosine hardly moves."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm

    lowest = min(np.floor(10 * values.min()) / 10, 0.9)
    angle = (lambda cosine: -np.arccos(np.clip(cosine, -1, 1)), lambda minus: np.cos(minus))
    return ScalarMappable(FuncNorm(angle, lowest, 1.0, clip=True), _COLOURS)


def _heat_map(axes: Axes, values: np.ndarray, skipped: np.ndarray, first: int, scale: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.imshow(values, cmap=scale.cmap, norm=scale.norm, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(values):
        red, green, blue, _ = scale.to_rgba(value)
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(column, row, _short(value), ha="center", va="center", color=ink, fontsize=8.5)
        if skipped[row, column]:
            axes.add_patch(
                Rectangle((column - 0.43, row - 0.4), 0.86, 0.8, fill=False, edgecolor=ink, linewidth=1.4)
            )
    axes.set_xticks(range(values.shape[1]), [str(first + 1 + index) for index in range(values.shape[1])])
    axes.set_yticks((0, 1), ("attention", "MLP"))
    axes.tick_params(length=0, labelsize=8.5)
    axes.annotate(
        "layer", (0, 0), (-3.5, -3.5), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="top", fontsize=8.5, color="#555555",
    )  # fmt: skip
    axes.spines[:].set_visible(False)


def _short(value: float) -> str:
    """Three digits without the leading zero, as in .953, −.021 and 1.00."""
    text = f"{value:.3f}"
    return "1.00" if text.startswith("1.") else text.replace("0.", ".", 1).replace("-", "−")


def _title(figure: Figure, report: dict[str, Any], title: str, below: str) -> None:
    width, height = figure.get_size_inches()
    name = report["model"] if len(report["model"]) <= 64 else "…" + report["model"][-63:]
    lines = ((0.12, title, 11.0, "bold"), (0.33, name, 8.5, "normal"), (0.49, below, 8.5, "normal"))
    for down, text, size, weight in lines:
        figure.text(
            0.2 / width, 1 - down / height, text, fontsize=size, fontweight=weight, va="top", parse_math=False
        )
