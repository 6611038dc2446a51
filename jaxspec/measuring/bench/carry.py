"""An adaptive γ carried from text to text, as the authors of Draft & Verify evaluate."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.methods import Method


def carried(method: Method, gamma: float | None) -> Method:
    """Returns the method for a text that starts from the γ with which the method's previous text ended.

    A method without an option `gamma` is returned unchanged.

    Args:
      method: an instance of one of `jaxspec.methods`.
      gamma: `Result.gamma` of the previous text; None before the first text, or where no stop rule has an adaptive γ.

    Examples:
      >>> from jaxspec.methods import AdaSPEED
      >>> carried(AdaSPEED(exit_layer=1), 0.7).gamma
      0.7
    """
    changes: dict[str, Any] = {} if gamma is None or "gamma" not in method.options() else {"gamma": gamma}
    return dataclasses.replace(method, **changes)
