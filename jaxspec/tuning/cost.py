"""What a draft is worth: the speed-up that its agreement and the measured costs of its parts allow."""

from __future__ import annotations

import dataclasses

from jaxspec.model.plan import LayerPlan

# The longest draft that is considered: K of Draft & Verify.
MOST_DRAFT_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured times of a round's parts, all in milliseconds, for one text.

    Attributes:
      attention_ms, mlp_ms: of one sublayer, when one token is drafted.
      rest_ms: of the rest of a draft step: embedding, final norm, head, choice of the token.
      verify_ms: pairs (rows, time) of the rounds that verify so many rows, rising; the first has 1 row and is
        a step of plain decoding. A round takes the narrowest that holds its draft.
    """

    attention_ms: float
    mlp_ms: float
    rest_ms: float
    verify_ms: tuple[tuple[int, float], ...]

    def draft_step_ms(self, plan: LayerPlan) -> float:
        """Time to draft one token with what a plan runs."""
        attention = plan.num_layers - len(plan.skip_attention)
        mlp = plan.num_layers - len(plan.skip_mlp)
        return self.rest_ms + attention * self.attention_ms + mlp * self.mlp_ms


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A speed-up over plain decoding, and the draft length K that gives it."""

    speedup: float
    num_draft_tokens: int


def tokens_per_round(agreement: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round that drafts K, each right with probability a: (1 − a^(K+1)) ÷ (1 − a).

    Leviathan et al. 2023, equation 1.
    """
    return sum(agreement**accepted for accepted in range(num_draft_tokens + 1))


def predicted_speedup(
    agreement: float, plan: LayerPlan, costs: Costs, most: int = MOST_DRAFT_TOKENS
) -> Prediction:
    """The best speed-up over plain decoding of drafts of constant length K = 1 … `most`.

        tokens_per_round(a, K) · verify(1) ÷ (K · draft step + verify(K + 1))

    with a the agreement rate, the draft step the sum of its sublayers and the rest, and verify(n) the round
    of n rows. It takes acceptances as independent, so it ranks masks; it does not predict their speeds.
    """
    step, plain = costs.draft_step_ms(plan), costs.verify_ms[0][1]

    def speedup(num_draft_tokens: int) -> float:
        verify = next(ms for rows, ms in costs.verify_ms if rows > num_draft_tokens)
        return tokens_per_round(agreement, num_draft_tokens) * plain / (num_draft_tokens * step + verify)

    best = max(range(1, most + 1), key=speedup)
    return Prediction(speedup(best), best)
