"""Outputs of a notebook."""

from __future__ import annotations

import sys
from typing import Any


class Live:
    """An output of a notebook's cell that each call replaces in place; outside of notebooks, nothing is shown.

    Examples:
      >>> live = Live()
      >>> live("first"), live("second")
      (None, None)
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, shown: Any) -> None:
        """Shows an object, by its `_repr_html_` or `_repr_svg_` if it has one."""
        if "ipykernel" not in sys.modules:
            return
        from IPython.display import display

        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)
