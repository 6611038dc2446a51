"""Speculative sampling with a separate draft model (Chen et al. 2023; Leviathan et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import layers_of, option
from jaxspec.methods.chain import ModelMethod
from jaxspec.methods.resources import LoadedModel, ModelLike, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(ModelMethod):
    """A smaller draft model, or the model's own first layers with a separate cache.

    Chen et al. 2023, Leviathan et al. 2023.

    Attributes:
      draft: the draft model: a directory, a .gguf file, a hub id or the name of an embedded model; in Python also a
        loaded `LanguageModel`.
      draft_exit: run only the draft's first N layers; without a draft, the model's own.

    Examples:
      >>> DraftModel(draft="small", num_draft_tokens=4)
      DraftModel(num_draft_tokens=4, draft='small')
    """

    name: ClassVar[str] = "draft-model"
    needs: ClassVar[str] = "draft=MODEL or draft_exit=N"

    draft: ModelLike | None = option(None, metavar="DIR|ID")
    draft_exit: int | None = None

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are those of the draft model."""
        from jaxspec.drafting.draft_model_drafter import DraftModelDrafter

        if self.draft is None and self.draft_exit is None:
            raise ValueError(
                "method draft-model needs a draft; give draft=DIR, or draft_exit=N for the model's own first N layers"
            )
        draft = target if self.draft is None else resources.load_draft(self.draft)
        if self.draft_exit is not None:
            draft = draft.until(self.draft_exit)
        config = self.read_by_draft(draft.config)
        drafter = DraftModelDrafter(config, *self.stopping(), pairs=resources.platform != "cpu")
        return drafter, self.params(target, resources, draft)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the draft's cost as the number of target layers of the same size, including the head."""
        return own_model_cost(target, params)


def own_model_cost(
    target: LoadedModel, params: Any, layers: float = 1, bits: float = 1, heads: float = 1
) -> DraftCost:
    """Returns the cost of a draft model with a separate cache.

    Args:
      target: the model that verifies.
      params: the draft's parameters.
      layers: the fraction of the draft's layers that a token runs through.
      bits: the bits of the draft's weights, relative to those of the target's.
      heads: the number of the draft's heads that a token runs.
    """
    from jaxspec.costs.rounds import DraftCost

    few = params.get("vocabulary")
    head = params.get("head", params["embed"]) if few is None else few.head
    runs = layers_of(params["layers"], target) * bits
    return DraftCost(layers * runs + heads * layers_of(head, target) * bits, heads=0, absorb_layers=runs)
