"""The best stop rule there is: one that knows the text. What any other could gain at most."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.bench.replay import along
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.protocol import Outcome, Signal, State


@struct.dataclass
class Oracle:
    """Stops a greedy draft before its first wrong token, but not before its first token.

    It knows of one text which of its tokens the draft would say, so it holds for that text alone.

    Attributes:
      right: bool[N], whether the draft proposes token n of the output after the n right ones before it.
    """

    right: jax.Array

    def init(self, batch_size: int) -> State:
        """int32[B], tokens of output so far: the prefill's first."""
        return jnp.ones(batch_size, jnp.int32)

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Whether the draft is wrong about this token, or would be about the next one, bool[B]."""
        here = state + signal.step
        both = jnp.take(self.right, jnp.stack([here, here + 1]), mode="fill", fill_value=False)
        return ~jnp.all(both, axis=0), state

    def observe(self, state: State, outcome: Outcome) -> State:
        """Counts what was committed."""
        return state + outcome.count


def oracle(
    lm: LanguageModel,
    prompt: Sequence[int],
    text: Sequence[int],
    draft: tuple[LlamaConfig, Params],
    size: int,
) -> Oracle:
    """The oracle for drafts by a smaller model, or the first layers of one, on one of a model's greedy texts.

    Args:
      lm: the model.
      prompt: token ids.
      text: the model's greedy text after the prompt.
      draft: what drafts, and its parameters.
      size: N, at least the text's length; texts with one N share an executable.
    """
    with jax.default_device(lm.device):
        said, _, _ = along(prompt, text, draft)
    right = said == np.asarray(text)
    return Oracle(jnp.asarray(np.pad(right, (0, size - len(text)))))
