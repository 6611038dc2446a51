"""How large a model and how long a training suit the data: what the options `auto` stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import tyro


class Auto(int):
    """A number that is not chosen yet: `AUTO` stands where the size of the data is to decide."""

    def __repr__(self) -> str:
        return "auto"

    __str__ = __repr__


AUTO = Auto(-1)


def _read(words: list[str]) -> int:
    if words[0] == str(AUTO):
        return AUTO
    try:
        return int(words[0])
    except ValueError:
        raise ValueError(f"is {words[0]!r}; give a whole number or auto") from None


Sized = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT|auto",
        instance_from_str=_read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]


def check(options: Any, **least: int) -> None:
    """Refuses numbers of a section of options that are below the least, by name, and not `auto`.

    Raises:
      ValueError: one is.
    """
    for name, bound in least.items():
        value = getattr(options, name)
        if value < bound and not isinstance(value, Auto):
            raise ValueError(f"{name} is {value}; give a whole number of at least {bound}")


NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "context"),
    *("window", "batch", "steps", "every"),
)
# Characters of training text from which a row holds: vocabulary, layers, width, and how often the text is gone through.
# More passes than about four teach little more (Muennighoff et al. 2023, "Scaling Data-Constrained Language
# Models"), but a small text needs them to be learned at all: 300 KB of stories were best after five to six.
_SIZES = (
    (0, 512, 2, 64, 16),
    (100_000, 1024, 4, 128, 6),
    (2_000_000, 2048, 6, 192, 4),
    (30_000_000, 4096, 8, 256, 2),
    (300_000_000, 8192, 12, 512, 1),
)
# Passes where a given model is trained further.
_FURTHER = 3
_LEAST_STEPS = 100
_HEAD_DIM = 32


def choose(characters: int, scratch: bool, accumulate: int, given: Mapping[str, int]) -> dict[str, int]:
    """Chooses the sizes of a training that suit its data; given ones stay, and the others follow them.

    The smallest rung takes a minute on two CPU cores, that of 0.1 to 2 million characters a few minutes, and each
    further one about ten times as long as the one before.

    Args:
      characters: of the training text.
      scratch: whether the model is trained from random weights; otherwise its shape and vocabulary are there.
      accumulate: micro-batches per step.
      given: by name of option, the numbers that are settled.

    Returns:
      `window`, `batch`, `steps` and `every`, from scratch also `vocab_size`, `layers`, `hidden_size`,
      `intermediate_size`, `head_dim`, `heads`, `kv_heads` and `context`.
    """
    sizes = dict(given)

    def settle(name: str, value: int) -> int:
        return sizes.setdefault(name, value)

    _, vocab_size, layers, hidden_size, passes = [row for row in _SIZES if row[0] <= characters][-1]
    per_token = 4.0  # characters
    if scratch:
        # What a byte-level vocabulary of this size made of stories and books.
        per_token = max(1.0, 0.55 * math.log2(settle("vocab_size", vocab_size)) - 2.8)
        settle("layers", layers)
        hidden_size = settle("hidden_size", hidden_size)
        settle("intermediate_size", 32 * math.ceil(8 / 3 * hidden_size / 32))
        head_dim = hidden_size // sizes["heads"] // 2 * 2 if "heads" in sizes else _HEAD_DIM
        head_dim = settle("head_dim", max(2, min(head_dim, hidden_size // 2 * 2)))
        groups = sizes.get("kv_heads", 1)
        settle("kv_heads", settle("heads", groups * max(1, hidden_size // head_dim // groups)))
        settle("context", max(512, sizes.get("window", 0)))
    else:
        passes = min(passes, _FURTHER)
    tokens = max(1, int(characters / per_token))
    window = settle("window", min(256, sizes.get("context", 256)))
    # Half of the windows that there might be: an estimate must not ask for more than there are.
    batch = settle("batch", max(1, min(8, tokens // (2 * window * accumulate))))
    steps = settle("steps", max(_LEAST_STEPS, math.ceil(passes * tokens / (batch * window * accumulate))))
    settle("every", min(200, max(10, steps // 10)))
    return sizes


def in_words(characters: int, chosen: Mapping[str, int]) -> str:
    """Describes in one line which sizes were chosen, by name of option, and why."""
    listed = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    return f"chosen for {characters:,} characters of training text: {listed}"
