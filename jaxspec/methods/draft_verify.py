"""Draft & Verify: the model without the layers that a search chose drafts for the whole (Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import Method, option, size_of
from jaxspec.methods.chain import StopName
from jaxspec.methods.files import file_of, found
from jaxspec.methods.masked import MaskedMethod
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.draft_verify import DraftVerify as Drafting
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftVerify(MaskedMethod):
    """The model without the sublayers that a search chose (Zhang et al. 2023).

    Attributes:
      plan: the file that says what to skip, instead of the one beside the model. Made by `jaxspec search`.

    Examples:
      >>> print(DraftVerify(plan="plan.json", stop_rule=["confidence"]))
      draft-verify stop_rule=('confidence',) plan='plan.json'
    """

    name: ClassVar[str] = "draft-verify"
    needs: ClassVar[str] = "a plan: `jaxspec search`, or plan=FILE"
    usual_rule: ClassVar[StopName] = "confidence"

    plan: FilePath | None = option(None, metavar="FILE")

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether a plan is given, for then `jaxspec compare` can run the method."""
        return "plan" in given

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; of its own it has at most a vocabulary."""
        from jaxspec.drafting.draft_verify import DraftVerify as Drafting
        from jaxspec.io import method_files

        path = file_of(self.plan, target, resources, method_files.PLAN_NAME)
        if path is None or (self.plan is None and not path.is_file()):
            raise FileNotFoundError(
                f"method draft-verify needs a plan{f', and there is no {path}' if path else ''}; "
                "make one with `jaxspec search`, or give plan=FILE"
            )
        plan = method_files.read_plan(path, target.fingerprint, target.config.num_layers)
        rule, length = self.stopping()
        drafter = Drafting(target.config, plan.traced(), rule, length, self.is_static(resources))
        return drafter, self.params(target, resources)

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method, where a plan lies beside the model."""
        from jaxspec.io import method_files

        return (cls(),) if found(None, target, resources, method_files.PLAN_NAME) is not None else ()

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns as many layers as what the plan runs has the parameters of."""
        import numpy as np

        from jaxspec.choosing.costs import DraftCost

        runs = np.asarray(cast("Drafting", drafter).plan)
        layers = target.params["layers"]
        sizes = np.array([[size_of(layer["attention"]), size_of(layer["mlp"])] for layer in layers])
        share = float((runs * sizes).sum() / sizes.sum())
        return DraftCost(layers=share * len(layers), head=params is None)
