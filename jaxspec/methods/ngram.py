"""Prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023): drafts copied from existing text."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import MAX_DRAFT_TOKENS, DraftingMethod, Lookup, Method, option
from jaxspec.methods.files import read_reference
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(Lookup, DraftingMethod):
    """Drafts copied from the text itself or from references; useful for repetitive text.

    Prompt lookup (Saxena 2023); with references LLMA (Yang et al. 2023).

    Attributes:
      ngram_max: the longest n-gram to search for. Default 3, with a reference 5.
      ngram_min: the shortest n-gram. Default 1.
      reference: text files to search (LLMA) instead of prompt and output.

    Examples:
      >>> NGram(ngram_max=4)
      NGram(ngram_max=4)
    """

    name: ClassVar[str] = "ngram"

    ngram_max: int | None = None
    ngram_min: int | None = None
    reference: tuple[str, ...] = option((), metavar="FILE")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return {"num_draft_tokens": "10, or 20 with a reference"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        from jaxspec.drafting.ngram_drafter import NGramDrafter

        reference = read_reference(self.reference, resources)
        longest = self.ngram_max if self.ngram_max is not None else (3 if reference is None else 5)
        shortest = self.ngram_min if self.ngram_min is not None else 1
        if not 1 <= shortest <= longest <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"ngram_min={shortest} and ngram_max={longest} are out of range; "
                f"give 1 <= min <= max <= {MAX_DRAFT_TOKENS}"
            )
        drafter = NGramDrafter(
            reference=reference,
            ngram_max=longest,
            ngram_min=shortest,
            num_draft_tokens=self.length(10 if reference is None else 20),
        )
        return drafter, None

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method itself, which needs no files."""
        return (cls(),)
