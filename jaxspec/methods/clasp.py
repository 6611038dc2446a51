"""CLaSp (Chen et al. 2025): drafts skip layers that are chosen again as the text grows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import layers_of, option
from jaxspec.methods.chain import StopName
from jaxspec.methods.masked import RefreshingMethod
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.clasp_drafter import CLaSpDrafter
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLaSp(RefreshingMethod):
    """The model without the layers that changed the last token's hidden state least, chosen again every few rounds.

    Chen et al. 2025, dynamic programming over the residual streams of a verified token.

    Attributes:
      skip_layers: the number of layers that a draft skips. Default: half of them.
      refresh: the number of rounds between choices; a choice costs about as much as the verification of `skip_layers`
        tokens. Default 16.

    Examples:
      >>> CLaSp(skip_layers=12)
      CLaSp(skip_layers=12)
    """

    name: ClassVar[str] = "clasp"
    compared: ClassVar[bool] = False
    usual_rule: ClassVar[StopName] = "confidence"

    skip_layers: int | None = option(None, metavar="M")

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its only possible parameter is a draft vocabulary."""
        import jax.numpy as jnp

        from jaxspec.drafting.clasp_drafter import CLaSpDrafter

        depth = target.config.num_layers
        if depth == 1:
            raise ValueError("method clasp skips layers, but the model has one; choose another method")
        count = depth // 2 if self.skip_layers is None else self.skip_layers
        if not 1 <= count < depth:
            raise ValueError(
                f"skip_layers is {count}, but the model has {depth} layers; give 1 to {depth - 1}"
            )
        refresh = jnp.int32(self.rounds(CLaSpDrafter))
        rule, length = self.stopping()
        drafter = CLaSpDrafter(self.read_by_draft(target.config), count, refresh, rule, length)
        return drafter, self.params(target, resources)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of the kept layers and of the choices."""
        from jaxspec.costs.rounds import DraftCost

        made = cast("CLaSpDrafter", drafter)
        layers = target.config.num_layers - made.num_skipped + layers_of(params, target)
        choice = made.num_skipped + 1, self.rounds(type(made))
        return DraftCost(layers=layers, heads=params is None, choice=choice)
