"""What a method is built from: the models and heads that are loaded, and how to load others.

Nothing here imports JAX at module scope, see `jaxspec.methods.base`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.heads import AnyHead
    from jaxspec.model.llama import Params
    from jaxspec.model.vocabulary import Vocabulary


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
      sampled: for quantised parameters, the numbers of each leaf that the fingerprint reads; else None.
      fitted_from: for a draft with other rows than its target, the original model; else None.

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
    fitted_from: LoadedModel | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The name of the model in the files of its methods, see `jaxspec.io.method_files.fingerprint`."""
        if self.fitted_from is not None:
            return self.fitted_from.fingerprint
        from jaxspec.io import method_files

        return method_files.fingerprint(self.config, self.params, self.sampled)

    def until(self, num_layers: int) -> LoadedModel:
        """Returns a model of the first `num_layers` layers alone, the same object each time."""
        from jaxspec.model import llama

        if num_layers not in self._cut:
            config = self.config.truncated(num_layers)
            params = llama.truncate(self.params, num_layers)
            whole = self.fitted_from
            self._cut[num_layers] = dataclasses.replace(
                self,
                config=config,
                params=params,
                exits=(),
                fitted_from=None if whole is None else whole.until(num_layers),
            )
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

        if (few := self.params.get("vocabulary")) is not None:  # a draft with fewer rows than its target
            ids = ids[ids < len(few.ids)]
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
      target: the fingerprint of the model that it was trained for; None if the head does not record it.
      rows: the number of the target's tokens, from the first, that it has rows for and proposes; None for all.

    Examples:
      >>> from jaxspec.model.eagle import HeadConfig
      >>> from jaxspec.testing import TARGET
      >>> LoadedHead(HeadConfig(TARGET.truncated(1)), params={}).config.kind
      'eagle'
    """

    config: AnyHead
    params: Params
    target: str | None = None
    rows: int | None = None


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
