"""Chooses the drafting method at run time: the one with the most expected tokens for its time, or none."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods import registry
from jaxspec.methods.base import Candidate, DraftingMethod, Method, option, token_share
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost, StepCosts
    from jaxspec.protocol import Drafter

# The longest draft: longer ones are rarely accepted whole, and a CPU verifies 8 rows as fast as 5.
_USUAL = 7
# The most candidates: each is built, and has a price in each choice.
_MOST = 32
# The expected acceptance of a lookup's first and further tokens, and of a model's tokens, if none was measured. Below
# the mean (.36 of first tokens in SmolLM2's answers to Spec-Bench), because a text that copies soon shows it.
_LOOKUP, _UNKNOWN = (0.25, 0.5), (0.5,)
# The least speed-up over plain decoding that the record of an offered head must promise. A head costs more than its
# drafts: time in prompts and in rounds without it, and drafts until a text has shown that they do not pay.
_WORTH = 1.25
# The window with which an offered self-draft is also tried, if a round after the longest text then takes less than this
# share of its time.
_WINDOW, _PAYS = (4, 2048), 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(DraftingMethod):
    """Chooses the drafting method and the draft length in each round: the fastest expected, or plain decoding.

    The choice is made inside the compiled loop, from the drafts accepted so far in each text, and from prices and
    expected acceptances that do not change. `jaxspec profile` measures the costs of steps; otherwise they are estimated
    from sizes. The acceptances of heads come from their records. Rejected drafts cost a text at most a small share of
    its time.

    Attributes:
      among: methods to choose among, beside plain decoding; their options are given beside this one. Default: ngram,
        early exits that the model was trained for, and heads beside it or from jaxspec that promise a gain.
      explain: report candidates and prices, see `Result.expected`; the command line writes them to standard error
        after the text.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> Auto(among=("ngram", LayerSkip(exit_layer=3)))
      Auto(among=(NGram(), LayerSkip(exit_layer=3)))
    """

    name: ClassVar[str] = "auto"
    composite: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    among: tuple[str | Method, ...] = option((), metavar="METHOD")
    explain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.among) > _MOST:
            raise ValueError(f"among names {len(self.among)} methods; give at most {_MOST}")
        # `kind_of` also refuses objects of methods that do not draft by themselves.
        pairs = [(one, kind_of(one)) for one in self.among]
        among = tuple(kind() if isinstance(one, str) else one for one, kind in pairs)
        object.__setattr__(self, "among", among)

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the defaults, by option."""
        return {"num_draft_tokens": str(_USUAL)}

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Auto:
        """Makes the method, with options of those that `among` names.

        Raises:
          ValueError: none of them has an option, or one does not fit; one line.
        """
        own = {name: given[name] for name in cls.options() if name in given}
        made = cls(**own)
        rest = {name: value for name, value in given.items() if name not in own}
        among = tuple(_with_options(one, rest) for one in made.methods())
        return dataclasses.replace(made, among=among) if rest else made

    @classmethod
    def parts(cls, given: Mapping[str, Any]) -> tuple[type[Method], ...]:
        """Returns the methods that `among` names."""
        return tuple(map(kind_of, given.get("among", ())))

    def methods(self) -> tuple[Method, ...]:
        """Returns the methods that `among` names, with their options; () where it names none."""
        return cast("tuple[Method, ...]", self.among)

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter of the candidates, whose parameters are a tuple; plain decoding if there are none."""
        return self.built(self.candidates(target, resources), target, resources)

    def built(
        self, candidates: Sequence[Candidate], target: LoadedModel, resources: Resources
    ) -> tuple[Drafter, Any]:
        """Makes the drafter of candidates, see `build`."""
        import jax.numpy as jnp

        from jaxspec.costs.prices import measured_prices
        from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
        from jaxspec.drafting.choosing_drafter import ChoosingDrafter, widths_of

        if not candidates:
            return AutoregressiveDrafter(self.length(_USUAL)), None
        drafters = tuple(one.drafter for one in candidates)
        widths, longest = widths_of(drafters), max(one.num_draft_tokens for one in drafters)
        accept = [_LOOKUP if one.cost.lookup else one.expected or _UNKNOWN for one in candidates]
        trees = [one.num_nodes if one.drafts_trees else 0 for one in drafters]
        given = _costs(target, resources), _works(candidates), trees, widths, longest, accept
        prices = measured_prices(*given, one_width=resources.platform != "cpu")
        drafter = ChoosingDrafter(target.config, drafters, prices, jnp.float32(ChoosingDrafter.memory))
        return drafter, tuple(one.params for one in candidates)

    def candidates(self, target: LoadedModel, resources: Resources) -> tuple[Candidate, ...]:
        """Makes the candidates; one without a K of its own gets this method's.

        Raises:
          ValueError, FileNotFoundError: a method in `among` cannot be built or chosen; one line.
        """
        kinds = registry.available()[0].values()
        offered = [one for kind in kinds for one in kind.offered(target, resources)]
        made = []
        for method in self.methods() or offered:
            try:
                candidate = self._candidate(method, target, resources)
            except (ValueError, OSError) as error:
                if self.methods():
                    raise
                # The user did not name it: a file beside the model may be out of date.
                warnings.warn(f"auto leaves out {method.name}: {error}", RuntimeWarning, stacklevel=2)
                continue
            if not self.methods() and candidate.expected is not None:
                alone: Any = self.built((candidate,), target, resources)[0]
                if alone.rule.speedups(0).max() < _WORTH:
                    continue
            made.append(candidate)
            if not self.methods():
                made += self._with_window(candidate, method, target, resources)
        # Reports distinguish candidates by name.
        before: Counter[str] = Counter()
        for at, one in enumerate(made):
            before[one.name] += 1
            if before[one.name] > 1:
                made[at] = dataclasses.replace(one, name=f"{one.name} ({before[one.name]})")
        return tuple(made)

    def _candidate(self, method: Method, target: LoadedModel, resources: Resources) -> Candidate:
        longest = self.length(_USUAL)
        method = method.limited(longest, target, resources)
        drafter, params = method.build(target, resources)
        drafter = drafter.taking_turns()
        cost = method.cost(target, drafter, params)
        if cost is None:
            raise ValueError(
                f"among names {method.name}, whose rounds have no price; choose it by method={method.name!r}"
            )
        needed = drafter.num_draft_tokens
        if needed > longest:
            raise ValueError(
                f"{method.name} drafts up to {needed} tokens in a row; give auto num_draft_tokens={needed} or more"
            )
        detail = getattr(drafter, "exit_layer", None)
        if drafter.drafts_trees:
            detail = f"{drafter.num_nodes}x{needed}"
        name = method.name if detail is None else f"{method.name} {detail}"
        if window := method.given.get("draft_window", ()):
            name, cost = (
                f"{name} window {window[0]},{window[1]}",
                dataclasses.replace(cost, window=sum(window)),
            )
        return Candidate(name, drafter, params, cost, method.expectation(target, resources))

    def _with_window(
        self, whole: Candidate, method: Method, target: LoadedModel, resources: Resources
    ) -> list[Candidate]:
        """Returns a self-draft that reads a part of a long text, if it saves a good part of a round at the longest."""
        if "draft_window" not in method.options():
            return []
        try:
            few = self._candidate(dataclasses.replace(method, draft_window=_WINDOW), target, resources)  # type: ignore[call-arg]
        except ValueError:  # each layer has a window of its own
            return []
        costs = _costs(target, resources)
        longest, length = target.config.context_length, whole.drafter.num_draft_tokens
        less, all_read = (one.cost.round_ms(costs, length, longest) for one in (few, whole))
        return [few] if less < _PAYS * all_read else []


def _costs(target: LoadedModel, resources: Resources) -> StepCosts:
    """Returns the measured costs of steps; without them assumed ones, with the cache's share from its bytes."""
    from jaxspec.costs.rounds import CPU_STEPS, guessed, guessed_row

    if resources.costs is not None:
        return resources.costs
    config, platform = target.config, resources.platform
    steps = CPU_STEPS[target.rounds_activations] if platform == "cpu" else ()
    # A layer with a window reads no more of a longer text.
    growing = [config.window(layer) for layer in range(config.num_layers)].count(None) / config.num_layers
    # On a CPU, attention of each further row computes: SmolLM2's takes .3 times as long as to read the cache.
    return guessed(
        config.num_layers,
        guessed_row(platform),
        steps=steps,
        live_token=growing * token_share(target),
        row_reads=0.3 if platform == "cpu" else 0.0,
    )


def _works(candidates: Sequence[Candidate]) -> list[DraftCost]:
    """Returns the work of drafts in the common loop, whose verification saves layers only after the same exit."""
    exits = {one.cost.shared for one in candidates if one.cost.shared}
    read = [layer for one in candidates for layer in one.drafter.aux_layers if isinstance(layer, int)]
    if len(exits) == 1 and min(read, default=max(exits)) >= max(exits):
        return [one.cost for one in candidates]
    return [dataclasses.replace(one.cost, shared=0.0) for one in candidates]


def kind_of(one: str | Method, name: str = "among") -> type[Method]:
    """Returns the class of a method, given as such or by its name in the option `name`.

    Raises:
      ValueError: there is no such method, or it does not draft by itself; one line.
    """
    try:
        kind = registry.find(one) if isinstance(one, str) else type(one)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from None
    if kind.composite or not kind.options():
        raise ValueError(f"`{name}` is {kind.name}; give a method that drafts itself, such as ngram")
    return kind


def _with_options(method: Method, given: Mapping[str, Any]) -> Method:
    """Returns a method with those of the given options that it has."""
    kind = type(method)
    options = {name: value for name, value in given.items() if name in kind.options()}
    return kind.from_options(method.given | kind.converted(options))
