"""The choice of method auto among two methods, for each row and by one price of a draft token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods import registry
from jaxspec.methods.auto import kind_of, with_options
from jaxspec.methods.base import Method, option, read_costs
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.choosing_drafter import ChoosingDrafter
    from jaxspec.protocol import Drafter

# The cost of a draft token, in steps of the target, if its method declares none.
_UNKNOWN = 0.5
# The expected acceptance of a lookup's first and further tokens, and of a draft token of a method without a record.
_LOOKUP, _ACCEPT = (0.5, 0.75), (0.75,)
_ROLES = {"first": "suffix", "second": "layerskip"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(Method):
    """Two methods; each round uses the one whose draft has the larger expected gain for its cost.

    On the command line and in `generate(method="hybrid", ...)`, the options of both methods are given next to these.
    This class takes two methods with their own options.

    Attributes:
      first: the method that copies drafts from text: suffix or ngram; or grammar. Give its options too. Default
        suffix.
      second: the method that drafts with a model: any other method. Give its options too. Default layerskip.
      draft_cost: the cost of a draft token of the second method, or of a level of its tree, in steps of one token.
        Default: the size of the weights that it reads, relative to those that a step of the model reads.

    Examples:
      >>> from jaxspec.methods import LayerSkip, Suffix
      >>> Hybrid(first=Suffix(suffix_max=8), second=LayerSkip(exit_layer=3))
      Hybrid(first=Suffix(suffix_max=8), second=LayerSkip(exit_layer=3))
    """

    name: ClassVar[str] = "hybrid"
    composite: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    first: str | Method | None = option(None, metavar="METHOD")
    second: str | Method | None = option(None, metavar="METHOD")
    draft_cost: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in _ROLES:
            if (part := getattr(self, role)) is not None:
                kind = _part(role, part)
                object.__setattr__(self, role, kind() if isinstance(part, str) else part)
        if self.draft_cost is not None and not 0 <= self.draft_cost < float("inf"):
            raise ValueError(f"draft_cost is {self.draft_cost}; give a number from 0 on")

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Hybrid:
        """Makes both methods from their options, and this one.

        Raises:
          ValueError: neither method has an option, or a value is invalid; one line.
        """
        own: dict[str, Any] = {name: given[name] for name in cls.options() if name in given}
        rest = {name: value for name, value in given.items() if name not in own}
        return cls(**own | {role: with_options(kind(), rest) for role, kind in _named(own).items()})

    @classmethod
    def parts(cls, given: Mapping[str, Any]) -> tuple[type[Method], ...]:
        """Returns the methods of `first` and `second` that are given by their names or left out."""
        return tuple(_named(given).values())

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter of both methods; its parameters are a tuple of theirs."""
        import jax.numpy as jnp

        from jaxspec.costs.prices import simple_prices
        from jaxspec.costs.rounds import guessed_row
        from jaxspec.drafting.choosing_drafter import ChoosingDrafter, widths_of
        from jaxspec.drafting.lookup import LookupDrafter

        copies, drafts = self._methods()
        first, _ = copies.build(target, resources)
        if not isinstance(first, LookupDrafter):
            raise ValueError(
                f"first is {copies.name}, which drafts with a model; give suffix, ngram or grammar, or swap the two"
            )
        second, own = drafts.build(target, resources)
        second = second.taking_turns()
        declared = drafts.cost(target, second, own)
        usual, row, length = _UNKNOWN, guessed_row(resources.platform), second.num_draft_tokens
        if declared is not None:
            usual = declared.draft_ms(read_costs(target, row), length) / length
        costs = 0.0, usual if self.draft_cost is None else self.draft_cost
        accept = _LOOKUP, drafts.expectation(target, resources) or _ACCEPT
        widths, longest = widths_of((first, second)), max(first.num_draft_tokens, second.num_draft_tokens)
        prices = simple_prices(widths, longest, costs, row, accept)
        # Each row chooses for itself, so that a sampled text does not depend on the other rows.
        memory = jnp.float32(ChoosingDrafter.memory)
        return ChoosingDrafter(target.config, (first, second), prices, memory, joint=False), (None, own)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost | None:
        """Returns the second method's cost with a lookup per round; copied drafts lower the measured times."""
        second = self._methods()[1].cost(target, cast("ChoosingDrafter", drafter).candidates[1], params[1])
        return None if second is None else dataclasses.replace(second, lookup=True, adapts=True)

    def _methods(self) -> tuple[Method, ...]:
        return tuple(getattr(self, role) or registry.find(usual)() for role, usual in _ROLES.items())


def _part(role: str, part: str | Method) -> type[Method]:
    """Returns the class of a method of a hybrid, which drafts and is not a hybrid itself."""
    kind = kind_of(part, role)
    if kind.composite or not kind.options():
        raise ValueError(f"{role} is {kind.name!r}; give a method that drafts and is not a hybrid")
    return kind


def _named(given: Mapping[str, Any]) -> dict[str, type[Method]]:
    """Returns the methods of a hybrid given by name and the defaults; flat options belong to them."""
    parts = {role: usual if given.get(role) is None else given[role] for role, usual in _ROLES.items()}
    return {role: _part(role, part) for role, part in parts.items() if isinstance(part, str)}
