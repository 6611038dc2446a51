"""S2D: a draft with sorted exits serves several targets, each token from the first exit that is sure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import Method, option
from jaxspec.methods.chain import ChainMethod, StopName
from jaxspec.methods.draft_model import own_model_cost
from jaxspec.methods.files import found
from jaxspec.methods.resources import FilePath, LoadedModel, ModelLike, Resources

if TYPE_CHECKING:
    import jax

    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.s2d import S2D as Drafting
    from jaxspec.protocol import Drafter

# The lowest that the paper tries; best there for small targets.
_THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class S2D(ChainMethod):
    """A sorted draft, each token from its first exit that is sure (Kavehzadeh et al. 2024).

    Attributes:
      draft: a model with sorted exits, made by `python -m training.soft`; without one, a model with sorted exits
        drafts for itself.
      thresholds: the file with the probabilities from which on each exit is taken, instead of the one beside the
        model. Made by `jaxspec tune --method s2d`. Default: as tuned, else 0.5.

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
        """Makes the drafter; its parameters are the draft's, if the target does not draft for itself."""
        from jaxspec.drafting.s2d import S2D as Drafting

        sorted_target = self.draft is None
        draft = target if self.draft is None else resources.load_draft(self.draft)
        # The target's last layer is what verifies.
        exits = tuple(n for n in draft.exits if not sorted_target or n < target.config.num_layers)
        if not exits:
            raise ValueError(
                f"method s2d needs a draft with sorted exits, and {draft.name or 'the model'} has none"
                f"{' below its last layer' if sorted_target else ''}; give draft=DIR, made by "
                "`python -m training.soft`"
            )
        draft = draft.until(exits[-1])
        thresholds = self._thresholds(exits, target, draft, resources)
        rule, length = self.stopping()
        if sorted_target:
            drafter = Drafting(target.config, exits, thresholds, rule, length, sorted_target=True)
            return drafter, self.params(target, resources)
        return Drafting(draft.config, exits, thresholds, rule, length), self.params(target, resources, draft)

    def limited(self, longest: int) -> Method:
        """Returns it with the largest K whose rounds, if it is given none, write no more than `longest` + 1 tokens."""
        from jaxspec.drafting.s2d import reach_of

        fitting = (k for k in range(longest, 0, -1) if reach_of(k, self.draft is None) <= longest + 1)
        return super().limited(next(fitting, 1))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the mean cost of the exits, because the exit of a token depends on the text."""
        from jaxspec.choosing.costs import DraftCost

        exits = cast("Drafting", drafter).exits
        depth = sum(exits) / len(exits)
        if self.draft is None:
            return DraftCost(layers=depth, head=params is None)
        return own_model_cost(target, params, layers=depth / exits[-1])

    def _thresholds(
        self, exits: tuple[int, ...], target: LoadedModel, draft: LoadedModel, resources: Resources
    ) -> jax.Array:
        """Returns the thresholds of the file named, else of the one beside the model, else 0.5; float32[exits − 1]."""
        import jax.numpy as jnp

        from jaxspec.io import method_files

        numbers, path = [_THRESHOLD] * (len(exits) - 1), None
        if self.thresholds is not None or resources.directory is not None:
            path = found(self.thresholds, target, resources, method_files.thresholds_name(draft.fingerprint))
        if path is not None:
            numbers = method_files.read_thresholds(path, target.fingerprint, draft.fingerprint, exits)
        return jnp.asarray(numbers, jnp.float32)
