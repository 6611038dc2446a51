"""Options that all methods share whose draft is made token by token: its length, its stop rule and γ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from jaxspec.methods.base import DraftingMethod

if TYPE_CHECKING:
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
        """Returns what to say of options that the method does not read with its stop rules."""
        rules = ",".join(self.rules(self.given))
        options = ", ".join(foreign)
        return f"method {self.name} with stop_rule={rules} has no option {options}; leave it out or choose another"

    def stopping(self, probe: Callable[[], Probe] | None = None) -> tuple[StopRule, int]:
        """Makes the stop rule, and K: a rule that ends drafts early has room for those that go well.

        Args:
          probe: makes the probe of the rule `probe`; None for a draft that has no single exit.

        Raises:
          ValueError: the rule `probe` is asked for where there can be none.
        """
        import jax.numpy as jnp

        from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, ProductBelow

        names = self.rules(self.given)
        length = self.length(5 if set(names) == {"constant"} else 12)
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
