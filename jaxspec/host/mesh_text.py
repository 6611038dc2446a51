"""Parses the text of a device mesh, such as data=2,model=4."""

from __future__ import annotations

import re

from jaxspec.host.messages import shown


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axis lengths of a mesh such as data=1,model=4. An axis that is left out has length 1.

    Raises:
      ValueError: the text is not a mesh; one line.
    """
    pairs = [re.fullmatch(r"\s*(data|model)\s*=\s*([1-9]\d{0,5})\s*", part) for part in text.split(",")]
    axes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if not all(pairs) or len(axes) < len(pairs):
        raise ValueError(
            f"mesh is {shown(text)}; give its axes data (rows) and model (heads), such as data=1,model=4"
        )
    return {"data": axes.get("data", 1), "model": axes.get("model", 1)}
