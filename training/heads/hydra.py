"""Training of Hydra's heads (Ankner et al. 2024): their parameters at the start, and their loss."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training.heads.head_type import HeadOptions, Kind, target_head
from training.heads.several import SeveralNetwork, several_loss, zeros


def _init(
    options: HeadOptions, target: LlamaConfig, params: Params, part: np.ndarray | None, seed: int
) -> tuple[SeveralNetwork, Params]:
    """Returns heads whose blocks copy the target's last hidden state, with copies of the target's output head."""
    del part, seed
    head = HydraConfig(target.hidden_size, target.vocab_size, options.num_heads or 4)
    made = zeros(head.shapes)
    for one in made["heads"]:
        block = one["blocks"][0]
        block["residual"] = jnp.eye(*block["residual"].shape)
        one["head"] = target_head(target, params)
    return SeveralNetwork(head, target), made


KINDS = {"hydra": Kind(_init, several_loss, ("num_heads", "step_decay"))}
