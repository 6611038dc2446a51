"""A spelling of method auto among two methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.methods import registry
from jaxspec.methods.auto import Auto, kind_of
from jaxspec.methods.base import DraftingMethod, Method, option

_ROLES = {"first": "suffix", "second": "layerskip"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(DraftingMethod):
    """Two methods, among which method auto chooses.

    Attributes:
      first: a method; give its options too.
      second: the other method; give its options too.
      explain: report the choices, as method auto does.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> Hybrid(first="ngram", second=LayerSkip(exit_layer=3))
      Auto(among=(NGram(), LayerSkip(exit_layer=3)))
    """

    name: ClassVar[str] = "hybrid"
    composite: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    first: str | Method | None = option(None, metavar="METHOD")
    second: str | Method | None = option(None, metavar="METHOD")
    explain: bool = False

    def __new__(cls, **given: Any) -> Auto:  # type: ignore[misc]
        """Makes method auto of the options, which may include those of both methods."""
        return registry.make(cls.name, given)  # type: ignore[return-value]

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the defaults, by option."""
        return _ROLES | Auto.usual()

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Auto:
        """Makes method auto.

        Raises:
          ValueError: an option does not fit; one line.
        """
        return Auto.from_options(_of_auto(given))

    @classmethod
    def parts(cls, given: Mapping[str, Any]) -> tuple[type[Method], ...]:
        """Returns both methods."""
        return Auto.parts(_of_auto(given))


def _of_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `Auto` for those of `Hybrid`."""
    both = {role: usual if given.get(role) is None else given[role] for role, usual in _ROLES.items()}
    for role, method in both.items():
        kind_of(method, role)
    return {name: one for name, one in given.items() if name not in both} | {"among": tuple(both.values())}
