"""What a method of decoding is: its options, declared once, and the parts that are made of them.

Nothing here imports JAX at module scope, so that a command line can be made of the options without waiting for it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from jaxspec.io.arguments import flag, listed, real, whole
from jaxspec.io.messages import shown

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.choosing.acceptance import Expectation
    from jaxspec.choosing.costs import Draft
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.heads import AnyHead
    from jaxspec.model.llama import Params
    from jaxspec.model.vocabulary import Vocabulary
    from jaxspec.protocol import Drafter

T = TypeVar("T")
# Longer drafts only compile longer: every width of a verification is compiled.
MAX_DRAFT_TOKENS = 128


class HasModel(Protocol):
    """A model that is loaded already, such as a `jaxspec.LanguageModel`.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> draft: HasModel = language_model()
      >>> draft.config.num_layers
      2
    """

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def params(self) -> Params: ...


# A model as a user names it: a directory, a .gguf file, a hub id, the name of an embedded model, or a loaded one.
ModelLike = str | os.PathLike[str] | HasModel
FilePath = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's config and parameters, without a tokenizer.

    Attributes:
      config: the architecture.
      params: the parameters.
      name: what messages call it.
      exits: the exits it was trained for, in layers run.
      sampled: of quantised parameters, what was read of each leaf for the fingerprint; else None.

    Examples:
      >>> from jaxspec.testing import TARGET, params
      >>> LoadedModel(TARGET, params()).until(1).config.num_layers
      1
    """

    config: LlamaConfig
    params: Params
    name: str = ""
    exits: tuple[int, ...] = ()
    sampled: Mapping[str, Sequence[np.ndarray]] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @functools.cached_property
    def fingerprint(self) -> str:
        """The name of the model in the files of its methods, see `jaxspec.io.method_files.fingerprint`."""
        from jaxspec.io import method_files

        return method_files.fingerprint(self.config, self.params, self.sampled)

    def until(self, num_layers: int) -> LoadedModel:
        """Returns a model of the first `num_layers` layers alone, the same object each time."""
        from jaxspec.model import llama

        if num_layers not in self._cut:
            config = self.config.truncated(num_layers)
            params = llama.truncate(self.params, num_layers)
            self._cut[num_layers] = dataclasses.replace(self, config=config, params=params, exits=())
        return self._cut[num_layers]

    @property
    def bits(self) -> int | None:
        """The bits of the model's quantised weights; None where its weights are those it was loaded with."""
        import jax

        from jaxspec.model.quantised import is_quantised

        leaves = jax.tree.leaves(self.params, is_leaf=is_quantised)
        return next((leaf.bits for leaf in leaves if is_quantised(leaf)), None)

    def has_quantised(self, bits: int) -> bool:
        """Returns whether `quantised` has been asked for these bits before, and so makes nothing."""
        return bits in self._quantised

    def quantised(self, bits: int) -> LoadedModel:
        """Returns the model with its matrices in int8 or int4 (8 or 4 bits), the same object each time."""
        from jaxspec.model.quantised import quantise

        if bits not in self._quantised:
            params = quantise(self.config, self.params, bits)
            self._quantised[bits] = dataclasses.replace(self, params=params)
        return self._quantised[bits]

    def vocabulary(self, ids: np.ndarray) -> Vocabulary:
        """Returns the head of tokens `ids`, int32[N], rising; its rows are gathered once, the same object each time."""
        import jax

        from jaxspec.model import llama

        key = ids.tobytes()
        if key not in self._vocabularies:
            gather = jax.jit(llama.vocabulary, static_argnums=0)  # leaves the rows where the head is
            self._vocabularies[key] = gather(self.config, self.params, ids)
        return self._vocabularies[key]

    @functools.cached_property
    def _cut(self) -> dict[int, LoadedModel]:
        return {}

    @functools.cached_property
    def _quantised(self) -> dict[int, LoadedModel]:
        return {}

    @functools.cached_property
    def _vocabularies(self) -> dict[bytes, Vocabulary]:
        return {}


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A head's config and parameters, loaded to where its target is.

    Attributes:
      config: what it is made of.
      params: the parameters, see `jaxspec.model.eagle` and its siblings.
      target: the fingerprint of the model that it was trained for; None where it does not say.

    Examples:
      >>> from jaxspec.model.eagle import HeadConfig
      >>> from jaxspec.testing import TARGET
      >>> LoadedHead(HeadConfig(TARGET.truncated(1)), params={}).config.kind
      'eagle'
    """

    config: AnyHead
    params: Params
    target: str | None = None


def no_heads(path: FilePath, target: LoadedModel) -> LoadedHead:
    """Refuses to load a head, where nothing says how.

    Raises:
      ValueError: always.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> no_heads("head", language_model().loaded)
      Traceback (most recent call last):
      ValueError: head cannot be loaded here; use the method through a `LanguageModel`
    """
    raise ValueError(f"{path} cannot be loaded here; use the method through a `LanguageModel`")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a method may need from outside; functions are called only if the method needs them.

    Attributes:
      load_draft: a model as a user names it → the model, checked to share the target's vocabulary.
      encode: text → token ids, for references.
      directory: the target's, where a method's files lie, if not in the user's data directory; None for a model made
        in memory, which has no files.
      laws: the names of the sampling laws that the texts of this batch follow, see `io.method_files.law_name`.
      platform: where the target runs: cpu, gpu or tpu.
      load_head: a head's directory or hub id and the target → the head, checked to fit.
      quantise: a model and 8 or 4 bits → a copy of it with such weights, checked to fit.

    Examples:
      >>> resources = Resources(load_draft=lambda model: model.loaded, encode=lambda text: [3, 4])
      >>> resources.laws, resources.platform
      (('greedy',), 'cpu')
    """

    load_draft: Callable[[ModelLike], LoadedModel]
    encode: Callable[[str], Sequence[int]]
    directory: Path | None = None
    laws: tuple[str, ...] = ("greedy",)
    platform: str = "cpu"
    load_head: Callable[[FilePath, LoadedModel], LoadedHead] = no_heads
    quantise: Callable[[LoadedModel, int], LoadedModel] = LoadedModel.quantised


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """What a text may change to between two calls of the loop; equal to itself alone.

    Attributes:
      name: as reports call it.
      drafter, params: as of `Method.build`.
      kind: what its drafts make a device do.
      expected: of what is accepted, where something was measured; None where nothing is known.
      offered: whether it is what the model offers, which `jaxspec tune --method auto` measures; another head or other
        options are not.

    Examples:
      >>> from jaxspec.choosing.costs import Draft
      >>> from jaxspec.drafting.ngram import NGram
      >>> Candidate("ngram", NGram(), None, Draft(lookup=True)).kind.lookup
      True
    """

    name: str
    drafter: Drafter
    params: Any
    kind: Draft
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

    def kind(self, target: LoadedModel, drafter: Drafter, params: Any) -> Draft | None:
        """Returns what drafts make a device do, by which `auto` knows their price; None for what it cannot choose.

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
