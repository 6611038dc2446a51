"""LayerSkip (Elhoushi et al. 2024): the first layers draft, and verification reuses their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import Method, layers_of, option
from jaxspec.methods.chain import ModelMethod, ProbedName
from jaxspec.methods.files import directories, file_of
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.drafting.exit_drafter import ExitDrafter
    from jaxspec.protocol import Drafter
    from jaxspec.stopping import Probe


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSkip(ModelMethod):
    """The model's first E layers; verification reuses their results (Elhoushi et al. 2024).

    With `draft_window` it runs all layers.

    Attributes:
      exit_layer: draft with the first E layers. Default: a quarter of them.
      probe: the file of the stop rule `probe`, instead of the one in the model's directory. Made by
        `python -m training.probe`.
      stop_rule: when to stop before K tokens: constant (never), confidence (the probability of the last draft token is
        below gamma), product (the product of all probabilities of the draft is below gamma), probe (the same with the
        estimates of a probe), adaptive-length (5 tokens, + 2 after a fully accepted draft, − 1 after any other). With
        several rules, the first one to apply stops the draft.

    Examples:
      >>> LayerSkip(exit_layer=3, num_draft_tokens=4)
      LayerSkip(num_draft_tokens=4, exit_layer=3)
    """

    name: ClassVar[str] = "layerskip"
    min_layers: ClassVar[int] = 2

    exit_layer: int | None = option(None, metavar="E")
    probe: FilePath | None = option(None, metavar="FILE")
    stop_rule: tuple[ProbedName, ...] = ()  # type: ignore[assignment]

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its only possible parameter is a draft vocabulary."""
        from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter

        depth = target.config.num_layers
        if depth == 1:
            raise ValueError(
                f"method {self.name} exits early, but the model has one layer; choose another method"
            )
        exit_layer = max(1, depth // 4) if self.exit_layer is None else self.exit_layer
        if not 1 <= exit_layer < depth:
            raise ValueError(
                f"exit_layer is {exit_layer}; the model has {depth} layers, give 1 to {depth - 1}"
            )
        rule, length = self.stopping(lambda: self._probe(exit_layer, target, resources))
        config = self.read_by_draft(target.config, exit_layer)
        return LayerSkipDrafter(config, exit_layer, rule, length), self.params(target, resources)

    @property
    def by_distribution(self) -> bool:
        """Whether a probe is read, which belongs to one sampling distribution."""
        return "probe" in self.rules

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method for each exit that the model was trained for."""
        if cls is not LayerSkip:
            return ()
        return tuple(cls(exit_layer=layers) for layers in target.exits if layers < target.config.num_layers)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of an early exit, with the head of `draft_vocab` if it is given."""
        from jaxspec.costs.rounds import DraftCost

        exit_layer = cast("ExitDrafter", drafter).exit_layer
        layers, shared = exit_layer + layers_of(params, target), 0 if self.draft_window else exit_layer
        return DraftCost(layers=layers, heads=params is None, shared=shared)

    def _probe(self, exit_layer: int, target: LoadedModel, resources: Resources) -> Probe:
        """Reads the probe of an exit for the sampling parameters of this batch."""
        import jax.numpy as jnp

        from jaxspec.io.methods import method_files
        from jaxspec.stopping import Probe

        if len(set(resources.distributions)) > 1:
            raise ValueError(
                f"the texts follow different distributions ({', '.join(sorted(set(resources.distributions)))}); "
                "a probe belongs to one: generate them in separate calls"
            )
        distribution = resources.distributions[0]
        path = file_of(self.probe, target, resources, method_files.probe_name(exit_layer, distribution))
        if path is None:
            raise ValueError("the model is in memory only and has no probe file; give probe=FILE")
        if self.probe is None and not path.is_file():
            raise FileNotFoundError(
                _no_such_probe(path, exit_layer, distribution, directories(target, resources))
            )
        read = method_files.read_probe(
            path, target.fingerprint, target.config.hidden_size, exit_layer, distribution
        )
        direction = jnp.asarray(read.v) * (
            target.params["norm"].astype(jnp.float32) + target.config.norm_offset
        )
        return Probe(direction, jnp.float32(read.b), jnp.float32(target.config.rms_norm_eps))


def _no_such_probe(path: Path, exit_layer: int, distribution: str, searched: Sequence[Path]) -> str:
    """Returns the message for a missing probe, with the exits and sampling parameters of the existing probes."""
    from jaxspec.io.methods import method_files

    found = sorted({(other, layer) for one in searched for layer, other in method_files.probes_in(one)})
    layers = [str(layer) for other, layer in found if other == distribution]
    remedy = "train one with `python -m training.probe`, or give probe=FILE"
    if layers:
        return (
            f"there is no probe for exit_layer={exit_layer} ({distribution}), only for {', '.join(layers)}; "
            f"give one of these, or {remedy}"
        )
    others = (
        f"; the model's probes are for {', '.join(sorted({other for other, _ in found}))}" if found else ""
    )
    return f"no probe {path}{others}; {remedy}"
