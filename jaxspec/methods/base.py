"""The base classes of decoding methods: a method declares its options once, and builds a drafter from them.

No module of a method imports JAX at module scope, so that the command line can show its options without this delay.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from jaxspec.host.arguments import flag, listed, real, whole
from jaxspec.host.messages import shown
from jaxspec.methods.resources import HasModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost, StepCosts
    from jaxspec.methods.resources import LoadedModel, Resources
    from jaxspec.protocol import Drafter

T = TypeVar("T")
# The largest number of draft tokens. Verification is compiled for every draft length up to K, so a larger K only takes
# longer to compile.
MAX_DRAFT_TOKENS = 128
# The most values of an option with several, such as files: a client of a server may give any number.
MAX_VALUES = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A drafter that `auto` can switch to between two calls of the loop. Candidates are compared by identity.

    Attributes:
      name: the name in reports.
      drafter, params: the result of `Method.build`.
      cost: the cost of its drafts.
      expected: the expected acceptance by position; None if none was measured.
    """

    name: str
    drafter: Drafter
    params: Any
    cost: DraftCost
    expected: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The base class of methods: a frozen dataclass whose fields are the method's options.

    A subclass sets `name`, defines `build`, and documents each field under `Attributes:` of its docstring, which the
    command line shows as help. Each field has a default that means "not given": None, False, True or ().

    A value is converted to the type of its field: NumPy and JAX numbers to int or float, and lists and single values
    to tuples. A value of another type raises a ValueError of one line.

    Class attributes:
      name: the name of the method, the value of `--method`.
      needs: what the user must have before the method can run, such as a trained head; "" for nothing.
      composite: whether it combines other methods, whose options are then given together with its own.
      compared: whether `jaxspec compare` and `bench` measure it by default. A method with `needs` is measured only if
        it is named.
      min_layers: the smallest number of layers of a target.

    Examples:
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class Mine(Method):
      ...     name: ClassVar[str] = "mine"
      ...     period: int = 4
      >>> print(Mine(period=6))
      mine period=6
    """

    name: ClassVar[str]
    needs: ClassVar[str] = ""
    composite: ClassVar[bool] = False
    compared: ClassVar[bool] = True
    min_layers: ClassVar[int] = 1

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _taken(field, value, hints[field.name]))

    @property
    def by_distribution(self) -> bool:
        """Whether `build` reads `Resources.distributions`; texts of other distributions then have another drafter.

        A method that combines others does so if one of them does.
        """
        parts = [
            one for value in self.given.values() for one in (value if type(value) is tuple else (value,))
        ]
        return any(isinstance(part, Method) and part.by_distribution for part in parts)

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def summary(cls) -> str:
        """Returns the first line of the class's docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Returns the names of the method's options."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the default of each option as text for the command line's help, by option."""
        return {}

    @classmethod
    def converted(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options by name, those of this class converted to the types of their fields.

        Raises:
          ValueError: a value cannot be converted; one line.
        """
        hints = _hints(cls)  # type: ignore[arg-type]
        fields = {field.name: field for field in dataclasses.fields(cls)}
        return {
            name: _taken(fields[name], value, hints[name]) if name in fields else value
            for name, value in given.items()
        }

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Method:
        """Makes the method from options by name, including the options of its `parts`."""
        return cls(**given)

    @classmethod
    def parts(cls, given: Mapping[str, Any]) -> tuple[type[Method], ...]:
        """Returns the methods that a composite method combines; () if the method is not composite.

        Args:
          given: options by name, see `converted`; some of them may choose the parts.
        """
        return ()

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter and its parameters (None if it has none).

        Args:
          target: the model that verifies.
          resources: the model's directory, the texts' sampling distributions and other inputs, see `Resources`.

        Raises:
          ValueError, FileNotFoundError: an option does not fit this target, or a file is missing; one line.
        """
        raise NotImplementedError

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the default candidates of `auto` with this class: those that need no options and are likely to pay.

        Args:
          target, resources: as for `build`.
        """
        return ()

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost | None:
        """Returns the cost of its drafts, which `auto` and reports use; None if it is not declared.

        Args:
          target: the model that verifies.
          drafter, params: the result of `build`.
        """
        return None

    def expectation(self, target: LoadedModel, resources: Resources) -> tuple[float, ...] | None:
        """Returns the acceptance by position that is recorded beside its head; None without a record.

        Args:
          target, resources: as for `build`.
        """
        return None

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with drafts of at most `longest` tokens, unless its options set the length.

        Args:
          longest: in tokens.
          target, resources: as for `build`.

        Raises:
          ValueError, FileNotFoundError: as `build`.
        """
        return self

    def candidates(self, target: LoadedModel, resources: Resources) -> tuple[Candidate, ...]:
        """Returns the candidates among which the method switches; () for a method with one drafter.

        Args:
          target, resources: as for `build`.

        Raises:
          ValueError, FileNotFoundError: as `build`.
        """
        return ()

    def __init_subclass__(cls) -> None:
        # The repr of a dataclass would show all options, most of which are not given.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Method.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"
        )

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{name}={value!r}" for name, value in self.given.items())))


