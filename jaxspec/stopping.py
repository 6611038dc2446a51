"""Stop rules: after each draft token they decide whether to stop drafting and verify. See `protocol.StopRule`.

`ConfidenceBelow` and `ProductBelow` compare an estimated acceptance probability with a threshold γ. The estimate is a
`DraftProbability` or a `Probe`, and γ is a `FixedGamma` or an `AdaptiveGamma`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.protocol import Outcome, Signal, State, StatelessRule, StopRule


@struct.dataclass
class Constant(StatelessRule):
    """Never stops, so every draft has K tokens (Chen et al. 2023, Leviathan et al. 2023).

    Examples:
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> Constant().stop((), signal)[0].tolist()
      [False]
    """

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns False for every row, bool[B], and the state."""
        return jnp.zeros(signal.token.shape, bool), state


class Estimate(Protocol):
    """Estimates the probability that a draft token is accepted, from the logits or hidden state of its `Signal`.

    Examples:
      >>> estimate: Estimate = DraftProbability()
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> estimate.log_probability(signal).shape
      (1,)
    """

    def log_probability(self, signal: Signal) -> jax.Array: ...


@struct.dataclass
class DraftProbability:
    """The probability of the draft token under the draft model, before temperature and filters.

    A draft with a reduced vocabulary normalises over fewer tokens, so its probabilities are slightly higher.

    Examples:
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> round(float(jnp.exp(DraftProbability().log_probability(signal))[0]), 4)
      0.25
    """

    def log_probability(self, signal: Signal) -> jax.Array:
        """Returns the logarithm of the estimated probability of acceptance, float32[B]."""
        log_probs = jax.nn.log_softmax(signal.logits, axis=-1)
        index = signal.token if signal.index is None else signal.index
        return jnp.take_along_axis(log_probs, index[:, None], axis=-1)[:, 0]


@struct.dataclass
class Probe:
    """A linear probe σ(v·h + b) of an early exit's hidden state h after the final norm (AdaSPEED, §II.B).

    A probe is trained on the acceptance probability of single tokens, which is min(1, p ÷ q) for sampled tokens. Block
    verification, the default acceptor for sampled tokens, accepts slightly more, so the estimate is then slightly low.

    Attributes:
      direction: [D], v times the weight of the model's final norm, which is therefore not applied to h.
      bias: scalar, b.
      eps: the final norm's ε.

    Examples:
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> probe = Probe(direction=jnp.ones(8), bias=jnp.float32(0.0))
      >>> round(float(jnp.exp(probe.log_probability(signal))[0]), 4)
      0.5
    """

    direction: jax.Array
    bias: jax.Array
    eps: jax.Array | float = 1e-5

    def log_probability(self, signal: Signal) -> jax.Array:
        """Returns the logarithm of the estimated probability of acceptance, float32[B]."""
        # The norm's weight is in `direction`, so only its division by the root mean square remains.
        hidden = signal.hidden.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(hidden * hidden, axis=-1) + self.eps)
        return jax.nn.log_sigmoid(jnp.sum(hidden * self.direction, axis=-1) * scale + self.bias)


class Gamma(Protocol):
    """A threshold γ: its initial state, its value, and its update after a round.

    Examples:
      >>> gamma: Gamma = FixedGamma(0.5)
      >>> float(gamma.value(gamma.init(batch_size=1)))
      0.5
    """

    def init(self, batch_size: int) -> State: ...

    def value(self, state: State) -> jax.Array: ...

    def observe(self, state: State, outcome: Outcome) -> State: ...


