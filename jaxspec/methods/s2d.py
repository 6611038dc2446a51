"""S2D (Kavehzadeh et al. 2024): a draft with sorted exits for several targets, with an exit chosen for each token."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import layers_of, option
from jaxspec.methods.chain import ModelMethod, StopName
from jaxspec.methods.draft_model import own_model_cost
from jaxspec.methods.files import found
from jaxspec.methods.resources import FilePath, LoadedModel, ModelLike, Resources

if TYPE_CHECKING:
    import jax

    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.s2d_drafter import S2DDrafter
    from jaxspec.protocol import Drafter

# The lowest threshold in the paper, and its best for small targets.
_THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class S2D(ModelMethod):
    """A draft with sorted exits; each token is from the first confident exit (Kavehzadeh et al. 2024).

    Attributes:
      draft: a model with sorted exits, made by `python -m training.soft`. Default: the model itself, if it has sorted
        exits.
      thresholds: the file with the minimum probability of each exit, instead of the one in the model's directory. Made
        by `jaxspec tune --method s2d`. Default: the values tuned for the target, otherwise those in the draft's own
        config.json, otherwise 0.5.

    Examples:
      >>> S2D(draft="sorted", thresholds="thresholds.json")
      S2D(draft='sorted', thresholds='thresholds.json')
    """

    name: ClassVar[str] = "s2d"
    needs: ClassVar[str] = "a sorted draft: draft=MODEL of `python -m training.soft`"
    usual_rule: ClassVar[StopName] = "adaptive-length"

    draft: ModelLike | None = option(None, metavar="DIR|ID")
    thresholds: FilePath | None = option(None, metavar="FILE")

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are those of the draft, unless the target drafts for itself."""
        from jaxspec.drafting.s2d_drafter import S2DDrafter

        sorted_target = self.draft is None
        draft = target if self.draft is None else resources.load_draft(self.draft)
        # The target's last layer verifies, so it is not an exit of the draft.
        exits = tuple(n for n in draft.exits if not sorted_target or n < target.config.num_layers)
        if not exits:
            raise ValueError(
                f"method s2d needs a draft with sorted exits, but {draft.name or 'the model'} has none"
                f"{' below its last layer' if sorted_target else ''}; give draft='sorted' "
                "for an embedded model, or draft=DIR made by `python -m training.soft`"
            )
        carried = draft.trained_for.thresholds
        draft = draft.until(exits[-1])
        thresholds = self._thresholds(exits, carried, target, draft, resources)
        config = self.read_by_draft(target.config if sorted_target else draft.config, exits[-1])
        rule, length = self.stopping()
        if sorted_target:
            drafter = S2DDrafter(config, exits, thresholds, rule, length, sorted_target=True)
            return drafter, self.params(target, resources)
        return S2DDrafter(config, exits, thresholds, rule, length), self.params(target, resources, draft)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the mean cost of the exits, because the exit of a token depends on the text.

        A token looks at the head of its exit and at those of the exits before it.
        """
        from jaxspec.costs.rounds import DraftCost

        exits = cast("S2DDrafter", drafter).exits
        depth, heads = sum(exits) / len(exits), (1 + len(exits)) / 2
        if self.draft is None:
            return DraftCost(depth + heads * layers_of(params, target), heads * (params is None))
        return own_model_cost(target, params, layers=depth / exits[-1], heads=heads)

    def _thresholds(
        self,
        exits: tuple[int, ...],
        carried: tuple[float, ...],
        target: LoadedModel,
        draft: LoadedModel,
        resources: Resources,
    ) -> jax.Array:
        """Returns the thresholds of a file, else `carried`, else 0.5; float32[exits − 1]."""
        import jax.numpy as jnp

        from jaxspec.io.methods import method_files

        numbers, path = list(carried or [_THRESHOLD] * len(exits))[: len(exits) - 1], None
        if self.thresholds is not None or resources.directory is not None:
            path = found(self.thresholds, target, resources, method_files.thresholds_name(draft.fingerprint))
        if path is not None:
            numbers = method_files.read_thresholds(path, target.fingerprint, draft.fingerprint, exits)
        return jnp.asarray(numbers, jnp.float32)
