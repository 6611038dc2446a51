"""A method made of two: drafts copied from text where they promise more, a model's drafts elsewhere."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods import registry
from jaxspec.methods.base import Method, option, share_of_step
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.acceptance import Expectation
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.hybrid import Hybrid as Drafting
    from jaxspec.protocol import Drafter

# Heads that draft best, the best first.
_HEADS = ("eagle3", "eagle", "kangaroo")
# Longer than any draft that pays.
_LONG = 16
# The cost of a draft token, in steps of the target, if its method declares none.
_UNKNOWN = 0.5
_USUAL = {"first": "suffix", "second": "layerskip"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(Method):
    """Two methods, in each round the one whose draft promises more for its cost.

    On a command line the options of both are given beside these. In Python that holds for `generate(method="hybrid",
    ...)`; this class takes two methods with options of their own.

    Attributes:
      first: what copies drafts from text: suffix or ngram; its options stand beside this one. Default suffix.
      second: what drafts with a model: any other method; its options stand beside this one. Default layerskip.
      draft_cost: the cost of a draft token of the second method, in steps of one token. Default: the size of the
        weights that it reads, relative to those that a step of the model reads.

    Examples:
      >>> from jaxspec.methods import LayerSkip, Suffix
      >>> Hybrid(first=Suffix(suffix_max=8), second=LayerSkip(exit_layer=3))
      Hybrid(first=Suffix(suffix_max=8), second=LayerSkip(exit_layer=3))
    """

    name: ClassVar[str] = "hybrid"
    composite: ClassVar[bool] = True

    first: str | Method | None = option(None, metavar="METHOD")
    second: str | Method | None = option(None, metavar="METHOD")
    draft_cost: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for role, part in self.given.items():
            if isinstance(part, str):
                object.__setattr__(self, role, _kind(role, part)())
            elif isinstance(part, Method):
                _check(role, type(part))
        if self.draft_cost is not None and not 0 <= self.draft_cost < float("inf"):
            raise ValueError(f"draft_cost is {self.draft_cost}; give a number from 0 on")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Hybrid:
        """Makes both methods, of the options that each has, and this one.

        Raises:
          ValueError: neither has an option, or one does not fit; one line.

        Examples:
          >>> Hybrid.of({"first": "ngram", "exit_layer": 3})
          Hybrid(first=NGram(), second=LayerSkip(exit_layer=3))
        """
        own: dict[str, Any] = {name: given[name] for name in cls.options() if name in given}
        rest = {name: value for name, value in given.items() if name not in own}
        kinds = _kinds(own)
        unread = sorted(name for name in rest if all(name not in kind.options() for kind in kinds.values()))
        if unread:
            raise ValueError(cls(**own).refusal([f"`{name}`" for name in unread]))
        for role, kind in kinds.items():
            own[role] = kind.of({name: value for name, value in rest.items() if name in kind.options()})
        return cls(**own)

    @classmethod
    def readers(cls) -> tuple[type[Method], ...]:
        """Returns this method and all that draft, whose options may stand beside its own."""
        return (cls, *registry.parts())

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns its own options and those that its two methods read."""
        return super().known(given).union(*(kind.known(given) for kind in _kinds(given).values()))

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether one of its two methods is given."""
        return num_layers > 1 and not _USUAL.keys().isdisjoint(given)

    def refusal(self, foreign: Sequence[str]) -> str:
        """Returns what to say of options that neither it nor its two methods read."""
        first, second = (part.name for part in self._parts().values())
        options = ", ".join(foreign)
        return (
            f"method hybrid of {first} and {second} has no option {options}; leave it out or choose another"
        )

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter of both; its parameters are the second's."""
        import jax.numpy as jnp

        from jaxspec.choosing.costs import guessed_row
        from jaxspec.drafting.hybrid import Hybrid as Drafting
        from jaxspec.drafting.lookup import LookupDrafter

        parts = self._parts()
        first, _ = parts["first"].build(target, resources)
        if not isinstance(first, LookupDrafter):
            raise ValueError(
                f"first is {parts['first'].name}, which drafts with a model; give suffix or ngram, or swap both"
            )
        second, own = parts["second"].build(target, resources)
        if second.drafts_trees:
            raise ValueError(f"second is {parts['second']}, which drafts a tree; let it draft a chain")
        second = second.taking_turns()
        declared = parts["second"].cost(target, second, own)
        usual = _UNKNOWN if declared is None else share_of_step(declared, target)
        if declared is not None and declared.once:  # one pass gives all tokens
            usual /= second.num_draft_tokens
        cost = usual if self.draft_cost is None else self.draft_cost
        row = guessed_row(resources.platform)
        numbers = cost, row, Drafting.memory, self._accept(second.num_draft_tokens, target, resources)
        return Drafting(target.config, first, second, *map(jnp.float32, numbers)), own

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns prompt lookup with a head, where there is one for the model; of several the first of `_HEADS`."""
        heads = (head for name in _HEADS for head in registry.find(name).offered(target, resources))
        return tuple(cls(first="ngram", second=head) for head in itertools.islice(heads, 1))

    def expectation(self, target: LoadedModel, resources: Resources) -> Expectation | None:
        """Returns the second's, as far as its drafts pay; what is found beside is known in rounds alone."""
        known = self._parts()["second"].expectation(target, resources)
        if known is None:
            return None
        drafter: Any = self.build(target, resources)[0]
        cost = float(drafter.row_cost + drafter.draft_cost)
        accept = (*known.accept, *known.accept[-1:] * _LONG)
        tokens = list(itertools.accumulate(itertools.accumulate(accept, operator.mul), initial=1.0))
        longest = max(range(1, len(tokens)), key=lambda length: tokens[length] / (1 + cost * length))
        return dataclasses.replace(known, accept=(*accept[:longest], 0.0), draft=(*[1.0] * longest, 0.0))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost | None:
        """Returns the second's, with a search in each round, as long as it pays; what found drafts save, times tell."""
        second = self._parts()["second"].cost(target, cast("Drafting", drafter).second, params)
        return None if second is None else dataclasses.replace(second, lookup=True, adapts=True)

    def _accept(self, longest: int, target: LoadedModel, resources: Resources) -> Sequence[float]:
        """Returns what is accepted of the second's drafts, by position, where anybody knows it."""
        from jaxspec.drafting.hybrid import Hybrid as Drafting

        known = self._parts()["second"].expectation(target, resources)
        accept = (float(Drafting.accept),) if known is None else known.accept
        return (*accept, *accept[-1:] * longest)[:longest]

    def limited(self, longest: int) -> Method:
        """Returns it with both methods limited."""
        parts: dict[str, Any] = {role: part.limited(longest) for role, part in self._parts().items()}
        return dataclasses.replace(self, **parts)

    def _parts(self) -> dict[str, Method]:
        return {role: getattr(self, role) or registry.find(usual)() for role, usual in _USUAL.items()}


def _kind(role: str, name: str) -> type[Method]:
    """Returns the method of a name that may be a part."""
    kind = registry.find(name)
    _check(role, kind)
    return kind


def _check(role: str, kind: type[Method]) -> None:
    """Raises a ValueError where a method cannot be a part."""
    if kind.composite or not kind.options():
        raise ValueError(f"{role} is {kind.name!r}; give a method that drafts, and no hybrid")


def _kinds(given: Mapping[str, Any]) -> dict[str, type[Method]]:
    """Returns the methods that are given by their names, or not at all: flat options are theirs."""
    names = {role: given.get(role) or usual for role, usual in _USUAL.items()}
    return {role: _kind(role, name) for role, name in names.items() if isinstance(name, str)}
