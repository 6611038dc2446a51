"""Draft & Verify (Zhang et al. 2023): the model drafts for itself without the sublayers that a search chose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import Method, layers_of, option, size_of
from jaxspec.methods.chain import StopName
from jaxspec.methods.files import file_of, found
from jaxspec.methods.masked import MaskedMethod
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftVerify(MaskedMethod):
    """The model without the sublayers that a search chose (Zhang et al. 2023).

    After `jaxspec search --by-kind`, each text leaves out the sublayers that suit its kind of prompt (KNN-SSD, Song et
    al. 2025).

    Attributes:
      plan: the file with the sublayers to skip, instead of the one in the model's directory. Made by `jaxspec search`.

    Examples:
      >>> print(DraftVerify(plan="plan.json", stop_rule=["confidence"]))
      draft-verify stop_rule=('confidence',) plan='plan.json'
    """

    name: ClassVar[str] = "draft-verify"
    needs: ClassVar[str] = "a plan: `jaxspec search`, or plan=FILE"
    usual_rule: ClassVar[StopName] = "confidence"

    plan: FilePath | None = option(None, metavar="FILE")

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its only possible parameter is a draft vocabulary."""
        import jax
        import jax.numpy as jnp

        from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
        from jaxspec.io.methods import method_files

        path = file_of(self.plan, target, resources, method_files.PLAN_NAME)
        if path is None or (self.plan is None and not path.is_file()):
            raise FileNotFoundError(
                f"method draft-verify needs a plan{f', but there is no {path}' if path else ''}; "
                "make one with `jaxspec search`, or give plan=FILE"
            )
        width = target.config.hidden_size
        plan, kinds = method_files.read_plans(path, target.fingerprint, target.config.num_layers, width)
        masks, centres = plan.traced(), None
        if kinds:
            with jax.ensure_compile_time_eval():  # as in `LayerPlan.traced`
                masks = jnp.asarray([one.run for one, near in kinds for _ in near], bool)
                centres = jnp.concatenate([near for _, near in kinds])
        rule, length = self.stopping()
        config = self.read_by_draft(target.config)
        drafter = DraftVerifyDrafter(config, masks, rule, length, self.is_static(resources), centres)
        return drafter, self.params(target, resources)

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method if a plan for the model is found."""
        from jaxspec.io.methods import method_files

        return (cls(),) if found(None, target, resources, method_files.PLAN_NAME) is not None else ()

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the number of layers that have as many parameters as the sublayers that run, on average of a bank."""
        import numpy as np

        from jaxspec.costs.rounds import DraftCost

        runs = np.asarray(cast("DraftVerifyDrafter", drafter).plan)
        runs = runs.reshape(-1, *runs.shape[-2:]).mean(axis=0)
        layers = target.params["layers"]
        sizes = np.array([[size_of(layer["attention"]), size_of(layer["mlp"])] for layer in layers])
        share = float((runs * sizes).sum() / sizes.sum())
        return DraftCost(layers=share * len(layers) + layers_of(params, target), heads=params is None)