@struct.dataclass
class FixedGamma:
    """A constant threshold.

    Attributes:
      gamma: a number in [0, 1], scalar or [B].

    Examples:
      >>> FixedGamma(jnp.array([0.25, 0.5])).value(()).tolist()
      [0.25, 0.5]
    """

    gamma: jax.Array | float

    def init(self, batch_size: int) -> State:
        """Returns the empty state, ()."""
        return ()

    def value(self, state: State) -> jax.Array:
        """Returns γ, float32, scalar or [B]."""
        return jnp.asarray(self.gamma, jnp.float32)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Returns the state unchanged."""
        return state


class GammaState(NamedTuple):
    """The state of an `AdaptiveGamma`; the engine finds it in a drafter's state by its type.

    Attributes:
      gamma: float32[B], γ of each row.
      rate: float32[B], AR, the acceptance rate of each row.

    Examples:
      >>> state = AdaptiveGamma(first=0.5).init(batch_size=1)
      >>> float(state.gamma[0]), float(state.rate[0])
      (0.5, 0.0)
    """

    gamma: jax.Array
    rate: jax.Array


@struct.dataclass
class AdaptiveGamma:
    """A threshold per row that follows the acceptance rate (Draft & Verify, §3.4).

    After each round that drafted: AR ← β1·AR + (1 − β1)·accepted ÷ drafted; γ̃ = γ + ε if AR ≤ α, else
    γ − ε; γ ← β2·γ + (1 − β2)·γ̃. AR starts at 0 for each text.

    A round changes γ by (1 − β2)·ε = 0.001, so γ hardly changes within a short text. Here each text starts from γ0. The
    authors of Draft & Verify, and the evaluations of ASD and AdaSPEED, start each text from the final γ of the text
    before. To reproduce this, generate the texts one after another, and pass `Result.gamma` of one text,
    clipped to [0, 1], to the next. As in the paper, γ is not bounded within a text: below 0 it never stops a draft, and
    above 1 it stops every draft after its first token.

    Attributes:
      first: γ0, scalar or [B].
      alpha: α, the target acceptance rate.
      beta1, beta2: the decay factors of AR and of γ.
      epsilon: ε.

    Examples:
      >>> gamma = AdaptiveGamma(first=0.5)
      >>> outcome = Outcome(jnp.array([[4, 0]]), jnp.array([1]), drafted=jnp.array([1]), accepted=jnp.array([0]))
      >>> round(float(gamma.observe(gamma.init(batch_size=1), outcome).gamma[0]), 4)
      0.501
    """

    first: jax.Array | float = 0.6
    alpha: jax.Array | float = 0.9
    beta1: jax.Array | float = 0.5
    beta2: jax.Array | float = 0.9
    epsilon: jax.Array | float = 0.01

    def init(self, batch_size: int) -> GammaState:
        """Returns the state of a new text: γ0, and an acceptance rate of 0."""
        first = jnp.broadcast_to(jnp.asarray(self.first, jnp.float32), (batch_size,))
        return GammaState(first, jnp.zeros(batch_size, jnp.float32))

    def value(self, state: GammaState) -> jax.Array:
        """Returns the γ of each row, float32[B]."""
        return state.gamma

    def observe(self, state: GammaState, outcome: Outcome) -> GammaState:
        """Updates γ and the acceptance rate after a round that drafted."""
        gamma, rate = state
        newest = outcome.accepted / jnp.maximum(outcome.drafted, 1)
        moved = self.beta1 * rate + (1 - self.beta1) * newest
        aim = jnp.where(moved <= self.alpha, gamma + self.epsilon, gamma - self.epsilon)
        # A round without draft tokens has no acceptance rate.
        drafted = outcome.drafted > 0
        aim = self.beta2 * gamma + (1 - self.beta2) * aim
        return GammaState(jnp.where(drafted, aim, gamma), jnp.where(drafted, moved, rate))


@struct.dataclass
class _Threshold(StopRule):
    """The base of rules with a threshold γ. The state is (the state of γ, the compared log-probability float32[B]).

    Attributes:
      gamma: a `FixedGamma` or an `AdaptiveGamma`.
      estimate: the estimate of a token's acceptance probability.
    """

    gamma: Gamma
    estimate: Estimate = DraftProbability()

    def init(self, batch_size: int) -> State:
        """Returns the state of a new text: γ's initial state, and a product of 1."""
        return self.gamma.init(batch_size), jnp.zeros(batch_size, jnp.float32)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Updates γ after a verification, and resets the product for the next draft."""
        return self.gamma.observe(state[0], outcome), jnp.zeros_like(state[1])

    def _below(self, state: State, seen: jax.Array) -> tuple[jax.Array, State]:
        return jnp.exp(seen) < self.gamma.value(state[0]), (state[0], seen)


@struct.dataclass
class ConfidenceBelow(_Threshold):
    """Stops after a token whose estimate is below γ; the token is kept (Draft & Verify, Zhang et al. 2023, §3.3).

    `gamma` is a `FixedGamma` or an `AdaptiveGamma`; `estimate` estimates a token's acceptance probability.

    Examples:
      >>> rule = ConfidenceBelow(FixedGamma(0.6))
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> stopped, _ = rule.stop(rule.init(batch_size=1), signal)  # a probability of 0.25
      >>> stopped.tolist()
      [True]
    """

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns whether the token's estimate is below γ, bool[B], and the state."""
        return self._below(state, self.estimate.log_probability(signal))


