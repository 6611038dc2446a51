"""Drafts the text that a grammar makes certain."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import DraftingMethod, Lookup
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(Lookup, DraftingMethod):
    """The tokens that the text's grammar makes certain, such as the keys of a JSON object.

    They are drafts that the model verifies. ngram, suffix and auto draft them too, where they find no other
    text. Without a grammar this is plain decoding.

    Examples:
      >>> Grammar(num_draft_tokens=4)
      Grammar(num_draft_tokens=4)
    """

    name: ClassVar[str] = "grammar"
    # Without a grammar it drafts nothing.
    compared: ClassVar[bool] = False

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return {"num_draft_tokens": "10"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        from jaxspec.drafting.grammar_drafter import GrammarDrafter

        return GrammarDrafter(self.length(GrammarDrafter.num_draft_tokens)), None
