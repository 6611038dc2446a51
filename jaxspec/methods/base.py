"""What a method of decoding is: its options, declared once, and the parts that are made of them.

Nothing here imports JAX at module scope, so that a command line can be made of the options without waiting for it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from jaxspec.io.arguments import flag, listed, real, whole
from jaxspec.io.messages import shown
from jaxspec.methods.resources import HasModel

if TYPE_CHECKING:
    from jaxspec.choosing.acceptance import Expectation
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.methods.resources import LoadedModel, Resources
    from jaxspec.protocol import Drafter

T = TypeVar("T")
# Longer drafts only compile longer: every width of a verification is compiled.
MAX_DRAFT_TOKENS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """What a text may change to between two calls of the loop; equal to itself alone.

    Attributes:
      name: as reports call it.
      drafter, params: the result of `Method.build`.
      cost: the cost of its drafts.
      expected: the expected acceptance, if any was measured; else None.
      offered: whether it is what the model offers, which `jaxspec tune --method auto` measures; another head or other
        options are not.

    Examples:
      >>> from jaxspec.choosing.costs import DraftCost
      >>> from jaxspec.drafting.ngram import NGram
      >>> Candidate("ngram", NGram(), None, DraftCost(lookup=True)).cost.lookup
      True
    """

    name: str
    drafter: Drafter
    params: Any
    cost: DraftCost
    expected: Expectation | None = None
    offered: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The base of every method: a frozen dataclass whose fields are the method's options.

    A subclass sets `name`, documents each field in its docstring under `Attributes:` (the command line's help is
    made of it) and supplies `build`. A field has a default that means "not given": None, False, True or ().

    Numbers of NumPy or JAX, lists and single values become what the field's type says; anything else raises a
    ValueError of one line.

    Class attributes:
      name: of the method, as `--method` takes it.
      needs: what a user must have before the method can run, "" for nothing; `jaxspec compare` leaves out such a
        method unless its options are given.
      composite: whether it is made of other methods, whose options stand beside its own.

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

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _taken(field, value, hints[field.name]))
        known = self.known(self.given)
        foreign = [f"`{name}`" for name in self.given if name not in known]
        if foreign:
            raise ValueError(self.refusal(sorted(foreign)))

    @property
    def given(self) -> dict[str, Any]:
        """The options that were set, by name."""
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
        """Returns what is done where an option is left out, by option, for the command line's help."""
        return {}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Method:
        """Makes the method of options by name, those of all its `readers` among them."""
        return cls(**given)

    @classmethod
    def readers(cls) -> tuple[type[Method], ...]:
        """Returns the methods whose options `of` may be given: this one alone, if it is not made of others."""
        return (cls,)

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns the options that the method reads, where those in `given` are set."""
        return frozenset(cls.options())

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether `jaxspec compare` runs the method where no methods are named.

        Args:
          given: the options that were set, of any method.
          num_layers: of the target.
        """
        return not cls.needs

    def refusal(self, foreign: Sequence[str]) -> str:
        """Returns what to say of options that the method does not read."""
        return f"method {self.name} has no option {', '.join(foreign)}; leave it out or choose another"

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter, and its parameters (None if it has none).

        Args:
          target: the model that verifies.
          resources: what the method may need from outside.

        Raises:
          ValueError, FileNotFoundError: an option does not fit this target, or a file is missing; one line.
        """
        raise NotImplementedError

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns what of this method `auto` chooses among where nobody says: what needs no option and may well pay.

        Args:
          target, resources: as of `build`.
        """
        return ()

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost | None:
        """Returns the declared cost of its drafts, which `auto`, `hybrid` and reports use; None if it declares none.

        Args:
          target: the model that verifies.
          drafter, params: what `build` made.
        """
        return None

    def expectation(self, target: LoadedModel, resources: Resources) -> Expectation | None:
        """Returns what is accepted of its drafts, where something that it drafts with says so; None elsewhere.

        Args:
          target, resources: as of `build`.
        """
        return None

    def limited(self, longest: int) -> Method:
        """Returns the method with drafts of at most `longest` tokens where nothing says how long they are."""
        return self

    def candidates(self, target: LoadedModel, resources: Resources) -> tuple[Candidate, ...]:
        """Returns what a text may change to from what `build` makes; () for a method of one drafter.

        Args:
          target, resources: as of `build`.

        Raises:
          ValueError, FileNotFoundError: as `build`.
        """
        return ()

    def __init_subclass__(cls) -> None:
        # Else each dataclass would show all its options, most of them not given.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Method.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"
        )

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{name}={value!r}" for name, value in self.given.items())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingMethod(Method):
    """The base of methods that draft.

    Attributes:
      num_draft_tokens: the most tokens drafted in a round, K.

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

    def limited(self, longest: int) -> Method:
        """Returns the method with this K, if it is given none."""
        if self.num_draft_tokens is not None:
            return self
        return dataclasses.replace(self, num_draft_tokens=longest)

    def length(self, usual: int) -> int:
        """Returns K: as given, else the method's usual one, which a file may name, as far as one may be given."""
        return min(usual, MAX_DRAFT_TOKENS) if self.num_draft_tokens is None else self.num_draft_tokens


def option(default: T, *, metavar: str) -> T:
    """Returns a field with the name that its value has in the command line's help.

    Examples:
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class Mine(Method):
      ...     exit_layer: int | None = option(None, metavar="E")
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar})


def size_of(params: Any) -> int:
    """Returns how many numbers parameters are.

    Examples:
      >>> import numpy as np
      >>> size_of({"one": np.zeros(3), "two": [np.zeros((2, 2))]})
      7
    """
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(params))


def layers_of(params: Any, target: LoadedModel) -> float:
    """Returns the number of the target's layers that have together as many numbers as `params`.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> target = language_model().loaded
      >>> layers_of(target.params["layers"], target) == target.config.num_layers
      True
    """
    return target.config.num_layers * size_of(params) / size_of(target.params["layers"])


def share_of_step(cost: DraftCost, target: LoadedModel) -> float:
    """Returns the bytes of weights that one pass of a draft reads, relative to those of a step of the target.

    Examples:
      >>> from jaxspec.choosing.costs import DraftCost
      >>> from jaxspec.testing import language_model
      >>> target = language_model().loaded
      >>> share_of_step(DraftCost(lookup=True), target), share_of_step(DraftCost(layers=2), target)
      (0.0, 1.0)
    """
    if not cost.layers:
        return 0.0
    import jax

    from jaxspec.model.llama import floor_bytes

    whole = floor_bytes(target.config, target.params)
    layers: int = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params["layers"]))
    read = cost.layers * layers / target.config.num_layers + (whole - layers if cost.head else 0)
    return read / whole


def plain_type(hint: Any) -> Any:
    """Returns the type of an option as a command line reads it: of a union the first type that can be typed.

    Examples:
      >>> plain_type(str | os.PathLike[str])
      <class 'str'>
    """
    if typing.get_origin(hint) is tuple:
        return types.GenericAlias(tuple, (plain_type(typing.get_args(hint)[0]), ...))
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    members = typing.get_args(hint)
    first = next(m for m in members if m in (bool, int, float, str) or typing.get_origin(m) is Literal)
    return first | None if type(None) in members else first


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _taken(field: dataclasses.Field[Any], value: Any, hint: Any) -> Any:
    """Returns the value as a field of type `hint` has it.

    Raises:
      ValueError: it is something else.
    """
    if value is field.default:
        return value
    name = field.name
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        values = [value] if isinstance(value, (str, os.PathLike, Method)) else listed(value)
        if values is None:
            raise ValueError(f"{name} is {shown(value)}; give a text or several")
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
