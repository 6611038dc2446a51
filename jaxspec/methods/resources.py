"""The inputs for building a method: loaded models and heads, and functions to load others.

This module does not import JAX at module scope, see `jaxspec.methods.base`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxspec.io.trained_for import TrainedFor

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.costs.rounds import StepCosts
    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.head import HeadConfig
    from jaxspec.model.llama import Params
    from jaxspec.model.quantisation import Quantised
    from jaxspec.model.vocabulary import Vocabulary


class HasModel(Protocol):
    """A loaded model, such as a `jaxspec.LanguageModel`."""

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def params(self) -> Params: ...


# A model as given by a user: a directory, a .gguf file, a hub id, the name of an embedded model, or a loaded model.
ModelLike = str | os.PathLike[str] | HasModel
FilePath = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's config and parameters, without a tokenizer.

    Attributes:
      config: the architecture.
      params: the parameters.
      name: its name in messages.
      trained_for: what it was trained for, as its config records it.
      sampled: for quantised parameters, the numbers of each leaf that the fingerprint reads; otherwise None.
      fitted_from: the original model of a draft that was fitted to the tokens of its target; otherwise None.
      inexact: the model of which this is the `exact` form, with the same parameters; otherwise None.

    Examples:
      >>> from jaxspec.testing import TARGET, params
      >>> LoadedModel(TARGET, params()).until(1).config.num_layers
      1
    """

    config: LlamaConfig
    params: Params
    name: str = ""
    trained_for: TrainedFor = TrainedFor()
    sampled: Mapping[str, Sequence[np.ndarray]] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    fitted_from: LoadedModel | None = dataclasses.field(default=None, repr=False, compare=False)
    inexact: LoadedModel | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identifier of the model in its method files, see `jaxspec.io.methods.method_files.fingerprint`."""
        if self.fitted_from is not None:
            return self.fitted_from.fingerprint
        from jaxspec.io.methods import method_files

        return method_files.fingerprint(self.config, self.params, self.sampled)

    @functools.cached_property
    def exact(self) -> LoadedModel:
        """The model with an `exact` config, see `LlamaConfig`. Copies of its weights are those of this model."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, exact=True), inexact=self)

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits that it was trained for, in layers."""
        return self.trained_for.exits

    def warn_of_another(self, target: LoadedModel) -> None:
        """Warns once of a target other than the one for which this draft was trained."""
        recorded = self.trained_for.target
        if recorded is not None and target.fingerprint not in {recorded, *self._warned_of}:
            self._warned_of.add(target.fingerprint)
            warnings.warn(
                f"{self.name or 'the draft'} was trained for another model ({recorded}, this one is "
                f"{target.fingerprint}); its draft vocabulary and thresholds may fit less well; the text is the same",
                RuntimeWarning,
                stacklevel=2,
            )

    def until(self, num_layers: int) -> LoadedModel:
        """Returns a model of only the first `num_layers` layers, the same object each time."""
        from jaxspec.model import llama

        if self.inexact is not None:
            return self.inexact.until(num_layers).exact
        if num_layers not in self._cut:
            config = self.config.truncated(num_layers)
            params = llama.truncate(self.params, num_layers)
            whole = self.fitted_from
            self._cut[num_layers] = dataclasses.replace(
                self,
                config=config,
                params=params,
                trained_for=dataclasses.replace(self.trained_for, exits=(), thresholds=()),
                fitted_from=None if whole is None else whole.until(num_layers),
            )
        return self._cut[num_layers]

    @property
    def bits(self) -> int | None:
        """The bits of the model's quantised weights; None if the weights are not quantised."""
        weight = self._quantised_weight
        return None if weight is None else weight.bits

    @property
    def rounds_activations(self) -> bool:
        """Whether products round activations to int8 too."""
        weight = self._quantised_weight
        return weight is not None and weight.outliers is not None

    @property
    def _quantised_weight(self) -> Quantised | None:
        """The first quantised weight; all of them have the same form."""
        import jax

        from jaxspec.model.quantisation import is_quantised

        leaves = jax.tree.leaves(self.params, is_leaf=is_quantised)
        return next(filter(is_quantised, leaves), None)

    def has_quantised(self, bits: int) -> bool:
        """Returns whether `quantised` already has a copy with these bits."""
        return self.inexact.has_quantised(bits) if self.inexact is not None else bits in self._quantised

    def quantised(self, bits: int) -> LoadedModel:
        """Returns the model with its matrices in int8 or int4 (8 or 4 bits), the same object each time."""
        from jaxspec.model.quantisation import quantise

        if self.inexact is not None:
            return self.inexact.quantised(bits).exact
        if bits not in self._quantised:
            params = quantise(self.config, self.params, bits)
            self._quantised[bits] = dataclasses.replace(self, params=params)
        return self._quantised[bits]

    def vocabulary(self, ids: np.ndarray) -> Vocabulary:
        """Returns the head of tokens `ids`, int32[N], ascending; the same object each time."""
        import jax
        import numpy as np

        from jaxspec.model import llama

        if self.inexact is not None:
            return self.inexact.vocabulary(ids)
        rows = ids
        if (few := self.params.get("vocabulary")) is not None:  # a draft without some of its target's tokens
            rows = np.flatnonzero(np.isin(few.ids, ids)).astype(np.int32)
        if not len(rows):
            raise ValueError("the draft vocabulary has no token of the target; give draft_vocab=")
        key = rows.tobytes()
        if key not in self._vocabularies:
            gather = jax.jit(llama.vocabulary, static_argnums=0)  # keeps the placement of the head
            self._vocabularies[key] = gather(self.config, self.params, rows)
        return self._vocabularies[key]

    @functools.cached_property
    def _warned_of(self) -> set[str]:
        return set()

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
    """A head's config and parameters, on the devices of its target.

    Attributes:
      config: the architecture.
      params: the parameters, see the module `network` in the folder of its type.
      target: the fingerprint of the model that it was trained for; None if the head does not record it.
      rows: the head proposes only the first `rows` tokens of the target; None for all.
    """

    config: HeadConfig
    params: Params
    target: str | None = None
    rows: int | None = None


