"""LayerSkip: the first layers draft, and verification goes on from their work (Elhoushi et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxspec.methods.base import Method, option
from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.files import directories, file_of
from jaxspec.methods.resources import FilePath, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.drafting.exits import ExitDrafter
    from jaxspec.protocol import Drafter
    from jaxspec.stopping import Probe


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSkip(ChainMethod):
    """The model's first E layers, whose work verification shares (Elhoushi et al. 2024).

    Attributes:
      exit_layer: draft with the first E layers. Default: a quarter of them.
      probe: the file of the stop rule `probe`, instead of the one beside the model. Made by
        `python -m training.probe`.

    Examples:
      >>> LayerSkip(exit_layer=3, num_draft_tokens=4)
      LayerSkip(num_draft_tokens=4, exit_layer=3)
    """

    name: ClassVar[str] = "layerskip"

    exit_layer: int | None = option(None, metavar="E")
    probe: FilePath | None = option(None, metavar="FILE")

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns the options that the method reads: `probe` only with the stop rule of that name."""
        known = super().known(given)
        return known if "probe" in cls.rules(given) else known - {"probe"}

    @classmethod
    def compared(cls, given: Mapping[str, Any], num_layers: int) -> bool:
        """Returns whether the method can run: a model of one layer has no layer to leave out."""
        return super().compared(given, num_layers) and num_layers > 1

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; of its own it has at most a vocabulary."""
        from jaxspec.drafting.layerskip import LayerSkip as Drafting

        depth = target.config.num_layers
        if depth == 1:
            raise ValueError(
                f"method {self.name} exits early, and the model has one layer; choose another method"
            )
        exit_layer = max(1, depth // 4) if self.exit_layer is None else self.exit_layer
        if not 1 <= exit_layer < depth:
            raise ValueError(
                f"exit_layer is {exit_layer}; the model has {depth} layers, give 1 to {depth - 1}"
            )
        rule, length = self.stopping(lambda: self._probe(exit_layer, target, resources))
        return Drafting(target.config, exit_layer, rule, length), self.params(target, resources)

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns an early exit after each number of layers that the model was trained for; of the others hardly any
        drafts are accepted."""
        if cls is not LayerSkip:
            return ()
        return tuple(cls(exit_layer=layers) for layers in target.exits if layers < target.config.num_layers)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns an early exit."""
        from jaxspec.choosing.costs import DraftCost

        exit_layer = cast("ExitDrafter", drafter).exit_layer
        return DraftCost(layers=exit_layer, head=params is None, shared=exit_layer)

    def _probe(self, exit_layer: int, target: LoadedModel, resources: Resources) -> Probe:
        """Reads the probe of an exit for the law of this batch."""
        import jax.numpy as jnp

        from jaxspec.io import method_files
        from jaxspec.stopping import Probe

        if len(set(resources.laws)) > 1:
            raise ValueError(
                f"the texts follow different laws ({', '.join(sorted(set(resources.laws)))}), and a probe belongs to "
                "one; generate them in separate calls"
            )
        law = resources.laws[0]
        path = file_of(self.probe, target, resources, method_files.probe_name(exit_layer, law))
        if path is None:
            raise ValueError("the model is in memory only, no probe lies beside it; give probe=FILE")
        if self.probe is None and not path.is_file():
            raise FileNotFoundError(_no_such_probe(path, exit_layer, law, directories(target, resources)))
        read = method_files.read_probe(path, target.fingerprint, target.config.hidden_size, exit_layer, law)
        direction = jnp.asarray(read.v) * target.params["norm"].astype(jnp.float32)
        return Probe(direction, jnp.float32(read.b), jnp.float32(target.config.rms_norm_eps))


def _no_such_probe(path: Path, exit_layer: int, law: str, searched: Sequence[Path]) -> str:
    """Returns what to say where the probe of an exit and a law is missing, but not all of them may be."""
    from jaxspec.io import method_files

    found = sorted({(other, layer) for one in searched for layer, other in method_files.probes_in(one)})
    layers = [str(layer) for other, layer in found if other == law]
    remedy = "train one with `python -m training.probe`, or give probe=FILE"
    if layers:
        return (
            f"there is no probe for exit_layer={exit_layer} ({law}), only for {', '.join(layers)}; "
            f"give one of these, or {remedy}"
        )
    others = (
        f"; the model's probes are for {', '.join(sorted({other for other, _ in found}))}" if found else ""
    )
    return f"no probe {path}{others}; {remedy}"
