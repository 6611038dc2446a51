"""γ carried from text to text, as Draft & Verify's authors evaluate: given explicitly, text by text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.engine.results import Result
from jaxspec.methods import Method


def carrying(generate: Callable[..., Result]) -> Callable[..., Result]:
    """Returns `generate` with a memory: each text of a method starts from the γ that the method's last text ended with.

    A method whose stop rule has no adaptive γ, or that has no option `gamma`, is left as it is.

    Args:
      generate: takes a prompt and keyword arguments, among them `method`, an instance of one of `jaxspec.methods`.

    Example:
      >>> from jaxspec.methods import AdaSPEED
      >>> from jaxspec.testing import language_model
      >>> generate = carrying(language_model().generate)
      >>> first = generate([3, 4], method=AdaSPEED(exit_layer=1), max_new_tokens=8)
      >>> second = generate([3, 4], method=AdaSPEED(exit_layer=1), max_new_tokens=8)
      >>> round(first.gamma, 3) != round(second.gamma, 3)
      True
    """
    ended: dict[Method, float] = {}

    def run(prompt: Any, *, method: Any = "autoregressive", **options: Any) -> Result:
        if not isinstance(method, Method):
            return generate(prompt, method=method, **options)
        changes: dict[str, Any] = {"gamma": ended[method]} if method in ended else {}
        result = generate(prompt, method=dataclasses.replace(method, **changes), **options)
        if result.gamma is not None and "gamma" in method.options():
            ended[method] = result.gamma
        return result

    return run
