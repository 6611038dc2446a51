"""No method but the choice between methods: what gives the most tokens per millisecond drafts next, or nothing does."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods import registry
from jaxspec.methods.base import Candidate, DraftingMethod, Method, option
from jaxspec.methods.files import found
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.acceptance import Expectation
    from jaxspec.protocol import Drafter

# Longer drafts are rarely accepted whole, and each verification is compiled for them.
_USUAL = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(DraftingMethod):
    """What drafts, and how long, follows what is accepted and what it costs; where nothing pays, nothing is drafted.

    A text begins with what is known to pay, such as a head whose acceptance lies beside it, else with plain decoding.
    Between calls of the compiled loop the choice is made again, by estimates of what is accepted (Thompson sampling)
    and the costs of steps, which `jaxspec profile --costs` measures; without them they are guessed, and observed times
    correct both. A candidate's programs are compiled in the background, once it promises to gain what they take. On a
    mesh nothing is chosen, and texts are decoded plainly.

    Attributes:
      among: methods to choose among, plain decoding always with them; their options stand beside this one. Default:
        ngram, suffix, early exits that the model was trained for, and heads that lie beside it or come with jaxspec.
      choices: a file of choices. If it exists, its choices are repeated, so that a seed gives the same text with any
        acceptor; otherwise the choices are written to it.
      explain: report what was expected and what was chosen, see `Result.choices`; the command line writes it to
        standard error after the text.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> Auto(among=("ngram", LayerSkip(exit_layer=3)))
      Auto(among=(NGram(), LayerSkip(exit_layer=3)))
    """

    name: ClassVar[str] = "auto"
    composite: ClassVar[bool] = True

    among: tuple[str | Method, ...] = option((), metavar="METHOD")
    choices: FilePath | None = option(None, metavar="FILE")
    explain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in map(_kind, self.among):
            if not kind.options() or issubclass(kind, Auto):
                raise ValueError(f"among names {kind.name!r}; give methods that draft")
        object.__setattr__(
            self, "among", tuple(_kind(one)() if isinstance(one, str) else one for one in self.among)
        )

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns that it is run only where it is named: a race is between methods."""
        return False

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {"num_draft_tokens": str(_USUAL)}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Auto:
        """Makes the method, with options of those that `among` names.

        Raises:
          ValueError: none of them has an option, or one does not fit; one line.

        Examples:
          >>> Auto.of({"among": ("ngram", "layerskip"), "exit_layer": 3})
          Auto(among=(NGram(), LayerSkip(exit_layer=3)))
        """
        own = {name: given[name] for name in cls.options() if name in given}
        made = cls(**own)
        rest = {name: value for name, value in given.items() if name not in own}
        kinds = [type(one) for one in made.methods()]
        # A method of others reads theirs; which they are, options say.
        reads = [kind.known(rest) if kind.composite else frozenset(kind.options()) for kind in kinds]
        if unread := sorted(name for name in rest if all(name not in names for names in reads)):
            raise ValueError(made.refusal([f"`{name}`" for name in unread]))
        parts = tuple(
            kind.of(one.given | {name: value for name, value in rest.items() if name in names})
            for kind, one, names in zip(kinds, made.methods(), reads, strict=True)
        )
        return dataclasses.replace(made, among=parts)

    @classmethod
    def readers(cls) -> tuple[type[Method], ...]:
        """Returns this method and all that draft, whose options may stand beside its own."""
        others = registry.available()[0].values()
        return (cls, *(kind for kind in others if kind.options() and not issubclass(kind, Auto)))

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns its own options and those that the methods of `among` read."""
        named = given.get("among") or ()
        among = (named,) if isinstance(named, (str, Method)) else tuple(named)
        kinds = [kind for kind in map(_kind, among) if not issubclass(kind, Auto)]
        return super().known(given).union(*(kind.known(given) for kind in kinds))

    def methods(self) -> tuple[Method, ...]:
        """Returns the methods that `among` names, with their options; () where it names none."""
        return cast("tuple[Method, ...]", self.among)

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes what a text begins with: plain decoding, with room for the others' drafts."""
        from jaxspec.drafting.autoregressive import Autoregressive as Drafting

        return Drafting(self.length(_USUAL)), None

    def candidates(self, target: LoadedModel, resources: Resources) -> tuple[Candidate, ...]:
        """Makes what may be chosen, each with this method's K where it is given none.

        Raises:
          ValueError, FileNotFoundError: one that is named in `among` cannot be built, or not be chosen; one line.
        """
        kinds = registry.available()[0].values()
        offered = [one for kind in kinds for one in kind.offered(target, resources)]
        own = [_of_any_length(one) for one in offered]
        made = []
        for method in self.methods() or offered:
            try:
                candidate = self._candidate(method, target, resources)
            except (ValueError, OSError) as error:
                if self.methods():
                    raise
                # Nobody asked for it: a stale file beside the model, say.
                warnings.warn(f"auto leaves out {method.name}: {error}", RuntimeWarning, stacklevel=2)
                continue
            made.append(dataclasses.replace(candidate, offered=_of_any_length(method) in own))
        # What is learnt of a candidate, and what a file of choices says, goes by its name.
        before: Counter[str] = Counter()
        for at, one in enumerate(made):
            before[one.name] += 1
            if before[one.name] > 1:
                made[at] = dataclasses.replace(one, name=f"{one.name} ({before[one.name]})")
        return tuple(made)

    @staticmethod
    def expected(target: LoadedModel, resources: Resources) -> dict[str, Expectation]:
        """Returns what `jaxspec tune --method auto` found out about a model's candidates, by name; {} where nothing.

        The model's own file has precedence. The file of a head that is distributed with jaxspec adds the candidates
        that it lacks, unless the model has a head of that kind in its directory.

        Raises:
          ValueError: a file is damaged or belongs to another model; one line.
        """
        from jaxspec.io import acceptance_file
        from jaxspec.io.heads import embedded_heads, head_name

        brought = (
            directory / acceptance_file.NAME
            for kind, directory in embedded_heads(target.fingerprint).items()
            if found(None, target, resources, head_name(kind)) is None
        )
        own = found(None, target, resources, acceptance_file.NAME)
        expected: dict[str, Expectation] = {}
        for path in (*filter(os.path.isfile, brought), *filter(None, [own])):
            expected |= acceptance_file.read_acceptance(path, target.fingerprint)
        return expected

    def _candidate(self, method: Method, target: LoadedModel, resources: Resources) -> Candidate:
        longest = self.length(_USUAL)
        method = method.limited(longest)
        drafter, params = method.build(target, resources)
        cost = method.cost(target, drafter, params)
        if cost is None or drafter.drafts_trees:
            raise ValueError(
                f"among names {method.name}, whose rounds have no price yet; choose it by method={method.name!r}"
            )
        # Rows have room for K + 1: a round that reaches farther would never run at a context's end.
        needed = max(drafter.num_draft_tokens, drafter.reach - 1)
        if needed > longest:
            raise ValueError(
                f"{method.name} drafts or writes up to {needed} tokens; give auto num_draft_tokens={needed} or more"
            )
        layers = getattr(drafter, "exit_layer", None)
        name = method.name if layers is None else f"{method.name} {layers}"
        return Candidate(name, drafter, params, cost, method.expectation(target, resources))


def _of_any_length(method: Method) -> Method:
    """The method, and those that it is made of, without their K: what is accepted is known by position."""
    parts: dict[str, Any] = {
        name: _of_any_length(one) for name, one in method.given.items() if isinstance(one, Method)
    }
    if isinstance(method, DraftingMethod):
        parts["num_draft_tokens"] = None
    return dataclasses.replace(method, **parts)


def _kind(one: str | Method) -> type[Method]:
    return registry.find(one) if isinstance(one, str) else type(one)
