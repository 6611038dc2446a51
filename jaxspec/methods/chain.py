"""Options that all methods share whose draft is made token by token: length, stop rule and γ, and its vocabulary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from jaxspec.methods.base import DraftingMethod, option
from jaxspec.methods.files import file_of
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.model.llama import Params
    from jaxspec.protocol import StopRule
    from jaxspec.stopping import Gamma, Probe

StopName = Literal["constant", "confidence", "product", "probe", "adaptive-length"]
GammaEdge = Literal["paper", "code"]
# What only an adaptive γ has, and what any γ has; the usual γ0 of the rules that have one.
_ADAPTIVE = ("gamma_alpha", "gamma_beta1", "gamma_beta2", "gamma_epsilon", "gamma_edge")
_GAMMA = ("gamma", "adaptive_gamma", *_ADAPTIVE)
_THRESHOLDS = {"confidence": 0.6, "product": 0.8, "probe": 0.8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainMethod(DraftingMethod):
    """The base of methods that draft token by token, with any stop rule.

    Attributes:
      stop_rule: when to stop before K: constant (never), confidence (a token's raw draft probability is below
        gamma), product (that of all the draft's tokens together is), probe (the same with a probe's probabilities),
        adaptive-length (5, + 2 after a round fully accepted, else − 1). Several stop at the first of them.
      gamma: the γ of confidence, product and probe to start with, 0 to 1. Default 0.6, of product and probe 0.8.
      adaptive_gamma: let γ follow the acceptance rate, as in Draft & Verify.
      gamma_alpha: of adaptive γ: the acceptance rate aimed at. Default 0.9.
      gamma_beta1: of adaptive γ: memory of the acceptance rate. Default 0.5.
      gamma_beta2: of adaptive γ: memory of γ. Default 0.9.
      gamma_epsilon: of adaptive γ: its step. Default 0.01.
      gamma_edge: of adaptive γ: as in the paper of Draft & Verify, or as in its authors' code, which leaves γ where
        enough was accepted of a draft of K tokens. Default paper.
      draft_vocab: draft with the head of the N most frequent tokens only, by the ranking beside the model (made by
        `jaxspec vocab`), or with those of a file. The text stays the same; with a large vocabulary a draft costs much
        less. Confidence is then a probability among these tokens. Default: all tokens.

    Class attributes:
      usual_rule: the stop rule where none is given.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> rule, num_draft_tokens = LayerSkip(stop_rule="product", gamma=0.7).stopping()
      >>> type(rule).__name__, num_draft_tokens
      ('ProductBelow', 12)
    """

    usual_rule: ClassVar[StopName] = "constant"

    stop_rule: tuple[StopName, ...] = ()
    gamma: float | None = None
    adaptive_gamma: bool = True
    gamma_alpha: float | None = None
    gamma_beta1: float | None = None
    gamma_beta2: float | None = None
    gamma_epsilon: float | None = None
    gamma_edge: GammaEdge | None = None
    draft_vocab: FilePath | int | None = option(None, metavar="N|FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "gamma_alpha", "gamma_beta1", "gamma_beta2", "gamma_epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; give a number from 0 to 1")
        if not self.adaptive_gamma:
            for name in _ADAPTIVE:
                if name in self.given:
                    raise ValueError(f"`{name}` belongs to an adaptive γ; leave out adaptive_gamma=False")
        if isinstance(self.draft_vocab, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", self.draft_vocab):
            object.__setattr__(self, "draft_vocab", int(self.draft_vocab))  # as a command line has it

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {"num_draft_tokens": "5, with a stop rule 12", "stop_rule": cls.usual_rule}

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns the options that the method reads: γ's only with a rule that has a γ."""
        known = super().known(given)
        return known if _THRESHOLDS.keys() & set(cls.rules(given)) else known - set(_GAMMA)

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> tuple[StopName, ...]:
        """Returns the stop rules that are given, else the method's usual one."""
        rules: Any = given.get("stop_rule")
        if isinstance(rules, str):
            return (cast(StopName, rules),)
        return (() if rules is None else tuple(rules)) or (cls.usual_rule,)

    def refusal(self, foreign: Sequence[str]) -> str:
        """Returns what to say of options that the method does not read, or not with its stop rules."""
        if not any(name.strip("`") in self.options() for name in foreign):
            return super().refusal(foreign)
        rules = ",".join(self.rules(self.given))
        options = ", ".join(foreign)
        return f"method {self.name} with stop_rule={rules} has no option {options}; leave it out or choose another"

    def stopping(
        self, probe: Callable[[], Probe] | None = None, usual: int | None = None
    ) -> tuple[StopRule, int]:
        """Makes the stop rule, and K: a rule that ends drafts early has room for those that go well.

        Args:
          probe: makes the probe of the rule `probe`; None for a draft that has no single exit.
          usual: K where none is given; None for 5, with a stop rule 12.

        Raises:
          ValueError: the rule `probe` is asked for where there can be none.
        """
        import jax.numpy as jnp

        from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, ProductBelow

        names = self.rules(self.given)
        length = self.length(usual or (5 if set(names) == {"constant"} else 12))
        rules: list[StopRule] = []
        for name in names:
            if name == "adaptive-length":
                rules.append(AdaptiveLength(jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(length)))
            elif name == "confidence":
                rules.append(ConfidenceBelow(self._gamma(name, length)))
            elif name == "product":
                rules.append(ProductBelow(self._gamma(name, length)))
            elif name == "probe":
                if probe is None:
                    raise ValueError(
                        "stop_rule='probe' needs a draft that always exits at one layer; choose layerskip, adaspeed "
                        "or adaspeed-probe"
                    )
                rules.append(ProductBelow(self._gamma(name, length), probe()))
        if not rules:
            return Constant(), length
        return rules[0] if len(rules) == 1 else AnyOf(tuple(rules)), length

    def params(
        self, target: LoadedModel, resources: Resources, draft: LoadedModel | None = None
    ) -> Params | None:
        """Returns the parameters of the drafter, with the draft's vocabulary where one is asked for.

        Args:
          target: the model that verifies, whose tokens are ranked.
          resources: says where its ranking lies.
          draft: the model that drafts; None for the target itself, whose own parameters are not repeated.

        Raises:
          ValueError, FileNotFoundError: there is no ranking, it is another model's, or it has too few tokens; one line.

        Examples:
          >>> from jaxspec.methods import LayerSkip
          >>> from jaxspec.testing import language_model
          >>> in_memory = Resources(load_draft=lambda model: model.loaded, encode=list)
          >>> LayerSkip().params(language_model().loaded, in_memory) is None
          True
        """
        own = None if draft is None else draft.params
        ids = self.vocabulary_ids(target, resources)
        if ids is None:
            return own
        return {**(own or {}), "vocabulary": (draft or target).vocabulary(ids)}

    def vocabulary_ids(self, target: LoadedModel, resources: Resources) -> np.ndarray | None:
        """Returns the tokens that `draft_vocab` names, int32[N], rising; None where all are drafted with.

        Args:
          target: the model that verifies, whose tokens are ranked.
          resources: says where its ranking lies.

        Raises:
          ValueError, FileNotFoundError: as `params`.

        Examples:
          >>> from jaxspec.methods import LayerSkip
          >>> from jaxspec.testing import language_model
          >>> in_memory = Resources(load_draft=lambda model: model.loaded, encode=list)
          >>> LayerSkip().vocabulary_ids(language_model().loaded, in_memory) is None
          True
        """
        if self.draft_vocab is None:
            return None
        from jaxspec.io import vocabulary_file

        if isinstance(self.draft_vocab, int):
            name, count = vocabulary_file.VOCABULARY_NAME, self.draft_vocab
            path = file_of(None, target, resources, name)
            if path is None or not path.is_file():
                raise FileNotFoundError(
                    f"draft_vocab={count} needs a ranking of tokens{f', and there is no {path}' if path else ''}; "
                    "make one with `jaxspec vocab --data FILE`, or give draft_vocab=FILE"
                )
        else:
            path, count = Path(str(self.draft_vocab)), None
        ranking = vocabulary_file.read_vocabulary(path, target.fingerprint, target.config.vocab_size)
        return ranking.first(count)

    def _gamma(self, rule: StopName, length: int) -> Gamma:
        """Makes the γ of a stop rule, fixed or adaptive."""
        import jax.numpy as jnp

        from jaxspec.stopping import AdaptiveGamma, FixedGamma

        first = jnp.float32(_THRESHOLDS[rule] if self.gamma is None else self.gamma)
        if not self.adaptive_gamma:
            return FixedGamma(first)
        paper = AdaptiveGamma()
        constants = {}
        for name in ("alpha", "beta1", "beta2", "epsilon"):
            given = getattr(self, f"gamma_{name}")
            constants[name] = jnp.float32(getattr(paper, name) if given is None else given)
        return AdaptiveGamma(
            first, **constants, full_length=jnp.int32(length) if self.gamma_edge == "code" else None
        )
