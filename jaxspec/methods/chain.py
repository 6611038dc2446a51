"""Options of all methods that draft token by token: length, stop rule, γ and draft vocabulary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxspec.host.messages import shown
from jaxspec.methods.base import DraftingMethod, option
from jaxspec.methods.files import file_of
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.model.config import LlamaConfig
    from jaxspec.model.llama import Params
    from jaxspec.protocol import StopRule
    from jaxspec.stopping import Estimate, Gamma

StopName = Literal["constant", "confidence", "product", "adaptive-length"]
# Those of drafts that have a probe, or a head that predicts the acceptance.
ProbedName = Literal["constant", "confidence", "product", "probe", "adaptive-length"]
# The default γ0 of the rules with a γ.
_THRESHOLDS = {"confidence": 0.6, "product": 0.8, "probe": 0.8}
# Options that only some stop rules read.
_READ_BY = {
    **dict.fromkeys(("gamma", "adaptive_gamma"), frozenset(_THRESHOLDS)),
    "probe": frozenset({"probe"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainMethod(DraftingMethod):
    """The base of methods that draft token by token, with any stop rule.

    Attributes:
      stop_rule: when to stop before K tokens: constant (never), confidence (the probability of the last draft token is
        below gamma), product (the product of all probabilities of the draft is below gamma), adaptive-length (5 tokens,
        + 2 after a fully accepted draft, − 1 after any other). With several rules, the first one to apply stops the
        draft.
      gamma: the initial γ of the rules with one, 0 to 1. Default 0.6, for products 0.8.
      adaptive_gamma: adapt γ to the acceptance rate, as in Draft & Verify.
      draft_vocab: draft only the N most frequent tokens of the ranking in the model's directory (made by
        `jaxspec vocab`), or the tokens of a file. The text stays the same; with a large vocabulary a draft costs much
        less. Probabilities of a draft are then among these tokens. Default: the tokens that the draft was trained for,
        otherwise all.

    Class attributes:
      usual_rule: the default stop rule.
      usual_gamma: the default γ0 of each rule that has one.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> rule, num_draft_tokens = LayerSkip(stop_rule="product", gamma=0.7).stopping()
      >>> type(rule).__name__, num_draft_tokens
      ('ProductBelow', 12)
    """

    usual_rule: ClassVar[ProbedName] = "constant"
    usual_gamma: ClassVar[Mapping[str, float]] = _THRESHOLDS

    stop_rule: tuple[StopName, ...] = ()
    gamma: float | None = None
    adaptive_gamma: bool = True
    draft_vocab: FilePath | int | None = option(None, metavar="N|FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = [name for name in self.given if name in _READ_BY and _READ_BY[name].isdisjoint(self.rules)]
        if idle:
            raise ValueError(
                f"method {self.name} with stop_rule={','.join(self.rules)} has no option "
                f"{', '.join(f'`{name}`' for name in sorted(idle))}; leave it out or choose another"
            )
        if self.gamma is not None and not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; give a number from 0 to 1")
        if isinstance(self.draft_vocab, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", self.draft_vocab):
            object.__setattr__(self, "draft_vocab", int(self.draft_vocab))  # as a command line has it

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return {"num_draft_tokens": "5, or 12 with a stop rule", "stop_rule": cls.usual_rule}

    @property
    def rules(self) -> tuple[ProbedName, ...]:
        """The given stop rules, or the method's default."""
        return self.stop_rule or (self.usual_rule,)

    def stopping(
        self, probe: Callable[[], Estimate] | None = None, usual: int | None = None
    ) -> tuple[StopRule, int]:
        """Makes the stop rule, and K, which is larger by default for rules that end a draft early.

        Args:
          probe: makes the probe of the rule `probe`; None for methods that do not take this rule.
          usual: default of K; None for 5, or 12 with a stop rule.
        """
        import jax.numpy as jnp

        from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, ProductBelow

        names = self.rules
        length = self.length(usual or (5 if set(names) == {"constant"} else 12))
        rules: list[StopRule] = []
        for name in names:
            if name == "adaptive-length":
                rules.append(AdaptiveLength(jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(length)))
            elif name == "confidence":
                rules.append(ConfidenceBelow(self._gamma(name)))
            elif name == "product":
                rules.append(ProductBelow(self._gamma(name)))
            elif name == "probe":
                assert probe is not None, f"{self.name} makes no probe"
                rules.append(ProductBelow(self._gamma(name), probe()))
        if not rules:
            return Constant(), length
        return rules[0] if len(rules) == 1 else AnyOf(tuple(rules)), length

    def params(
        self, target: LoadedModel, resources: Resources, draft: LoadedModel | None = None
    ) -> Params | None:
        """Returns the parameters of the drafter, with the draft vocabulary: `draft_vocab`, or else the draft's own.

        Warns if the draft was trained for another target.

        Args:
          target: the model that verifies, whose tokens are ranked.
          resources: gives the directory of the ranking.
          draft: the model that drafts; None for the target itself, whose parameters are not repeated.

        Raises:
          ValueError, FileNotFoundError: there is no ranking, it is another model's, or it has too few tokens; one line.
        """
        own = None if draft is None else draft.params
        ids = self.vocabulary_ids(target, resources)
        if draft is not None:
            import numpy as np

            draft.warn_of_another(target)
            if ids is None and (trained := draft.trained_for.draft_vocab):
                ids = np.asarray(trained, np.int32)
        if ids is None:
            return own
        return {**(own or {}), "vocabulary": (draft or target).vocabulary(ids)}

    def vocabulary_ids(self, target: LoadedModel, resources: Resources) -> np.ndarray | None:
        """Returns the tokens of `draft_vocab`, int32[N], ascending; None for all tokens.

        Args:
          target: the model that verifies, whose tokens are ranked.
          resources: gives the directory of the ranking.

        Raises:
          ValueError, FileNotFoundError: see `params`.
        """
        if self.draft_vocab is None:
            return None
        from jaxspec.io.methods import vocabulary_file

        if isinstance(self.draft_vocab, int):
            name, count = vocabulary_file.VOCABULARY_NAME, self.draft_vocab
            path = file_of(None, target, resources, name)
            if path is None or not path.is_file():
                raise FileNotFoundError(
                    f"draft_vocab={count} needs a ranking of tokens{f', but there is no {path}' if path else ''}; "
                    "make one with `jaxspec vocab --data FILE`, or give draft_vocab=FILE"
                )
        else:
            path, count = Path(str(self.draft_vocab)), None
        ranking = vocabulary_file.read_vocabulary(path, target.fingerprint, target.config.vocab_size)
        return ranking.first(count, source=path)

    def _gamma(self, rule: ProbedName) -> Gamma:
        """Makes the γ of a stop rule, fixed or adaptive."""
        import jax
        import jax.numpy as jnp

        from jaxspec.stopping import AdaptiveGamma, FixedGamma

        first = self.usual_gamma[rule] if self.gamma is None else self.gamma
        gamma = AdaptiveGamma(first) if self.adaptive_gamma else FixedGamma(first)
        typed: Gamma = jax.tree.map(jnp.float32, gamma)
        return typed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMethod(ChainMethod):
    """The base of chain methods whose draft is a model, or a part of one, that reads a cache.

    Attributes:
      draft_window: a draft reads only the first SINKS tokens of a long text and the latest W, such as 4,2048;
        verification reads all. Layers with a window of their own keep it.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> print(LayerSkip(draft_window=(4, 2048)))
      layerskip draft_window=(4, 2048)
    """

    draft_window: tuple[int, ...] = option((), metavar="SINKS,W")

    def __post_init__(self) -> None:
        super().__post_init__()
        window = self.draft_window
        if window and (len(window) != 2 or window[0] < 0 or window[1] < 1):
            raise ValueError(
                f"draft_window is {shown(list(window))}; give two numbers, the first tokens of a text that a draft "
                "reads and the latest ones, such as 4,2048"
            )

    def read_by_draft(self, config: LlamaConfig, layers: int | None = None) -> LlamaConfig:
        """Returns the configuration of a draft of the first `layers` layers, or of all, with `draft_window`.

        Raises:
          ValueError: all layers have a window of their own; one line.
        """
        if not self.draft_window:
            return config
        if config.sliding_windows and all(config.sliding_windows[:layers]):
            raise ValueError(
                f"draft_window is for layers that read a whole text, but each layer of the draft has a window of "
                f"{config.window(0)} tokens; leave it out"
            )
        sinks, last = self.draft_window
        return dataclasses.replace(config, draft_window=(sinks, last))
