"""What a draft is scored by: its agreement with the model, or its speed beside plain decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.bench.speed import acceptance, tokens_per_second
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Drafter
from jaxspec.tuning.agreement import Calibration, agreement
from jaxspec.tuning.cost import Costs, predicted_speedup

_agreement = jax.jit(agreement, static_argnames="config")


class Agreement:
    """Scores a mask by one parallel pass; see `tuning.agreement`. One executable serves every mask.

    Args:
      lm: the model.
      texts: its own.
      costs: of a round's parts.
      by_speedup: score by the predicted speed-up, for masks of different cost; else by the agreement alone.
    """

    def __init__(self, lm: LanguageModel, texts: Calibration, costs: Costs, by_speedup: bool) -> None:
        self._lm, self._texts, self._costs, self._by_speedup = lm, texts, costs, by_speedup
        self(LayerPlan.skipping(lm.config.num_layers))  # compiles

    def __call__(self, plan: LayerPlan) -> dict[str, Any]:
        """`score`, `agreement`, `predicted_speedup`, `num_draft_tokens` (the K of that prediction)."""
        with jax.default_device(self._lm.device):
            traced = plan.traced()
        rate = float(_agreement(self._lm.config, self._lm.params, self._texts, traced))
        predicted = predicted_speedup(rate, plan, self._costs)
        return {
            "score": predicted.speedup if self._by_speedup else rate,
            "agreement": rate,
            "predicted_speedup": predicted.speedup,
            "num_draft_tokens": predicted.num_draft_tokens,
        }


# As `LanguageModel.generate` takes it.
Method = Drafter | tuple[Drafter, Any]


class Speed:
    """Measures the speed of drafters beside plain decoding; one set of executables serves all of one structure.

    It counts as `benchmarks.suite` does: texts end where the model ends them, and a speed-up is the ratio of all
    tokens ÷ all time.

    Args:
      lm: the model.
      prompts: token ids; each is generated after by itself, as in the papers.
      max_new_tokens: of each.
      drafter: any of those to be measured, with its parameters if it has some; it compiles them all.
    """

    def __init__(
        self, lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, drafter: Method
    ) -> None:
        self._prompts = prompts
        self._turns = 0
        self._generate = functools.partial(lm.generate, max_new_tokens=max_new_tokens, temperature=0.0)
        self(drafter)
        lm.executables.wait()

    def __call__(self, drafter: Method) -> dict[str, Any]:
        """One turn over all prompts.

        Returns:
          `score` (the speed-up over plain decoding, each prompt of which ran just before or after),
          `tokens_per_second`, `plain_tokens_per_second`, and `draft_acceptance_rate`, null where nothing was
          drafted.

        Raises:
          ValueError: every text ends with its first token, so that there is no speed.
        """
        mine: list[Result] = []
        plain: list[Result] = []
        for prompt in self._prompts:
            # There and back, so that both see the same noise.
            turn: list[tuple[list[Result], dict[str, Any]]] = [(mine, {"method": drafter}), (plain, {})]
            for results, method in turn if self._turns % 2 == 0 else reversed(turn):
                results.append(self._generate(prompt, **method))
            self._turns += 1
        speed, plain_speed = tokens_per_second(mine), tokens_per_second(plain)
        if speed is None or plain_speed is None:
            raise ValueError("every text ends with its first token; give other prompts")
        return {
            "score": speed / plain_speed,
            "tokens_per_second": speed,
            "plain_tokens_per_second": plain_speed,
            "draft_acceptance_rate": acceptance(mine)["draft_acceptance_rate"],
        }
