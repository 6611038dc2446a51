"""Objectives of a search: agreement with the model, or measured speed relative to plain decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.costs.rounds import predicted_speedup
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host import processes
from jaxspec.measuring.bench.speed import acceptance, speed_ratio, tokens_per_second
from jaxspec.measuring.bench.timing import Run, measure_runs, warm_up
from jaxspec.measuring.tuning.agreement import AgreementTexts, agreement
from jaxspec.measuring.tuning.round_costs import Costs
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import fetched, local
from jaxspec.protocol import Drafter

_agreement = jax.jit(agreement, static_argnames="config")


class Agreement:
    """Scores a mask by its predicted speed-up, from one parallel pass, see `tuning.agreement`.

    One executable serves all masks.

    Args:
      lm: the model.
      texts: the model's own texts.
      costs: costs of the parts of a round.
    """

    def __init__(self, lm: LanguageModel, texts: AgreementTexts, costs: Costs) -> None:
        self._lm, self._texts, self._costs = lm, texts, costs
        self(LayerPlan.skipping(lm.config.num_layers))  # compiles

    def __call__(self, plan: LayerPlan) -> dict[str, Any]:
        """`score`, `agreement`, `predicted_speedup`, `num_draft_tokens` (the K of that prediction)."""
        with jax.default_device(local(self._lm.device)):
            traced = plan.traced()
        found = fetched(_agreement(self._lm.config, self._lm.params, self._texts, traced))
        # All processes must propose the same next mask; an interrupt (Ctrl-C) is exchanged here too.
        (rate,) = processes.agreed(self._lm.mesh, float(found))
        plain, round_ms = self._costs.verify_ms[0][1], functools.partial(self._costs.round_ms, plan)
        predicted = predicted_speedup(rate, plain, round_ms)
        return {
            "score": predicted.speedup,
            "agreement": rate,
            "predicted_speedup": predicted.speedup,
            "num_draft_tokens": predicted.num_draft_tokens,
        }


# The `method` argument of `LanguageModel.generate`.
Method = Drafter | tuple[Drafter, Any]


class Speed:
    """Measures the speed of drafters relative to plain decoding, see `bench.speed`.

    Drafters of the same structure share executables. Texts end at the model's end-of-text token.

    Args:
      lm: the model.
      prompts: token ids; each is generated separately, as in the papers.
      max_new_tokens: the maximum number of new tokens per prompt.
      drafter: one of the drafters to measure, with its parameters if it has any; compiles for all of them.
    """

    def __init__(
        self, lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, drafter: Method
    ) -> None:
        self._lm, self._prompts, self._turns = lm, prompts, 0
        self._generate = functools.partial(lm.generate, max_new_tokens=max_new_tokens, temperature=0.0)
        warm_up([lm], self._runs(drafter), prompts)

    def _runs(self, drafter: Method) -> dict[str, Run]:
        return {
            "drafted": lambda prompt, turn: self._generate(prompt, method=drafter),
            "plain": lambda prompt, turn: self._generate(prompt, method="autoregressive"),
        }

    def __call__(self, drafter: Method) -> dict[str, Any]:
        """Runs one turn over all prompts.

        Returns:
          `score` (the speed-up over plain decoding), `tokens_per_second`, `plain_tokens_per_second`, and
          `draft_acceptance_rate`, None without draft tokens.

        Raises:
          ValueError: every text ends with its first token, so that no speed can be measured.
        """
        runs = self._runs(drafter)
        measured = measure_runs([self._lm], runs, self._prompts, 1, first_turn=self._turns, warm=True)
        by_prompt = list(measured)
        self._turns += 1
        mine, plain = ([taken[name] for taken in by_prompt] for name in runs)
        score, _ = speed_ratio(mine, plain)
        if score is None:
            raise ValueError("every text ends with its first token; give other prompts")
        return {
            "score": score,
            "tokens_per_second": tokens_per_second(mine),
            "plain_tokens_per_second": tokens_per_second(plain),
            "draft_acceptance_rate": acceptance(mine)["draft_acceptance_rate"],
        }
