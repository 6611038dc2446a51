"""ASD (Metel et al. 2024): what a draft skips follows from the cosine similarities of its prompt."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.io.asd_numbers import ASDNumbers
from jaxspec.methods.base import option
from jaxspec.methods.chain import StopName
from jaxspec.methods.files import found
from jaxspec.methods.masked import MaskedMethod
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.asd import ASD as Drafting
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ASD(MaskedMethod):
    """The model without the sublayers that the prompt's own similarities show to matter least.

    Metel et al. 2024, Algorithm 1 (ADMG).

    Attributes:
      alpha: skip attention whose cosine similarity is at least this, above 0; 1 switches the rule off. Default: as
        tuned (`jaxspec tune`), else 0.985.
      every: skip every m-th layer; 0 switches the rule off. Default: as tuned, else 3, for CodeLlama 4.
      keep_last: never skip the last n layers; 0 switches the rule off. Default: as tuned, else 2, for CodeLlama 3.
      asd_numbers: a file with these three numbers, instead of the one beside the model.
      shared_mask: one mask for all prompts of a batch, from their mean similarities.

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
        """Makes the drafter; of its own it has at most a vocabulary."""
        import jax.numpy as jnp

        from jaxspec.drafting.asd import ASD as Drafting

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
        return Drafting(
            target.config, *numbers, rule, length, self.shared_mask, self.is_static(resources)
        ), self.params(target, resources)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost without the layers that `every` and `keep_last` skip; `alpha` skips more, by prompt."""
        from jaxspec.choosing.costs import DraftCost

        made, depth = cast("Drafting", drafter), target.config.num_layers
        every, kept = int(made.every), int(made.keep_last)
        skipped = (depth - kept) // every if every else 0
        return DraftCost(layers=depth - skipped, head=params is None)

    def _usual(self, target: LoadedModel, resources: Resources) -> ASDNumbers:
        """Returns the numbers of the file named, else of the one beside the model, else the paper's for this model."""
        from jaxspec.io import method_files

        path = found(self.asd_numbers, target, resources, method_files.ASD_NAME)
        if path is not None:
            return method_files.read_asd(path, target.fingerprint)
        code = "codellama" in target.name.lower().replace("-", "")
        numbers = ASDNumbers(every=4, keep_last=3) if code else ASDNumbers()
        return dataclasses.replace(numbers, keep_last=min(numbers.keep_last, target.config.num_layers))
