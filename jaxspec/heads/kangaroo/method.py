"""Kangaroo: the first layers and an adapter draft, and verification goes on from their work."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.heads.method import HeadMethod
from jaxspec.methods.base import layers_of, option
from jaxspec.methods.chain import StopName
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.exit_drafter import ExitDrafter
    from jaxspec.protocol import Drafter

# The most draft tokens of the authors' code.
_USUAL = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kangaroo(HeadMethod):
    """The model's first E layers and a trained attention on them, whose work verification shares (Liu et al. 2024).

    The paper's stop rule is the usual one here: a draft ends with the first token that is less likely than 0.6, which
    is verified too. With `adaptive_gamma=False` the threshold stays there, as in the paper.

    Attributes:
      exit_layer: the adapter reads what the model's first E layers make: the number that it was trained for. Default:
        what its file says; published ones do not (2 for Vicuna-7B, 3 for Vicuna-13B).

    Examples:
      >>> Kangaroo(draft="adapter", exit_layer=2)
      Kangaroo(draft='adapter', exit_layer=2)
    """

    name: ClassVar[str] = "kangaroo"
    needs: ClassVar[str] = "an adapter: draft=DIR, or heads/kangaroo beside the model"
    usual_rule: ClassVar[StopName] = "confidence"
    may_pay: ClassVar[bool] = True

    exit_layer: int | None = option(None, metavar="E")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return super().usual() | {"num_draft_tokens": str(_USUAL)}

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of an adapter."""
        from jaxspec.heads.kangaroo.drafter import KangarooDrafter

        depth = target.config.num_layers
        if depth == 1:
            raise ValueError(
                f"method {self.name} exits early, and the model has one layer; choose another method"
            )
        exit_layer = head.exit_layer if self.exit_layer is None else self.exit_layer
        if exit_layer is None:
            raise ValueError(
                "the adapter's config.json does not say which layers it was trained for; give exit_layer=E (published "
                "ones: 2 for Vicuna-7B, 3 for Vicuna-13B)"
            )
        if not 1 <= exit_layer < depth:
            raise ValueError(
                f"exit_layer is {exit_layer}; the model has {depth} layers, give 1 to {depth - 1}"
            )
        return KangarooDrafter(target.config, head, exit_layer, *self.stopping(usual=_USUAL))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of an early exit and its adapter; to absorb a text the target runs over it once more."""
        from jaxspec.costs.rounds import DraftCost

        exit_layer, depth = cast("ExitDrafter", drafter).exit_layer, target.config.num_layers
        adapter = layers_of(params, target)
        return DraftCost(
            layers=exit_layer + adapter,
            heads="vocabulary" not in params,
            shared=exit_layer,
            absorb_layers=depth + adapter,
        )
