"""An oracle stop rule, which has the text: an upper bound for all other rules."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks.papers.replay import along
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Outcome, Signal, State


@struct.dataclass
class Oracle:
    """Stops a greedy draft before its first wrong token, but not before its first token.

    It contains the draft's errors on one text, so it is valid for that text only.

    Attributes:
      right: bool[N], whether the draft proposes token n of the output after the n right ones before it.
    """

    right: jax.Array

    def init(self, batch_size: int) -> State:
        """Returns the number of output tokens so far, int32[B]: one, from the prefill."""
        return jnp.ones(batch_size, jnp.int32)

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns whether this token of the draft, or the next one, is wrong, bool[B]."""
        here = state + signal.step
        both = jnp.take(self.right, jnp.stack([here, here + 1]), mode="fill", fill_value=False)
        return ~jnp.all(both, axis=0), state

    def observe(self, state: State, outcome: Outcome) -> State:
        """Counts the committed tokens."""
        return state + outcome.count


def oracle(
    lm: LanguageModel,
    prompt: Sequence[int],
    text: Sequence[int],
    draft: tuple[LlamaConfig, Params],
    size: int,
) -> Oracle:
    """Makes the oracle for one greedy text of a model and the drafts of a smaller or truncated model.

    Args:
      lm: the model.
      prompt: token ids.
      text: the model's greedy text after the prompt.
      draft: config and parameters of the draft model.
      size: N, at least the text's length; texts with the same N share an executable.
    """
    with jax.default_device(lm.device):
        said, _, _ = along(prompt, text, draft)
    right = said == np.asarray(text)
    return Oracle(jnp.asarray(np.pad(right, (0, size - len(text)))))
