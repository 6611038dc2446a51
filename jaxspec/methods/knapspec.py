"""KnapSpec (arXiv 2602.20217): drafts skip the sublayers whose time is best saved, chosen again as the text grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import layers_of, read_costs, size_of, token_share
from jaxspec.methods.chain import ChainMethod, StopName
from jaxspec.methods.masked import RefreshingMethod
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.knapspec_drafter import KnapSpecDrafter, SublayerTimes
    from jaxspec.protocol import Drafter

# K with a stop rule, and the longest draft that is chosen without one.
_USUAL_LENGTH, _LONGEST = 4, 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnapSpec(RefreshingMethod):
    """The model without the sublayers whose time is best saved at this length, chosen again every few rounds.

    KnapSpec (arXiv 2602.20217), CLaSp's dynamic programming over sublayers with weights from their times. By default a
    draft has 4 tokens and ends below a probability of 0.7, as in the authors' program; with `stop_rule=constant` it has
    the length that is chosen with the sublayers, as in their formula.

    Attributes:
      refresh: the number of rounds between choices; a choice reads hundreds of tokens. Default 64.
      gamma: the initial γ of the rules with one, 0 to 1. Default 0.7, for products 0.8.
      adaptive_gamma: adapt γ to the acceptance rate, as in Draft & Verify.

    Examples:
      >>> KnapSpec(stop_rule=("constant",))
      KnapSpec(stop_rule=('constant',))
    """

    name: ClassVar[str] = "knapspec"
    compared: ClassVar[bool] = False
    usual_rule: ClassVar[StopName] = "confidence"
    usual_gamma: ClassVar[Mapping[str, float]] = {**ChainMethod.usual_gamma, "confidence": 0.7}
    min_layers: ClassVar[int] = 3

    adaptive_gamma: bool = False

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return super().usual() | {
            "num_draft_tokens": f"{_USUAL_LENGTH}, or at most {_LONGEST} without a stop rule"
        }

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its only possible parameter is a draft vocabulary."""
        import jax
        import jax.numpy as jnp

        from jaxspec.drafting.knapspec_drafter import KnapSpecDrafter, weights_of

        config = self.read_by_draft(target.config)
        if config.num_layers < self.min_layers:
            raise ValueError(
                "method knapspec runs the first and the last two sublayers, and the model has "
                f"{2 * config.num_layers}; choose another method"
            )
        rule, length = self.stopping(usual=_LONGEST if self.rules == ("constant",) else _USUAL_LENGTH)
        with jax.ensure_compile_time_eval():
            times = self._times(target, resources)
            # Weights change with the length one way, then the other, so their sum is largest at an end.
            ends = times.of(config, jnp.array([0, config.context_length]))
            num_rows = 1 + int(weights_of(ends).sum(axis=1).max()) // 2
        refresh = jnp.int32(self.rounds(KnapSpecDrafter))
        drafter = KnapSpecDrafter(
            config, times, num_rows, refresh=refresh, rule=rule, num_draft_tokens=length
        )
        return drafter, self.params(target, resources)

    @staticmethod
    def _times(target: LoadedModel, resources: Resources) -> SublayerTimes:
        """Returns the measured times of sublayers, or the bytes that they read relative to those of a step."""
        import jax.numpy as jnp

        from jaxspec.drafting.knapspec_drafter import SublayerTimes

        config, params, costs = target.config, target.params, resources.costs
        if costs is None:
            costs = dataclasses.replace(read_costs(target), live_token_ms=token_share(target))
        rest = costs.step_ms(layers=0, live=0)
        layer = max(costs.step_ms(layers=1, live=0) - rest, 1e-6)  # measured times are noisy
        attention, mlp = (size_of(params["layers"][0][name]) for name in ("attention", "mlp"))
        return SublayerTimes(
            mlp=jnp.float32(layer * mlp / (attention + mlp)),
            attention=jnp.float32(layer * attention / (attention + mlp)),
            cached=jnp.float32(costs.live_token_ms / config.num_layers),
            rest=jnp.float32(rest),
        )

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of half of the layers, the fewest that a choice leaves, and of the choices."""
        from jaxspec.costs.rounds import DraftCost

        made = cast("KnapSpecDrafter", drafter)
        choice = made.num_rows * made.num_fitted, self.rounds(type(made))
        return DraftCost(
            target.config.num_layers / 2 + layers_of(params, target), params is None, choice=choice
        )