def no_heads(path: FilePath, target: LoadedModel) -> LoadedHead:
    """The default of `Resources.load_head`, which cannot load a head.

    Raises:
      ValueError: always.
    """
    raise ValueError(f"{path} cannot be loaded here; use the method through a `LanguageModel`")


@dataclasses.dataclass(frozen=True)
class Resources:
    """Inputs and functions for building a method; functions are called only if the method needs them.

    Attributes:
      load_draft: (model as given by a user) → the model, which proposes tokens of the target only.
      encode: text → token ids, for references.
      directory: directory of the target and its method files, which may also be in the user's data directory; None for
        a model made in memory, which has no files.
      distributions: the names of the sampling distributions of this batch's texts, see
        `io.methods.method_files.distribution_name`.
      platform: platform of the target: cpu, gpu or tpu.
      load_head: (directory or hub id of a head, target) → the head, checked to fit.
      quantise: (model, 8 or 4 bits) → a copy with quantised weights, checked to fit.
      costs: the measured costs of steps, for `auto`; None if there are none.

    Examples:
      >>> resources = Resources(load_draft=lambda model: model.loaded, encode=lambda text: [3, 4])
      >>> resources.distributions, resources.platform
      (('greedy',), 'cpu')
    """

    load_draft: Callable[[ModelLike], LoadedModel]
    encode: Callable[[str], Sequence[int]]
    directory: Path | None = None
    distributions: tuple[str, ...] = ("greedy",)
    platform: str = "cpu"
    load_head: Callable[[FilePath, LoadedModel], LoadedHead] = no_heads
    quantise: Callable[[LoadedModel, int], LoadedModel] = LoadedModel.quantised
    costs: StepCosts | None = None
