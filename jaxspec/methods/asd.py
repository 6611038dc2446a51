"""ASD (Metel et al. 2024): drafts skip sublayers chosen by the cosine similarities of the prompt."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.methods.base import layers_of, option
from jaxspec.methods.chain import StopName
from jaxspec.methods.files import found
from jaxspec.methods.masked import MaskedMethod
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.asd_drafter import ASDDrafter
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ASD(MaskedMethod):
    """The model without the sublayers that change the prompt's hidden states least.

    Metel et al. 2024, Algorithm 1 (ADMG).

    Attributes:
      alpha: skip attention whose cosine similarity is at least this, above 0; 1 turns the rule off. Default: the tuned
        value (`jaxspec tune`), otherwise 0.985.
      every: skip every m-th layer; 0 turns the rule off. Default: the tuned value, otherwise 3, for CodeLlama 4.
      keep_last: never skip the last n layers; 0 turns the rule off. Default: the tuned value, otherwise 2, for
        CodeLlama 3.
      asd_numbers: a file with these three numbers, instead of the one in the model's directory.
      shared_mask: use one mask for all prompts of a batch, from their mean similarities.

    Examples:
      >>> ASD(alpha=0.98, every=4, keep_last=2)
      ASD(alpha=0.98, every=4, keep_last=2)
    """

    name: ClassVar[str] = "asd"
    usual_rule: ClassVar[StopName] = "confidence"

    alpha: float | None = None
    every: int | None = option(None, metavar="M")
    keep_last: int | None = None
    asd_numbers: FilePath | None = option(None, metavar="FILE")
    shared_mask: bool = False

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its only possible parameter is a draft vocabulary."""
        import jax.numpy as jnp

        from jaxspec.drafting.asd_drafter import ASDDrafter

        given = {"alpha": self.alpha, "every": self.every, "keep_last": self.keep_last}
        usual = self._usual(target, resources) if None in given.values() else ASDNumbers()
        changes: dict[str, Any] = {name: number for name, number in given.items() if number is not None}
        chosen = dataclasses.replace(usual, **changes)
        depth = target.config.num_layers
        if chosen.keep_last > depth:
            raise ValueError(
                f"keep_last is {chosen.keep_last}; give a number from 0 to {depth}, the model's layers"
            )
        if chosen.every == 1 and chosen.keep_last == 0:
            raise ValueError("every=1 with keep_last=0 skips every layer; a draft must run at least one")
        rule, length = self.stopping()
        numbers = jnp.float32(chosen.alpha), jnp.int32(chosen.every), jnp.int32(chosen.keep_last)
        config = self.read_by_draft(target.config)
        drafter = ASDDrafter(config, *numbers, rule, length, self.shared_mask, self.is_static(resources))
        return drafter, self.params(target, resources)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost without the layers skipped by `every`; `alpha` skips more, depending on the prompt."""
        from jaxspec.costs.rounds import DraftCost

        made, depth = cast("ASDDrafter", drafter), target.config.num_layers
        every, kept = int(made.every), int(made.keep_last)
        skipped = (depth - kept) // every if every else 0
        return DraftCost(layers=depth - skipped + layers_of(params, target), heads=params is None)

    def _usual(self, target: LoadedModel, resources: Resources) -> ASDNumbers:
        """Returns the numbers of the given file, of the one in the model's directory, or the paper's for this model."""
        from jaxspec.io.methods import method_files

        path = found(self.asd_numbers, target, resources, method_files.ASD_NAME)
        if path is not None:
            return ASDNumbers.read(path, target.fingerprint)
        code = "codellama" in target.name.lower().replace("-", "")
        numbers = ASDNumbers(every=4, keep_last=3) if code else ASDNumbers()
        return dataclasses.replace(numbers, keep_last=min(numbers.keep_last, target.config.num_layers))
