"""Methods on a model with synthetic acceptance, each compared with plain decoding, and the parts of their rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.asd_drafter import ASD
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.drafting.draft_verify_drafter import DraftVerify
from jaxspec.drafting.layerskip_drafter import LayerSkip
from jaxspec.engine.language_model import LanguageModel
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.speed import acceptance, speed_ratio
from jaxspec.measuring.bench.steps import Loop, Steps, SubmodelSteps
from jaxspec.measuring.bench.timing import Run
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Drafter, Proposal, State, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow, ProductBelow
from jaxspec.texts.results import Result

# Largest draft length of methods with a stop rule.
LONGEST = 12
# Measured methods by name: `ngram` on a repetitive text, the others by `dial_cases`.
CASES = ("draft-model", "layerskip", "adaspeed", "draft-verify", "draft-verify static", "asd", "ngram")
# The prompt for models with synthetic acceptance.
START = list(range(3, 35))


@struct.dataclass
class WrongDrafts(Drafter):
    """Proposes K tokens that are almost never accepted, so that a round verifies K + 1 rows and emits one token.

    Attributes:
      num_draft_tokens: K.
    """

    num_draft_tokens: int = struct.field(pytree_node=False)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, distribution: Distribution
    ) -> tuple[Proposal, State, KVCache]:
        """Proposes tokens that depend only on the length of the text."""
        vocab_size = params.target["embed"].shape[0]
        step = jnp.arange(1, self.num_draft_tokens + 1)[None]
        tokens = (view.length[:, None] * 7919 + step * 104729) % vocab_size
        count = jnp.full_like(view.length, self.num_draft_tokens)
        return Proposal(tokens.astype(jnp.int32), count), state, view.cache


def dial_cases(
    lm: LanguageModel, depth: int, num_draft_tokens: int, max_new_tokens: int, longest: int = LONGEST
) -> dict[str, Case]:
    """Returns the methods that use synthetic acceptance; `draft-verify` with a traced and with a static mask.

    Args:
      lm: a model from `dial_model`.
      depth: number of layers at full strength: of the early exits, and of the draft model.
      num_draft_tokens: K of drafts of constant length.
      max_new_tokens: new tokens per generation.
      longest: K of drafts with a stop rule.
    """
    config, layers = lm.config, lm.config.num_layers
    draft = (config.truncated(depth), llama.truncate(lm.params, depth))
    skipped = range(depth, layers - 1, 2)
    mask = LayerPlan.skipping(layers, skipped, skipped)
    pairs = lm.platform != "cpu"
    first, rest = only_layers(layers, range(depth)), only_layers(layers, range(depth, layers))
    # With synthetic acceptance, ASD measures every later attention layer as redundant; m exempts the others.
    every, keep_last = depth + 1, 2
    whole = range(every - 1, layers - keep_last, every)
    asd_mask = LayerPlan.skipping(layers, [*range(depth, layers - keep_last), *whole], whole)
    # A random model has low probabilities, so the thresholds are low too.
    confidence, product = ConfidenceBelow(AdaptiveGamma(0.05)), ProductBelow(AdaptiveGamma(0.02))
    drafters: dict[str, tuple[Drafter, dict[str, Any]]] = {
        "draft-model": (
            DraftModel(draft[0], num_draft_tokens=num_draft_tokens, pairs=pairs),
            {"plan": first, "again": not pairs},
        ),
        "layerskip": (
            LayerSkip(config, depth, num_draft_tokens=num_draft_tokens),
            {"plan": first, "rest": rest},
        ),
        "adaspeed": (LayerSkip(config, depth, product, longest), {"plan": first, "rest": rest}),
        "draft-verify": (DraftVerify(config, mask.traced(), confidence, longest), {"plan": mask}),
        "draft-verify static": (DraftVerify(config, mask, confidence, longest), {"plan": mask}),
        "asd": (ASD(config, 0.985, every, keep_last, confidence, longest), {"plan": asd_mask}),
    }
    cases = {}
    for name, (drafter, parts) in drafters.items():
        params = draft[1] if name == "draft-model" else None
        cases[name] = Case(lm, START, drafter, params, max_new_tokens, **parts)
    return cases


class Case:
    """One method compared with plain decoding, on one model and prompt.

    Args:
      lm: the model.
      prompt: token ids.
      drafter, params: the method.
      max_new_tokens: new tokens per generation.
      plan: the layers of a draft step; None if drafting costs nothing.
      rest: the layers of the verification if it reuses those of the draft; None for all layers.
      again: whether a fully accepted draft is followed by one more draft step.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: list[int],
        drafter: Drafter,
        params: Any,
        max_new_tokens: int,
        plan: LayerPlan | None = None,
        rest: LayerPlan | None = None,
        again: bool = False,
    ) -> None:
        self.lm, self.prompt = lm, prompt
        self._plan, self._rest, self._again = plan, rest, again
        self._widths = drafter.verify_widths
        generate = functools.partial(lm.generate, max_new_tokens=max_new_tokens, ignore_eos=True)
        self.plain_run: Run = lambda prompt, turn: generate(prompt, method=BASELINE)
        self.run: Run = lambda prompt, turn: generate(prompt, method=(drafter, params))

    def take(self, mine: list[Result], plain: list[Result]) -> None:
        """Adds results of the method and of plain decoding, one of each per turn."""
        self.mine, self._plain = mine, plain

    def _width(self, drafted: int) -> int:
        if self.lm.platform != "cpu":  # see `model.control.narrowest`
            return self._widths[-1]
        return min(width for width in self._widths if width > drafted)

    def _verify_name(self, width: int) -> str:
        return f"{self._rest or 'all'} over {width}"

    def parts(self) -> dict[str, Callable[[], Loop]]:
        """Returns functions that make the parts of the recorded rounds, by name, for timing."""
        parts: dict[str, Callable[[], Loop]] = {}
        for width in {self._width(drafted) for drafted in self.mine[0].draft_lengths}:
            if self._rest is not None:
                parts[self._verify_name(width)] = functools.partial(SubmodelSteps, self.lm, self._rest, width)
            else:
                parts[self._verify_name(width)] = functools.partial(rounds_of, self.lm, width)
        if self._plan is not None:
            parts[f"draft {self._plan}"] = functools.partial(SubmodelSteps, self.lm, self._plan)
        if self._plan is not None and self._rest is not None:
            parts[f"last {self._plan}"] = functools.partial(SubmodelSteps, self.lm, self._plan, head=False)
        return parts

    def report(self, costs: Mapping[str, float]) -> dict[str, Any]:
        """Returns the figures of the method, from the cost of each part in milliseconds."""
        first = self.mine[0]
        draft_ms = costs[f"draft {self._plan}"] if self._plan is not None else 0.0
        last_ms = costs[f"last {self._plan}"] if self._rest is not None else 0.0
        lengths = first.draft_lengths
        verify_ms = sum(costs[self._verify_name(self._width(drafted))] + last_ms for drafted in lengths)
        steps = sum(lengths) + (first.statistics.acceptance_histogram[-1] if self._again else 0)
        plain_ms = (first.statistics.num_tokens - 1) * costs["plain step"]
        predicted = plain_ms / (verify_ms + steps * draft_ms)
        speedup, _ = speed_ratio([self.mine], [self._plain])
        return {
            "speedup": speedup,
            "predicted": predicted,
            "obtained_over_predicted": None if speedup is None else speedup / predicted,
            **acceptance([self.mine]),
            "draft_step_ms": draft_ms or None,
            "identical_to_autoregressive": first.tokens == self._plain[0].tokens,
        }


def only_layers(num_layers: int, layers: Sequence[int]) -> LayerPlan:
    """Returns a plan that runs whole layers, and only these."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    return LayerPlan.skipping(num_layers, others, others)


def rounds_of(lm: LanguageModel, rows: int, capacity: int = 256) -> Steps:
    """Makes rounds that verify `rows` rows and yield one token each; with one row they are steps of plain decoding."""
    drafter: Drafter = WrongDrafts(rows - 1) if rows > 1 else Autoregressive()
    return Steps(lm, Weights(lm.params), drafter, capacity)
