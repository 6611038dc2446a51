"""Trains a sorted draft by SoFT: `jaxspec train soft --exits 6 9 12 --data FILE --output DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from jaxspec.io import checkpoint
from jaxspec.loading.loading import find_model
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training import job
from training.data import bpe_tokenizer
from training.data.sizing import Auto
from training.loop import state_sharding
from training.losses.exits import soft_loss
from training.run_options import SCRATCH, DraftOptions, TargetWeights
from training.start import Objective, Start, draft_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DraftOptions):
    """Sorted fine-tuning: one draft with several exits, for several targets (SoFT, of the S2D paper).

    The draft is the first layers of a given model (`--start TARGET`), another pretrained model, or trained from
    scratch. Its number of layers is that of its last exit. `python -m training.sft --start-layers N` with the same data
    is the baseline.

    Attributes:
      exits: number of layers at each exit, ascending; the last one is the whole draft. Default: after a half, three
        quarters and all of the layers of --start-layers, of --layers, or of the start; of 3/8 of them if the start is
        the target (the paper: 12 of 32).
      target: a model with the same vocabulary. Each checkpoint measures the share of the exits' tokens that it accepts,
        and the exits may be distilled from it. Default: the draft's own last exit.
      distil_weight: weight of the divergence from the target's distribution in the loss, 0 to 1.
      target_weights: weights of the target: a dtype, or int8 with a scale per output channel. `auto`: as `compute`.
    """

    job: ClassVar[str] = "soft"

    exits: tuple[int, ...] = ()
    target: Path | None = None
    distil_weight: float = 0.0
    target_weights: TargetWeights = "auto"

    def __post_init__(self):
        if not self.exits:
            object.__setattr__(self, "exits", usual_exits(self._usual_layers()))
        if not self.exits or sorted(set(self.exits)) != list(self.exits) or self.exits[0] < 1:
            raise ValueError(f"exits is {self.exits}; give numbers of layers, rising, such as --exits 6 9 12")
        if not 0 <= self.distil_weight <= 1:
            raise ValueError(f"distil_weight is {self.distil_weight}; give a share from 0 to 1")
        if self.distil_weight and self.target is None:
            raise ValueError("distil_weight needs a model to distil from; name it with --target DIR")
        if self.target_weights != "auto" and self.target is None:
            raise ValueError(
                f"target_weights is {self.target_weights}, and no target is given; name it with --target DIR"
            )
        if self.start != SCRATCH:
            if self.start_layers not in (None, self.exits[-1]):
                raise ValueError(
                    f"start_layers is {self.start_layers}, the last exit {self.exits[-1]}; a sorted draft ends "
                    "with its last exit: leave start_layers out"
                )
            object.__setattr__(self, "start_layers", self.exits[-1])
        elif isinstance(self.model.layers, Auto):
            shape = dataclasses.replace(self.model, layers=self.exits[-1])
            object.__setattr__(self, "model", shape)
        elif self.model.layers != self.exits[-1]:
            raise ValueError(
                f"layers is {self.model.layers}, the last exit {self.exits[-1]}; give --layers {self.exits[-1]}"
            )
        super().__post_init__()

    def _usual_layers(self) -> int:
        """Returns the layers of the draft where no exits are given."""
        if self.start == SCRATCH and isinstance(self.model.layers, Auto):
            raise ValueError(
                "exits must be given for a draft from scratch of unknown depth, such as --exits 2,4,6"
            )
        if known := self.model.layers if self.start == SCRATCH else self.start_layers:
            return known
        layers = checkpoint.read_config(find_model(self.start)).num_layers
        return layers if self.target not in (None, Path(self.start)) else -(-3 * layers // 8)


def usual_exits(layers: int) -> tuple[int, ...]:
    """Returns the default exits of a draft: after a half, three quarters and all of its layers.

    Examples:
      >>> usual_exits(12), usual_exits(2)
      ((6, 9, 12), (1, 2))
    """
    return tuple(sorted({max(1, layers * part // 4) for part in (2, 3, 4)}))


def load_target(options: Options, source: Path, draft: Start) -> tuple[tuple[LlamaConfig, Params], str]:
    """Loads a target's config and parameters, in shards on the mesh of the draft; returns also its fingerprint.

    Raises:
      ValueError: the target's vocabulary differs from the draft's.
    """
    target = checkpoint.read_config(source)
    same = bpe_tokenizer.load(source).get_vocab() == draft.words.get_vocab()
    if not same or target.vocab_size != draft.config.vocab_size:
        raise ValueError(
            f"{source} has another vocabulary ({target.vocab_size} tokens) than the draft "
            f"({draft.config.vocab_size}); a draft serves targets of its own tokenizer: train it with --tokenizer "
            f"{source}"
        )
    kind, compute = options.target_weights, options.compute_dtype
    params, fingerprint = state_sharding.load_target(draft.mesh, source, target, kind, compute)
    return (target, params), fingerprint


def objective(options: Options, start: Start) -> Objective:
    """Makes the loss: the mean over the exits."""
    target = fingerprint = None
    if options.target is not None:
        target, fingerprint = load_target(options, find_model(options.target), start)
    part = draft_tokens(options, start.config)
    loss = soft_loss(
        start.config,
        options.exits,
        options.recompute,
        None if target is None else target[0],
        options.distil_weight,
        part,
    )
    return Objective(
        loss,
        exits=options.exits,
        judged=options.exits,
        target=target,
        target_fingerprint=fingerprint,
        part=part,
        distil_weight=options.distil_weight,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return job.main(Options, objective, "training.soft", arguments)


if __name__ == "__main__":
    sys.exit(main())