@struct.dataclass
class ProductBelow(_Threshold):
    """Stops after the token at which the product of the draft's estimates falls below γ; the token is kept.

    The product estimates the probability that the whole draft is accepted (AdaSPEED, §II.A, Algorithm 2). With a
    `Probe` as `estimate` this is AdaSPEED with linear probes (§II.B). `gamma` is a `FixedGamma` or an `AdaptiveGamma`.

    Examples:
      >>> rule = ProductBelow(FixedGamma(0.2))
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> first, state = rule.stop(rule.init(batch_size=1), signal)  # a product of 0.25
      >>> second, state = rule.stop(state, signal)  # of 0.0625
      >>> bool(first[0]), bool(second[0])
      (False, True)
    """

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns whether the product of the draft's estimates is below γ, bool[B], and the state."""
        return self._below(state, state[1] + self.estimate.log_probability(signal))


@struct.dataclass
class AdaptiveLength(StopRule):
    """A draft length per row that grows by `rise` if all draft tokens were accepted, and otherwise shrinks by `fall`.

    This is the heuristic schedule of transformers' assisted generation (5, + 2, − 1) and of Spec-Bench. It is the
    default of method `s2d`, although the paper of S2D (Kavehzadeh et al. 2024) uses a constant K (`Constant`).

    Attributes:
      first: int32, scalar or [B], the initial length, at least 1.
      rise, fall: int32, tokens.
      maximum: int32, the maximum length; K, because no draft is longer.

    Examples:
      >>> rule = AdaptiveLength(first=5, rise=2)
      >>> tokens, five = jnp.zeros((1, 6), jnp.int32), jnp.array([5])
      >>> rule.observe(rule.init(batch_size=1), Outcome(tokens, five + 1, drafted=five, accepted=five)).tolist()
      [7]
    """

    first: jax.Array | int = 5
    rise: jax.Array | int = 2
    fall: jax.Array | int = 1
    maximum: jax.Array | int = 64

    def init(self, batch_size: int) -> State:
        """Returns the first draft length of each row, int32[B]."""
        return jnp.broadcast_to(jnp.asarray(self.first, jnp.int32), (batch_size,))

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns whether a row's draft has reached its length, bool[B], and the state."""
        return signal.step + 1 >= state, state

    def observe(self, state: State, outcome: Outcome) -> State:
        """Returns the draft length of each row for the next round, int32[B]."""
        full = outcome.accepted == outcome.drafted
        moved = jnp.clip(jnp.where(full, state + self.rise, state - self.fall), 1, self.maximum)
        return jnp.where(outcome.drafted > 0, moved, state)


@struct.dataclass
class AnyOf(StopRule):
    """Stops as soon as one of several rules stops.

    Attributes:
      rules: the rules. Each of them is called after every token, also if another one has stopped.

    Examples:
      >>> rule = AnyOf((Constant(), AdaptiveLength(first=1)))
      >>> signal = Signal(jnp.int32(0), jnp.array([2]), jnp.zeros((1, 4)), jnp.zeros((1, 8)))
      >>> stopped, _ = rule.stop(rule.init(batch_size=1), signal)
      >>> stopped.tolist()
      [True]
    """

    rules: tuple[StopRule, ...]

    def init(self, batch_size: int) -> State:
        """Returns the states of the rules."""
        return tuple(rule.init(batch_size) for rule in self.rules)

    def stop(self, state: State, signal: Signal) -> tuple[jax.Array, State]:
        """Returns whether any rule stops, bool[B], and the states."""
        stopped = jnp.zeros(signal.token.shape, bool)
        states = []
        for rule, rule_state in zip(self.rules, state, strict=True):
            verdict, rule_state = rule.stop(rule_state, signal)
            stopped |= verdict
            states.append(rule_state)
        return stopped, tuple(states)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Updates every rule."""
        return tuple(rule.observe(s, outcome) for rule, s in zip(self.rules, state, strict=True))
