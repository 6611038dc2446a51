"""DSpark: a head that drafts a whole block in one pass, each token given the one before it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.dflash.method import DFlash
from jaxspec.methods.base import Method, layers_of
from jaxspec.methods.chain import ProbedName
from jaxspec.methods.resources import LoadedHead, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.heads.dspark.drafter import Confidence
    from jaxspec.model.llama import Params
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(DFlash):
    """As dflash, with a low-rank bias by the token before and a predicted acceptance (DSpark, 2026).

    Attributes:
      stop_rule: when to stop before K tokens: constant (never), confidence (the probability of the last draft token is
        below gamma), product (the product of all probabilities of the draft is below gamma), probe (the same with the
        acceptances that the head predicts), adaptive-length (5 tokens, + 2 after a fully accepted draft, − 1 after any
        other). With several rules, the first one to apply stops the draft.

    Examples:
      >>> DSpark(draft="deepseek-ai/dspark_qwen3_8b_block7", stop_rule="probe")
      DSpark(stop_rule=('probe',), draft='deepseek-ai/dspark_qwen3_8b_block7')
    """

    name: ClassVar[str] = "dspark"
    needs: ClassVar[str] = "a head of DSpark: draft=DIR, or heads/dspark beside the model"
    may_pay: ClassVar[bool] = True
    independent: ClassVar[bool] = False

    stop_rule: tuple[ProbedName, ...] = ()  # type: ignore[assignment]

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with this K, see DFlash. By default, a predicted acceptance ends its drafts."""
        config: Any = self._head(target, resources).config
        chosen = self.tree or self.stop_rule or config.confidence == "none"
        method = self if chosen else dataclasses.replace(self, stop_rule=("probe",))
        return super(DSpark, method).limited(longest, target, resources)

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of DSpark."""
        from jaxspec.heads.dspark.drafter import Confidence, DSparkDrafter

        def predicted() -> Confidence:
            if head.confidence == "none":
                raise ValueError("stop_rule='probe' needs a head that predicts the acceptance; give another")
            return Confidence()

        return DSparkDrafter(target.config, head, *self.block(head, predicted))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of DFlash's pass, and of the bias of each token, which reads `markov_out`."""
        block = {name: leaf for name, leaf in params.items() if not name.startswith("markov_")}
        cost = super().cost(target, drafter, block)
        further = drafter.num_draft_tokens * layers_of(params["markov_out"], target)
        return dataclasses.replace(cost, layers=cost.layers + further)

    def _params(self, head: LoadedHead, target: LoadedModel, resources: Resources) -> Params:
        """Returns the head's parameters, with the bias of the tokens of its vocabulary only."""
        import jax.numpy as jnp

        own = super()._params(head, target, resources)
        few, held = own.get("vocabulary"), head.params.get("vocabulary")
        if few is None or few is held:
            return own
        rows = few.ids if held is None else jnp.searchsorted(held.ids, few.ids)
        return {**own, "markov_out": own["markov_out"][rows]}
