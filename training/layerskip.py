"""Trains a Llama by the LayerSkip recipe: `jaxspec train layerskip --data FILE --output DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

from training import job
from training.losses.exits import LayerSkipOptions, layerskip_loss
from training.run_options import SCRATCH, JobOptions
from training.start import Objective, Start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobOptions):
    """Trains a Llama whose early layers can draft for its last layer (LayerSkip), by layer dropout and exit losses.

    Attributes:
      layerskip: the recipe.
      exits: exit layers whose acceptance is measured at each checkpoint. Default: a quarter and a half of the depth.
    """

    job: ClassVar[str] = "layerskip"

    layerskip: LayerSkipOptions = dataclasses.field(default_factory=LayerSkipOptions)
    exits: tuple[int, ...] = ()


def recipe(options: Options) -> LayerSkipOptions:
    """Completes the recipe: the dropout schedule depends on whether training starts from scratch."""
    if options.layerskip.dropout_over_time is not None:
        return options.layerskip
    over_time: Literal["exponential", "constant"] = "exponential" if options.start == SCRATCH else "constant"
    return dataclasses.replace(options.layerskip, dropout_over_time=over_time)


def usual_exits(layers: int) -> tuple[int, ...]:
    """Returns the default exits: a quarter of the layers for a cheap draft, a half for a good one."""
    return tuple(sorted({max(1, layers // 4), layers // 2})) if layers > 1 else ()


def objective(options: Options, start: Start) -> Objective:
    """Makes the LayerSkip loss. The exits draft for the model itself.

    Raises:
      ValueError: an exit is not below the last layer.
    """
    config = start.config
    outside = [layers for layers in options.exits if not 1 <= layers < config.num_layers]
    if outside:
        raise ValueError(
            f"exits {outside} of a model with {config.num_layers} layers; give layers from 1 to "
            f"{config.num_layers - 1}"
        )
    loss = layerskip_loss(config, recipe(options), options.loop.steps, options.recompute)
    return Objective(loss, options.exits or usual_exits(config.num_layers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return job.main(Options, objective, "training.layerskip", arguments)


if __name__ == "__main__":
    sys.exit(main())
