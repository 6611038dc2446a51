"""The cost of a round in steps of plain decoding: real rounds, timed in turns with plain decoding.

Whole rounds are timed, because the times of separate parts do not add up: the weights of a small model stay in a
processor's cache while one part runs repeatedly, but not between the parts of a round. They are timed in turns, because
other load on a machine changes the times by half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench.speed import acceptance, speed_ratio
from jaxspec.measuring.bench.timing import measure_runs
from jaxspec.protocol import StopRule
from jaxspec.stopping import AdaptiveLength, AnyOf, FixedGamma, ProductBelow
from jaxspec.texts.results import Result

Name = TypeVar("Name")


def fixed_length(length: int) -> StopRule:
    """Makes a rule with the computation of `ProductBelow` that stops after `length` draft tokens.

    Its rounds cost as much as rounds of a rule with a threshold, at a known length. The length is data, so that all
    lengths share a program.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxspec.protocol import Signal
      >>> rule, unlikely = fixed_length(2), jnp.array([[0.0, 9.0]])
      >>> state, stopped = rule.init(1), []
      >>> for step in range(2):
      ...     now, state = rule.stop(state, Signal(jnp.int32(step), jnp.array([0]), unlikely, jnp.zeros((1, 4))))
      ...     stopped.append(bool(now[0]))
      >>> stopped
      [False, True]
    """
    # The probability is never below −1, so only the length stops.
    return AnyOf((ProductBelow(FixedGamma(-1.0)), AdaptiveLength(length, rise=0, fall=0)))


def round_prices(
    lm: LanguageModel,
    drafters: Mapping[Name, Any],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repeats: int,
    on_progress: OnProgress = lambda what: None,
) -> dict[Name, float]:
    """Times greedy texts, and divides the time of a round by that of a step of plain decoding in the same turn.

    Args:
      lm: the model.
      drafters: methods by name, as for `generate`; all rounds of a method should draft the same number of tokens.
      prompts: token ids.
      max_new_tokens: new tokens per text; end-of-text tokens are ignored.
      repeats: number of turns.
      on_progress: called with the current activity.

    Returns:
      price of a round by name, the median over the turns; plain decoding's is 1.
    """

    def run(method: Any) -> Callable[[Any, int], Result]:
        return lambda prompt, turn: lm.generate(
            prompt, method=method, max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True
        )

    runs = {"autoregressive": run("autoregressive")} | {
        str(name): run(method) for name, method in drafters.items()
    }
    taken = list(measure_runs([lm], runs, prompts, repeats, on_progress=on_progress))
    plain = [by_run["autoregressive"] for by_run in taken]
    prices = {}
    for name in drafters:
        mine = [by_run[str(name)] for by_run in taken]
        speedup, length = speed_ratio(mine, plain)[0], acceptance(mine)["mean_acceptance_length"]
        if speedup and length:
            prices[name] = length / speedup
    return prices


def price_of(rounds: np.ndarray, prices: Mapping[int, float]) -> np.ndarray:
    """Returns the cost of rounds of any draft length, interpolated linearly between prices at some lengths.

    Args:
      rounds: int[..., K + 1], rounds by the number of draft tokens.
      prices: by draft tokens, up to K; a round without a draft is a step of plain decoding, 1.

    Returns:
      float[...], in steps of plain decoding.

    Examples:
      >>> float(price_of(np.array([1, 0, 2, 0]), {1: 1.5, 3: 2.5}))
      5.0
    """
    known = {0: 1.0} | dict(prices)
    lengths = sorted(known)
    each = np.interp(np.arange(rounds.shape[-1]), lengths, [known[length] for length in lengths])
    priced: np.ndarray = rounds @ each
    return priced
