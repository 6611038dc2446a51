"""Warnings about methods that are slower than plain decoding, by measurement or by estimate."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from jaxspec.methods import Method

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.engine.results import Statistics

# An acceptance rate that a method rarely exceeds.
_OFTEN = 0.8
# A text with fewer draft tokens is not judged. Guessed costs can be wrong, so they must predict a larger loss.
_ENOUGH, _BY_GUESS = 32, 0.8
# A speed-up from here on is no loss: a few timings differ by as much.
_NO_LOSS = 0.95


def warn_slower(name: str, speedup: float, more: str = "") -> None:
    """Prints one line if a method was clearly slower than plain decoding."""
    if speedup < _NO_LOSS:
        print(
            f"jaxspec: warning: {name} is slower here than plain decoding ({speedup:.2f}×{more})",
            file=sys.stderr,
        )


def warn_slower_by(lm: LanguageModel, method: Method, statistics: Statistics) -> None:
    """Prints one line if a text took longer than plain decoding, judged by its drafted and accepted tokens.

    The costs of steps are those that `jaxspec profile --costs` has measured here, else guesses.
    """
    from jaxspec.choosing.costs import guessed, guessed_row, reached_speedup

    if statistics.num_draft_tokens < _ENOUGH or (cost := _cost(lm, method)) is None:
        return
    costs = lm.step_costs or guessed(lm.config.num_layers, guessed_row(lm.platform))
    speedup = reached_speedup(
        cost,
        costs,
        statistics.num_tokens - 1,
        statistics.num_rounds,
        statistics.num_drafts,
        statistics.num_draft_tokens,
    )
    if lm.step_costs is not None or speedup < _BY_GUESS:
        accepted = statistics.num_accepted_tokens / statistics.num_draft_tokens
        by = "measured" if lm.step_costs is not None else "guessed"
        more = f" by {by} costs; {accepted:.0%} of its drafts were accepted; method auto chooses what pays"
        warn_slower(method.name, speedup, more)


def slower(lm: LanguageModel, method: Method) -> str | None:
    """Returns one line if a method is expected to be slower than plain decoding even if most drafts are accepted.

    It needs the costs of steps that `jaxspec profile --costs` has measured here, and returns None without them.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> from jaxspec.testing import language_model
      >>> slower(language_model(), LayerSkip(exit_layer=1)) is None
      True
    """
    from jaxspec.choosing.costs import predicted_speedup

    cost = None if lm.step_costs is None else _cost(lm, method)
    if cost is None or lm.step_costs is None:
        return None
    predicted = predicted_speedup(_OFTEN, cost, lm.step_costs, cost.widths[-1] - 1)
    if predicted.speedup >= _NO_LOSS:
        return None
    return (
        f"method {method.name} is expected to reach {predicted.speedup:.2f} times plain decoding's speed here, where "
        f"{_OFTEN:.0%} of its drafts are accepted; method auto chooses what pays"
    )


def _cost(lm: LanguageModel, method: Method) -> DraftCost | None:
    """Returns the declared cost of a method's drafts; None if it declares none or drafts trees."""
    try:
        drafter, params = lm.drafter(method)
    except (ValueError, OSError):  # for example a file that does not exist for this distribution
        return None
    cost = method.cost(lm.loaded, drafter, params)
    if cost is None or drafter.drafts_trees:
        return None
    return dataclasses.replace(cost, widths=drafter.verify_widths)
