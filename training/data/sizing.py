"""Chooses model and training sizes that suit the amount of data, for the options given as `auto`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from jaxspec.console.parsing import Text
from jaxspec.host.messages import shown


class Auto(int):
    """The integer type of `AUTO`, a placeholder for a number that the size of the data decides."""

    def __repr__(self) -> str:
        return "auto"

    __str__ = __repr__


AUTO = Auto(-1)


def _read(name: str, word: str) -> int:
    if word == str(AUTO):
        return AUTO
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{name} is {shown(word)}; give a whole number or auto") from None


Sized = Annotated[int, Text("N|auto", _read)]


def check(options: Any, **least: int) -> None:
    """Checks that each named option is `auto` or at least its lower bound.

    Raises:
      ValueError: an option is below its bound.
    """
    for name, bound in least.items():
        value = getattr(options, name)
        if value < bound and not isinstance(value, Auto):
            raise ValueError(f"{name} is {value}; give a whole number of at least {bound}")


NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "context"),
    *("window", "batch", "accumulate", "steps", "every"),
)
# Columns: the least number of characters of training text for this row, vocabulary, layers, width, and passes over
# the text. More than about four passes bring little (Muennighoff et al. 2023, "Scaling Data-Constrained Language
# Models"), but small texts need more: 300 KB of stories were best after five to six.
_SIZES = (
    (0, 512, 2, 64, 16),
    (100_000, 1024, 4, 128, 6),
    (2_000_000, 2048, 6, 192, 4),
    (30_000_000, 4096, 8, 256, 2),
    (300_000_000, 8192, 12, 512, 1),
)
# A given model is trained further as in the papers (SoFT: windows of 2,048 tokens, 128 rows a step, 3 passes). A
# micro-batch has as many tokens on each device as one from scratch.
_FURTHER_WINDOW, _FURTHER_ROWS, _FURTHER_PASSES = 2048, 128, 3
_MICRO_TOKENS = 2048
_LEAST_STEPS = 100
_HEAD_DIM = 32


class Further(NamedTuple):
    """A given model that is trained further.

    Attributes:
      context: its longest text, in tokens.
      places: number of devices that divide the rows of a batch.
    """

    context: int
    places: int = 1


def choose(
    characters: int,
    scratch: bool,
    given: Mapping[str, int],
    epochs: float | None = None,
    further: Further | None = None,
    tokens: int | None = None,
) -> dict[str, int]:
    """Chooses training sizes that suit the data. Given sizes stay, and the others follow them.

    Training with the smallest row takes about a minute on two CPU cores, with the row for 0.1 to 2 million characters
    a few minutes, and with each further row about ten times as long.

    Args:
      characters: number of characters of the training text.
      scratch: whether a model is trained from random weights; otherwise shape and vocabulary are those of a given one.
      given: the sizes that are already set, by option name.
      epochs: passes over the text; None for a number that suits the data.
      further: the given model that is itself trained; None for a model from scratch or a head.
      tokens: number of tokens of the training text; None for an estimate from its characters.

    Returns:
      `window`, `batch`, `accumulate`, `steps` and `every`; from scratch also `vocab_size`, `layers`, `hidden_size`,
      `intermediate_size`, `head_dim`, `heads`, `kv_heads` and `context`.
    """
    sizes = dict(given)

    def settle(name: str, value: int) -> int:
        return sizes.setdefault(name, value)

    _, vocab_size, layers, hidden_size, passes = [row for row in _SIZES if row[0] <= characters][-1]
    per_token = 4.0  # characters
    if scratch:
        # Measured: characters per token of a byte-level vocabulary of this size on stories and books.
        per_token = max(1.0, 0.55 * math.log2(settle("vocab_size", vocab_size)) - 2.8)
        settle("layers", layers)
        hidden_size = settle("hidden_size", hidden_size)
        settle("intermediate_size", 32 * math.ceil(8 / 3 * hidden_size / 32))
        head_dim = hidden_size // sizes["heads"] // 2 * 2 if "heads" in sizes else _HEAD_DIM
        head_dim = settle("head_dim", max(2, min(head_dim, hidden_size // 2 * 2)))
        groups = sizes.get("kv_heads", 1)
        settle("kv_heads", settle("heads", groups * max(1, hidden_size // head_dim // groups)))
        settle("context", max(512, sizes.get("window", 0)))
    tokens = max(1, int(characters / per_token) if tokens is None else tokens)
    usual_window = min(256, sizes.get("context", 256))
    window = settle("window", usual_window if further is None else min(_FURTHER_WINDOW, further.context))
    # At most half of the estimated windows, because a step must not need more windows than there are.
    rows = max(1, tokens // (2 * window))
    if further is None:
        passes = passes if scratch else min(passes, _FURTHER_PASSES)
        batch = settle("batch", max(1, min(8, rows // settle("accumulate", 1))))
    else:
        rows, passes, places = min(_FURTHER_ROWS, rows), _FURTHER_PASSES, further.places
        micro = min(rows // sizes.get("accumulate", 1), places * max(1, min(8, _MICRO_TOKENS // window)))
        batch = settle("batch", max(1, micro // places) * places)
    step_tokens = batch * settle("accumulate", max(1, rows // batch)) * window
    least = _LEAST_STEPS if further is None and epochs is None else 1
    steps = settle("steps", max(least, math.ceil((epochs or passes) * tokens / step_tokens)))
    settle("every", min(200, max(10, steps // 10)))
    return sizes


def divided(rows: int, window: int, places: int) -> dict[str, int]:
    """Divides the rows of a step into micro-batches, for a run that resumes on another number of devices.

    Args:
      rows: rows of a step, in all micro-batches.
      window: tokens of a row.
      places: number of devices that divide the rows of a batch.

    Returns:
      `batch` and `accumulate`, as `choose` divides these rows for a given model; {} if the devices do not divide them.

    Examples:
      >>> divided(128, 2048, places=8)
      {'batch': 8, 'accumulate': 16}
    """
    most = places * max(1, min(8, _MICRO_TOKENS // window))
    batch = max((n for n in range(places, most + 1, places) if rows % n == 0), default=None)
    return {} if batch is None else {"batch": batch, "accumulate": rows // batch}


def in_words(characters: int, chosen: Mapping[str, int]) -> str:
    """Describes in one line which sizes were chosen, by option name, and for how much text."""
    listed = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    return f"chosen for {characters:,} characters of training text: {listed}"
