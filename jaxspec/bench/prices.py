"""What a round costs, in steps of plain decoding: whole rounds of the real loop, timed in turns with plain decoding.

Whole rounds, because parts that are timed apart do not add up: the weights of a small model stay in a processor's cache
while one part runs again and again, and leave it between the parts of a round. In turns, because what else a machine
does moves such prices by half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxspec.bench.speed import acceptance, speed_ratio
from jaxspec.bench.timing import OnProgress, measure_runs
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result
from jaxspec.protocol import StopRule
from jaxspec.stopping import AdaptiveLength, AnyOf, FixedGamma, ProductBelow

Name = TypeVar("Name")


def fixed_length(length: int) -> StopRule:
    """A rule that weighs every draft token as `ProductBelow` does, and stops after so many whatever it finds.

    Rounds under it cost what rounds of a rule with a threshold cost, at a length that is known. The length is data, so
    that all lengths share a program.

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
    # No probability is below −1.
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
      drafters: as `generate` takes a method, by name; all rounds of one should draft as many tokens.
      prompts: token ids.
      max_new_tokens: of each text; nothing ends it before.
      repeats: turns.
      on_progress: called with what is being done.

    Returns:
      By name the price of a round, the median over the turns; plain decoding's is 1.
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
    """What rounds cost that draft any number of tokens, given prices at some numbers, straight lines between them.

    Args:
      rounds: int[..., K + 1], rounds by the number of tokens drafted.
      prices: by drafted tokens, up to K; a round without a draft is a step of plain decoding, 1.

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
