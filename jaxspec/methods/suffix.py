"""SuffixDecoding (Oliaro et al. 2024): drafts along the most frequent continuation of the text's last tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import MAX_DRAFT_TOKENS, DraftingMethod, Lookup, option
from jaxspec.methods.files import read_reference
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(Lookup, DraftingMethod):
    """The most frequent continuation of the last tokens, while it is probable (Oliaro et al. 2024).

    Attributes:
      suffix_max: the longest suffix of the text to search for; all lengths from 1 are tried. Default 16.
      suffix_factor: the maximum number of draft tokens per token of the matched suffix. Default 1.
      suffix_min_prob: a draft ends before a token of lower relative frequency. Default 0.1.
      reference: text files to search in addition to prompt and output, such as past outputs.

    Examples:
      >>> Suffix(suffix_max=8, suffix_factor=2)
      Suffix(suffix_max=8, suffix_factor=2.0)
    """

    name: ClassVar[str] = "suffix"

    suffix_max: int | None = None
    suffix_factor: float | None = None
    suffix_min_prob: float | None = None
    reference: tuple[str, ...] = option((), metavar="FILE")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return {"num_draft_tokens": "15"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        import jax.numpy as jnp

        from jaxspec.drafting.suffix_drafter import SuffixDrafter

        longest = SuffixDrafter.suffix_max if self.suffix_max is None else self.suffix_max
        if not 1 <= longest <= MAX_DRAFT_TOKENS:
            raise ValueError(f"suffix_max is {longest}; give 1 to {MAX_DRAFT_TOKENS}")
        factor = SuffixDrafter.factor if self.suffix_factor is None else self.suffix_factor
        if not 0 < factor < float("inf"):
            raise ValueError(f"suffix_factor is {factor}; give a number above 0")
        least = SuffixDrafter.min_prob if self.suffix_min_prob is None else self.suffix_min_prob
        if not 0 <= least <= 1:
            raise ValueError(f"suffix_min_prob is {least}; give a number from 0 to 1")
        drafter = SuffixDrafter(
            reference=read_reference(self.reference, resources),
            min_prob=jnp.float32(least),
            factor=jnp.float32(factor),
            suffix_max=longest,
            num_draft_tokens=self.length(SuffixDrafter.num_draft_tokens),
        )
        return drafter, None