class Lookup(Method):
    """A base of methods whose drafts are copied: the cost of a draft is that of a search."""

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of a lookup."""
        from jaxspec.costs.rounds import DraftCost

        return DraftCost(lookup=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingMethod(Method):
    """The base class of methods that draft.

    Attributes:
      num_draft_tokens: the maximum number of tokens drafted in a round, K.

    Examples:
      >>> from jaxspec.methods import NGram
      >>> NGram(num_draft_tokens=4).length(usual=10), NGram().length(usual=10)
      (4, 10)
    """

    num_draft_tokens: int | None = dataclasses.field(default=None, metadata={"metavar": "K"})

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.num_draft_tokens
        if count is not None and count < 1:
            raise ValueError(f"num_draft_tokens is {count}; a drafting method needs at least 1")
        if count is not None and count > MAX_DRAFT_TOKENS:
            raise ValueError(f"num_draft_tokens is {count}; give at most {MAX_DRAFT_TOKENS}")

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with K = `longest`, unless K is given."""
        if self.num_draft_tokens is not None:
            return self
        return dataclasses.replace(self, num_draft_tokens=longest)

    def length(self, usual: int) -> int:
        """Returns K: the given one, else `usual`, at most `MAX_DRAFT_TOKENS`."""
        return min(usual, MAX_DRAFT_TOKENS) if self.num_draft_tokens is None else self.num_draft_tokens


def option(default: T, *, metavar: str) -> T:
    """Returns a dataclass field whose value is called `metavar` in the command line's help.

    Examples:
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class Mine(Method):
      ...     exit_layer: int | None = option(None, metavar="E")
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar})


def size_of(params: Any) -> int:
    """Returns the total number of elements of a tree of parameters."""
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(params))


def layers_of(params: Any, target: LoadedModel) -> float:
    """Returns the size of `params` in layers of the target: the ratio of the numbers of elements, times L; 0 for None.

    Numbers count, not bytes: on a CPU a layer with int8 weights takes nearly as long as one in float32, which `auto`
    must predict. Therefore `share_of_step` is too low for float32 drafts of a target with int8 weights.
    """
    return target.config.num_layers * size_of(params) / size_of(target.params["layers"])


def read_costs(target: LoadedModel) -> StepCosts:
    """Returns costs of steps in proportion to the bytes of weights that they read, in units of a step of one row.

    Further rows are free, as is nearly so on accelerators.
    """
    import jax

    from jaxspec.costs.rounds import guessed
    from jaxspec.model.llama import floor_bytes

    layers: int = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params["layers"]))
    rest = 1 - layers / floor_bytes(target.config, target.params)
    return guessed(target.config.num_layers, 0.0, rest, lookup=0.0)


def token_share(target: LoadedModel) -> float:
    """Returns the bytes of a cached token, divided by those of the weights that a step of the target reads."""
    from jaxspec.model import cache, llama

    of_token = cache.size_bytes(target.config, 1, 1, target.params["embed"].dtype)
    return of_token / llama.floor_bytes(target.config, target.params)


def share_of_step(cost: DraftCost, target: LoadedModel) -> float:
    """Returns the bytes of weights that one draft pass reads, divided by those that a step of the target reads."""
    return cost.draft_ms(read_costs(target), 1)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _taken(field: dataclasses.Field[Any], value: Any, hint: Any) -> Any:
    """Returns the value of a field, converted to its type `hint`.

    Raises:
      ValueError: it cannot be converted.
    """
    if value is field.default:
        return value
    name = field.name
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        values = [value] if isinstance(value, (str, os.PathLike, Method)) else listed(value)
        if values is None:
            wanted = "a list of whole numbers" if inner is int else "a text or several"
            raise ValueError(f"{name} is {shown(value)}; give {wanted}")
        if len(values) > MAX_VALUES:
            raise ValueError(f"{name} has {len(values)} values; give at most {MAX_VALUES}")
        return tuple(_one(name, f"{name}[{index}]", one, inner) for index, one in enumerate(values))
    return _one(name, name, value, hint)


def _one(option: str, name: str, value: Any, hint: Any) -> Any:
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None and type(None) in members:
        return None
    if str in members and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    for member in members:
        if typing.get_origin(member) is Literal:
            known = typing.get_args(member)
            if not isinstance(value, (str, int)) or value not in known:
                raise ValueError(f"unknown {option} {shown(value)}; give one of {', '.join(map(str, known))}")
            return value
        if member is bool:
            return flag(name, value)
        if member is int:
            return whole(name, value)
        if member is float:
            return real(name, value)
    if Method in members and isinstance(value, Method):
        return value
    if HasModel in members and hasattr(value, "config") and hasattr(value, "params"):
        return value
    raise ValueError(f"{name} is {shown(value)}; give a text")
