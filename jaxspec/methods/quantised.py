"""Self-speculation with the model's own weights in few bits, after QuantSpec (Tiwari et al. 2025, arXiv 2502.10424)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.draft_model import own_model_cost
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(ChainMethod):
    """The model's own weights in int8 or int4 draft, with a cache of their own.

    After QuantSpec (Tiwari et al. 2025), without its quantised cache, which draft and target share there. Nothing is
    trained. It can pay where a step takes as long as its weights take to be read, which int8 halves beside bfloat16.

    Attributes:
      draft_bits: of the draft's weights, 8 or 4, with one scale for each output channel. Default 8, of a model with
        int8 weights 4.

    Examples:
      >>> Quantised(draft_bits=4, num_draft_tokens=3)
      Quantised(num_draft_tokens=3, draft_bits=4)
    """

    name: ClassVar[str] = "quantised"

    draft_bits: Literal[8, 4] | None = None

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether `draft_bits` is given: the copy takes memory, which nobody may have meant to spend."""
        return "draft_bits" in given

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {**super().usual(), "draft_bits": "8, of a model with int8 weights 4"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are the target's, quantised.

        Raises:
          ValueError: the target's weights are of as few bits, or there is no memory for the copy; one line.
        """
        from jaxspec.drafting.draft_model import DraftModel

        bits = self._bits(target)
        if target.bits is not None and bits >= target.bits:
            raise ValueError(
                f"draft_bits is {bits}, and the weights of {target.name or 'the model'} are int{target.bits} already; "
                "give fewer, or load the model without weights"
            )
        draft = resources.quantise(target, bits)
        rule, length = self.stopping()
        drafter = DraftModel(draft.config, rule, length, pairs=resources.platform != "cpu")
        return drafter, self.params(target, resources, draft)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of the target's own layers and head at the draft's bits, with a cache of its own."""
        held = target.bits or 8 * target.params["norm"].dtype.itemsize
        return own_model_cost(target, params, bits=self._bits(target) / held)

    def _bits(self, target: LoadedModel) -> int:
        return self.draft_bits or (8 if target.bits is None else 4)
