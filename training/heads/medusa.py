"""Training of Medusa's heads (Cai et al. 2024): their parameters at the start, and their loss."""

from __future__ import annotations

import numpy as np

from jaxspec.heads.medusa.network import MedusaConfig
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.heads.head_type import HeadOptions, Kind, target_head
from training.heads.several import SeveralNetwork, several_loss, zeros


def _init(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[SeveralNetwork, Params]:
    """Returns heads whose blocks are the identity, with copies of the target's output head unless `shared_head`."""
    del part, seed
    rows = None if options.shared_head else target.vocab_size
    count = options.num_heads or 5
    head = MedusaConfig(target.hidden_size, count, head_size=rows, own_heads=not options.shared_head)
    made = zeros(head.shapes)
    for one in made["heads"] if head.own_heads else ():
        one["head"] = target_head(target, params)
    return SeveralNetwork(head, target), made


KINDS = {"medusa": Kind(_init, several_loss, ("num_heads", "shared_head", "step_decay"))}
