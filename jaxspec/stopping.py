"""Stop rules: when to stop drafting and verify. See `protocol.StopRule`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.protocol import Outcome, Signal, State, StatelessRule, StopRule


@struct.dataclass
class Constant(StatelessRule):
    """Never stops by itself: every draft has K tokens (Chen et al. 2023, Leviathan et al. 2023)."""

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """False for every row, bool[B]."""
        return jnp.zeros(signal.token.shape, bool), state


@struct.dataclass
class ConfidenceBelow(StatelessRule):
    """Stops after a token whose raw draft probability is below γ; the token itself is kept.

    The exit of Draft & Verify (Zhang et al. 2023, §3.3). Raw: before temperature and filters.

    Attributes:
      gamma: float32, scalar or [B], in [0, 1].
    """

    gamma: jax.Array

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Whether the token was doubtful, bool[B]."""
        log_probs = jax.nn.log_softmax(signal.logits, axis=-1)
        drawn = jnp.take_along_axis(log_probs, signal.token[:, None], axis=-1)[:, 0]
        return jnp.exp(drawn) < self.gamma, state


@struct.dataclass
class AdaptiveLength:
    """A draft length per row that grows after success: + `rise` if all was accepted, else − `fall`.

    The draft length of S2D (Kavehzadeh et al. 2024), also transformers' heuristic schedule.

    Attributes:
      first: int32, scalar or [B], the length to start with, at least 1.
      rise, fall: int32.
      most: int32, where growth ends: K, above which a length means nothing.
    """

    first: jax.Array | int = 5
    rise: jax.Array | int = 2
    fall: jax.Array | int = 1
    most: jax.Array | int = 64

    def init(self, batch_size: int) -> State:
        """The current length of each row, int32[B]."""
        return jnp.broadcast_to(jnp.asarray(self.first, jnp.int32), (batch_size,))

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Whether the row has its length, bool[B]."""
        return signal.step + 1 >= state, state

    def observe(self, state: State, outcome: Outcome) -> State:
        """Moves the length after a round that drafted."""
        full = outcome.accepted == outcome.drafted
        moved = jnp.clip(jnp.where(full, state + self.rise, state - self.fall), 1, self.most)
        return jnp.where(outcome.drafted > 0, moved, state)


@struct.dataclass
class AnyOf:
    """Stops as soon as one of several rules does.

    Attributes:
      rules: the rules; each sees every token.
    """

    rules: tuple[StopRule, ...]

    def init(self, batch_size: int) -> State:
        """The rules' states."""
        return tuple(rule.init(batch_size) for rule in self.rules)

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Whether any rule stops, bool[B]."""
        stopped = jnp.zeros(signal.token.shape, bool)
        states = []
        for rule, rule_state in zip(self.rules, state, strict=True):
            verdict, rule_state = rule.stop(rule_state, signal)
            stopped |= verdict
            states.append(rule_state)
        return stopped, tuple(states)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Lets every rule learn."""
        return tuple(rule.observe(s, outcome) for rule, s in zip(self.rules, state, strict=True))
