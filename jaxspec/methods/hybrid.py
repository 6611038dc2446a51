"""Combines two methods: drafts copied from text and drafts of a model, chosen per round by their expected gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods import registry
from jaxspec.methods.base import Method, option, read_costs
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.choosing_drafter import Choosing
    from jaxspec.protocol import Drafter

# The cost of a draft token, in steps of the target, if its method declares none.
_UNKNOWN = 0.5
# The expected acceptance of a lookup's first and further tokens, and of a draft token of a method without a record.
_LOOKUP, _ACCEPT = (0.5, 0.75), 0.75
_USUAL = {"first": "suffix", "second": "layerskip"}


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
        for role, part in self.given.items():
            if isinstance(part, str):
                object.__setattr__(self, role, _kind(role, part)())
            elif isinstance(part, Method):
                _check(role, type(part))
        if self.draft_cost is not None and not 0 <= self.draft_cost < float("inf"):
            raise ValueError(f"draft_cost is {self.draft_cost}; give a number from 0 on")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Hybrid:
        """Makes both methods from their options, and this one.

        Raises:
          ValueError: neither method has an option, or a value is invalid; one line.
        """
        own: dict[str, Any] = {name: given[name] for name in cls.options() if name in given}
        rest = {name: value for name, value in given.items() if name not in own}
        kinds = _kinds(own)
        for role, kind in kinds.items():
            own[role] = kind.of({name: value for name, value in rest.items() if name in kind.options()})
        return cls(**own)

    @classmethod
    def parts(cls, given: Mapping[str, Any]) -> tuple[type[Method], ...]:
        """Returns the methods of `first` and `second` that are given by their names or left out."""
        return tuple(_kinds(given).values())

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter of both methods; its parameters are a tuple of theirs."""
        import jax.numpy as jnp

        from jaxspec.costs.prices import simple_prices
        from jaxspec.costs.rounds import guessed_row
        from jaxspec.drafting.choosing_drafter import Choosing, widths_of
        from jaxspec.drafting.lookup import LookupDrafter

        parts = self._parts()
        first, _ = parts["first"].build(target, resources)
        if not isinstance(first, LookupDrafter):
            raise ValueError(
                f"first is {parts['first'].name}, which drafts with a model; give suffix, ngram or grammar, or swap "
                "the two"
            )
        second, own = parts["second"].build(target, resources)
        second = second.taking_turns()
        declared = parts["second"].cost(target, second, own)
        usual, row, length = _UNKNOWN, guessed_row(resources.platform), second.num_draft_tokens
        if declared is not None:
            usual = declared.draft_ms(read_costs(target, row), length) / length
        costs = 0.0, usual if self.draft_cost is None else self.draft_cost
        known = parts["second"].expectation(target, resources)
        accept = _LOOKUP, (_ACCEPT,) if known is None else known
        widths, longest = widths_of((first, second)), max(first.num_draft_tokens, second.num_draft_tokens)
        prices = simple_prices(widths, longest, costs, row, accept)
        # Each row chooses for itself, so that a sampled text does not depend on the other rows.
        memory = jnp.float32(Choosing.memory)
        return Choosing(target.config, (first, second), prices, memory, joint=False), (None, own)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost | None:
        """Returns the second method's cost with a lookup per round; copied drafts lower the measured times."""
        second = self._parts()["second"].cost(target, cast("Choosing", drafter).candidates[1], params[1])
        return None if second is None else dataclasses.replace(second, lookup=True, adapts=True)

    def _parts(self) -> dict[str, Method]:
        return {role: getattr(self, role) or registry.find(usual)() for role, usual in _USUAL.items()}


def _kind(role: str, name: str) -> type[Method]:
    """Returns the method of a name after `_check`."""
    kind = registry.find(name)
    _check(role, kind)
    return kind


def _check(role: str, kind: type[Method]) -> None:
    """Raises a ValueError for a method that does not draft, or that is a hybrid itself."""
    if kind.composite or not kind.options():
        raise ValueError(f"{role} is {kind.name!r}; give a method that drafts and is not a hybrid")


def _kinds(given: Mapping[str, Any]) -> dict[str, type[Method]]:
    """Returns the methods given by name and the defaults; flat options belong to them."""
    names = {role: usual if given.get(role) is None else given[role] for role, usual in _USUAL.items()}
    return {role: _kind(role, name) for role, name in names.items() if isinstance(name, str)}
