"""The file of `--prices`: the data from which method `auto` chooses, with which another process repeats a text."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.costs.prices import Prices
from jaxspec.host.files import write_json
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.methods.method_files import check_model, read_format

FORMAT = "jaxspec.prices/1"
_REMEDY = "jaxspec generate --method auto --prices FILE"


def as_json(prices: Prices, names: tuple[str, ...], widths: tuple[int, ...]) -> dict[str, Any]:
    """Returns the candidates, the widths of verification, and the prices, as JSON values."""
    arrays = {
        name: np.asarray(getattr(prices, name)).tolist() for name in ("rows", "verify", "draft", "accept")
    }
    return {"candidates": list(names), "widths": list(widths), **arrays}


def write_prices(path: str | os.PathLike[str], model: str, content: dict[str, Any]) -> None:
    """Writes the result of `as_json`; `model` is the model's fingerprint."""
    write_json(Path(path), {"format": FORMAT, "model": model, **content})


@brief_errors()
def read_prices(
    path: str | os.PathLike[str], model: str, names: tuple[str, ...], widths: tuple[int, ...], longest: int
) -> Prices:
    """Returns the prices of a file, checked to belong to this model and to these candidates.

    Raises:
      ValueError: the file is damaged, or belongs to another model or to other candidates; one line.
    """
    content = read_format(path, FORMAT, "a file of prices")
    check_model(path, content.get("model"), model, _REMEDY)
    for name, own in {"candidates": list(names), "widths": list(widths)}.items():
        if content.get(name) != own:
            raise ValueError(
                f"{path} has the {name} {shown(content.get(name))}, this text {own}; give another file"
            )
    rows: Any = content.get("rows")
    count = len(names)
    of_rows = {"verify": (len(widths), 2), "draft": (count, longest + 1, 2)}
    try:
        with np.errstate(over="ignore"):  # an infinite number is refused below
            given = {name: np.array(content.get(name), np.float32) for name in ("verify", "draft", "accept")}
        good = (
            isinstance(rows, list) and len(rows) > 0 and all(type(one) is int and one < 2**31 for one in rows)
        )
        good = good and rows[0] > 0 and all(one < after for one, after in itertools.pairwise(rows))
        good = good and all(given[name].shape == (len(rows), *shape) for name, shape in of_rows.items())
        good = good and given["accept"].shape == (count, longest)
        good = good and all(bool(np.isfinite(one).all()) for one in given.values())
        good = good and bool((given["verify"][..., 0] > 0).all() and (given["verify"][..., 1] >= 0).all())
        good = good and bool(((given["accept"] >= 0) & (given["accept"] <= 1)).all())
    except (ValueError, TypeError, OverflowError):
        good = False
    if not good:
        raise ValueError(f"{path} has no valid prices; make it with `{_REMEDY}`")
    return Prices(jnp.array(rows, jnp.int32), **{name: jnp.asarray(one) for name, one in given.items()})
