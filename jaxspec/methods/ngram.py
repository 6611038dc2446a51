"""Prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023): drafts copied from text that is there already."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxspec.methods.base import MAX_DRAFT_TOKENS, DraftingMethod, Method, option
from jaxspec.methods.files import read_reference
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.protocol import Drafter

Match = Literal["latest", "earliest", "longest", "random"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(DraftingMethod):
    """Drafts are copied from the text itself, or from given references; good where text repeats.

    Prompt lookup (Saxena 2023); with references LLMA (Yang et al. 2023).

    Attributes:
      ngram_max: the longest run of tokens that is looked for. Default 3, with a reference 5.
      ngram_min: the shortest. Default 1.
      match: which of several places: latest, earliest, longest continuation, or random among those. Default latest.
      reference: text files in which alone to search (LLMA), instead of prompt and output.

    Examples:
      >>> NGram(ngram_max=4, match="longest")
      NGram(ngram_max=4, match='longest')
    """

    name: ClassVar[str] = "ngram"

    ngram_max: int | None = None
    ngram_min: int | None = None
    match: Match | None = None
    reference: tuple[str, ...] = option((), metavar="FILE")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {"num_draft_tokens": "10, with a reference 20"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        from jaxspec.drafting.ngram import NGram as Drafting

        reference = read_reference(self.reference, resources)
        longest = self.ngram_max if self.ngram_max is not None else (3 if reference is None else 5)
        shortest = self.ngram_min if self.ngram_min is not None else 1
        if not 1 <= shortest <= longest <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"ngram_min={shortest} and ngram_max={longest} do not fit; "
                f"give 1 <= min <= max <= {MAX_DRAFT_TOKENS}"
            )
        drafter = Drafting(
            reference=reference,
            match=self.match or "latest",
            ngram_max=longest,
            ngram_min=shortest,
            num_draft_tokens=self.length(10 if reference is None else 20),
        )
        return drafter, None

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method itself: it needs nothing."""
        return (cls(),)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns a lookup; without an option that changes it, one that can be replayed."""
        from jaxspec.choosing.costs import DraftCost

        return DraftCost(lookup=True, replayed=set(self.given) <= {"num_draft_tokens"})
