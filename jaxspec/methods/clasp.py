"""CLaSp (Chen et al. 2025): the layers that a draft leaves out follow the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.io.messages import shown
from jaxspec.methods.base import option
from jaxspec.methods.chain import ChainMethod, StopName
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.clasp import CLaSp as Drafting
    from jaxspec.protocol import Drafter

# It is counted in int32.
_MOST_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLaSp(ChainMethod):
    """The model without the layers that mattered least for the last token, chosen again while it writes.

    Chen et al. 2025, dynamic programming over the residual streams of a verified token.

    Attributes:
      skip_layers: how many layers a draft leaves out. Default: half of them.
      refresh: rounds from one choice to the next; a choice costs about a verification of so many tokens. Default 16.

    Examples:
      >>> CLaSp(skip_layers=12)
      CLaSp(skip_layers=12)
    """

    name: ClassVar[str] = "clasp"
    usual_rule: ClassVar[StopName] = "confidence"

    skip_layers: int | None = option(None, metavar="M")
    refresh: int | None = option(None, metavar="ROUNDS")

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether one of its numbers is given: a choice costs much, so it runs only where it is meant."""
        return num_layers > 1 and not {"skip_layers", "refresh"}.isdisjoint(given)

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; of its own it has at most a vocabulary."""
        import jax.numpy as jnp

        from jaxspec.drafting.clasp import CLaSp as Drafting

        depth = target.config.num_layers
        if depth == 1:
            raise ValueError("method clasp leaves layers out, and the model has one; choose another method")
        count = depth // 2 if self.skip_layers is None else self.skip_layers
        if not 1 <= count < depth:
            raise ValueError(
                f"skip_layers is {count}, and the model has {depth} layers; give 1 to {depth - 1}"
            )
        refresh = Drafting.refresh if self.refresh is None else self.refresh
        if not 1 <= refresh <= _MOST_ROUNDS:
            raise ValueError(f"refresh is {shown(refresh)}; give 1 to {_MOST_ROUNDS}")
        rule, length = self.stopping()
        drafter = Drafting(target.config, count, jnp.int32(refresh), rule, length)
        return drafter, self.params(target, resources)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of the kept layers, without the search for them; the target runs over a text once more."""
        from jaxspec.choosing.costs import DraftCost

        depth, skipped = target.config.num_layers, cast("Drafting", drafter).num_skipped
        return DraftCost(layers=depth - skipped, head=params is None, absorb_layers=depth)
