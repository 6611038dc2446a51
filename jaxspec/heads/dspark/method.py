"""DSpark: a head that drafts a whole block in one pass, each token given the one before it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.dflash.method import DFlash
from jaxspec.methods.base import Method
from jaxspec.methods.resources import LoadedHead, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.heads.dspark.drafter import Confidence
    from jaxspec.model.llama import Params
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(DFlash):
    """As dflash, with a low-rank bias by the token before and a predicted acceptance (DSpark, 2026).

    With the stop rule `probe`, a draft ends when the product of the acceptances that the head predicts is below gamma.

    Examples:
      >>> DSpark(draft="deepseek-ai/dspark_qwen3_8b_block7", stop_rule="probe")
      DSpark(stop_rule=('probe',), draft='deepseek-ai/dspark_qwen3_8b_block7')
    """

    name: ClassVar[str] = "dspark"
    needs: ClassVar[str] = "a head of DSpark: draft=DIR, or heads/dspark beside the model"
    may_pay: ClassVar[bool] = True
    independent: ClassVar[bool] = False

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method with drafts that end by the predicted acceptance, if there is a head for the model."""
        return tuple(cls(stop_rule=("probe",)) for _ in super().offered(target, resources))

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of DSpark."""
        from jaxspec.heads.dspark.drafter import Confidence
        from jaxspec.heads.dspark.drafter import DSpark as Drafting

        def predicted() -> Confidence:
            if head.confidence == "none":
                raise ValueError(
                    "stop_rule='probe' needs a head that predicts the acceptance; choose another stop_rule"
                )
            return Confidence()

        return Drafting(target.config, head, *self.block(head, predicted))

    def _params(self, head: LoadedHead, target: LoadedModel, resources: Resources) -> Params:
        """Returns the head's parameters, with the bias of the tokens of its vocabulary only."""
        import jax.numpy as jnp

        own = super()._params(head, target, resources)
        few, held = own.get("vocabulary"), head.params.get("vocabulary")
        if few is None or few is held:
            return own
        rows = few.ids if held is None else jnp.searchsorted(held.ids, few.ids)
        return {**own, "markov_out": own["markov_out"][rows]}
